#include "cli/completion.h"

#include "absl/status/status.h"

namespace millrace {
namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson LogProbsJson(const google::protobuf::RepeatedPtrField<v1::TokenLogProbs>& logprobs) {
  OrderedJson list = OrderedJson::array();
  for (const v1::TokenLogProbs& item : logprobs) {
    OrderedJson one = {{"token_id", item.token_id()}, {"logprob", item.logprob()}};
    one["top_token_ids"] = OrderedJson(item.top_token_ids());
    one["top_logprobs"] = OrderedJson(item.top_logprobs());
    list.push_back(std::move(one));
  }
  return list;
}

OrderedJson ChoiceJson(const v1::GenerateResponse& choice) {
  const v1::Finish& finish = choice.finish();
  OrderedJson json;
  json["token_ids"] = OrderedJson(choice.token_ids());
  json["text"] = choice.text();
  json["finish_reason"] = finish.reason() == v1::FINISH_REASON_LENGTH ? "length" : "stop";
  json["prompt_tokens"] = finish.usage().prompt_tokens();
  json["cached_tokens"] = finish.usage().cached_tokens();
  if (choice.logprobs_size() > 0) json["logprobs"] = LogProbsJson(choice.logprobs());
  if (choice.prompt_logprobs_size() > 0) json["prompt_logprobs"] = LogProbsJson(choice.prompt_logprobs());
  if (finish.has_stop_token_id()) json["stop_token_id"] = finish.stop_token_id();
  if (finish.has_stop_string()) json["stop_string"] = finish.stop_string();
  json["seed"] = finish.seed();
  json["worker"] = finish.route().worker_id();
  json["request_id"] = finish.request_id();
  return json;
}

}  // namespace

void Completion::Add(const v1::GenerateResponse& piece) {
  if (piece.index() >= kMaxChoices) return;  // Json() then finds an unfinished choice
  if (piece.index() >= choices_.size()) choices_.resize(piece.index() + 1);
  v1::GenerateResponse& choice = choices_[piece.index()];
  std::string text = std::move(*choice.mutable_text());
  text += piece.text();
  choice.MergeFrom(piece);  // appends what is repeated, but replaces a string
  choice.set_text(std::move(text));
}

OrderedJson Completion::Json(const grpc::Status& status, bool several_choices) const {
  if (!status.ok()) return ErrorJson(ToAbsl(status));
  const absl::Status unfinished = absl::InternalError("the stream ended before the answer did");
  if (choices_.empty()) return ErrorJson(unfinished);
  OrderedJson list = OrderedJson::array();
  for (const v1::GenerateResponse& choice : choices_) {
    if (!choice.has_finish()) return ErrorJson(unfinished);
    list.push_back(ChoiceJson(choice));
  }
  return several_choices ? OrderedJson{{"choices", std::move(list)}} : list[0];
}

absl::Status ToAbsl(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

OrderedJson ErrorJson(const absl::Status& status) {
  return {{"error", absl::StatusCodeToString(status.code())}, {"message", std::string(status.message())}};
}

std::string DumpLine(const OrderedJson& json) {
  return json.dump(-1, ' ', true, OrderedJson::error_handler_t::replace);
}

}  // namespace millrace
