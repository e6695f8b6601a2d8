// A model's chat template: messages to the prompt, text for text equal to Jinja as transformers sets it up. The result
// tells the template's own text from what came with the request, so that a control token spelt by a user stays text.
// Bounded in processor time (1 s), steps, bytes and depth; a template is foreign code. Immutable after loading; any
// number of threads may render.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "router/text/tokenizer.h"

namespace millrace {

class ChatTemplate {
 public:
  static constexpr size_t kMaxSourceBytes = 256 << 10;
  static constexpr size_t kMaxOutputBytes = Tokenizer::kMaxTextBytes;

  // chat_template.jinja, or "chat_template" of tokenizer_config.json. NOT_FOUND when the model has neither.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Load(const std::filesystem::path& model_dir);
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> FromSource(std::string source, std::string bos, std::string eos);
  ~ChatTemplate();

  struct Input {
    std::string messages_json;  // array of objects; members that are null are left out
    std::string tools_json;     // array, or empty
    bool add_generation_prompt = true;
    std::string kwargs_json;  // object with further variables, or empty; cannot replace the variables above
  };
  // INVALID_ARGUMENT for an input that is not as described, for what the template refuses (with its own message) and
  // for what it fails on; RESOURCE_EXHAUSTED when it passes a bound.
  absl::StatusOr<std::vector<Tokenizer::Piece>> Render(const Input& input) const;

 private:
  struct Program;
  ChatTemplate(std::unique_ptr<Program> program, std::string bos, std::string eos);

  std::unique_ptr<const Program> program_;
  const std::string bos_, eos_;
};

}  // namespace millrace
