#include "router/api/validate.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

constexpr size_t kMaxIdBytes = 128;
constexpr uint32_t kMaxDrainMs = 3'600'000;
constexpr size_t kMaxModelBytes = 256;
constexpr size_t kMaxRoleBytes = 64;
constexpr size_t kMaxToolsBytes = 1 << 20;
constexpr size_t kMaxJsonBytes = 64 << 10;
constexpr int kMaxMessages = 4096;
constexpr int kMaxBiases = 1024;
constexpr int kMaxStops = 16;
constexpr size_t kMaxStopBytes = 256;
constexpr int kMaxStopTokens = 32;
constexpr int kMaxDetokenized = 1 << 20;

// Keeps the first refusal.
class Verdict {
 public:
  // `range` is open at its lower end where `open`; a NaN is in no range.
  void Float(absl::string_view field, float value, double low, double high, bool open = false) {
    if ((open ? value > low : value >= low) && value <= high) return;
    Refuse(absl::StrCat(field, " is ", value, "; the limit is ", open ? "(" : "[", low, ", ", high, "]"));
  }
  void Int(absl::string_view field, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    Refuse(absl::StrCat(field, " is ", value, "; the limit is ", low, " to ", high));
  }
  void AtLeast(absl::string_view field, int64_t value, int64_t low) {
    if (value < low) Refuse(absl::StrCat(field, " is ", value, "; the least is ", low));
  }
  void Count(absl::string_view field, int64_t count, int64_t low, int64_t high) {
    if (count >= low && count <= high) return;
    Refuse(absl::StrCat(field, " holds ", count, "; the limit is ", low, " to ", high));
  }
  void Bytes(absl::string_view field, size_t size, size_t low, size_t high) {
    if (size >= low && size <= high) return;
    Refuse(absl::StrCat(field, " has ", size, " bytes; the limit is ", low, " to ", high));
  }
  void Refuse(std::string message) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(std::move(message));
  }
  bool ok() const { return status_.ok(); }
  absl::Status Take() { return std::move(status_); }

 private:
  absl::Status status_;
};

void CheckChat(const v1::Chat& chat, Verdict& verdict) {
  verdict.Count("chat.messages", chat.messages_size(), 1, kMaxMessages);
  verdict.Bytes("chat.tools_json", chat.tools_json().size(), 0, kMaxToolsBytes);
  verdict.Bytes("chat.template_kwargs_json", chat.template_kwargs_json().size(), 0, kMaxJsonBytes);
  size_t content = 0;
  for (int i = 0; i < chat.messages_size() && verdict.ok(); ++i) {
    const v1::ChatMessage& message = chat.messages(i);
    verdict.Bytes(absl::StrCat("chat.messages[", i, "].role"), message.role().size(), 1, kMaxRoleBytes);
    verdict.Bytes(absl::StrCat("chat.messages[", i, "].extra_json"), message.extra_json().size(), 0, kMaxJsonBytes);
    content += message.content().size();
  }
  verdict.Bytes("chat.messages[].content", content, 0, kMaxTextBytes);
}

void CheckSampling(const v1::SamplingParams& sampling, Verdict& verdict) {
  if (sampling.has_temperature()) verdict.Float("sampling.temperature", sampling.temperature(), 0, 100);
  verdict.AtLeast("sampling.top_k", sampling.top_k(), 0);
  if (sampling.has_top_p()) verdict.Float("sampling.top_p", sampling.top_p(), 0, 1, true);
  if (sampling.has_min_p()) verdict.Float("sampling.min_p", sampling.min_p(), 0, 1);
  if (sampling.has_repetition_penalty()) {
    verdict.Float("sampling.repetition_penalty", sampling.repetition_penalty(), 0, 100, true);
  }
  verdict.Float("sampling.presence_penalty", sampling.presence_penalty(), -100, 100);
  verdict.Float("sampling.frequency_penalty", sampling.frequency_penalty(), -100, 100);
  verdict.Count("sampling.logit_bias", static_cast<int64_t>(sampling.logit_bias().size()), 0, kMaxBiases);
  if (verdict.ok()) {
    for (const auto& [token, bias] : sampling.logit_bias()) {
      verdict.Float(absl::StrCat("sampling.logit_bias[", token, "]"), bias, -100, 100);
    }
  }
  verdict.Count("sampling.stop", sampling.stop_size(), 0, kMaxStops);
  for (int i = 0; i < sampling.stop_size() && verdict.ok(); ++i) {
    verdict.Bytes(absl::StrCat("sampling.stop[", i, "]"), sampling.stop(i).size(), 1, kMaxStopBytes);
  }
  verdict.Count("sampling.stop_token_ids", sampling.stop_token_ids_size(), 0, kMaxStopTokens);
  if (sampling.has_max_tokens()) verdict.AtLeast("sampling.max_tokens", sampling.max_tokens(), 1);
  verdict.AtLeast("sampling.min_tokens", sampling.min_tokens(), 0);
  if (sampling.has_max_tokens()) verdict.Int("sampling.min_tokens", sampling.min_tokens(), 0, sampling.max_tokens());
  verdict.Int("sampling.logprobs", sampling.logprobs(), 0, 20);
  verdict.Int("sampling.prompt_logprobs", sampling.prompt_logprobs(), 0, 20);
  if (sampling.has_n()) verdict.Int("sampling.n", sampling.n(), 1, 8);
}

void CheckResume(const v1::GenerateRequest& request, Verdict& verdict) {
  if (request.resume().empty()) return;
  const v1::SamplingParams& sampling = request.sampling();
  const int64_t choices = sampling.has_n() ? sampling.n() : 1;
  verdict.Count("resume", request.resume_size(), choices, choices);
  if (!sampling.has_seed()) verdict.Refuse("sampling.seed is absent; with resume it must be set");
  for (int i = 0; i < request.resume_size() && verdict.ok(); ++i) {
    const v1::Resume& resume = request.resume(i);
    const std::string name = absl::StrCat("resume[", i, "]");
    if (sampling.has_max_tokens()) {
      verdict.Count(name + ".token_ids", resume.token_ids_size(), 0, sampling.max_tokens());
    }
    const bool may_have = i == 0 && sampling.has_prompt_logprobs();
    verdict.Int(name + ".prompt_logprobs", resume.prompt_logprobs(), 0, may_have ? INT32_MAX : 0);
  }
}

template <class Ids>
void CheckIds(absl::string_view field, const Ids& ids, uint32_t vocab_size, Verdict& verdict) {
  for (int i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && static_cast<uint32_t>(ids[i]) < vocab_size) continue;
    verdict.Int(absl::StrCat(field, "[", i, "]"), ids[i], 0, int64_t{vocab_size} - 1);
    return;
  }
}

}  // namespace

absl::Status Validate(const v1::GenerateRequest& request) {
  Verdict verdict;
  verdict.Bytes("request_id", request.request_id().size(), 0, kMaxIdBytes);
  verdict.Bytes("model", request.model().size(), 0, kMaxModelBytes);
  verdict.Bytes("cache_salt", request.cache_salt().size(), 0, kMaxIdBytes);
  verdict.Bytes("tenant", request.tenant().size(), 0, kMaxIdBytes);
  verdict.Int("priority", request.priority(), -100, 100);
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kText:
      verdict.Bytes("text", request.text().size(), 0, kMaxTextBytes);
      break;
    case v1::GenerateRequest::kTokenIds:
      if (request.token_ids().ids().empty()) verdict.Refuse("token_ids.ids holds 0; the least is 1");
      break;
    case v1::GenerateRequest::kChat:
      CheckChat(request.chat(), verdict);
      break;
    case v1::GenerateRequest::PROMPT_NOT_SET:
      verdict.Refuse("prompt is not set; one of text, token_ids and chat must be");
      break;
  }
  CheckSampling(request.sampling(), verdict);
  CheckResume(request, verdict);
  return verdict.Take();
}

absl::Status Validate(const v1::TokenizeRequest& request) {
  Verdict verdict;
  verdict.Bytes("model", request.model().size(), 0, kMaxModelBytes);
  verdict.Bytes("text", request.text().size(), 0, kMaxTextBytes);
  return verdict.Take();
}

absl::Status Validate(const v1::DetokenizeRequest& request) {
  Verdict verdict;
  verdict.Bytes("model", request.model().size(), 0, kMaxModelBytes);
  verdict.Count("token_ids", request.token_ids_size(), 0, kMaxDetokenized);
  for (int i = 0; i < request.token_ids_size() && verdict.ok(); ++i) {
    if (request.token_ids(i) < 0) verdict.AtLeast(absl::StrCat("token_ids[", i, "]"), request.token_ids(i), 0);
  }
  return verdict.Take();
}

absl::Status Validate(const v1::RenderChatRequest& request) {
  Verdict verdict;
  verdict.Bytes("model", request.model().size(), 0, kMaxModelBytes);
  CheckChat(request.chat(), verdict);
  return verdict.Take();
}

absl::Status Validate(const v1::DrainWorkerRequest& request) {
  Verdict verdict;
  verdict.Bytes("worker_id", request.worker_id().size(), 1, kMaxIdBytes);
  if (request.budget_ms() > kMaxDrainMs) {
    verdict.Refuse(absl::StrCat("budget_ms is ", request.budget_ms(), "; the limit is 0 to ", kMaxDrainMs));
  }
  return verdict.Take();
}

absl::Status Validate(const v1::CancelRequestRequest& request) {
  Verdict verdict;
  verdict.Bytes("request_id", request.request_id().size(), 1, kMaxIdBytes);
  return verdict.Take();
}

absl::Status ValidateTokenIds(const v1::GenerateRequest& request, uint32_t vocab_size) {
  Verdict verdict;
  CheckIds("token_ids.ids", request.token_ids().ids(), vocab_size, verdict);
  CheckIds("sampling.stop_token_ids", request.sampling().stop_token_ids(), vocab_size, verdict);
  for (const auto& [token, bias] : request.sampling().logit_bias()) {
    verdict.Int("a token of sampling.logit_bias", token, 0, int64_t{vocab_size} - 1);
  }
  for (int i = 0; i < request.resume_size(); ++i) {
    CheckIds(absl::StrCat("resume[", i, "].token_ids"), request.resume(i).token_ids(), vocab_size, verdict);
  }
  return verdict.Take();
}

}  // namespace millrace
