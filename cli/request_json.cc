#include "cli/request_json.h"

#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "router/text/json.h"

namespace millrace {
namespace {

using Json = nlohmann::ordered_json;
using google::protobuf::FieldDescriptor;

absl::Status WrongType(absl::string_view field, absl::string_view want, const Json& value) {
  std::string shown = TextOf(value);
  if (shown.size() > 80) shown = absl::StrCat(shown.substr(0, 80), "…");
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", want, ", not ", shown));
}

template <typename Integer>
absl::StatusOr<Integer> IntegerOf(absl::string_view field, const Json& value) {
  using Limits = std::numeric_limits<Integer>;
  if (value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(Limits::max())) {
    return static_cast<Integer>(value.get<uint64_t>());
  }
  if (value.is_number_integer() && !value.is_number_unsigned()) {
    const int64_t number = value.get<int64_t>();
    if (std::is_signed_v<Integer> && number >= static_cast<int64_t>(Limits::min())) return static_cast<Integer>(number);
  }
  return WrongType(field, absl::StrCat("an integer of ", Limits::min(), " … ", Limits::max()), value);
}

absl::StatusOr<float> FloatOf(absl::string_view field, const Json& value) {
  if (!value.is_number()) return WrongType(field, "a number", value);
  return static_cast<float>(value.get<double>());
}

absl::Status SetStop(const Json& value, v1::SamplingParams& sampling) {
  const Json list = value.is_array() ? value : Json::array({value});
  for (const Json& item : list) {
    if (!item.is_string()) return WrongType("stop", "a string or a list of strings", value);
    sampling.add_stop(item.get<std::string>());
  }
  return absl::OkStatus();
}

absl::Status SetLogitBias(const Json& value, v1::SamplingParams& sampling) {
  if (!value.is_object()) return WrongType("logit_bias", "an object of token ids to numbers", value);
  for (const auto& [key, bias] : value.items()) {
    int32_t token = 0;
    if (!absl::SimpleAtoi(key, &token)) return WrongType("logit_bias", "token ids as keys", key);
    absl::StatusOr<float> number = FloatOf(absl::StrCat("logit_bias[", key, "]"), bias);
    if (!number.ok()) return number.status();
    (*sampling.mutable_logit_bias())[token] = *number;
  }
  return absl::OkStatus();
}

// A plain field of SamplingParams, by its name in the proto.
absl::Status SetScalar(const FieldDescriptor& field, const Json& value, v1::SamplingParams& sampling) {
  const auto& reflection = *sampling.GetReflection();
  const auto store = [&](auto parsed, auto setter) {
    if (!parsed.ok()) return parsed.status();
    (reflection.*setter)(&sampling, &field, *parsed);
    return absl::OkStatus();
  };
  using Reflection = google::protobuf::Reflection;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_FLOAT:
      return store(FloatOf(field.name(), value), &Reflection::SetFloat);
    case FieldDescriptor::CPPTYPE_INT32:
      return store(IntegerOf<int32_t>(field.name(), value), &Reflection::SetInt32);
    case FieldDescriptor::CPPTYPE_UINT64:
      return store(IntegerOf<uint64_t>(field.name(), value), &Reflection::SetUInt64);
    case FieldDescriptor::CPPTYPE_BOOL:
      return store(BoolOf(field.name(), value), &Reflection::SetBool);
    default:
      return absl::UnimplementedError(absl::StrCat(field.name(), ": no JSON form"));
  }
}

// true when `key` is a sampling field.
absl::StatusOr<bool> SetSamplingField(const std::string& key, const Json& value, v1::SamplingParams& sampling) {
  const FieldDescriptor* field = v1::SamplingParams::descriptor()->FindFieldByName(key);
  if (field == nullptr) return false;
  absl::Status status;
  if (key == "stop") {
    status = SetStop(value, sampling);
  } else if (key == "logit_bias") {
    status = SetLogitBias(value, sampling);
  } else if (key == "stop_token_ids") {
    status = AppendTokenIds(key, value, *sampling.mutable_stop_token_ids());
  } else {
    status = SetScalar(*field, value, sampling);
  }
  if (!status.ok()) return status;
  return true;
}

// true when `key` is a field of the request itself.
absl::StatusOr<bool> SetRequestField(const std::string& key, const Json& value, CompletionRequest& out) {
  v1::GenerateRequest& request = out.request;
  const auto set_string = [&](std::string* target) -> absl::StatusOr<bool> {
    absl::StatusOr<std::string> text = StringOf(key, value);
    if (!text.ok()) return text.status();
    *target = *std::move(text);
    return true;
  };
  if (key == "prompt") return set_string(request.mutable_text());
  if (key == "request_id") return set_string(request.mutable_request_id());
  if (key == "model") return set_string(request.mutable_model());
  if (key == "cache_salt") return set_string(request.mutable_cache_salt());
  if (key == "tenant") return set_string(request.mutable_tenant());
  if (key == "token_ids") {
    absl::Status status = AppendTokenIds(key, value, *request.mutable_token_ids()->mutable_ids());
    if (!status.ok()) return status;
    return true;
  }
  if (key == "priority") {
    absl::StatusOr<int32_t> priority = IntegerOf<int32_t>(key, value);
    if (!priority.ok()) return priority.status();
    request.set_priority(*priority);
    return true;
  }
  if (key == "deadline_ms") {
    absl::StatusOr<int32_t> deadline = IntegerOf<int32_t>(key, value);
    if (!deadline.ok() || *deadline < 1) return WrongType(key, "an integer of 1 … 2147483647", value);
    out.deadline_ms = *deadline;
    return true;
  }
  return SetSamplingField(key, value, *request.mutable_sampling());
}

absl::Status AddMessage(const Json& value, v1::Chat& chat) {
  const std::string name = absl::StrCat("messages[", chat.messages_size(), "]");
  if (!value.is_object()) return WrongType(name, "an object", value);
  v1::ChatMessage& message = *chat.add_messages();
  Json extra = Json::object();
  for (const auto& [key, item] : value.items()) {
    if (item.is_null()) continue;  // templates see a null as an absent key
    if (key != "role" && key != "content") {
      extra[key] = item;
      continue;
    }
    absl::StatusOr<std::string> text = StringOf(absl::StrCat(name, ".", key), item);
    if (!text.ok()) return text.status();
    (key == "role" ? *message.mutable_role() : *message.mutable_content()) = *std::move(text);
  }
  if (!value.contains("role")) return absl::InvalidArgumentError(absl::StrCat(name, ": no role"));
  if (!extra.empty()) message.set_extra_json(TextOf(extra));
  return absl::OkStatus();
}

}  // namespace

std::string TextOf(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

absl::StatusOr<bool> BoolOf(absl::string_view field, const Json& value) {
  if (!value.is_boolean()) return WrongType(field, "true or false", value);
  return value.get<bool>();
}

absl::StatusOr<std::string> StringOf(absl::string_view field, const Json& value) {
  if (!value.is_string()) return WrongType(field, "a string", value);
  return value.get<std::string>();
}

absl::Status AppendTokenIds(absl::string_view field, const Json& value, google::protobuf::RepeatedField<int32_t>& ids) {
  if (!value.is_array()) return WrongType(field, "a list of integers", value);
  for (const Json& item : value) {
    absl::StatusOr<int32_t> id = IntegerOf<int32_t>(absl::StrCat(field, "[", ids.size(), "]"), item);
    if (!id.ok()) return id.status();
    ids.Add(*id);
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> SetChatField(absl::string_view key, const Json& value, v1::Chat& chat) {
  if (key == "messages") {
    if (!value.is_array()) return WrongType(key, "a list of objects", value);
    for (const Json& item : value) {
      if (absl::Status status = AddMessage(item, chat); !status.ok()) return status;
    }
  } else if (key == "tools") {
    if (!value.is_array()) return WrongType(key, "a list of objects", value);
    chat.set_tools_json(TextOf(value));
  } else if (key == "chat_template_kwargs") {
    if (!value.is_object()) return WrongType(key, "an object", value);
    chat.set_template_kwargs_json(TextOf(value));
  } else if (key == "add_generation_prompt") {
    absl::StatusOr<bool> wanted = BoolOf(key, value);
    if (!wanted.ok()) return wanted.status();
    chat.set_add_generation_prompt(*wanted);
  } else {
    return false;
  }
  return true;
}

absl::StatusOr<CompletionRequest> ParseCompletion(const std::string& line) {
  absl::StatusOr<Json> json = ParseOrderedJson(line, "request");
  if (!json.ok()) return json.status();
  if (!json->is_object()) return WrongType("request", "an object", *json);
  CompletionRequest out;
  v1::Chat chat;
  bool chat_fields = false;
  int prompts = 0;
  for (const auto& [key, value] : json->items()) {
    if (value.is_null()) continue;  // as if it were absent
    prompts += key == "prompt" || key == "token_ids" || key == "messages";
    absl::StatusOr<bool> known = SetChatField(key, value, chat);
    if (known.ok() && *known) {
      chat_fields = true;
    } else if (known.ok()) {
      known = SetRequestField(key, value, out);
    }
    if (!known.ok()) return known.status();
    if (!*known) return absl::InvalidArgumentError(absl::StrCat("unknown field '", key, "'"));
  }
  if (prompts != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("one of prompt, token_ids and messages is wanted, ", prompts, " given"));
  }
  if (chat_fields && !json->contains("messages")) {
    return absl::InvalidArgumentError("tools, add_generation_prompt and chat_template_kwargs go with messages");
  }
  if (chat_fields) *out.request.mutable_chat() = std::move(chat);
  return out;
}

}  // namespace millrace
