// A model whose next token is a hash of every token that it finds in the cache of the sequence, so that a wrong block,
// position or order shows in the output. The pool starts as garbage. One that is gated ends a step only when it is let.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "kernels/check.h"
#include "worker/engine/engine_limits.h"
#include "worker/model/model.h"

namespace millrace::testing {

inline constexpr int32_t kPoison = 99;  // a sequence whose last token is this one has logits that are not finite

// How the draft model guesses: the token that comes with this probability, else any.
struct FakeDraft {
  double right = 1;
  uint64_t seed = 1;
};

class FakeModel final : public Model {
 public:
  explicit FakeModel(const EngineLimits& limits, int max_steps_in_flight = 1, FakeDraft draft = {})
      : limits_(limits),
        max_steps_in_flight_(max_steps_in_flight),
        draft_(draft),
        random_(draft.seed),
        draft_pool_(static_cast<size_t>(limits.num_blocks) * kBlockTokens, -54321),
        last_tokens_(static_cast<size_t>(limits.num_slots)),
        pool_(static_cast<size_t>(limits.num_blocks) * kBlockTokens, -12345) {}

  static int32_t NextToken(const std::vector<int32_t>& tokens, uint64_t seed, int32_t vocab_size,
                           const std::vector<int32_t>& forbidden = {}) {
    uint64_t hash = seed + 1;
    for (const int32_t token : tokens) {
      hash = (hash ^ static_cast<uint32_t>(token)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
    }
    auto token = static_cast<int32_t>(hash % static_cast<uint64_t>(vocab_size - 1));  // never kPoison
    while (std::ranges::find(forbidden, token) != forbidden.end()) token = (token + 1) % (vocab_size - 1);
    return token;
  }

  // What a sequence alone would get.
  static std::vector<int32_t> Generate(std::vector<int32_t> tokens, int count, uint64_t seed = 0,
                                       int32_t vocab_size = 100) {
    const auto begin = static_cast<std::ptrdiff_t>(tokens.size());
    for (int i = 0; i < count; ++i) tokens.push_back(NextToken(tokens, seed, vocab_size));
    return {tokens.begin() + begin, tokens.end()};
  }

  int max_steps_in_flight() const override { return max_steps_in_flight_; }
  DraftModel draft_model() const override { return limits_.draft_model; }

  // Computes at once; the results are given later, as a device that runs behind the host would.
  void Launch(const StepInput& given) override {
    MILLRACE_CHECK(std::ssize(outputs_) < max_steps_in_flight_, "not too many steps are under way");
    StepInput input = given;
    ReadDrafts(input);
    for (size_t row = 0; row < input.tokens.size(); ++row) {
      const int32_t token = input.tokens[row];
      MILLRACE_CHECK(token >= 0 || max_steps_in_flight_ > 1, "one step at a time knows its tokens", token);
      pool_[static_cast<size_t>(input.kv_slots[row])] = token >= 0 ? token : last_tokens_[static_cast<size_t>(~token)];
    }
    StepOutput& output = outputs_.emplace_back();
    output.tokens.assign(input.logit_rows.size(), 0);
    output.logprobs.assign(input.logit_rows.size(), {});
    for (size_t r = 0; r < input.logit_rows.size(); ++r) Sample(input, r, output);
    const absl::MutexLock lock(&mutex_);
    rows_.push_back(static_cast<int32_t>(input.tokens.size()));
  }

  void Await(StepOutput& output) override {
    MILLRACE_CHECK(!outputs_.empty(), "a step is under way");
    AwaitGate();
    output = std::move(outputs_.front());
    outputs_.pop_front();
  }

  void ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) override {
    const absl::MutexLock lock(&mutex_);
    history_[slot] = {std::vector<int32_t>(prompt.data, prompt.data + prompt.size),
                      std::vector<int32_t>(output.data, output.data + output.size)};
  }

  // Thread-safe, for the test.
  struct History {
    std::vector<int32_t> prompt, output;
  };
  History history(int slot) {
    const absl::MutexLock lock(&mutex_);
    return history_[slot];
  }
  std::vector<int32_t> rows_of_steps() {
    const absl::MutexLock lock(&mutex_);
    return rows_;
  }
  void CloseGate() {
    const absl::MutexLock lock(&mutex_);
    steps_let_ = 0;
  }
  void LetSteps(int64_t count) {
    const absl::MutexLock lock(&mutex_);
    steps_let_ += count;
  }
  void OpenGate() {
    const absl::MutexLock lock(&mutex_);
    steps_let_ = kUngated;
  }

 private:
  static constexpr int64_t kUngated = INT64_MAX / 2;

  void AwaitGate() {
    const absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](int64_t* let) { return *let > 0; }, &steps_let_));
    if (steps_let_ < kUngated) --steps_let_;
  }

  // The token at a position of a sequence of the step, as far as a pool knows it.
  static int32_t& At(std::vector<int32_t>& pool, const StepInput& input, int32_t sequence, int32_t position) {
    const int64_t entry = sequence * input.block_table_width + position / kBlockTokens;
    return pool[static_cast<size_t>(input.block_table[static_cast<size_t>(entry)] * kBlockTokens +
                                    position % kBlockTokens)];
  }

  // A draft that reads another token than the sequence has there, or misses one, guesses wrong: the test sees by how
  // many are right that it has read them all.
  void ReadDrafts(StepInput& input) {
    for (const DraftInput& draft : input.drafts) {
      int32_t position = draft.position;
      for (int32_t i = draft.unread_begin; i < draft.unread_end; ++i) {
        At(draft_pool_, input, draft.sequence, position++) = input.unread[static_cast<size_t>(i)];
      }
      const auto first_row = static_cast<size_t>(input.query_start[static_cast<size_t>(draft.sequence)]);
      if (draft.count > 0) {
        MILLRACE_CHECK(position == input.positions[first_row] + 1, "it has read all that there is", position);
      }
      std::vector<int32_t> tokens;
      for (int32_t p = 0; p < position; ++p) tokens.push_back(At(draft_pool_, input, draft.sequence, p));
      for (int32_t j = 0; j < draft.count; ++j) {
        const SamplingRow& sampling = input.sampling[static_cast<size_t>(draft.first_logit_row + j)];
        int32_t guess = NextToken(tokens, sampling.seed, limits_.vocab_size, Forbidden(input, sampling));
        if (std::uniform_real_distribution<>()(random_) >= draft_.right) {
          guess = static_cast<int32_t>(random_() % static_cast<uint64_t>(limits_.vocab_size));
        }
        input.tokens[first_row + 1 + static_cast<size_t>(j)] = guess;
        if (j + 1 < draft.count) At(draft_pool_, input, draft.sequence, position++) = guess;
        tokens.push_back(guess);
      }
    }
    for (const int32_t token : input.tokens) MILLRACE_CHECK(token != kGuessedToken, "every guess was made");
  }

  static std::vector<int32_t> Forbidden(const StepInput& input, const SamplingRow& sampling) {
    std::vector<int32_t> forbidden;
    for (int32_t i = sampling.bias_begin; i < sampling.bias_end; ++i) {
      const LogitBias& bias = input.biases[static_cast<size_t>(i)];
      if (std::isinf(bias.value)) forbidden.push_back(bias.token);
    }
    return forbidden;
  }

  void Sample(const StepInput& input, size_t r, StepOutput& output) {
    const int32_t row = input.logit_rows[r];
    if (input.is_guess[r] && output.tokens[r - 1] != input.tokens[static_cast<size_t>(row)]) {
      output.tokens[r] = kNotReached;
      return;
    }
    const auto sequence =
        static_cast<size_t>(std::ranges::upper_bound(input.query_start, row) - input.query_start.begin() - 1);
    const int32_t visible = input.context_len[sequence] - (input.query_start[sequence + 1] - 1 - row);
    std::vector<int32_t> tokens;
    for (int32_t p = 0; p < visible; ++p) {
      const int32_t block = input.block_table[sequence * static_cast<size_t>(input.block_table_width) +
                                              static_cast<size_t>(p / kBlockTokens)];
      tokens.push_back(pool_[static_cast<size_t>(block * kBlockTokens + p % kBlockTokens)]);
    }
    const SamplingRow& sampling = input.sampling[r];
    int32_t token = NextToken(tokens, sampling.seed, limits_.vocab_size, Forbidden(input, sampling));
    if (tokens.back() == kPoison) token = -1;
    if (input.target[r] >= 0) token = input.target[r];
    output.tokens[r] = token;
    if (input.slots[r] >= 0) last_tokens_[static_cast<size_t>(input.slots[r])] = token;
    if (sampling.history >= 0 && token >= 0) {
      const absl::MutexLock lock(&mutex_);
      history_[sampling.history].output.push_back(token);
    }
    if (input.num_logprobs[r] < 0) return;
    output.logprobs[r].chosen = -static_cast<float>(visible);  // tells which position it came from
    for (int32_t i = 0; i < input.num_logprobs[r]; ++i) {
      output.logprobs[r].top_tokens.push_back(i);
      output.logprobs[r].top_values.push_back(-static_cast<float>(i));
    }
  }

  const EngineLimits limits_;
  const int max_steps_in_flight_;
  const FakeDraft draft_;
  std::mt19937_64 random_;
  std::vector<int32_t> draft_pool_;  // what the draft model has read
  std::vector<int32_t> last_tokens_;
  std::deque<StepOutput> outputs_;
  std::vector<int32_t> pool_;
  absl::Mutex mutex_;
  int64_t steps_let_ = kUngated;
  std::map<int, History> history_;
  std::vector<int32_t> rows_;
};

}  // namespace millrace::testing
