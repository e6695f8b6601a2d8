// What of one Generate call goes into a trace: a span for the call, and below it one for each time that a choice spent
// waiting, in prefill and in decode. Without an exporter it only says what is passed on to workers. A value, of one
// thread at a time; the exporter outlives it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "millrace/v1/inference.pb.h"
#include "router/api/request_metrics.h"
#include "router/schedule/scheduler.h"
#include "service/span_exporter.h"

namespace millrace {

class RequestTrace {
 public:
  RequestTrace() = default;  // in no trace
  // `traceparent`: the client's, of any form; nothing: it has none. `exporter` may be null.
  RequestTrace(SpanExporter* exporter, std::optional<absl::string_view> traceparent);

  // For the workers that run its choices; empty: nobody records it.
  std::string ForWorkers() const;

  void Describe(const v1::GenerateRequest& request, const std::string& request_id, const std::string& model_name);
  void AddChoice(size_t index, const SequenceReport& report, absl::string_view worker_id, absl::string_view ending,
                 Time finished);
  void AddUsage(int64_t prompt_tokens, int64_t cached_tokens, int64_t generated_tokens);
  // The call has ended: exports what was said above. Once.
  void End(grpc::StatusCode code, Time arrived, Time finished);

 private:
  void AddPhase(const char* name, size_t index, absl::string_view worker_id, Time start, Time end);

  SpanExporter* exporter_ = nullptr;  // null: nothing is recorded
  TraceContext parent_;               // the client's, or a new trace
  uint64_t span_id_ = 0;              // of the call's span
  int64_t unix_offset_ = 0;           // of the monotonic clock
  google::protobuf::RepeatedPtrField<otlp::KeyValue> attributes_;
  std::vector<std::string> endings_;  // by choice
  std::vector<otlp::Span> spans_;
};

// The one traceparent of a call's metadata; nothing if there is none or more than one.
std::optional<absl::string_view> TraceparentOf(const grpc::CallbackServerContext& context);

}  // namespace millrace
