// The range checks of an edit that need no state: every id, count, offset and number of it is checked here once, on
// arrival, before it reaches the engine. What depends on the running set is checked by SlotTable. A pure function, for
// any thread.
#pragma once

#include "absl/status/status.h"
#include "millrace/worker/v1/worker.pb.h"
#include "worker/engine/engine_limits.h"

namespace millrace {

// INVALID_ARGUMENT, naming the field, its value and the limit.
absl::Status ValidateEdit(const worker::v1::Edit& edit, const EngineLimits& limits);

}  // namespace millrace
