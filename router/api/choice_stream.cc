#include "router/api/choice_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

constexpr size_t kPromptLogProbsPerMessage = 2048;  // about 0.5 MB with 20 alternatives each

v1::TokenLogProbs ToClient(const worker::v1::LogProbs& source) {
  v1::TokenLogProbs logprobs;
  logprobs.set_token_id(source.token_id());
  logprobs.set_logprob(source.logprob());
  logprobs.mutable_top_token_ids()->CopyFrom(source.top_token_ids());
  logprobs.mutable_top_logprobs()->CopyFrom(source.top_logprobs());
  return logprobs;
}

uint64_t Elapsed(Time from, Time to) { return from == 0 || to <= from ? 0 : static_cast<uint64_t>(to - from); }

}  // namespace

ChoiceStream::ChoiceStream(uint32_t index, const v1::SamplingParams& params, uint64_t seed,
                           const std::string& request_id, const Tokenizer& tokenizer)
    : index_(index),
      request_id_(request_id),
      stops_(params.stop().begin(), params.stop().end()),
      detokenizer_(tokenizer, !params.has_skip_special_tokens() || params.skip_special_tokens()),
      stop_strings_(stops_, params.include_stop_string()) {
  finish_.set_seed(seed);
}

absl::Status ChoiceStream::Replay(const v1::Resume& resume, const SequenceSpec& spec) {
  known_prompt_logprobs_ = resume.prompt_logprobs();
  for (int i = 0; i < resume.token_ids_size(); ++i) {
    const int32_t id = resume.token_ids(i);
    const bool stops = std::ranges::find(spec.stop_token_ids, id) != spec.stop_token_ids.end();
    if (ended_ || i >= spec.max_tokens) {
      return absl::InvalidArgumentError(absl::StrCat("resume[", index_, "].token_ids holds ", resume.token_ids_size(),
                                                     "; the answer ends after ", i));
    }
    AppendToken(id);
    DropPending();
    // The text held back until here comes with the Finish, which the client does not have.
    if (stops || i + 1 == spec.max_tokens) {
      End(stops ? worker::v1::FINISH_REASON_STOP_TOKEN : worker::v1::FINISH_REASON_LENGTH, id);
    }
  }
  return absl::OkStatus();
}

void ChoiceStream::Append(const SequenceEvent& event) {
  if (ended_) return;
  if (!event.prompt_logprobs.empty()) {
    const auto known = static_cast<std::ptrdiff_t>(std::min(known_prompt_logprobs_, event.prompt_logprobs.size()));
    prompt_logprobs_.assign(event.prompt_logprobs.rbegin(), event.prompt_logprobs.rend() - known);
  }
  for (size_t i = 0; i < event.token_ids.size() && !ended_; ++i) {
    if (i < event.logprobs.size()) AppendLogProbs(event.logprobs[i]);
    AppendToken(event.token_ids[i]);
  }
  if (event.finished) End(event.finish_reason, event.token_ids.empty() ? -1 : event.token_ids.back());
}

void ChoiceStream::AppendToken(int32_t id) {
  pending_.add_token_ids(id);
  pending_bytes_ += sizeof(int32_t);
  ++generated_tokens_;
  AppendText(detokenizer_.Append(id));
}

void ChoiceStream::End(worker::v1::FinishReason reason, int32_t last_token) {
  if (ended_) return;
  EndText();
  if (ended_) return;
  ended_ = true;
  const bool stopped = reason == worker::v1::FINISH_REASON_STOP_TOKEN;
  finish_.set_reason(stopped ? v1::FINISH_REASON_STOP : v1::FINISH_REASON_LENGTH);
  if (stopped && last_token >= 0) finish_.set_stop_token_id(last_token);
}

void ChoiceStream::AppendLogProbs(const worker::v1::LogProbs& logprobs) {
  *pending_.add_logprobs() = ToClient(logprobs);
  pending_bytes_ += 16 + 8 * static_cast<size_t>(logprobs.top_token_ids_size());
}

void ChoiceStream::AppendText(const std::string& text) {
  if (text.empty()) return;
  const StopStrings::Result result = stop_strings_.Append(text);
  pending_.mutable_text()->append(result.text);
  pending_bytes_ += result.text.size();
  if (!result.stopped) return;
  ended_ = true;
  finish_.set_reason(v1::FINISH_REASON_STOP);
  finish_.set_stop_string(stops_[static_cast<size_t>(result.matched)]);
}

void ChoiceStream::EndText() {
  AppendText(detokenizer_.Finish());
  if (ended_) return;
  const std::string rest = stop_strings_.Finish();
  pending_.mutable_text()->append(rest);
  pending_bytes_ += rest.size();
}

void ChoiceStream::Complete(const SequenceOutcome& outcome) {
  if (complete_) return;
  complete_ = finish_waits_ = true;
  const SequenceReport& report = outcome.report;
  finish_.set_request_id(request_id_);
  finish_.mutable_usage()->set_prompt_tokens(static_cast<uint32_t>(report.prompt_tokens));
  finish_.mutable_usage()->set_cached_tokens(static_cast<uint32_t>(report.cached_tokens));
  finish_.mutable_usage()->set_generated_tokens(generated_tokens_);
  finish_.mutable_timing()->set_queue_us(Elapsed(report.submitted, report.admitted));
  finish_.mutable_timing()->set_prefill_us(Elapsed(report.admitted, report.first_token));
  finish_.mutable_timing()->set_decode_us(Elapsed(report.first_token, report.last_token));
  finish_.mutable_speculation()->set_drafted_tokens(static_cast<uint32_t>(report.drafted_tokens));
  finish_.mutable_speculation()->set_accepted_tokens(static_cast<uint32_t>(report.accepted_tokens));
  finish_.mutable_route()->set_worker_id(outcome.worker_id);
  finish_.mutable_route()->set_predicted_cached_tokens(static_cast<uint32_t>(report.predicted_cached_tokens));
  finish_.mutable_route()->set_real_cached_tokens(static_cast<uint32_t>(report.cached_tokens));
  finish_.mutable_route()->set_preemptions(static_cast<uint32_t>(report.preemptions));
  finish_.mutable_route()->set_moves(static_cast<uint32_t>(report.moves));
}

v1::GenerateResponse ChoiceStream::TakeMessage() {
  v1::GenerateResponse message;
  const size_t taken = std::min(prompt_logprobs_.size(), kPromptLogProbsPerMessage);
  // More prompt positions than one message should hold come first, in messages of their own.
  if (taken == prompt_logprobs_.size()) {
    message = std::move(pending_);
    pending_.Clear();
    pending_bytes_ = 0;
    if (finish_waits_) *message.mutable_finish() = std::move(finish_);
    finish_waits_ = false;
  }
  message.set_index(index_);
  for (size_t i = 0; i < taken; ++i) {
    *message.add_prompt_logprobs() = ToClient(prompt_logprobs_.back());
    prompt_logprobs_.pop_back();
  }
  return message;
}

void ChoiceStream::DropPending() {
  pending_.Clear();
  pending_bytes_ = 0;
  prompt_logprobs_.clear();
  finish_waits_ = false;
}

}  // namespace millrace
