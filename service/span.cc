#include "service/span.h"

#include <string>

namespace millrace {
namespace {

void AppendBytes(uint64_t value, std::string* bytes) {
  for (int shift = 56; shift >= 0; shift -= 8) bytes->push_back(static_cast<char>(value >> shift & 0xff));
}

otlp::AnyValue* Add(absl::string_view key, google::protobuf::RepeatedPtrField<otlp::KeyValue>* attributes) {
  otlp::KeyValue* const added = attributes->Add();
  added->set_key(std::string(key));
  return added->mutable_value();
}

}  // namespace

otlp::Span MakeSpan(const TraceContext& parent, uint64_t span_id, absl::string_view name, otlp::Span::Kind kind,
                    int64_t start, int64_t end) {
  otlp::Span span;
  AppendBytes(parent.trace_high, span.mutable_trace_id());
  AppendBytes(parent.trace_low, span.mutable_trace_id());
  AppendBytes(span_id, span.mutable_span_id());
  if (parent.span_id != 0) AppendBytes(parent.span_id, span.mutable_parent_span_id());
  span.set_name(std::string(name));
  span.set_kind(kind);
  span.set_start_time_unix_nano(static_cast<uint64_t>(start) * 1000);
  span.set_end_time_unix_nano(static_cast<uint64_t>(end) * 1000);
  return span;
}

void AddAttribute(absl::string_view key, absl::string_view value,
                  google::protobuf::RepeatedPtrField<otlp::KeyValue>* attributes) {
  Add(key, attributes)->set_string_value(std::string(value));
}

void AddAttribute(absl::string_view key, int64_t value,
                  google::protobuf::RepeatedPtrField<otlp::KeyValue>* attributes) {
  Add(key, attributes)->set_int_value(value);
}

void AddAttribute(absl::string_view key, double value, google::protobuf::RepeatedPtrField<otlp::KeyValue>* attributes) {
  Add(key, attributes)->set_double_value(value);
}

}  // namespace millrace
