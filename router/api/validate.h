// Every limit on what a client may send; inference.proto documents them. A refusal is INVALID_ARGUMENT and names the
// field, its value and the limit. Stateless; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "millrace/v1/admin.pb.h"
#include "millrace/v1/inference.pb.h"

namespace millrace {

inline constexpr size_t kMaxRequestBytes =
    16 << 20;  // of any message; larger than every field, so that ours is the error seen
inline constexpr size_t kMaxTextBytes = 4 << 20;

// What holds for any model.
absl::Status Validate(const v1::GenerateRequest& request);
absl::Status Validate(const v1::TokenizeRequest& request);
absl::Status Validate(const v1::DetokenizeRequest& request);
absl::Status Validate(const v1::RenderChatRequest& request);
absl::Status Validate(const v1::DrainWorkerRequest& request);
absl::Status Validate(const v1::CancelRequestRequest& request);

// Every token id of the request against the model's vocabulary.
absl::Status ValidateTokenIds(const v1::GenerateRequest& request, uint32_t vocab_size);

}  // namespace millrace
