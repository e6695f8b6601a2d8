#include "router/schedule/speculation_policy.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "router/schedule/step_cost.h"

namespace millrace {
namespace {

constexpr double kLeastGain = 0.03;     // that a change must promise
constexpr int kMostRounds = 8;          // towards the best rate; three or four do
constexpr float kSequenceTrials = 128;  // remembered
constexpr float kAverageTrials = 1024;
constexpr float kSequencePrior = 32;  // trials that the average counts for
constexpr float kAveragePrior = 16;   // and the first guess
constexpr float kDriftReports = 256;  // in which evidence that is not renewed falls to 1 / e
constexpr float kMostRight = 0.99f;
// The first guess, by method: found, right. Hopeful: what is not tried is never known.
constexpr float kFound[kDraftMethods] = {0.3f, 1};
constexpr float kRight[kDraftMethods] = {0.7f, 0.8f};
constexpr int kLookup = worker::v1::DRAFT_METHOD_LOOKUP - 1;
constexpr int kModel = worker::v1::DRAFT_METHOD_MODEL - 1;

int BandOf(uint32_t position) { return position < 2 ? static_cast<int>(position) : position < 4 ? 2 : 3; }

void Count(Guesses::Count* count, bool right, float trials) {
  count->tried += 1 - count->tried / trials;
  count->right += static_cast<float>(right) - count->right / trials;
}

void Count(Guesses* guesses, bool lookup, uint32_t guessed, uint32_t right, bool ended, float trials) {
  if (lookup) Count(&guesses->found, guessed > 0, trials);
  for (uint32_t position = 0; position < guessed && position <= right; ++position) {
    if (position == right && ended) break;
    Count(&guesses->bands[static_cast<size_t>(BandOf(position))], position < right, trials);
  }
}

float Share(const Guesses::Count& count, float expected, float trials) {
  return (count.right + trials * expected) / (count.tried + trials);
}

void Fade(Guesses::Count* count, float kept) {
  count->tried *= kept;
  count->right *= kept;
}

void Fade(Guesses* guesses, float kept) {
  Fade(&guesses->found, kept);
  for (Guesses::Count& band : guesses->bands) Fade(&band, kept);
}

}  // namespace

SpeculationPolicy::SpeculationPolicy(const worker::v1::Ready& ready, bool enabled) {
  for (const worker::v1::Drafter& drafter : ready.drafters()) {
    max_length_ = std::max(max_length_, drafter.max_length());
    if (enabled) drafters_.push_back(drafter);
    if (drafter.method() == worker::v1::DRAFT_METHOD_MODEL) depth_us_ = drafter.step_us();
  }
}

absl::Status SpeculationPolicy::CheckDrafters(const worker::v1::Ready& ready) {
  bool seen[kDraftMethods] = {};
  for (const worker::v1::Drafter& drafter : ready.drafters()) {
    if (drafter.method() < 1 || drafter.method() > kDraftMethods) {
      return absl::InvalidArgumentError(
          absl::StrCat("drafters holds method ", drafter.method(), ", which is not within 1 … ", kDraftMethods));
    }
    if (seen[drafter.method() - 1]) {
      return absl::InvalidArgumentError(absl::StrCat("drafters holds method ", drafter.method(), " twice"));
    }
    seen[drafter.method() - 1] = true;
    if (drafter.max_length() < 1 || drafter.max_length() > kMaxDraftLength) {
      return absl::InvalidArgumentError(absl::StrCat("drafters holds max_length ", drafter.max_length(),
                                                     ", which is not within 1 … ", kMaxDraftLength));
    }
    for (const double part : {drafter.step_us(), drafter.row_us(), drafter.context_ns()}) {
      if (std::isfinite(part) && part >= 0 && part <= 1e9) continue;
      return absl::InvalidArgumentError(absl::StrCat("drafters holds ", part, ", which is not within 0 … 1e9"));
    }
  }
  return absl::OkStatus();
}

void SpeculationPolicy::Learn(const DraftChoice& choice, uint32_t guessed, uint32_t right, bool ended,
                              SequenceGuesses* guesses) {
  if (choice.length == 0 || !active()) return;
  const auto method = static_cast<size_t>(choice.method - 1);
  const bool lookup = choice.method == worker::v1::DRAFT_METHOD_LOOKUP;
  Count(&(*guesses)[method], lookup, guessed, right, ended, kSequenceTrials);
  Count(&average_[method], lookup, guessed, right, ended, kAverageTrials);
}

// A band of which nothing is known is as good as the one before it; a sequence differs from the average in the later
// bands as it does in the earlier ones.
void SpeculationPolicy::Prepare(const worker::v1::StepCost& cost, absl::Span<const Candidate> candidates) {
  const auto num_rows = static_cast<double>(candidates.size());
  double context = 0;
  prospects_.assign(candidates.size(), {});
  for (size_t i = 0; i < candidates.size(); ++i) {
    context += candidates[i].context;
    Prospect& prospect = prospects_[i];
    for (const worker::v1::Drafter& drafter : drafters_) {
      const auto method = static_cast<size_t>(drafter.method() - 1);
      const Guesses& all = average_[method];
      const Guesses& its = (*candidates[i].guesses)[method];
      const float found = Share(its.found, Share(all.found, kFound[method], kAveragePrior), kSequencePrior);
      float usual[Guesses::kBands], right[Guesses::kBands];
      for (int band = 0; band < Guesses::kBands; ++band) {
        const auto at = static_cast<size_t>(band);
        usual[band] = Share(all.bands[at], band == 0 ? kRight[method] : usual[band - 1], kAveragePrior);
        const float expected = band == 0 ? usual[0] : usual[band] + right[band - 1] - usual[band - 1];
        right[band] = Share(its.bands[at], std::clamp(expected, 0.0f, kMostRight), kSequencePrior);
      }
      float gain = found;
      for (uint32_t position = 0; position < drafter.max_length(); ++position) {
        gain *= right[BandOf(position)];
        prospect.gains[method][position] = gain;
      }
      const double draft_us = drafter.row_us() + candidates[i].context * drafter.context_ns() * 1e-3;
      prospect.costs[method] = found * (cost.row_us() + draft_us);
      if (method == kLookup) prospect.costs[method] += drafter.step_us() / num_rows;
    }
  }
  plain_us_ = std::max(StepSeconds(cost, 0, num_rows, context) * 1e6, 1.0);
}

// At a price of `rate` tokens for a microsecond, the depth of MODEL whose worth exceeds its price most.
uint32_t SpeculationPolicy::BestDepth(double rate) const {
  std::array<double, kMaxDraftLength + 1> worth{};
  for (const Prospect& prospect : prospects_) {
    double lookup = 0, model = 0;
    for (const float gain : prospect.gains[kLookup]) {
      if (gain <= rate * prospect.costs[kLookup]) break;
      lookup += gain - rate * prospect.costs[kLookup];
    }
    for (uint32_t depth = 0; depth <= kMaxDraftLength; ++depth) {
      if (depth > 0) model += std::max(0.0, prospect.gains[kModel][depth - 1] - rate * prospect.costs[kModel]);
      worth[depth] += std::max(lookup, model);
    }
  }
  uint32_t best = 0;
  for (uint32_t depth = 1; depth <= kMaxDraftLength; ++depth) {
    if (worth[depth] - rate * depth * depth_us_ > worth[best] - rate * best * depth_us_) best = depth;
  }
  return best;
}

void SpeculationPolicy::Choose(double rate, uint32_t depth) {
  for (Prospect& prospect : prospects_) {
    prospect.best = {};
    double most = 0;
    for (const worker::v1::Drafter& drafter : drafters_) {
      const auto method = static_cast<size_t>(drafter.method() - 1);
      const uint32_t longest = method == kModel ? depth : kMaxDraftLength;
      double worth = 0;
      uint32_t length = 0;
      for (; length < longest && prospect.gains[method][length] > rate * prospect.costs[method]; ++length) {
        worth += prospect.gains[method][length] - rate * prospect.costs[method];
      }
      if (worth <= most) continue;
      most = worth;
      prospect.best = {drafter.method(), length};
    }
  }
}

template <class ChoiceOf>
double SpeculationPolicy::Rate(const ChoiceOf& choice_of) const {
  double tokens = static_cast<double>(prospects_.size()), us = plain_us_;
  uint32_t depth = 0;
  for (size_t i = 0; i < prospects_.size(); ++i) {
    const DraftChoice& choice = choice_of(i);
    if (choice.length == 0) continue;
    const auto method = static_cast<size_t>(choice.method - 1);
    for (uint32_t position = 0; position < choice.length; ++position) tokens += prospects_[i].gains[method][position];
    us += choice.length * prospects_[i].costs[method];
    if (method == kModel) depth = std::max(depth, choice.length);
  }
  return tokens / (us + depth * depth_us_);
}

// What is not tried any more is forgotten slowly, so that it is tried again: a sequence by what is usual, and what is
// usual, if nobody tries, by the first guess.
void SpeculationPolicy::Drift(uint32_t reports, absl::Span<Candidate> candidates) {
  const float kept = std::exp(-static_cast<float>(reports) / kDriftReports);
  bool used[kDraftMethods] = {};
  for (Candidate& candidate : candidates) {
    for (int method = 0; method < kDraftMethods; ++method) {
      if (candidate.choice.length > 0 && candidate.choice.method - 1 == method) {
        used[method] = true;
      } else {
        Fade(&(*candidate.guesses)[static_cast<size_t>(method)], kept);
      }
    }
  }
  for (int method = 0; method < kDraftMethods; ++method) {
    if (!used[method]) Fade(&average_[static_cast<size_t>(method)], kept);
  }
}

void SpeculationPolicy::Decide(const worker::v1::StepCost& cost, uint32_t reports, absl::Span<Candidate> candidates) {
  if (candidates.empty() || !active()) return;
  Drift(reports, candidates);
  Prepare(cost, candidates);
  const double present = Rate([&](size_t i) -> const DraftChoice& { return candidates[i].choice; });
  // The best ratio of two sums: at the price of the rate so far each choice stands for itself, and makes a better rate.
  double rate = static_cast<double>(candidates.size()) / plain_us_;
  for (int round = 0; round < kMostRounds; ++round) {
    Choose(rate, BestDepth(rate));
    const double better = Rate([&](size_t i) -> const DraftChoice& { return prospects_[i].best; });
    if (better <= rate * (1 + 1e-9)) break;
    rate = better;
  }
  const bool change = rate >= present * (1 + kLeastGain);
  uint32_t depth = 0;
  for (const Candidate& candidate : candidates) {
    if (candidate.choice.method == worker::v1::DRAFT_METHOD_MODEL) depth = std::max(depth, candidate.choice.length);
  }
  for (size_t i = 0; i < candidates.size(); ++i) {
    const DraftChoice& best = prospects_[i].best;
    if (change) {
      candidates[i].choice = best;
    } else if (candidates[i].fresh) {
      // It joins the others, but no deeper than they go.
      const bool model = best.method == worker::v1::DRAFT_METHOD_MODEL;
      candidates[i].choice = model && depth == 0
                                 ? DraftChoice{}
                                 : DraftChoice{best.method, model ? std::min(best.length, depth) : best.length};
    }
    candidates[i].fresh = false;
  }
}

}  // namespace millrace
