#include "router/api/call_record.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "service/log.h"

namespace millrace {
namespace {

Time Between(Time from, Time to) { return from == 0 || to <= from ? 0 : to - from; }

Ending EndingOf(const SequenceEvent& event) {
  if (!event.status.ok()) return Ending::kError;
  return event.finish_reason == worker::v1::FINISH_REASON_STOP_TOKEN ? Ending::kStop : Ending::kLength;
}

}  // namespace

CallRecord::CallRecord(RequestMetrics* metrics, std::string request_id, Time arrived, size_t num_choices)
    : metrics_(metrics), request_id_(std::move(request_id)), arrived_(arrived), choices_(num_choices) {}

CallRecord::~CallRecord() {
  if (finished_ == 0) return;  // it never began; its refusal has been filed
  SequenceReport sum;          // and of times the longest
  std::vector<std::string> endings, workers;
  Time queue = 0, prefill = 0, decode = 0;
  int64_t generated = 0;
  for (size_t i = 0; i < choices_.size(); ++i) {
    const Choice& choice = choices_[i];
    const SequenceReport& report = choice.report;
    sum.prompt_tokens = std::max(sum.prompt_tokens, report.prompt_tokens);
    sum.cached_tokens += report.cached_tokens;
    generated += choice.generated;
    sum.preemptions += report.preemptions;
    sum.moves += report.moves;
    queue = std::max(queue, Between(report.submitted, report.admitted));
    prefill = std::max(prefill, Between(report.admitted, report.first_token));
    decode = std::max(decode, Between(report.first_token, report.last_token));
    endings.emplace_back(choice.ending.has_value() ? EndingName(*choice.ending) : "none");
    if (std::find(workers.begin(), workers.end(), choice.worker_id) == workers.end()) {
      workers.push_back(choice.worker_id);
    }
    trace_.AddChoice(i, report, choice.worker_id, endings.back(), finished_);
  }
  metrics_->OnCallEnd(code_);
  trace_.AddUsage(sum.prompt_tokens, sum.cached_tokens, generated);
  trace_.End(code_, arrived_, finished_);
  Log(LogLevel::kInfo, "request",
      {{"id", request_id_},
       {"status", StatusCodeName(code_)},
       {"finish", absl::StrJoin(endings, ",")},
       {"worker", absl::StrJoin(workers, ",")},
       {"prompt_tokens", sum.prompt_tokens},
       {"cached_tokens", sum.cached_tokens},
       {"generated_tokens", generated},
       {"queue_us", queue},
       {"prefill_us", prefill},
       {"decode_us", decode},
       {"total_us", Between(arrived_, finished_)},
       {"preemptions", sum.preemptions},
       {"moves", sum.moves}});
}

void CallRecord::OnUpdate(const SequenceUpdate& update, Time now) {
  Choice& choice = choices_[static_cast<size_t>(update.choice)];
  if (!update.event.token_ids.empty()) {
    if (choice.last_output == 0) {
      metrics_->OnFirstOutput(now - arrived_);
    } else {
      metrics_->OnGap(now - choice.last_output);
    }
    choice.last_output = now;
    choice.generated += static_cast<int64_t>(update.event.token_ids.size());
  }
  if (update.outcome.has_value()) End(choice, *update.outcome, EndingOf(update.event), now);
}

void CallRecord::OnCancelled(size_t choice, const SequenceOutcome& outcome, Ending ending, Time now) {
  End(choices_[choice], outcome, ending, now);
}

void CallRecord::OnFinish(grpc::StatusCode code, Time now) {
  code_ = code;
  finished_ = now;
}

void CallRecord::End(Choice& choice, const SequenceOutcome& outcome, Ending ending, Time now) {
  if (choice.ending.has_value()) return;
  choice.report = outcome.report;
  choice.worker_id = outcome.worker_id;
  choice.ending = ending;
  metrics_->OnSequenceEnd(outcome.report, choice.generated, ending, now - arrived_);
}

void CallRecord::Refused(RequestMetrics* metrics, RequestTrace trace, grpc::StatusCode code, Time arrived, Time now) {
  trace.End(code, arrived, now);
  metrics->OnCallEnd(code);
  Log(LogLevel::kInfo, "request", {{"status", StatusCodeName(code)}, {"total_us", Between(arrived, now)}});
}

}  // namespace millrace
