// What is counted about requests: each figure once a request, but for the gaps between outputs, and always by an atomic
// addition, never under a lock. Any thread; lives as long as the server. Fixed size.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "grpcpp/support/status.h"
#include "router/schedule/scheduler.h"
#include "service/histogram.h"
#include "service/metric_page.h"

namespace millrace {

// How a sequence ended, in vLLM's words.
enum class Ending { kStop, kLength, kAbort, kError };
absl::string_view EndingName(Ending ending);
// "OK" … "UNAUTHENTICATED"; "UNKNOWN" for a number that is no code.
absl::string_view StatusCodeName(grpc::StatusCode code);

class RequestMetrics {
 public:
  RequestMetrics();

  void OnFirstOutput(Time since_arrival) { time_to_first_token_.Observe(since_arrival); }
  void OnGap(Time gap);  // between two outputs of a sequence
  // `generated`: tokens of this call; a resumed answer has more.
  void OnSequenceEnd(const SequenceReport& report, int64_t generated, Ending ending, Time since_arrival);
  void OnCallEnd(grpc::StatusCode code);

  void Collect(const std::string& model_name, MetricPage* page) const;

 private:
  static constexpr size_t kCodes = 17;

  void CollectSequences(const MetricPage::Labels& model, MetricPage* page) const;

  Histogram time_to_first_token_, inter_token_, time_per_token_, end_to_end_;
  Histogram queue_time_, prefill_time_, decode_time_, inference_time_;
  Histogram prompt_tokens_, generation_tokens_;
  Histogram gap_;
  std::array<std::atomic<uint64_t>, 4> endings_{};
  std::array<std::atomic<uint64_t>, kCodes> codes_{};
  std::atomic<uint64_t> admitted_prompt_tokens_{0}, cached_tokens_{0}, predicted_tokens_{0};
  std::atomic<uint64_t> mismatches_{0}, moves_{0};
};

}  // namespace millrace
