#include "router/schedule/speculation_policy.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "router/schedule/step_cost.h"
#include "tests/router/schedule/random_seed.h"

namespace millrace {
namespace {

using worker::v1::DRAFT_METHOD_LOOKUP;
using worker::v1::DRAFT_METHOD_MODEL;

constexpr uint32_t kContext = 1024;
constexpr uint32_t kMostDrafts = 8;

// An 8B model in bf16 and a draft of 0.6B on one H200, by their bytes and the rate of its memory.
worker::v1::StepCost Cost() {
  worker::v1::StepCost cost;
  cost.set_step_us(3520);
  cost.set_row_us(8);
  cost.set_context_ns(34.3);
  return cost;
}

worker::v1::Drafter Small() {
  worker::v1::Drafter drafter;
  drafter.set_method(DRAFT_METHOD_MODEL);
  drafter.set_max_length(kMostDrafts);
  drafter.set_step_us(277);
  drafter.set_row_us(1);
  drafter.set_context_ns(26.7);
  return drafter;
}

worker::v1::Drafter Lookup() {
  worker::v1::Drafter drafter;
  drafter.set_method(DRAFT_METHOD_LOOKUP);
  drafter.set_max_length(kMostDrafts);
  drafter.set_row_us(0.5);
  return drafter;
}

// Sequences that decode together, and a worker that does as it is told.
class Load {
 public:
  Load(size_t num_sequences, std::vector<worker::v1::Drafter> drafters, double model, double lookup = 0,
       double found = 0)
      : drafters_(std::move(drafters)), policy_(ReadyOf(drafters_), true), rng_(TestSeed(7)) {
    accuracy_[DRAFT_METHOD_MODEL - 1] = model;
    accuracy_[DRAFT_METHOD_LOOKUP - 1] = lookup;
    found_ = found;
    guesses_.resize(num_sequences);
    for (SequenceGuesses& guesses : guesses_) candidates_.push_back({&guesses, kContext, {}, true});
  }

  void SetAccuracy(double model) { accuracy_[DRAFT_METHOD_MODEL - 1] = model; }

  // Tokens a microsecond that the steps can be expected to have brought.
  double Run(int steps) {
    double tokens = 0, us = 0;
    for (int step = 0; step < steps; ++step) {
      if (step % 8 == 0) Decide();
      for (const auto& it : candidates_) tokens += Tokens(it.choice);
      us += StepUs();
      for (const auto& it : candidates_) Draw(it);
    }
    return tokens / us;
  }

  double FixedRate(uint32_t length) {
    for (auto& it : candidates_)
      it.choice = {length == 0 ? worker::v1::DRAFT_METHOD_UNSPECIFIED : DRAFT_METHOD_MODEL, length};
    double tokens = 0;
    for (const auto& it : candidates_) tokens += Tokens(it.choice);
    return tokens / StepUs();
  }
  double BestFixedRate() {
    double best = 0;
    for (uint32_t length = 0; length <= kMostDrafts; ++length) best = std::max(best, FixedRate(length));
    return best;
  }

  double MeanLength() const {
    double sum = 0;
    for (const auto& it : candidates_) sum += it.choice.length;
    return sum / static_cast<double>(candidates_.size());
  }
  const DraftChoice& choice(size_t i) const { return candidates_[i].choice; }
  int changes() const { return changes_; }  // decisions that changed something

 private:
  static worker::v1::Ready ReadyOf(const std::vector<worker::v1::Drafter>& drafters) {
    worker::v1::Ready ready;
    for (const auto& drafter : drafters) *ready.add_drafters() = drafter;
    return ready;
  }

  void Decide() {
    const auto before = candidates_;
    policy_.Decide(Cost(), 8, absl::MakeSpan(candidates_));
    bool changed = false;
    for (size_t i = 0; i < before.size(); ++i) changed |= !(before[i].choice == candidates_[i].choice);
    changes_ += changed;
  }

  double Accuracy(const DraftChoice& choice) const { return accuracy_[choice.method - 1]; }
  double Found(const DraftChoice& choice) const { return choice.method == DRAFT_METHOD_LOOKUP ? found_ : 1; }

  double Tokens(const DraftChoice& choice) const {
    if (choice.length == 0) return 1;
    const double a = Accuracy(choice);
    return 1 + Found(choice) * (a == 1 ? choice.length : a * (1 - std::pow(a, choice.length)) / (1 - a));
  }

  double StepUs() const {
    double rows = 0, context = 0, us = 0;
    uint32_t depth = 0;
    for (const auto& it : candidates_) {
      rows += 1 + Found(it.choice) * it.choice.length;
      context += it.context;
      for (const auto& drafter : drafters_) {
        if (drafter.method() != it.choice.method) continue;
        us += it.choice.length * Found(it.choice) * (drafter.row_us() + it.context * drafter.context_ns() / 1000);
        if (drafter.method() == DRAFT_METHOD_MODEL) depth = std::max(depth, it.choice.length);
      }
    }
    for (const auto& drafter : drafters_) {
      if (drafter.method() == DRAFT_METHOD_MODEL) us += depth * drafter.step_us();
    }
    return us + StepSeconds(Cost(), 0, rows, context) * 1e6;
  }

  void Draw(const SpeculationPolicy::Candidate& it) {
    if (it.choice.length == 0) return;
    std::uniform_real_distribution<double> uniform(0, 1);
    const uint32_t guessed = uniform(rng_) < Found(it.choice) ? it.choice.length : 0;
    uint32_t right = 0;
    while (right < guessed && uniform(rng_) < Accuracy(it.choice)) ++right;
    policy_.Learn(it.choice, guessed, right, false, it.guesses);
  }

  std::vector<worker::v1::Drafter> drafters_;
  SpeculationPolicy policy_;
  std::mt19937_64 rng_;
  double accuracy_[kDraftMethods] = {};
  double found_ = 0;
  std::vector<SequenceGuesses> guesses_;
  std::vector<SpeculationPolicy::Candidate> candidates_;
  int changes_ = 0;
};

TEST(SpeculationPolicy, DraftsMuchWhenAloneAndNothingInACrowd) {
  const struct {
    size_t batch;
    double accuracy, least, most;
  } cases[] = {{1, 0.8, 4, 8}, {1, 0.3, 0, 2}, {32, 0.8, 2, 5}, {64, 0.6, 0, 2}, {256, 0.6, 0, 0}, {256, 0.3, 0, 0}};
  for (const auto& it : cases) {
    SCOPED_TRACE(testing::Message() << "batch " << it.batch << ", accuracy " << it.accuracy);
    Load load(it.batch, {Small()}, it.accuracy);
    load.Run(400);
    EXPECT_GE(load.MeanLength(), it.least);
    EXPECT_LE(load.MeanLength(), it.most);
  }
}

TEST(SpeculationPolicy, IsWithinThreePercentOfTheBestFixedLength) {
  for (const size_t batch : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
    for (const double accuracy : {0.3, 0.6, 0.8}) {
      Load load(batch, {Small()}, accuracy);
      load.Run(400);
      const double rate = load.Run(800);
      const double length = load.MeanLength();
      const double best = load.BestFixedRate();
      EXPECT_GE(rate, 0.97 * best) << "batch " << batch << ", accuracy " << accuracy << ", length " << length;
    }
  }
}

// Among these accuracies some lie where two lengths are as good as each other.
TEST(SpeculationPolicy, StaysWithWhatItChoseWhileNothingButNoiseChanges) {
  int changes = 0;
  for (const size_t batch : {1, 4, 16, 64}) {
    for (double accuracy = 0.4; accuracy < 0.85; accuracy += 0.05) {
      Load load(batch, {Small()}, accuracy);
      load.Run(400);
      const int before = load.changes();
      load.Run(2400);  // 300 decisions
      changes += load.changes() - before;
    }
  }
  std::printf("%d changes in 12,000 decisions\n", changes);
  EXPECT_LE(changes, 30);
}

TEST(SpeculationPolicy, ABadSequenceStopsAndAGoodOneStartsAgain) {
  Load load(16, {Small()}, 0.8);
  load.Run(400);
  const double good = load.MeanLength();
  EXPECT_GE(good, 3);
  load.SetAccuracy(0.02);
  load.Run(400);
  EXPECT_LE(load.MeanLength(), 0.5);
  load.SetAccuracy(0.8);
  load.Run(4000);
  EXPECT_GE(load.MeanLength(), 0.6 * good);
}

TEST(SpeculationPolicy, TryingAgainCostsLittle) {
  for (const size_t batch : {1, 16, 64}) {
    Load load(batch, {Small()}, 0.0);
    load.Run(400);
    const double rate = load.Run(20'000);
    EXPECT_GE(rate, 0.98 * load.FixedRate(0)) << "batch " << batch;
  }
}

// Every other sequence is bad.
TEST(SpeculationPolicy, JudgesEachSequenceByItself) {
  SpeculationPolicy policy(
      [] {
        worker::v1::Ready ready;
        *ready.add_drafters() = Small();
        return ready;
      }(),
      true);
  std::vector<SequenceGuesses> guesses(16);
  std::vector<SpeculationPolicy::Candidate> candidates;
  for (SequenceGuesses& it : guesses) candidates.push_back({&it, kContext, {}, true});
  for (int step = 0; step < 200; ++step) {
    if (step % 8 == 0) policy.Decide(Cost(), 8, absl::MakeSpan(candidates));
    for (size_t i = 0; i < candidates.size(); ++i) {
      const DraftChoice& choice = candidates[i].choice;
      policy.Learn(choice, choice.length, i % 2 == 0 ? choice.length : 0, false, candidates[i].guesses);
    }
  }
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (i % 2 == 0) {
      EXPECT_GE(candidates[i].choice.length, 6u) << i;
    } else {
      EXPECT_LE(candidates[i].choice.length, 1u) << i;
    }
  }
}

TEST(SpeculationPolicy, TakesTheMethodThatBringsMore) {
  Load quotes(4, {Lookup(), Small()}, 0.3, 0.95, 0.9);
  quotes.Run(1000);
  EXPECT_EQ(quotes.choice(0).method, DRAFT_METHOD_LOOKUP);
  Load prose(4, {Lookup(), Small()}, 0.8, 0.1, 0.1);
  prose.Run(1000);
  EXPECT_EQ(prose.choice(0).method, DRAFT_METHOD_MODEL);
}

TEST(SpeculationPolicy, NothingIsKnownOfGuessesBehindAnEnd) {
  SpeculationPolicy policy(
      [] {
        worker::v1::Ready ready;
        *ready.add_drafters() = Small();
        return ready;
      }(),
      true);
  SequenceGuesses guesses{};
  policy.Learn({DRAFT_METHOD_MODEL, 4}, 4, 1, true, &guesses);
  const Guesses& its = guesses[DRAFT_METHOD_MODEL - 1];
  EXPECT_EQ(its.bands[0].tried, 1);
  EXPECT_EQ(its.bands[0].right, 1);
  EXPECT_EQ(its.bands[1].tried, 0);
  policy.Learn({DRAFT_METHOD_MODEL, 4}, 4, 1, false, &guesses);
  EXPECT_EQ(its.bands[1].tried, 1);
  EXPECT_EQ(its.bands[1].right, 0);
  EXPECT_EQ(its.bands[2].tried, 0);
}

}  // namespace
}  // namespace millrace
