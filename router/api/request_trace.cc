#include "router/api/request_trace.h"

#include <utility>

#include "router/fleet/clock.h"

namespace millrace {
namespace {

// Those of gRPC's codes that say that the server failed, not the client.
bool IsFault(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::UNKNOWN:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
    case grpc::StatusCode::UNIMPLEMENTED:
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DATA_LOSS:
      return true;
    default:
      return false;
  }
}

uint64_t DrawSpanId() {
  const uint64_t drawn = RandomBits();
  return drawn == 0 ? 1 : drawn;
}

}  // namespace

std::optional<absl::string_view> TraceparentOf(const grpc::CallbackServerContext& context) {
  const auto [first, last] = context.client_metadata().equal_range("traceparent");
  if (first == last || std::next(first) != last) return std::nullopt;
  return absl::string_view(first->second.data(), first->second.size());
}

RequestTrace::RequestTrace(SpanExporter* exporter, std::optional<absl::string_view> traceparent) {
  std::optional<TraceContext> client;
  if (traceparent.has_value()) client = ParseTraceparent(*traceparent);
  if (client.has_value()) parent_ = *client;
  if (exporter == nullptr || (client.has_value() && !client->sampled)) return;
  exporter_ = exporter;
  if (!client.has_value()) parent_ = {RandomBits(), DrawSpanId(), 0, true};
  span_id_ = DrawSpanId();
  unix_offset_ = static_cast<int64_t>(UnixMicros()) - MonotonicNow();
}

std::string RequestTrace::ForWorkers() const {
  if (!parent_.sampled) return "";
  TraceContext context = parent_;
  if (exporter_ != nullptr) context.span_id = span_id_;
  return FormatTraceparent(context);
}

void RequestTrace::Describe(const v1::GenerateRequest& request, const std::string& request_id,
                            const std::string& model_name) {
  if (exporter_ == nullptr) return;
  AddAttribute("gen_ai.operation.name", request.has_chat() ? "chat" : "text_completion", &attributes_);
  AddAttribute("gen_ai.request.model", model_name, &attributes_);
  AddAttribute("gen_ai.response.id", request_id, &attributes_);
  const v1::SamplingParams& sampling = request.sampling();
  if (sampling.has_max_tokens()) {
    AddAttribute("gen_ai.request.max_tokens", int64_t{sampling.max_tokens()}, &attributes_);
  }
  if (sampling.has_temperature()) {
    AddAttribute("gen_ai.request.temperature", double{sampling.temperature()}, &attributes_);
  }
}

void RequestTrace::AddChoice(size_t index, const SequenceReport& report, absl::string_view worker_id,
                             absl::string_view ending, Time finished) {
  if (exporter_ == nullptr) return;
  endings_.emplace_back(ending);
  const auto until = [finished](Time next) { return next == 0 ? finished : next; };
  if (report.submitted != 0) AddPhase("queue", index, "", report.submitted, until(report.admitted));
  if (report.admitted != 0) AddPhase("prefill", index, worker_id, report.admitted, until(report.first_token));
  if (report.first_token != 0) AddPhase("decode", index, worker_id, report.first_token, report.last_token);
}

void RequestTrace::AddPhase(const char* name, size_t index, absl::string_view worker_id, Time start, Time end) {
  otlp::Span span = MakeSpan({parent_.trace_high, parent_.trace_low, span_id_, true}, DrawSpanId(), name,
                             otlp::Span::KIND_INTERNAL, start + unix_offset_, end + unix_offset_);
  AddAttribute("millrace.choice", static_cast<int64_t>(index), span.mutable_attributes());
  if (!worker_id.empty()) AddAttribute("millrace.worker", worker_id, span.mutable_attributes());
  spans_.push_back(std::move(span));
}

void RequestTrace::AddUsage(int64_t prompt_tokens, int64_t cached_tokens, int64_t generated_tokens) {
  if (exporter_ == nullptr) return;
  AddAttribute("gen_ai.usage.input_tokens", prompt_tokens, &attributes_);
  AddAttribute("gen_ai.usage.output_tokens", generated_tokens, &attributes_);
  AddAttribute("millrace.cached_tokens", cached_tokens, &attributes_);
}

void RequestTrace::End(grpc::StatusCode code, Time arrived, Time finished) {
  if (exporter_ == nullptr) return;
  otlp::Span span = MakeSpan(parent_, span_id_, "millrace.v1.InferenceService/Generate", otlp::Span::KIND_SERVER,
                             arrived + unix_offset_, finished + unix_offset_);
  span.mutable_attributes()->Swap(&attributes_);
  AddAttribute("gen_ai.provider.name", "millrace", span.mutable_attributes());
  AddAttribute("rpc.system", "grpc", span.mutable_attributes());
  AddAttribute("rpc.service", "millrace.v1.InferenceService", span.mutable_attributes());
  AddAttribute("rpc.method", "Generate", span.mutable_attributes());
  AddAttribute("rpc.grpc.status_code", static_cast<int64_t>(code), span.mutable_attributes());
  if (!endings_.empty()) {
    otlp::KeyValue* const reasons = span.add_attributes();
    reasons->set_key("gen_ai.response.finish_reasons");
    for (std::string& ending : endings_) {
      reasons->mutable_value()->mutable_array_value()->add_values()->set_string_value(std::move(ending));
    }
  }
  if (IsFault(code)) span.mutable_status()->set_code(otlp::Status::CODE_ERROR);
  spans_.push_back(std::move(span));
  std::exchange(exporter_, nullptr)->Add(std::move(spans_));
}

}  // namespace millrace
