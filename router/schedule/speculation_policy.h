// How many tokens each sequence of a worker drafts, and how. Expected tokens per predicted second of a step are made as
// many as possible, from what guesses were worth so far and what rows and drafting cost; the README has the rule. Pure
// and deterministic. One per worker, as long as its stream; what is known of a sequence belongs to the sequence and
// goes with it. O(sequences * drafted tokens) a decision, O(drafted tokens) a row; 80 bytes a sequence.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "millrace/worker/v1/worker.pb.h"
#include "router/schedule/scheduler.h"

namespace millrace {

inline constexpr uint32_t kMaxDraftLength = kDraftPositions;

struct DraftChoice {
  worker::v1::DraftMethod method = worker::v1::DRAFT_METHOD_UNSPECIFIED;
  uint32_t length = 0;
  bool operator==(const DraftChoice&) const = default;
};

// How often guesses of one method were there and right. Older trials are forgotten.
struct Guesses {
  struct Count {
    float tried = 0, right = 0;
  };
  static constexpr int kBands = 4;  // positions 0, 1, 2 … 3, 4 …
  Count found;                      // steps that should have drafted, and those with any guess
  std::array<Count, kBands> bands;  // guesses behind right ones only
};

inline constexpr int kDraftMethods = 2;                      // LOOKUP, MODEL
using SequenceGuesses = std::array<Guesses, kDraftMethods>;  // by method - 1

class SpeculationPolicy {
 public:
  // REQUIRES: CheckDrafters(ready). Nothing is drafted unless `enabled`.
  SpeculationPolicy(const worker::v1::Ready& ready, bool enabled);
  static absl::Status CheckDrafters(const worker::v1::Ready& ready);

  bool active() const { return !drafters_.empty(); }
  uint32_t max_length() const { return max_length_; }  // what the worker may draft at all, wanted or not

  // A row of a sequence that was told `choice`: so many tokens were guessed, the first `right` of them were right. If
  // it `ended` there, nothing is known of those behind.
  void Learn(const DraftChoice& choice, uint32_t guessed, uint32_t right, bool ended, SequenceGuesses* guesses);

  // A decoding sequence.
  struct Candidate {
    SequenceGuesses* guesses;
    uint32_t context;    // tokens
    DraftChoice choice;  // the present one; Decide puts the next one there
    bool fresh;          // nothing was decided for it so far
  };
  // Decides for all sequences that decode there, `reports` steps after the last time.
  void Decide(const worker::v1::StepCost& cost, uint32_t reports, absl::Span<Candidate> candidates);

 private:
  // A candidate's prospects. A draft's row is paid for if there is a guess, and gains a token if it and all before it
  // are right.
  struct Prospect {
    std::array<std::array<float, kMaxDraftLength>, kDraftMethods> gains{};  // tokens, by position
    std::array<double, kDraftMethods> costs{};                              // microseconds a drafted token
    DraftChoice best;
  };

  void Prepare(const worker::v1::StepCost& cost, absl::Span<const Candidate> candidates);
  uint32_t BestDepth(double rate) const;
  void Choose(double rate, uint32_t depth);
  template <class ChoiceOf>
  double Rate(const ChoiceOf& choice_of) const;  // tokens a microsecond
  void Drift(uint32_t reports, absl::Span<Candidate> candidates);

  std::vector<worker::v1::Drafter> drafters_;
  uint32_t max_length_ = 0;
  double depth_us_ = 0;              // of MODEL, for all sequences together
  SequenceGuesses average_{};        // of this worker's sequences
  std::vector<Prospect> prospects_;  // scratch of Decide
  double plain_us_ = 0;              // predicted step without drafts
};

}  // namespace millrace
