// Which sequence a worker may have died of. Tokens are exact, so what kills one worker kills the next at the same
// place: a suspect was in the step that each died in, and got no further in between. Innocent company of a culprit, and
// everybody when several workers are killed from outside, can look the same; so only a few suspects are judged at once.
// If there are many, they are tried one at a time, and the next loss proves which one it is.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "router/schedule/scheduler_state.h"

namespace millrace {
namespace {

constexpr int kSuspectLosses = 2;
constexpr int64_t kFewSuspects = 4;
// Reports that a worker had not sent yet when it died are lost, two steps and what its queue held.
constexpr uint32_t kSamePlace = 4;  // tokens

}  // namespace

std::vector<Sequence*> Scheduler::State::Guilty(std::vector<Sequence*> in_step) {
  for (Sequence* sequence : in_step) {
    ++sequence->losses;
    sequence->loss_length = sequence->length();
  }
  const int64_t suspects =
      std::count_if(in_step.begin(), in_step.end(), [&](const Sequence* sequence) { return IsSuspect(*sequence); });
  const int proof = suspects <= kFewSuspects ? kSuspectLosses : kSuspectLosses + 1;
  std::erase_if(in_step, [&](const Sequence* sequence) { return sequence->losses < proof; });
  return in_step;
}

bool Scheduler::State::IsSuspect(const Sequence& sequence) const { return sequence.losses >= kSuspectLosses; }

void Scheduler::State::GotFurther(Sequence* sequence) const {
  if (sequence->length() > sequence->loss_length + kSamePlace) sequence->losses = 0;
}

bool Scheduler::State::MayRun(const Sequence& sequence) const {
  if (!IsSuspect(sequence)) return true;
  const auto other = sequences.find(on_trial);
  return other == sequences.end() || other->second->place != Sequence::Place::kRunning || !IsSuspect(*other->second);
}

void Scheduler::State::Quarantine(Sequence* sequence, Time now) {
  quarantined.Add(ContentOf(sequence->root, sequence->tokens, sequence->num_prompt, sequence->sampling), now);
  Fail(sequence, absl::InternalError(absl::StrCat("it was running on ", sequence->losses,
                                                  " workers when they were lost; it is not tried again")));
}

// Without the seed: a client that gives none is given another one each time.
PrefixHash Scheduler::State::ContentOf(const PrefixHash& root, const std::vector<int32_t>& prompt, size_t num_prompt,
                                       worker::v1::Sampling sampling) const {
  sampling.clear_seed();
  const PrefixHash how = hasher.Root(sampling.SerializeAsString());
  const PrefixHash what = hasher.Next(root, prompt.data(), num_prompt);
  return {what.lo ^ how.lo ^ num_prompt, what.hi ^ how.hi};
}

absl::Status Scheduler::State::CheckContent(const SequenceSpec& spec, Time now) {
  if (quarantined.empty()) return absl::OkStatus();
  const Time until =
      quarantined.Until(ContentOf(hasher.Root(spec.cache_salt), spec.prompt, spec.prompt.size(), spec.sampling), now);
  if (until == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("workers were lost while they ran this prompt; it is refused for another ",
                   (until - now + 999'999) / 1'000'000, " s"));
}

}  // namespace millrace
