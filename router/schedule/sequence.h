// One output to generate, from Submit to its last event: what the client asked, the tokens so far, and where it stands.
// The router's copy is the truth; what a worker has of it can be rebuilt from here. Owned by the Scheduler. Memory: 4
// bytes per token, 16 per full block, 80 for what its guesses were worth, and its sampling parameters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "router/schedule/prefix_hash.h"
#include "router/schedule/scheduler.h"
#include "router/schedule/speculation_policy.h"

namespace millrace {

struct Tenant;

struct Sequence {
  enum class Place { kQueued, kRunning, kParked, kEnded };  // parked: taken from its worker while paused

  SequenceId id = 0;
  std::vector<int32_t> tokens;  // prompt and output
  uint32_t num_prompt = 0;
  uint32_t min_length = 0;  // lengths count prompt and output
  uint32_t max_length = 0;
  worker::v1::Sampling sampling;
  std::vector<int32_t> stop_token_ids;
  Tenant* tenant = nullptr;  // while it lives; null: none
  int priority = 0;
  Time deadline = kNever;
  Time pause_ends = kNever;  // set while it is paused

  std::string cache_salt;
  std::string traceparent;
  PrefixHash root;                 // of the salt
  std::vector<PrefixHash> hashes;  // of the full blocks of `tokens`, extended as needed

  Place place = Place::kQueued;
  bool cancelled = false;
  bool returned = false;  // it ran before: it goes to the front of its priority
  int losses = 0;         // workers that died while it was in their step, one after another without it getting further
  uint32_t loss_length = 0;  // at the last of them
  uint32_t worker = 0;       // while running: its place in the scheduler's table
  uint32_t slot = 0;

  Time first_due = kNever;  // since it was admitted: when its first token must come for its answer to make the deadline
  double limit = 0;         // seconds it may wait before that counts: max(2 s, 2 * cold prefill)
  double left = 0;          // while queued: predicted seconds of prefill at the best worker
  int64_t queue_rank = 0;
  uint32_t queue_index = 0;

  SequenceGuesses guesses{};
  std::vector<worker::v1::LogProbs> prompt_logprobs;  // gathered until the first token
  SequenceReport report;

  uint32_t length() const { return static_cast<uint32_t>(tokens.size()); }
  bool paused() const { return pause_ends != kNever; }
  Time due() const { return std::min(deadline, pause_ends); }  // when it ends, whatever it has
  bool wants_prompt_logprobs() const { return sampling.has_prompt_logprobs() && length() == num_prompt; }
  bool has_penalty() const {
    return sampling.repetition_penalty() != 1 || sampling.presence_penalty() != 0 || sampling.frequency_penalty() != 0;
  }
};

}  // namespace millrace
