#include "router/text/chat_template.h"

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "router/text/file.h"
#include "router/text/jinja_budget.h"
#include "router/text/jinja_builtins.h"
#include "router/text/jinja_json.h"
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

absl::Status SetVariables(const ChatTemplate::Input& input, jinja::context& context) {
  if (!input.kwargs_json.empty()) {
    const absl::StatusOr<jinja::value> kwargs = JinjaFromJson(input.kwargs_json, "template_kwargs_json", false);
    if (!kwargs.ok()) return kwargs.status();
    if (!jinja::is_val<jinja::value_object>(*kwargs))
      return absl::InvalidArgumentError("template_kwargs_json: not an object");
    for (const auto& [name, argument] : (*kwargs)->as_ordered_object()) context.set_val(name, argument);
  }
  const absl::StatusOr<jinja::value> messages =
      JinjaFromJson(input.messages_json, "messages", /*drop_null_members=*/true);
  if (!messages.ok()) return messages.status();
  if (!jinja::is_val<jinja::value_array>(*messages)) return absl::InvalidArgumentError("messages: not an array");
  for (const jinja::value& message : (*messages)->as_array()) {
    if (jinja::is_val<jinja::value_object>(message)) continue;
    return absl::InvalidArgumentError("messages: an element is not an object");
  }
  context.set_val("messages", *messages);
  const absl::StatusOr<jinja::value> tools =
      JinjaFromJson(input.tools_json.empty() ? "null" : input.tools_json, "tools_json", false);
  if (!tools.ok()) return tools.status();
  if (!(*tools)->is_none() && !jinja::is_val<jinja::value_array>(*tools)) {
    return absl::InvalidArgumentError("tools_json: not an array");
  }
  context.set_val("tools", *tools);
  context.set_val("add_generation_prompt", jinja::mk_val<jinja::value_bool>(input.add_generation_prompt));
  return absl::OkStatus();
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

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::FromSource(std::string source, std::string bos,
                                                                       std::string eos) {
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
  absl::StatusOr<std::vector<Tokenizer::Piece>> pieces = std::vector<Tokenizer::Piece>();
  const absl::Status status = RunEngine([&] {
    jinja::context context;
    const absl::Status variables = SetVariables(input, context);
    if (!variables.ok()) return variables;
    context.set_val("bos_token", jinja::mk_val<jinja::value_string>(bos_));
    context.set_val("eos_token", jinja::mk_val<jinja::value_string>(eos_));
    jinja::runtime runtime(context);
    pieces = ToPieces(jinja::runtime::gather_string_parts(runtime.execute(program_->tree)));
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return pieces;
}

}  // namespace millrace
