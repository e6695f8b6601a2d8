#include "router/api/served_model.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "router/text/json.h"

namespace millrace {
namespace {

absl::StatusOr<std::string> MessagesJson(const v1::Chat& chat) {
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  for (int i = 0; i < chat.messages_size(); ++i) {
    const v1::ChatMessage& source = chat.messages(i);
    nlohmann::ordered_json message = {{"role", source.role()}, {"content", source.content()}};
    if (!source.extra_json().empty()) {
      const std::string what = absl::StrCat("chat.messages[", i, "].extra_json");
      absl::StatusOr<nlohmann::ordered_json> extra = ParseOrderedJson(source.extra_json(), what);
      if (!extra.ok()) return extra.status();
      if (!extra->is_object()) return absl::InvalidArgumentError(absl::StrCat(what, " is not a JSON object"));
      message.update(*extra);
    }
    messages.push_back(std::move(message));
  }
  // Replacing instead of throwing; nothing is left to replace after the wire's own check.
  return messages.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServedModel>> ServedModel::Load(const std::filesystem::path& dir, std::string name) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(dir);
  if (!tokenizer.ok()) return tokenizer.status();
  absl::StatusOr<std::unique_ptr<ChatTemplate>> chat_template = ChatTemplate::Load(dir);
  if (!chat_template.ok() && !absl::IsNotFound(chat_template.status())) return chat_template.status();
  if (name.empty()) name = std::filesystem::weakly_canonical(dir).filename().string();
  return std::unique_ptr<ServedModel>(new ServedModel(std::move(name), *std::move(tokenizer),
                                                      chat_template.ok() ? *std::move(chat_template) : nullptr));
}

absl::Status ServedModel::CheckName(const std::string& name) const {
  if (name.empty() || name == name_) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("model is \"", name, "\"; this router serves \"", name_, "\""));
}

absl::StatusOr<std::vector<Tokenizer::Piece>> ServedModel::Render(const v1::Chat& chat) const {
  if (chat_template_ == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("model \"", name_, "\" has no chat template; send text or token_ids"));
  }
  absl::StatusOr<std::string> messages = MessagesJson(chat);
  if (!messages.ok()) return messages.status();
  ChatTemplate::Input input;
  input.messages_json = *std::move(messages);
  input.tools_json = chat.tools_json();
  input.add_generation_prompt = !chat.has_add_generation_prompt() || chat.add_generation_prompt();
  input.kwargs_json = chat.template_kwargs_json();
  return chat_template_->Render(input);
}

absl::StatusOr<std::vector<int32_t>> ServedModel::EncodePrompt(const v1::GenerateRequest& request) const {
  absl::StatusOr<std::vector<int32_t>> tokens;
  if (request.has_token_ids()) {
    tokens = std::vector<int32_t>(request.token_ids().ids().begin(), request.token_ids().ids().end());
  } else if (request.has_chat()) {
    absl::StatusOr<std::vector<Tokenizer::Piece>> pieces = Render(request.chat());
    if (!pieces.ok()) return pieces.status();
    tokens = tokenizer_->EncodePieces(*pieces);
  } else {
    tokens = tokenizer_->Encode(request.text(), {.add_special_tokens = true});
  }
  if (tokens.ok() && tokens->empty()) return absl::InvalidArgumentError("the prompt has 0 tokens; the least is 1");
  return tokens;
}

}  // namespace millrace
