// A validated request as what the scheduler wants: one spec for each choice, defaults filled in. Stateless; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "millrace/v1/inference.pb.h"
#include "router/schedule/scheduler.h"

namespace millrace {

struct SpecContext {
  const worker::v1::Model* model;
  int64_t max_sequence_tokens;  // what the context and the pool allow
  uint64_t seed;                // of choice 0
  Time deadline;
};

absl::StatusOr<std::vector<SequenceSpec>> MakeSpecs(const v1::GenerateRequest& request, std::vector<int32_t> prompt,
                                                    const SpecContext& context);

}  // namespace millrace
