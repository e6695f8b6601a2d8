// Sequences whose readers have fallen behind.
#include "router/schedule/scheduler_state.h"

namespace millrace {

void Scheduler::State::SetDue(Sequence* sequence, Time pause_ends) {
  if (sequence->due() != kNever) deadlines.erase({sequence->due(), sequence->id});
  sequence->pause_ends = pause_ends;
  if (sequence->due() != kNever) deadlines.insert({sequence->due(), sequence->id});
}

void Scheduler::SetPaused(SequenceId id, bool paused, Time now) {
  State& state = *state_;
  const auto found = state.sequences.find(id);
  if (found == state.sequences.end()) return;
  Sequence* const sequence = found->second.get();
  if (sequence->place == Sequence::Place::kEnded || sequence->paused() == paused) return;
  state.SetDue(sequence, paused ? now + state.options.max_pause : kNever);
  state.counts.paused += paused ? 1 : -1;
  if (sequence->place == Sequence::Place::kRunning) {
    RunningSet& set = state.Change(sequence->worker);
    set.PauseChanged(sequence->slot);
    state.Return(set.GrowLeases(), now);
  } else if (sequence->place == Sequence::Place::kParked) {
    --state.num_parked;
    if (!state.places.empty() && sequence->max_length > state.largest_pool) {
      state.FailTooLong(sequence);
    } else {
      state.Enqueue(sequence, now);
    }
  }
  state.Dispatch(now);
}

}  // namespace millrace
