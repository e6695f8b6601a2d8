// The part of a worker's Ready that concerns the fleet: its names, and whether its vocabulary fits this router's
// tokenizer. Sizes, costs and agreement among workers are the scheduler's to check.
#pragma once

#include "absl/status/status.h"
#include "millrace/worker/v1/worker.pb.h"

namespace millrace {

// `tokenizer_vocab`: ids that the router's tokenizer may produce; a model with fewer cannot take its prompts.
absl::Status ValidateReady(const worker::v1::Ready& ready, uint32_t tokenizer_vocab);

}  // namespace millrace
