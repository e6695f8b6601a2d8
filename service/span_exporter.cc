#include "service/span_exporter.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "service/log.h"

namespace millrace {

std::unique_ptr<SpanExporter> SpanExporter::Start(const std::string& endpoint, const Origin& origin) {
  if (endpoint.empty()) return nullptr;
  std::unique_ptr<SpanExporter> exporter(new SpanExporter(endpoint, origin));
  exporter->thread_ = std::thread([raw = exporter.get()] { raw->Run(); });
  return exporter;
}

SpanExporter::SpanExporter(const std::string& endpoint, const Origin& origin)
    : endpoint_(endpoint),
      stub_(otlp::TraceService::NewStub(grpc::CreateChannel(endpoint, grpc::InsecureChannelCredentials()))) {
  otlp::ResourceSpans* const spans = request_.add_resource_spans();
  auto* const attributes = spans->mutable_resource()->mutable_attributes();
  AddAttribute("service.name", origin.service, attributes);
  AddAttribute("service.instance.id", origin.instance, attributes);
  AddAttribute("service.version", origin.version, attributes);
  spans->add_scope_spans()->mutable_scope()->set_name("millrace");
}

SpanExporter::~SpanExporter() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
    flushed_by_ = absl::Now() + kFlushTime;
    // A call that began before has a deadline that is too late.
    if (!mutex_.AwaitWithDeadline(absl::Condition(&ended_), flushed_by_) && sending_ != nullptr) {
      sending_->TryCancel();
    }
  }
  thread_.join();
}

void SpanExporter::Add(std::vector<otlp::Span> spans) {
  int64_t refused = 0;
  {
    absl::MutexLock lock(&mutex_);
    for (otlp::Span& span : spans) {
      if (queue_.size() < kMaxQueued) {
        *queue_.Add() = std::move(span);
      } else {
        ++refused;
      }
    }
  }
  if (refused > 0) CountDropped(refused, "the queue is full");
}

void SpanExporter::Run() {
  auto* const batch = request_.mutable_resource_spans(0)->mutable_scope_spans(0)->mutable_spans();
  for (;;) {
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(this, &SpanExporter::HalfFull), kPeriod);
      if (stop_ && (queue_.empty() || absl::Now() >= flushed_by_)) {
        ended_ = true;
        return;
      }
      batch->Swap(&queue_);
    }
    if (!batch->empty()) Send(request_);
    batch->Clear();
  }
}

void SpanExporter::Send(const otlp::ExportTraceServiceRequest& request) {
  const int64_t count = request.resource_spans(0).scope_spans(0).spans_size();
  otlp::ExportTraceServiceResponse response;
  grpc::ClientContext context;
  {
    absl::MutexLock lock(&mutex_);
    context.set_deadline(absl::ToChronoTime(std::min(absl::Now() + kExportTimeout, flushed_by_)));
    sending_ = &context;
  }
  const grpc::Status status = stub_->Export(&context, request, &response);
  {
    absl::MutexLock lock(&mutex_);
    sending_ = nullptr;
  }
  const int64_t rejected =
      status.ok() ? std::clamp<int64_t>(response.partial_success().rejected_spans(), 0, count) : count;
  exported_.fetch_add(static_cast<uint64_t>(count - rejected), std::memory_order_relaxed);
  if (rejected > 0) {
    CountDropped(rejected, status.ok() ? response.partial_success().error_message() : status.error_message());
  }
}

void SpanExporter::CountDropped(int64_t count, const std::string& why) {
  dropped_.fetch_add(static_cast<uint64_t>(count), std::memory_order_relaxed);
  const std::optional<uint64_t> kept_back = said_.Say("spans", absl::Now());
  if (!kept_back.has_value()) return;
  Log(LogLevel::kWarning, "spans_dropped",
      {{"collector", endpoint_}, {"count", count}, {"why", why}, {"kept_back", *kept_back}});
}

void SpanExporter::Fill(MetricPage* page) const {
  const std::pair<const char*, const std::atomic<uint64_t>*> outcomes[] = {{"exported", &exported_},
                                                                           {"dropped", &dropped_}};
  for (const auto& [outcome, count] : outcomes) {
    page->AddCounter("millrace_spans_total", "spans by what became of them",
                     static_cast<double>(count->load(std::memory_order_relaxed)), {{"outcome", outcome}});
  }
  absl::MutexLock lock(&mutex_);
  page->AddGauge("millrace_spans_queued", "spans that wait to be sent", queue_.size());
}

}  // namespace millrace
