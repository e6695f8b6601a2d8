// Spans as OTLP's message, which is their one form. Stateless; any thread.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "opentelemetry/proto/collector/trace/v1/trace_service.pb.h"
#include "service/trace_context.h"

namespace millrace {

namespace otlp = opentelemetry::proto::collector::trace::v1;

// A span below `parent`; parent.span_id 0: the first of its trace. Times in unix microseconds.
otlp::Span MakeSpan(const TraceContext& parent, uint64_t span_id, absl::string_view name, otlp::Span::Kind kind,
                    int64_t start, int64_t end);

void AddAttribute(absl::string_view key, absl::string_view value, google::protobuf::RepeatedPtrField<otlp::KeyValue>*);
void AddAttribute(absl::string_view key, int64_t value, google::protobuf::RepeatedPtrField<otlp::KeyValue>*);
void AddAttribute(absl::string_view key, double value, google::protobuf::RepeatedPtrField<otlp::KeyValue>*);

}  // namespace millrace
