// What is remembered of one Generate call: filed when it goes, as one line of the log, its share of the metrics and its
// spans. Neither text nor token ids. Guarded by the call's lock; lives as long as the call, so that nobody knows more
// when it is filed.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "grpcpp/support/status.h"
#include "router/api/request_metrics.h"
#include "router/api/request_trace.h"
#include "router/fleet/sequence_sink.h"

namespace millrace {

class CallRecord {
 public:
  // `arrived`: when the request's bytes had come. `metrics` outlives this.
  CallRecord(RequestMetrics* metrics, std::string request_id, Time arrived, size_t num_choices);
  ~CallRecord();
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;

  void SetTrace(RequestTrace trace) { trace_ = std::move(trace); }
  void OnUpdate(const SequenceUpdate& update, Time now);
  // A sequence was stopped: its text was complete, or nobody wants it any more.
  void OnCancelled(size_t choice, const SequenceOutcome& outcome, Ending ending, Time now);
  void OnFinish(grpc::StatusCode code, Time now);

  // A call that was refused before it had a record.
  static void Refused(RequestMetrics* metrics, RequestTrace trace, grpc::StatusCode code, Time arrived, Time now);

 private:
  struct Choice {
    Time last_output = 0;
    int64_t generated = 0;  // tokens in this call
    SequenceReport report;
    std::string worker_id;
    std::optional<Ending> ending;
  };

  void End(Choice& choice, const SequenceOutcome& outcome, Ending ending, Time now);

  RequestMetrics* const metrics_;
  const std::string request_id_;
  const Time arrived_;
  Time finished_ = 0;
  grpc::StatusCode code_ = grpc::StatusCode::UNKNOWN;
  std::vector<Choice> choices_;
  RequestTrace trace_;
};

}  // namespace millrace
