// The text side of the model that this router serves: its name, tokenizer and chat template. Loaded at start-up, then
// immutable; any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "millrace/v1/inference.pb.h"
#include "router/text/chat_template.h"
#include "router/text/tokenizer.h"

namespace millrace {

class ServedModel {
 public:
  // `name` empty: the folder's.
  static absl::StatusOr<std::unique_ptr<ServedModel>> Load(const std::filesystem::path& dir, std::string name);

  const std::string& name() const { return name_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  bool has_chat_template() const { return chat_template_ != nullptr; }

  // NOT_FOUND unless `name` is empty or this model's.
  absl::Status CheckName(const std::string& name) const;
  absl::StatusOr<std::vector<Tokenizer::Piece>> Render(const v1::Chat& chat) const;
  // The tokens of a validated request's prompt; at least one.
  absl::StatusOr<std::vector<int32_t>> EncodePrompt(const v1::GenerateRequest& request) const;

 private:
  ServedModel(std::string name, std::unique_ptr<Tokenizer> tokenizer, std::unique_ptr<ChatTemplate> chat_template)
      : name_(std::move(name)), tokenizer_(std::move(tokenizer)), chat_template_(std::move(chat_template)) {}

  const std::string name_;
  const std::unique_ptr<const Tokenizer> tokenizer_;
  const std::unique_ptr<const ChatTemplate> chat_template_;  // null: the model has none
};

}  // namespace millrace
