// Submit: what is refused, and the way into the queue.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "router/schedule/scheduler_state.h"

namespace millrace {
namespace {

// Whether each token is within 0 … last, without branches. With t and last below 2^31, t | (last - t) has its highest
// bit just if t is above; a negative t has it anyway.
bool AllWithin(absl::Span<const int32_t> tokens, uint32_t last) {
  uint32_t above = 0;
  for (const int32_t token : tokens) above |= static_cast<uint32_t>(token) | (last - static_cast<uint32_t>(token));
  return above >> 31 == 0;
}

}  // namespace

absl::Status Scheduler::State::CheckSpec(const SequenceSpec& spec) const {
  const auto check_tokens = [&](const char* name, const auto& tokens) {
    if (AllWithin(tokens, model->vocab_size() - 1)) return absl::OkStatus();
    for (int i = 0; i < static_cast<int>(tokens.size()); ++i) {
      if (tokens[i] >= 0 && static_cast<uint32_t>(tokens[i]) < model->vocab_size()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(name, "[", i, "] = ", tokens[i], " is not within 0 … ", model->vocab_size() - 1));
    }
    return absl::OkStatus();
  };
  if (spec.prompt.empty()) return absl::InvalidArgumentError("the prompt has 0 tokens; the least is 1");
  if (spec.max_tokens < 1)
    return absl::InvalidArgumentError(absl::StrCat("max_tokens ", spec.max_tokens, " is below 1"));
  if (spec.output.size() >= static_cast<size_t>(spec.max_tokens)) {
    return absl::InvalidArgumentError(
        absl::StrCat("output has ", spec.output.size(), " tokens; the limit is below max_tokens, ", spec.max_tokens));
  }
  if (spec.min_tokens < 0 || spec.min_tokens > spec.max_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("min_tokens ", spec.min_tokens, " is not within 0 … ", spec.max_tokens));
  }
  if (spec.stop_token_ids.size() > 64) {
    return absl::InvalidArgumentError(
        absl::StrCat("stop_token_ids has ", spec.stop_token_ids.size(), " items; at most 64"));
  }
  const int64_t tokens = static_cast<int64_t>(spec.prompt.size()) + spec.max_tokens;
  if (tokens > model->max_context()) {
    return absl::OutOfRangeError(absl::StrCat("prompt and max_tokens: ", spec.prompt.size(), " + ", spec.max_tokens,
                                              " = ", tokens, " tokens; the context is ", model->max_context()));
  }
  if (tokens > largest_pool) {
    return absl::ResourceExhaustedError(absl::StrCat("prompt and max_tokens: ", spec.prompt.size(), " + ",
                                                     spec.max_tokens, " = ", tokens, " tokens; the largest pool holds ",
                                                     largest_pool));
  }
  absl::Status status = check_tokens("prompt", spec.prompt);
  if (status.ok()) status = check_tokens("output", spec.output);
  if (status.ok()) status = check_tokens("stop_token_ids", spec.stop_token_ids);
  if (status.ok()) status = check_tokens("bias_token_ids", spec.sampling.bias_token_ids());
  return status;
}

std::unique_ptr<Sequence> Scheduler::State::Make(SequenceSpec spec, Time now) {
  auto sequence = std::make_unique<Sequence>();
  sequence->id = next_sequence++;
  sequence->num_prompt = static_cast<uint32_t>(spec.prompt.size());
  sequence->max_length = sequence->num_prompt + static_cast<uint32_t>(spec.max_tokens);
  sequence->min_length = spec.min_tokens == 0 ? 0 : sequence->num_prompt + static_cast<uint32_t>(spec.min_tokens);
  sequence->tokens = std::move(spec.prompt);
  sequence->tokens.insert(sequence->tokens.end(), spec.output.begin(), spec.output.end());
  sequence->sampling = std::move(spec.sampling);
  sequence->stop_token_ids = std::move(spec.stop_token_ids);
  sequence->tenant = spec.tenant.empty() ? nullptr : queue.Enter(spec.tenant);
  sequence->priority = spec.priority;
  sequence->deadline = spec.deadline;
  sequence->root = hasher.Root(spec.cache_salt);
  sequence->cache_salt = std::move(spec.cache_salt);
  sequence->traceparent = std::move(spec.traceparent);
  sequence->limit = std::max(2.0, 2 * PrefillSeconds(last_cost, 0, sequence->length()));
  sequence->report.prompt_tokens = static_cast<int32_t>(sequence->num_prompt);
  sequence->report.generated_tokens = static_cast<int32_t>(spec.output.size());
  sequence->report.submitted = now;
  return sequence;
}

absl::StatusOr<std::vector<SequenceId>> Scheduler::Submit(std::vector<SequenceSpec> specs, Time now) {
  State& state = *state_;
  if (!state.model.has_value()) return absl::UnavailableError("no worker has joined yet");
  for (const SequenceSpec& spec : specs) {
    if (absl::Status status = state.CheckSpec(spec); !status.ok()) return status;
    if (absl::Status status = state.CheckContent(spec, now); !status.ok()) return status;
  }
  State::Sequences comers;
  for (SequenceSpec& spec : specs) comers.push_back(state.Make(std::move(spec), now));
  absl::Status status;
  if (!comers.empty()) status = state.CheckDeadline(comers.front().get(), now);
  if (status.ok()) status = state.MakeRoom(comers, now);
  if (!status.ok()) {
    for (const auto& sequence : comers) {
      if (sequence->tenant != nullptr) state.queue.Leave(sequence->tenant);
    }
    state.counts.refused += comers.size();
    return status;
  }
  std::vector<SequenceId> ids;
  for (std::unique_ptr<Sequence>& sequence : comers) {
    if (sequence->deadline != kNever) state.deadlines.insert({sequence->deadline, sequence->id});
    state.counts.prompt_tokens += sequence->length();
    ids.push_back(sequence->id);
    state.Enqueue(sequence.get(), now);
    state.sequences.emplace(sequence->id, std::move(sequence));
  }
  state.Dispatch(now);
  return ids;
}

void Scheduler::State::Predict(Sequence* sequence) {
  FindPrefix(sequence);
  uint32_t depth = 0;
  for (const uint32_t other : match.depth) depth = std::max(depth, other);
  depth = std::min(depth, (sequence->length() - 1) / block_tokens);
  const double cached = static_cast<double>(depth) * block_tokens;
  sequence->left = PrefillSeconds(last_cost, cached, sequence->length() - cached);
}

void Scheduler::State::Enqueue(Sequence* sequence, Time now) {
  sequence->place = Sequence::Place::kQueued;
  Predict(sequence);
  queue.Push(sequence, now);
}

void Scheduler::State::Return(Sequence* sequence, Time now) {
  --counts.running;
  sequence->returned = true;
  if (sequence->wants_prompt_logprobs()) sequence->prompt_logprobs.clear();
  if (!sequence->paused()) return Enqueue(sequence, now);
  sequence->place = Sequence::Place::kParked;
  ++num_parked;
}

void Scheduler::State::Return(const RunningSet::Evicted& evicted, Time now) {
  for (Sequence* sequence : evicted.preempted) {
    ++sequence->report.preemptions;
    ++counts.preemptions;
    Return(sequence, now);
  }
  for (Sequence* sequence : evicted.orphans) Return(sequence, now);
}

}  // namespace millrace
