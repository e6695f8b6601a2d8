#include "router/fleet/ready.h"

#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

constexpr size_t kMaxIdBytes = 128;
constexpr size_t kMaxNameBytes = 256;
constexpr int kMaxEosTokens = 32;

absl::Status CheckText(absl::string_view field, const std::string& value, size_t low, size_t high) {
  if (value.size() >= low && value.size() <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("ready.", field, " has ", value.size(), " bytes; the limit is ", low, " to ", high));
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
  for (const absl::Status& status :
       {CheckText("worker_id", ready.worker_id(), 1, kMaxIdBytes),
        CheckText("instance_id", ready.instance_id(), 1, kMaxIdBytes),
        CheckText("model.name", model.name(), 0, kMaxNameBytes),
        CheckText("model.fingerprint", model.fingerprint(), 0, kMaxNameBytes), CheckEos(model)}) {
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
