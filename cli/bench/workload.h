// The requests of a benchmark, planned before it starts: when each should start and how long it is. Prompts are made
// when they are sent, from block ids, so that equal ids give equal prefixes. A plain value; 8 bytes per block id.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace millrace {

struct PlannedRequest {
  absl::Duration start;  // after the benchmark's, in an open loop
  uint32_t input_tokens = 0, output_tokens = 0;
  uint32_t block_tokens = 0;     // tokens that one id stands for; the last block may be cut short
  std::vector<uint64_t> blocks;  // at least input_tokens / block_tokens, rounded up
};

struct WorkloadOptions {
  std::string workload = "synthetic";  // synthetic, shared_prefix or trace
  int64_t num_requests = 100;          // of a trace: at most
  int64_t input_tokens = 128, output_tokens = 64;
  int64_t groups = 4, prefix_tokens = 96;  // shared_prefix: a request's first prefix_tokens are its group's
  double rate = 0;                         // requests a second, Poisson; 0: closed loop, or the trace's own times
  double speed = 1, scale = 1;             // trace: times run so much faster, lengths are multiplied
  uint64_t seed = 0;
};

// INVALID_ARGUMENT names the option, or the line of the trace.
absl::StatusOr<std::vector<PlannedRequest>> PlanSynthetic(const WorkloadOptions& options);
// One JSON object a line: timestamp (ms), input_length, output_length (tokens), hash_ids (one per 512 tokens of input).
// The times of one tick are spread over it.
absl::StatusOr<std::vector<PlannedRequest>> PlanTrace(std::istream& lines, const WorkloadOptions& options);

// The prompt: a function of the block ids and the vocabulary's size alone.
std::vector<int32_t> PromptOf(const PlannedRequest& request, uint32_t vocab_size);

}  // namespace millrace
