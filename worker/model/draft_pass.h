// One pass of a draft model: the step in which it guesses the next token of every sequence that wants one more. Pure;
// used by the engine thread.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/tensor.h"
#include "worker/model/step.h"

namespace millrace {

// How many passes the drafts of a step take; the first also reads what is unread.
int32_t NumDraftPasses(const StepInput& input);

// Fills `out` with pass `pass` of input's drafts. `tokens` are the step's rows with the guesses of earlier passes in
// their places; a token below 0 stands for one that slot ~token keeps, as in a step. Logit row r of `out` gives the
// guess of row guess_rows[r] of the step, and keeps it in that row's slot where it has one.
void FillDraftPass(const StepInput& input, int32_t pass, Vec<const int32_t> tokens, StepInput& out,
                   std::vector<int32_t>& guess_rows);

}  // namespace millrace
