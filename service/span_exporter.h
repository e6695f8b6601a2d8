// Sends spans to an OpenTelemetry collector, OTLP over gRPC, from a thread of its own. Add never waits: a queue of
// kMaxQueued spans takes them, and what finds no room, or is sent in vain, is counted and lost. Any thread. Lives as
// long as its server; the destructor sends what is left, within kFlushTime. Memory: at most two queues.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "opentelemetry/proto/collector/trace/v1/trace_service.grpc.pb.h"
#include "service/metric_page.h"
#include "service/once_a_minute.h"
#include "service/span.h"

namespace millrace {

class SpanExporter {
 public:
  static constexpr int kMaxQueued = 2048;                              // one message, far below 4 MiB
  static constexpr absl::Duration kPeriod = absl::Seconds(1);          // sent so often, or when half of them are there
  static constexpr absl::Duration kExportTimeout = absl::Seconds(10);  // OTLP's usual one
  static constexpr absl::Duration kFlushTime = absl::Seconds(2);

  struct Origin {
    std::string service, instance, version;
  };

  // Null without an `endpoint`, HOST:PORT. Nothing is connected before there is a span.
  static std::unique_ptr<SpanExporter> Start(const std::string& endpoint, const Origin& origin);
  ~SpanExporter();

  void Add(std::vector<otlp::Span> spans);
  void Fill(MetricPage* page) const;

 private:
  SpanExporter(const std::string& endpoint, const Origin& origin);

  void Run();
  bool HalfFull() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stop_ || queue_.size() >= kMaxQueued / 2; }
  void Send(const otlp::ExportTraceServiceRequest& request);
  void CountDropped(int64_t count, const std::string& why);

  const std::string endpoint_;
  const std::unique_ptr<otlp::TraceService::Stub> stub_;
  otlp::ExportTraceServiceRequest request_;  // of the thread
  std::atomic<uint64_t> exported_{0}, dropped_{0};
  OnceAMinute said_;

  mutable absl::Mutex mutex_;
  google::protobuf::RepeatedPtrField<otlp::Span> queue_ ABSL_GUARDED_BY(mutex_);
  grpc::ClientContext* sending_ ABSL_GUARDED_BY(mutex_) = nullptr;
  absl::Time flushed_by_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace millrace
