// What a worker says of the traced sequences of one stream: for each a span from its admission to its end here, with
// its first token. Edits come from gRPC's threads, reports from the engine's; a stream without traced sequences takes
// no lock. Lives as long as its stream; the exporter outlives it. Memory: one entry a traced slot.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "millrace/worker/v1/worker.pb.h"
#include "service/span_exporter.h"

namespace millrace {

class SequenceSpans {
 public:
  explicit SequenceSpans(SpanExporter* exporter) : exporter_(exporter) {}  // may be null
  ~SequenceSpans();                                                        // those that go on are lost to the router

  void OnEdit(const worker::v1::Edit& edit);
  void OnReport(const worker::v1::StepReport& report);

 private:
  struct Entry {
    TraceContext parent;
    uint64_t edit_id = 0;  // that admitted it: what was reported before is of the slot's earlier sequence
    int64_t admitted = 0, first_token = 0;  // unix microseconds
    int64_t cached = 0, prefilled = 0, generated = 0;
  };

  void End(uint32_t slot, absl::string_view ending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  SpanExporter* const exporter_;
  std::atomic<size_t> num_traced_{0};  // entries_.size()
  absl::Mutex mutex_;
  absl::flat_hash_map<uint32_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);  // by slot
};

}  // namespace millrace
