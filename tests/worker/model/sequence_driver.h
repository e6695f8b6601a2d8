// Drives a model as an engine would: packs chunks of every unfinished sequence into one step, and appends what is
// sampled. Block ids are handed out in a shuffled order, so that no block table is contiguous. Lives for one test.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "worker/model/step.h"

namespace millrace {

class SequenceDriver {
 public:
  struct Sequence {
    std::vector<int32_t> tokens;  // the prompt, then what was generated
    size_t num_prompt = 0, num_wanted = 0, num_computed = 0;
    SamplingRow sampling;
    int num_logprobs = -1;
    std::vector<int32_t> blocks;
    std::vector<TokenLogProbs> logprobs;  // of the generated tokens

    std::vector<int32_t> generated() const {
      return {tokens.begin() + static_cast<std::ptrdiff_t>(num_prompt), tokens.end()};
    }
    bool done() const { return tokens.size() >= num_prompt + num_wanted; }
  };

  SequenceDriver(int64_t num_blocks, int64_t chunk, unsigned shuffle_seed = 1)
      : chunk_(chunk), free_(static_cast<size_t>(num_blocks)) {
    std::iota(free_.begin(), free_.end(), 0);
    std::shuffle(free_.begin(), free_.end(), std::mt19937(shuffle_seed));
  }

  size_t Add(const std::vector<int32_t>& prompt, size_t num_wanted, int num_logprobs = -1, SamplingRow sampling = {}) {
    sequences_.push_back({prompt, prompt.size(), num_wanted, 0, sampling, num_logprobs, {}, {}});
    return sequences_.size() - 1;
  }

  const Sequence& operator[](size_t i) const { return sequences_[i]; }

  // The next step: up to `chunk` tokens of every unfinished sequence, at most max_rows in all. False where none is
  // unfinished.
  bool Pack(StepInput& input, int64_t max_rows) {
    input.Clear();
    packed_.clear();
    input.query_start = {0};
    for (Sequence& sequence : sequences_) {
      const auto room = static_cast<size_t>(max_rows - input.num_rows());
      if (sequence.done() || room == 0) continue;
      const size_t count =
          std::min({static_cast<size_t>(chunk_), sequence.tokens.size() - sequence.num_computed, room});
      packed_.push_back(&sequence);
      for (size_t i = 0; i < count; ++i) PackRow(sequence, input);
      input.query_start.push_back(static_cast<int32_t>(input.num_rows()));
      input.context_len.push_back(static_cast<int32_t>(sequence.num_computed));
      if (sequence.num_computed < sequence.tokens.size()) continue;
      sequence.sampling.position = static_cast<int64_t>(sequence.tokens.size());
      input.logit_rows.push_back(static_cast<int32_t>(input.num_rows() - 1));
      input.sampling.push_back(sequence.sampling);
      input.target.push_back(-1);
      input.slots.push_back(-1);
      input.num_logprobs.push_back(sequence.num_logprobs);
      input.is_guess.push_back(false);
    }
    for (const Sequence* sequence : packed_) {
      input.block_table_width = std::max(input.block_table_width, static_cast<int64_t>(sequence->blocks.size()));
    }
    for (const Sequence* sequence : packed_) {
      input.block_table.insert(input.block_table.end(), sequence->blocks.begin(), sequence->blocks.end());
      input.block_table.resize(input.block_table.size() + static_cast<size_t>(input.block_table_width) -
                               sequence->blocks.size());
    }
    return !packed_.empty();
  }

  void Apply(const StepOutput& output) {
    size_t row = 0;
    for (Sequence* sequence : packed_) {
      if (sequence->num_computed < sequence->tokens.size()) continue;
      sequence->tokens.push_back(output.tokens[row]);
      if (sequence->num_logprobs >= 0) sequence->logprobs.push_back(output.logprobs[row]);
      ++row;
    }
  }

  template <class Runner>
  void RunAll(Runner& runner) {
    StepInput input;
    StepOutput output;
    while (Pack(input, runner.options().max_rows)) {
      runner.Run(input, output);
      Apply(output);
    }
  }

 private:
  void PackRow(Sequence& sequence, StepInput& input) {
    const size_t position = sequence.num_computed++;
    if (position % kBlockTokens == 0) {
      sequence.blocks.push_back(free_.back());
      free_.pop_back();
    }
    input.tokens.push_back(sequence.tokens[position]);
    input.positions.push_back(static_cast<int32_t>(position));
    input.kv_slots.push_back(sequence.blocks.back() * kBlockTokens + static_cast<int32_t>(position % kBlockTokens));
  }

  int64_t chunk_;
  std::vector<int32_t> free_;
  std::vector<Sequence> sequences_;
  std::vector<Sequence*> packed_;  // into this step
};

}  // namespace millrace
