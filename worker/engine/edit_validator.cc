#include "worker/engine/edit_validator.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace millrace {
namespace {

using worker::v1::Admit;
using worker::v1::Edit;
using worker::v1::Sampling;

constexpr int kMaxLogProbs = 20;
constexpr int kMaxSaltBytes = 128;
constexpr int kMaxTraceparentBytes = 64;

absl::Status Range(absl::string_view field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; the limits are ", min, " and ", max));
}

template <class Ids>
absl::Status RangeOfAll(absl::string_view field, const Ids& ids, int64_t end) {
  for (int i = 0; i < ids.size(); ++i) {
    const int64_t id = ids[i];
    if (id < 0 || id >= end) {
      return absl::InvalidArgumentError(absl::StrCat(field, "[", i, "] is ", id, "; the limits are 0 and ", end - 1));
    }
  }
  return absl::OkStatus();
}

// Written so that a NaN fails.
absl::Status RealRange(absl::string_view field, float value, double min, double max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; the limits are ", min, " and ", max));
}

absl::Status ValidateBiases(const Sampling& sampling, int32_t vocab_size) {
  if (auto s = Range("bias_token_ids: their number", sampling.bias_token_ids_size(), 0, kMaxBiases); !s.ok()) return s;
  if (auto s = Range("bias_values: their number", sampling.bias_values_size(), sampling.bias_token_ids_size(),
                     sampling.bias_token_ids_size());
      !s.ok()) {
    return s;
  }
  if (auto s = RangeOfAll("bias_token_ids", sampling.bias_token_ids(), vocab_size); !s.ok()) return s;
  std::vector<int32_t> ids(sampling.bias_token_ids().begin(), sampling.bias_token_ids().end());
  std::ranges::sort(ids);
  if (const auto twin = std::ranges::adjacent_find(ids); twin != ids.end()) {
    return absl::InvalidArgumentError(absl::StrCat("bias_token_ids has ", *twin, " twice; the limit is once"));
  }
  for (const float value : sampling.bias_values()) {
    if (std::isnan(value) || value == INFINITY) {
      return absl::InvalidArgumentError(
          absl::StrCat("bias_values holds ", value, "; the limit is a finite number or -inf"));
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateSampling(const Sampling& sampling, const EngineLimits& limits) {
  constexpr double kTiny = 1e-30, kHuge = 1e30;
  absl::Status status = RealRange("temperature", sampling.temperature(), 0, kHuge);
  status.Update(Range("top_k", sampling.top_k(), 0, INT32_MAX));
  status.Update(RealRange("top_p", sampling.top_p(), kTiny, 1));
  status.Update(RealRange("min_p", sampling.min_p(), 0, 1));
  status.Update(RealRange("repetition_penalty", sampling.repetition_penalty(), kTiny, kHuge));
  status.Update(RealRange("presence_penalty", sampling.presence_penalty(), -kHuge, kHuge));
  status.Update(RealRange("frequency_penalty", sampling.frequency_penalty(), -kHuge, kHuge));
  const int64_t max_logprobs = std::min(kMaxLogProbs, limits.vocab_size);
  if (sampling.has_logprobs()) status.Update(Range("logprobs", sampling.logprobs(), 0, max_logprobs));
  if (sampling.has_prompt_logprobs())
    status.Update(Range("prompt_logprobs", sampling.prompt_logprobs(), 0, max_logprobs));
  status.Update(ValidateBiases(sampling, limits.vocab_size));
  return status;
}

absl::Status ValidateLengths(const Admit& admit, const EngineLimits& limits) {
  constexpr int64_t kBlock = kBlockTokens;
  const int64_t cached = admit.num_cached_tokens(), length = cached + admit.token_ids_size();
  if (auto s = Range("token_ids: their number", admit.token_ids_size(), 1, limits.max_context); !s.ok()) return s;
  if (auto s = Range("num_cached_tokens", cached, 0, limits.max_context); !s.ok()) return s;
  if (cached % kBlock != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_cached_tokens is ", cached, "; the limit is a multiple of ", kBlock));
  }
  if (auto s = Range("block_table: its number of blocks", admit.block_table_size(), (length + kBlock - 1) / kBlock,
                     limits.max_table_blocks());
      !s.ok()) {
    return s;
  }
  if (auto s = Range("max_length", admit.max_length(), length + 1, limits.max_context); !s.ok()) return s;
  if (auto s = Range("min_length", admit.min_length(), 0, admit.max_length()); !s.ok()) return s;
  return Range("num_prompt_tokens", admit.num_prompt_tokens(), 1, length);
}

// Penalties look at every token (repetition) or at the output (presence, frequency): those that are cached must be
// named.
absl::Status ValidateCachedIds(const Admit& admit) {
  const Sampling& sampling = admit.sampling();
  const bool of_output = sampling.presence_penalty() != 0 || sampling.frequency_penalty() != 0;
  const bool needed =
      sampling.repetition_penalty() != 1 || (of_output && admit.num_cached_tokens() > admit.num_prompt_tokens());
  if (admit.cached_token_ids_size() == 0 && !needed) return absl::OkStatus();
  return Range("cached_token_ids: their number", admit.cached_token_ids_size(), admit.num_cached_tokens(),
               admit.num_cached_tokens());
}

absl::Status ValidateAdmit(const Admit& admit, const EngineLimits& limits) {
  if (auto s = Range("slot", admit.slot(), 0, limits.num_slots - 1); !s.ok()) return s;
  if (auto s = ValidateLengths(admit, limits); !s.ok()) return s;
  if (auto s = ValidateSampling(admit.sampling(), limits); !s.ok()) return s;
  if (auto s = ValidateCachedIds(admit); !s.ok()) return s;
  if (auto s = RangeOfAll("token_ids", admit.token_ids(), limits.vocab_size); !s.ok()) return s;
  if (auto s = RangeOfAll("cached_token_ids", admit.cached_token_ids(), limits.vocab_size); !s.ok()) return s;
  if (auto s = RangeOfAll("block_table", admit.block_table(), limits.num_blocks); !s.ok()) return s;
  if (auto s = Range("stop_token_ids: their number", admit.stop_token_ids_size(), 0, kMaxStopTokens); !s.ok()) return s;
  if (auto s = RangeOfAll("stop_token_ids", admit.stop_token_ids(), limits.vocab_size); !s.ok()) return s;
  if (auto s = Range("cache_salt: its bytes", static_cast<int64_t>(admit.cache_salt().size()), 0, kMaxSaltBytes);
      !s.ok()) {
    return s;
  }
  if (auto s =
          Range("traceparent: its bytes", static_cast<int64_t>(admit.traceparent().size()), 0, kMaxTraceparentBytes);
      !s.ok()) {
    return s;
  }
  if (admit.has_filling_slot()) {
    if (auto s = Range("filling_slot", admit.filling_slot(), 0, limits.num_slots - 1); !s.ok()) return s;
    if (admit.filling_slot() == admit.slot()) {
      return absl::InvalidArgumentError(absl::StrCat("filling_slot is ", admit.slot(), "; the limit is another slot"));
    }
  }
  if (admit.sampling().has_prompt_logprobs() && admit.num_cached_tokens() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_cached_tokens is ", admit.num_cached_tokens(), "; the limit with prompt_logprobs is 0"));
  }
  return absl::OkStatus();
}

absl::Status Within(absl::string_view list, int index, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(list, "[", index, "].", status.message()));
}

absl::Status ValidateDraft(const worker::v1::Draft& draft, const EngineLimits& limits) {
  if (auto s = Range("slot", draft.slot(), 0, limits.num_slots - 1); !s.ok()) return s;
  if (auto s = Range("length", draft.length(), 0, kMaxDrafts); !s.ok()) return s;
  const int max_method =
      limits.draft_model == DraftModel::kNone ? worker::v1::DRAFT_METHOD_LOOKUP : worker::v1::DRAFT_METHOD_MODEL;
  const int min_method = draft.length() == 0 ? worker::v1::DRAFT_METHOD_UNSPECIFIED : worker::v1::DRAFT_METHOD_LOOKUP;
  return Range("method", draft.method(), min_method, max_method);
}

}  // namespace

absl::Status ValidateEdit(const Edit& edit, const EngineLimits& limits) {
  if (auto s = RangeOfAll("release", edit.release(), limits.num_slots); !s.ok()) return s;
  for (int i = 0; i < edit.admit_size(); ++i) {
    if (auto s = Within("admit", i, ValidateAdmit(edit.admit(i), limits)); !s.ok()) return s;
  }
  for (int i = 0; i < edit.extend_size(); ++i) {
    const auto& extend = edit.extend(i);
    absl::Status status = Range("slot", extend.slot(), 0, limits.num_slots - 1);
    status.Update(Range("block_table: its number of blocks", extend.block_table_size(), 0, limits.max_table_blocks()));
    status.Update(RangeOfAll("block_table", extend.block_table(), limits.num_blocks));
    if (!status.ok()) return Within("extend", i, status);
  }
  for (int i = 0; i < edit.rank_size(); ++i) {
    const absl::Status status = Range("slot", edit.rank(i).slot(), 0, limits.num_slots - 1);
    if (!status.ok()) return Within("rank", i, status);
  }
  for (int i = 0; i < edit.draft_size(); ++i) {
    if (auto s = Within("draft", i, ValidateDraft(edit.draft(i), limits)); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace millrace
