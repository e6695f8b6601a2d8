#include "router/text/chat_template.h"

#include <json.h>  // the engine's, not router/text/json.h

#include <exception>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "router/text/file.h"
#include "router/text/jinja_budget.h"
#include "router/text/jinja_builtins.h"
#include "router/text/json.h"
#include "router/text/tokenizer_config.h"
#include "router/text/utf8.h"

namespace millrace {
namespace {

// Of one {{ … }} or {% … %}: long chains become trees as deep as they are long.
constexpr size_t kMaxBlockTokens = 4096;
constexpr size_t kMaxErrorBytes = 500;

absl::Status Refused(std::string message) {
  if (message.size() > kMaxErrorBytes) message.resize(kMaxErrorBytes);
  std::string text;
  AppendLossyUtf8(message, text);
  return absl::InvalidArgumentError(absl::StrCat("chat template: ", text));
}

// Runs `body` with a budget; everything the engine throws becomes a status.
template <typename Body>
absl::Status RunEngine(Body body) {
  const JinjaBudget budget;
  try {
    return body();
  } catch (const JinjaBudgetExceeded& exceeded) {
    return absl::ResourceExhaustedError(absl::StrCat("chat template: ", exceeded.what));
  } catch (const TemplateRaised& raised) {
    return Refused(raised.message);
  } catch (const std::exception& error) {
    return Refused(error.what());
  }
}

absl::Status CheckBlocks(const std::vector<jinja::token>& tokens) {
  size_t length = 0;
  for (const jinja::token& token : tokens) {
    length = token.t == jinja::token::open_statement || token.t == jinja::token::open_expression ? 0 : length + 1;
    if (length > kMaxBlockTokens) {
      return Refused(absl::StrCat("a block has more than ", kMaxBlockTokens, " tokens"));
    }
  }
  return absl::OkStatus();
}

// The messages without members that are null.
absl::StatusOr<std::string> CleanMessages(const std::string& text) {
  absl::StatusOr<nlohmann::ordered_json> messages = ParseOrderedJson(text, "messages");
  if (!messages.ok()) return messages.status();
  if (!messages->is_array()) return absl::InvalidArgumentError("messages: not an array");
  for (nlohmann::ordered_json& message : *messages) {
    if (!message.is_object()) return absl::InvalidArgumentError("messages: an element is not an object");
    for (auto member = message.begin(); member != message.end();) {
      if (member->is_null()) {
        member = message.erase(member);
      } else {
        ++member;
      }
    }
  }
  return messages->dump();
}

// `text` as it came, "" for nothing or null.
absl::StatusOr<std::string> CheckedJson(const std::string& text, const std::string& what, bool wants_array) {
  if (text.empty()) return text;
  const absl::StatusOr<nlohmann::ordered_json> json = ParseOrderedJson(text, what);
  if (!json.ok()) return json.status();
  if (json->is_null()) return std::string();
  if (wants_array ? !json->is_array() : !json->is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": not an ", wants_array ? "array" : "object"));
  }
  return text;
}

void SetFromJson(jinja::context& context, const std::string& name, const std::string& json) {
  common_json variables = common_json::object();
  variables[name] = common_json::parse(json);
  jinja::global_from_json(context, variables, /*mark_input=*/true);
}

absl::StatusOr<std::vector<Tokenizer::Piece>> ToPieces(const jinja::value_string& text) {
  std::vector<Tokenizer::Piece> pieces;
  size_t bytes = 0;
  for (const auto& part : text->val_str.parts) {
    bytes += part.val.size();
    if (bytes > ChatTemplate::kMaxOutputBytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("chat template: prompt longer than ", ChatTemplate::kMaxOutputBytes, " bytes"));
    }
    if (!part.val.empty()) pieces.push_back({part.val, part.is_input});
  }
  return pieces;
}

}  // namespace

struct ChatTemplate::Program {
  jinja::program tree;
};

ChatTemplate::ChatTemplate(std::unique_ptr<Program> program, std::string bos, std::string eos)
    : program_(std::move(program)), bos_(std::move(bos)), eos_(std::move(eos)) {}
ChatTemplate::~ChatTemplate() = default;

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Load(const std::filesystem::path& model_dir) {
  absl::StatusOr<TokenizerConfig> config = TokenizerConfig::Load(model_dir);
  if (!config.ok()) return config.status();
  absl::StatusOr<std::string> source = ReadFile(model_dir / "chat_template.jinja", kMaxSourceBytes);
  if (absl::IsNotFound(source.status()) && config->chat_template.has_value()) source = *config->chat_template;
  if (absl::IsNotFound(source.status())) {
    return absl::NotFoundError(absl::StrCat("no chat template in ", model_dir.string()));
  }
  if (!source.ok()) return source.status();
  return FromSource(*std::move(source), config->bos_token, config->eos_token);
}

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::FromSource(std::string source, std::string bos, std::string eos) {
  if (source.size() > kMaxSourceBytes) {
    return Refused(absl::StrCat("source of ", source.size(), " bytes, limit ", kMaxSourceBytes));
  }
  if (FirstInvalidUtf8(source) != source.size()) return Refused("source is not UTF-8");
  auto program = std::make_unique<Program>();
  const absl::Status status = RunEngine([&] {
    const jinja::lexer_result tokens = jinja::lexer().tokenize(source);
    absl::Status blocks = CheckBlocks(tokens.tokens);
    if (blocks.ok()) program->tree = jinja::parse_from_tokens(tokens);
    return blocks;
  });
  if (!status.ok()) return status;
  return std::unique_ptr<ChatTemplate>(new ChatTemplate(std::move(program), std::move(bos), std::move(eos)));
}

absl::StatusOr<std::vector<Tokenizer::Piece>> ChatTemplate::Render(const Input& input) const {
  const absl::StatusOr<std::string> messages = CleanMessages(input.messages_json);
  if (!messages.ok()) return messages.status();
  const absl::StatusOr<std::string> tools = CheckedJson(input.tools_json, "tools", /*wants_array=*/true);
  if (!tools.ok()) return tools.status();
  const absl::StatusOr<std::string> kwargs = CheckedJson(input.kwargs_json, "template arguments", /*wants_array=*/false);
  if (!kwargs.ok()) return kwargs.status();

  absl::StatusOr<std::vector<Tokenizer::Piece>> pieces = std::vector<Tokenizer::Piece>();
  const absl::Status status = RunEngine([&] {
    jinja::context context;
    if (!kwargs->empty()) jinja::global_from_json(context, common_json::parse(*kwargs), /*mark_input=*/true);
    SetFromJson(context, "messages", *messages);
    SetFromJson(context, "tools", tools->empty() ? "null" : *tools);
    context.set_val("bos_token", jinja::mk_val<jinja::value_string>(bos_));
    context.set_val("eos_token", jinja::mk_val<jinja::value_string>(eos_));
    context.set_val("add_generation_prompt", jinja::mk_val<jinja::value_bool>(input.add_generation_prompt));
    jinja::runtime runtime(context);
    pieces = ToPieces(jinja::runtime::gather_string_parts(runtime.execute(program_->tree)));
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return pieces;
}

}  // namespace millrace
