#include "worker/engine/step_cost.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>

namespace millrace {
namespace {

// Repeats each step until it has been timed `kMaxRepeats` times or its time is spent; the least counts.
constexpr int kMaxRepeats = 3;
constexpr double kTimePerStepUs = 100'000;

class StepTimer {
 public:
  StepTimer(Model& model, const EngineLimits& limits) : model_(model), limits_(limits) {}

  // Decodes `rows` sequences of `context` tokens each.
  double Decode(int32_t rows, int32_t context) { return Time(rows, 1, context - 1); }
  // Drafts kMaxDrafts tokens for each of `sequences`, without what it costs to check them.
  double Draft(int32_t sequences, int32_t context) {
    const double given = Time(sequences, 1 + kMaxDrafts, context - 1, Guesses::kGiven);
    return std::max(0.0, Time(sequences, 1 + kMaxDrafts, context - 1, Guesses::kDrafted) - given);
  }
  // Prefills n tokens after `start` of one sequence.
  double Prefill(int32_t n, int32_t start) { return Time(1, n, start); }

 private:
  // Whether the rows of a sequence after the first are guesses.
  enum class Guesses { kNone, kGiven, kDrafted };

  double Time(int32_t num_sequences, int32_t n, int32_t start, Guesses guesses = Guesses::kNone) {
    Fill(num_sequences, n, start);
    if (guesses != Guesses::kNone) AddGuesses(num_sequences, n, start, guesses);
    double best = std::numeric_limits<double>::max(), spent = 0;
    for (int i = 0; i < kMaxRepeats && spent < kTimePerStepUs; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      model_.Run(input_, output_);
      const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
      best = std::min(best, us);
      spent += us;
    }
    return best;
  }

  void Fill(int32_t num_sequences, int32_t n, int32_t start) {
    input_.Clear();
    input_.query_start.push_back(0);
    input_.block_table_width = (start + n + kBlockTokens - 1) / kBlockTokens;
    for (int32_t s = 0; s < num_sequences; ++s) {
      const auto block_of = [&](int64_t i) {  // sequences overlap where the pool is too small for all of them
        return static_cast<int32_t>((s * input_.block_table_width + i) % limits_.num_blocks);
      };
      for (int32_t p = start; p < start + n; ++p) {
        input_.tokens.push_back(static_cast<int32_t>(random_() % static_cast<uint32_t>(limits_.vocab_size)));
        input_.positions.push_back(p);
        input_.kv_slots.push_back(block_of(p / kBlockTokens) * kBlockTokens + p % kBlockTokens);
      }
      for (int64_t i = 0; i < input_.block_table_width; ++i) input_.block_table.push_back(block_of(i));
      input_.query_start.push_back(static_cast<int32_t>(input_.tokens.size()));
      input_.context_len.push_back(start + n);
      input_.logit_rows.push_back(static_cast<int32_t>(input_.tokens.size()) - 1);
      input_.slots.push_back(s);
      input_.sampling.emplace_back();
      input_.target.push_back(-1);
      input_.num_logprobs.push_back(-1);
      input_.is_guess.push_back(false);
    }
  }

  void AddGuesses(int32_t num_sequences, int32_t n, int32_t start, Guesses guesses) {
    input_.logit_rows.clear();
    for (std::vector<int32_t>* ids : {&input_.slots, &input_.target, &input_.num_logprobs}) {
      ids->assign(static_cast<size_t>(num_sequences * n), -1);
    }
    input_.sampling.assign(static_cast<size_t>(num_sequences * n), {});
    input_.is_guess.assign(static_cast<size_t>(num_sequences * n), true);
    for (int32_t s = 0; s < num_sequences; ++s) {
      input_.is_guess[static_cast<size_t>(s * n)] = false;
      for (int32_t i = 0; i < n; ++i) input_.logit_rows.push_back(s * n + i);
      if (guesses == Guesses::kGiven) continue;
      input_.drafts.push_back({.sequence = s,
                               .count = n - 1,
                               .first_logit_row = s * n,
                               .position = start,
                               .unread_begin = s,
                               .unread_end = s + 1});
      input_.unread.push_back(input_.tokens[static_cast<size_t>(s * n)]);
      for (int32_t i = 1; i < n; ++i) input_.tokens[static_cast<size_t>(s * n + i)] = kGuessedToken;
    }
  }

  Model& model_;
  const EngineLimits& limits_;
  std::mt19937 random_;
  StepInput input_;
  StepOutput output_;
};

}  // namespace

double PrefillUs(const worker::v1::StepCost& cost, int64_t start, int64_t n) {
  const double middle = static_cast<double>(start) + static_cast<double>(n) / 2;
  return static_cast<double>(n) * (cost.prefill_token_us() + middle * cost.prefill_context_ns() / 1000);
}

double DecodeUs(const worker::v1::StepCost& cost, int64_t rows, int64_t context) {
  return static_cast<double>(rows) * cost.row_us() + static_cast<double>(context) * cost.context_ns() / 1000;
}

// PrefillUs is b/2 n^2 + a n with b = prefill_context_ns / 1000 and a = prefill_token_us + start b; its root in the
// form that does not cancel.
int64_t PrefillFitting(const worker::v1::StepCost& cost, int64_t start, int64_t max_n, double budget_us) {
  if (budget_us <= 0) return 0;
  const double b = cost.prefill_context_ns() / 1000;
  const double a = cost.prefill_token_us() + static_cast<double>(start) * b;
  const double divisor = a + std::sqrt(a * a + 2 * b * budget_us);
  if (divisor <= 0 || 2 * budget_us / divisor >= static_cast<double>(max_n)) return max_n;
  return static_cast<int64_t>(2 * budget_us / divisor);
}

worker::v1::StepCost MeasureStepCost(Model& model, const EngineLimits& limits) {
  StepTimer timer(model, limits);
  const auto within = [&](int32_t tokens) { return std::clamp(tokens, 1, limits.max_context); };
  timer.Prefill(within(std::min(16, limits.max_rows)), 0);  // warms up: pages, threads
  const double one = timer.Decode(1, 1);
  const int32_t rows = std::clamp(8, 1, limits.num_slots);
  const double many = rows > 1 ? timer.Decode(rows, 1) : one;
  const int32_t context = within(512);
  const double far = timer.Decode(rows, context);

  // A chunk that takes well more than a step's floor shows what a token costs.
  int32_t chunk = 1;
  double chunk_us = one;
  while (chunk_us < 2 * one && 2 * chunk <= std::min({limits.max_rows, limits.max_context / 2, 1024})) {
    chunk *= 2;
    chunk_us = timer.Prefill(chunk, 0);
  }
  const int32_t before = limits.max_context >= 2 * chunk ? std::min(512, limits.max_context - chunk) : 0;
  const double late_us = before > 0 ? timer.Prefill(chunk, before) : chunk_us;

  worker::v1::StepCost cost;
  cost.set_row_us(rows > 1 ? std::max(0.0, (many - one) / (rows - 1)) : 0);
  cost.set_context_ns(context > 1 ? std::max(0.0, (far - many) * 1000 / (static_cast<double>(rows) * (context - 1)))
                                  : 0);
  cost.set_step_us(std::max(0.0, one - cost.row_us()));
  const double context_us =
      before > 0 ? std::max(0.0, (late_us - chunk_us) / (static_cast<double>(chunk) * before)) : 0;
  cost.set_prefill_context_ns(context_us * 1000);
  cost.set_prefill_token_us(std::max(0.0, chunk_us / chunk - context_us * chunk / 2));
  return cost;
}

std::vector<worker::v1::Drafter> MeasureDrafters(Model& model, const EngineLimits& limits) {
  std::vector<worker::v1::Drafter> drafters;
  // Looking up is free but where it keeps the host from launching ahead: that time no formula of a drafter holds.
  if (model.max_steps_in_flight() == 1) {
    drafters.emplace_back().set_method(worker::v1::DRAFT_METHOD_LOOKUP);
    drafters.back().set_max_length(kMaxDrafts);
  }
  const int32_t context = std::min(512, limits.max_context - kMaxDrafts);
  const int32_t sequences =
      std::min({8, limits.num_slots, limits.max_rows / (1 + kMaxDrafts), limits.max_logit_rows / (1 + kMaxDrafts)});
  if (limits.draft_model == DraftModel::kNone || context < 1 || sequences < 1) return drafters;
  StepTimer timer(model, limits);
  timer.Draft(1, 1);  // warms up
  const double one = timer.Draft(1, 1) / kMaxDrafts;
  const double many = sequences > 1 ? timer.Draft(sequences, 1) / kMaxDrafts : one;
  const double far = timer.Draft(sequences, context) / kMaxDrafts;
  worker::v1::Drafter& drafter = drafters.emplace_back();
  drafter.set_method(worker::v1::DRAFT_METHOD_MODEL);
  drafter.set_max_length(kMaxDrafts);
  drafter.set_row_us(sequences > 1 ? std::max(0.0, (many - one) / (sequences - 1)) : 0);
  drafter.set_context_ns(
      context > 1 ? std::max(0.0, (far - many) * 1000 / (static_cast<double>(sequences) * (context - 1))) : 0);
  drafter.set_step_us(std::max(0.0, one - drafter.row_us()));
  return drafters;
}

}  // namespace millrace
