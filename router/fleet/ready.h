// What a worker says about itself, checked on arrival: every number that sizes an allocation has a bound here.
#pragma once

#include "absl/status/status.h"
#include "millrace/worker/v1/worker.pb.h"

namespace millrace {

// `tokenizer_vocab`: ids that the router's tokenizer may produce; a model with fewer cannot take its prompts.
absl::Status ValidateReady(const worker::v1::Ready& ready, uint32_t tokenizer_vocab);

}  // namespace millrace
