// `millrace tokenize`: a model folder's tokenizer and chat template at work, without a cluster.
#include <algorithm>
#include <filesystem>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cli/command.h"
#include "cli/completion.h"
#include "cli/request_json.h"
#include "router/text/chat_template.h"
#include "router/text/json.h"
#include "router/text/tokenizer.h"

namespace millrace {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string model, text;
  bool jsonl = false;
};

struct Model {
  std::unique_ptr<Tokenizer> tokenizer;
  absl::StatusOr<std::unique_ptr<ChatTemplate>> chat;  // not every model has one
};

absl::Status CheckFields(const Json& line, absl::Span<const absl::string_view> known) {
  for (const auto& item : line.items()) {
    if (std::find(known.begin(), known.end(), item.key()) == known.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown field '", item.key(), "'; known here: ", absl::StrJoin(known, ", ")));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> FlagOf(const Json& line, const char* name, bool otherwise) {
  return line.contains(name) ? BoolOf(name, line[name]) : absl::StatusOr<bool>(otherwise);
}

absl::StatusOr<Json> Encode(const Model& model, const Json& line) {
  if (auto status = CheckFields(line, {"text", "add_special_tokens", "special_as_text"}); !status.ok()) return status;
  const absl::StatusOr<std::string> text = StringOf("text", line["text"]);
  if (!text.ok()) return text.status();
  const absl::StatusOr<bool> add_special = FlagOf(line, "add_special_tokens", false);
  if (!add_special.ok()) return add_special.status();
  const absl::StatusOr<bool> as_text = FlagOf(line, "special_as_text", false);
  if (!as_text.ok()) return as_text.status();
  const auto ids = model.tokenizer->Encode(*text, {.add_special_tokens = *add_special, .special_as_text = *as_text});
  if (!ids.ok()) return ids.status();
  return Json{{"token_ids", *ids}};
}

absl::StatusOr<Json> Decode(const Model& model, const Json& line) {
  if (auto status = CheckFields(line, {"token_ids", "skip_special_tokens"}); !status.ok()) return status;
  google::protobuf::RepeatedField<int32_t> ids;
  if (auto status = AppendTokenIds("token_ids", line["token_ids"], ids); !status.ok()) return status;
  const absl::StatusOr<bool> skip = FlagOf(line, "skip_special_tokens", false);
  if (!skip.ok()) return skip.status();
  return Json{{"text", model.tokenizer->Decode(absl::MakeConstSpan(ids.data(), ids.size()), *skip)}};
}

absl::StatusOr<Json> Render(const Model& model, const Json& line) {
  if (auto status = CheckFields(line, {"messages", "tools", "add_generation_prompt", "chat_template_kwargs"});
      !status.ok()) {
    return status;
  }
  if (!model.chat.ok()) return model.chat.status();
  const absl::StatusOr<bool> prompt = FlagOf(line, "add_generation_prompt", true);
  if (!prompt.ok()) return prompt.status();
  ChatTemplate::Input input;
  input.messages_json = TextOf(line["messages"]);
  input.add_generation_prompt = *prompt;
  if (line.contains("tools")) input.tools_json = TextOf(line["tools"]);
  if (line.contains("chat_template_kwargs")) input.kwargs_json = TextOf(line["chat_template_kwargs"]);
  const absl::StatusOr<std::vector<Tokenizer::Piece>> pieces = (*model.chat)->Render(input);
  if (!pieces.ok()) return pieces.status();
  std::string text;
  for (const Tokenizer::Piece& piece : *pieces) text += piece.text;
  return Json{{"prompt", text}};
}

absl::StatusOr<Json> Answer(const Model& model, const std::string& text) {
  absl::StatusOr<Json> line = ParseOrderedJson(text, "line");
  if (!line.ok()) return line.status();
  if (!line->is_object()) return absl::InvalidArgumentError("line: not an object");
  for (auto item = line->begin(); item != line->end();) item = item->is_null() ? line->erase(item) : std::next(item);
  if (line->contains("text")) return Encode(model, *line);
  if (line->contains("token_ids")) return Decode(model, *line);
  if (line->contains("messages")) return Render(model, *line);
  return absl::InvalidArgumentError("one of text, token_ids and messages is wanted, none given");
}

}  // namespace

int RunTokenize(Words words, Terminal terminal) {
  Options options;
  Arguments arguments(
      "tokenize --model DIR [--jsonl] [TEXT]",
      "Text to token ids. With --jsonl, one JSON object a line: text to token_ids, token_ids to text, messages\n"
      "to prompt.",
      "echo '{\"text\": \"Hello\"}' | millrace tokenize --model models/smollm2 --jsonl");
  arguments.TakePositional(&options.text);
  arguments.Add("model", &options.model, "folder of the model");
  arguments.Add("jsonl", &options.jsonl, "read JSON lines from stdin");
  if (const int code = ParseOrExit(arguments, words, terminal); code >= 0) return code;
  if (options.model.empty()) return Fail(terminal, absl::InvalidArgumentError("--model is missing"), kExitUsage);
  if (options.jsonl != options.text.empty()) {
    return Fail(terminal, absl::InvalidArgumentError("give either --jsonl or a text"), kExitUsage);
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(options.model);
  if (!tokenizer.ok()) return Fail(terminal, tokenizer.status());
  const Model model{*std::move(tokenizer), ChatTemplate::Load(options.model)};
  if (!options.jsonl) {
    const auto ids = model.tokenizer->Encode(options.text, {});
    if (!ids.ok()) return Fail(terminal, ids.status());
    terminal.out << absl::StrJoin(*ids, " ") << std::endl;
    return kExitOk;
  }
  std::string line;
  while (terminal.out.good() && std::getline(terminal.in, line)) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const absl::StatusOr<Json> answer = Answer(model, line);
    terminal.out << DumpLine(answer.ok() ? *answer : ErrorJson(answer.status())) << std::endl;
  }
  return terminal.out.good() ? kExitOk : kExitFailed;
}

}  // namespace millrace
