// From a plan to the model's input, and from its output to the running set and the report. Pure but for their
// arguments; used by the engine thread.
#pragma once

#include <vector>

#include "millrace/worker/v1/worker.pb.h"
#include "worker/engine/slot_table.h"
#include "worker/engine/step_packer.h"
#include "worker/model/step.h"

namespace millrace {

// Fills `input`, whose sequences are the plan's chunks in order, and the part of the report that is known before the
// step.
void BuildStep(const SlotTable& table, const StepPlan& plan, StepInput& input, worker::v1::StepReport& report);

// Moves the running set past a step that was launched: its tokens count as computed, guesses aside, and what it samples
// as pending.
void AdvancePast(const StepPlan& plan, SlotTable& table);

// Takes the step's results: sampled tokens replace the pending ones, right guesses count as computed (in `plan` too),
// rows and progress are reported. Results of sequences that ended since the launch are dropped. A slot whose row has a
// finish reason has ended: it is to be released.
void ApplyStep(const StepInput& input, const StepOutput& output, StepPlan& plan, SlotTable& table,
               worker::v1::StepReport& report);

}  // namespace millrace
