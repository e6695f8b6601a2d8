#include "router/fleet/ready.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

constexpr size_t kMaxIdBytes = 128;
constexpr size_t kMaxNameBytes = 256;
constexpr int kMaxEosTokens = 32;
constexpr double kMaxCost = 1e9;

absl::Status CheckText(absl::string_view field, const std::string& value, size_t low, size_t high) {
  if (value.size() >= low && value.size() <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("ready.", field, " has ", value.size(), " bytes; the limit is ", low, " to ", high));
}

absl::Status CheckCount(absl::string_view field, uint32_t value, uint32_t low, uint32_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("ready.", field, " is ", value, "; the limit is ", low, " to ", high));
}

absl::Status CheckCost(absl::string_view field, double value) {
  if (std::isfinite(value) && value >= 0 && value <= kMaxCost) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("ready.step_cost.", field, " is ", value, "; the limit is 0 to ", kMaxCost));
}

absl::Status CheckEos(const worker::v1::Model& model) {
  if (model.eos_token_ids_size() > kMaxEosTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("ready.model.eos_token_ids holds ", model.eos_token_ids_size(), "; the limit is ", kMaxEosTokens));
  }
  for (const int32_t id : model.eos_token_ids()) {
    if (id < 0 || static_cast<uint32_t>(id) >= model.vocab_size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("ready.model.eos_token_ids holds ", id, "; the limit is 0 to ", model.vocab_size() - 1));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateReady(const worker::v1::Ready& ready, uint32_t tokenizer_vocab) {
  const worker::v1::Model& model = ready.model();
  const worker::v1::StepCost& cost = ready.step_cost();
  for (const absl::Status& status :
       {CheckText("worker_id", ready.worker_id(), 1, kMaxIdBytes), CheckText("instance_id", ready.instance_id(), 1, kMaxIdBytes),
        CheckText("model.name", model.name(), 0, kMaxNameBytes), CheckText("model.fingerprint", model.fingerprint(), 0, kMaxNameBytes),
        CheckCount("num_blocks", ready.num_blocks(), 1, 1 << 26), CheckCount("block_tokens", ready.block_tokens(), 1, 4096),
        CheckCount("num_slots", ready.num_slots(), 1, 1 << 16), CheckCount("model.vocab_size", model.vocab_size(), 1, 1 << 24),
        CheckCount("model.max_context", model.max_context(), 2, 1 << 24), CheckEos(model), CheckCost("step_us", cost.step_us()),
        CheckCost("prefill_token_us", cost.prefill_token_us()), CheckCost("prefill_context_ns", cost.prefill_context_ns()),
        CheckCost("row_us", cost.row_us()), CheckCost("context_ns", cost.context_ns()),
        CheckCount("step_target_us", ready.step_target_us(), 0, 60'000'000)}) {
    if (!status.ok()) return status;
  }
  if (model.vocab_size() < tokenizer_vocab) {
    return absl::FailedPreconditionError(absl::StrCat("ready.model.vocab_size is ", model.vocab_size(),
                                                      "; this router's tokenizer needs at least ", tokenizer_vocab,
                                                      ": worker and router serve different models"));
  }
  return absl::OkStatus();
}

}  // namespace millrace
