#include "router/api/request_metrics.h"

#include "absl/strings/string_view.h"

namespace millrace {
namespace {

constexpr double kMicro = 1e-6;

// vLLM's buckets, so that dashboards for it work here.
constexpr double kFirstTokenBounds[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                                        1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
constexpr double kTokenBounds[] = {.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
constexpr double kPhaseBounds[] = {.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                   30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
constexpr double kLengthBounds[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000};
// A small model on a large GPU gives a token every millisecond or two.
constexpr double kGapBounds[] = {.0005, .001, .002, .003, .004, .006, .008, .01, .015,
                                 .02,   .03,  .05,  .075, .1,   .2,   .5,   1,   5};

constexpr absl::string_view kEndings[] = {"stop", "length", "abort", "error"};
constexpr absl::string_view kCodeNames[] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

void Add(std::atomic<uint64_t>& counter, int64_t value) {
  counter.fetch_add(static_cast<uint64_t>(value), std::memory_order_relaxed);
}

double Value(const std::atomic<uint64_t>& counter) {
  return static_cast<double>(counter.load(std::memory_order_relaxed));
}

size_t CodeIndex(grpc::StatusCode code) {
  const auto index = static_cast<size_t>(code);
  return index < std::size(kCodeNames) ? index : static_cast<size_t>(grpc::StatusCode::UNKNOWN);
}

}  // namespace

absl::string_view EndingName(Ending ending) { return kEndings[static_cast<size_t>(ending)]; }
absl::string_view StatusCodeName(grpc::StatusCode code) { return kCodeNames[CodeIndex(code)]; }

RequestMetrics::RequestMetrics()
    : time_to_first_token_(kFirstTokenBounds, kMicro),
      inter_token_(kTokenBounds, kMicro),
      time_per_token_(kTokenBounds, kMicro),
      end_to_end_(kPhaseBounds, kMicro),
      queue_time_(kPhaseBounds, kMicro),
      prefill_time_(kPhaseBounds, kMicro),
      decode_time_(kPhaseBounds, kMicro),
      inference_time_(kPhaseBounds, kMicro),
      prompt_tokens_(kLengthBounds, 1),
      generation_tokens_(kLengthBounds, 1),
      gap_(kGapBounds, kMicro) {
  static_assert(std::size(kCodeNames) == kCodes);
}

void RequestMetrics::OnGap(Time gap) {
  inter_token_.Observe(gap);
  gap_.Observe(gap);
}

void RequestMetrics::OnSequenceEnd(const SequenceReport& report, int64_t generated, Ending ending, Time since_arrival) {
  Add(endings_[static_cast<size_t>(ending)], 1);
  Add(moves_, report.moves);
  end_to_end_.Observe(since_arrival);
  prompt_tokens_.Observe(report.prompt_tokens);
  generation_tokens_.Observe(generated);
  if (report.admitted == 0) return;
  Add(admitted_prompt_tokens_, report.prompt_tokens);
  Add(cached_tokens_, report.cached_tokens);
  Add(predicted_tokens_, report.predicted_cached_tokens);
  Add(mismatches_, report.cached_tokens != report.predicted_cached_tokens);
  queue_time_.Observe(report.admitted - report.submitted);
  if (report.first_token == 0) return;
  prefill_time_.Observe(report.first_token - report.admitted);
  decode_time_.Observe(report.last_token - report.first_token);
  inference_time_.Observe(report.last_token - report.admitted);
  if (generated < 2) return;
  time_per_token_.Observe((report.last_token - report.first_token) / (generated - 1));
}

void RequestMetrics::OnCallEnd(grpc::StatusCode code) { Add(codes_[CodeIndex(code)], 1); }

void RequestMetrics::CollectSequences(const MetricPage::Labels& model, MetricPage* page) const {
  for (size_t i = 0; i < endings_.size(); ++i) {
    MetricPage::Labels labels = model;
    labels.emplace_back("finished_reason", kEndings[i]);
    page->AddCounter("vllm:request_success_total", "ended sequences", Value(endings_[i]), labels);
  }
  page->AddCounter("vllm:prefix_cache_queries_total", "prompt tokens of ended sequences that had been admitted",
                   Value(admitted_prompt_tokens_), model);
  page->AddCounter("vllm:prefix_cache_hits_total", "of these, found in the prefix cache at first admission",
                   Value(cached_tokens_), model);
  page->AddHistogram("vllm:time_to_first_token_seconds", "arrival of the call to a sequence's first output",
                     time_to_first_token_, model);
  page->AddHistogram("vllm:inter_token_latency_seconds", "between two outputs of a sequence", inter_token_, model);
  page->AddHistogram("vllm:request_time_per_output_token_seconds", "decode time of a sequence / (tokens - 1)",
                     time_per_token_, model);
  page->AddHistogram("vllm:e2e_request_latency_seconds", "arrival of the call to a sequence's end", end_to_end_, model);
  page->AddHistogram("vllm:request_queue_time_seconds", "submission to first admission", queue_time_, model);
  page->AddHistogram("vllm:request_prefill_time_seconds", "first admission to first token", prefill_time_, model);
  page->AddHistogram("vllm:request_decode_time_seconds", "first token to last token", decode_time_, model);
  page->AddHistogram("vllm:request_inference_time_seconds", "first admission to last token", inference_time_, model);
  page->AddHistogram("vllm:request_prompt_tokens", "prompt tokens of a sequence", prompt_tokens_, model);
  page->AddHistogram("vllm:request_generation_tokens", "generated tokens of a sequence", generation_tokens_, model);
}

void RequestMetrics::Collect(const std::string& model_name, MetricPage* page) const {
  CollectSequences({{"model_name", model_name}}, page);
  page->AddHistogram("millrace_token_gap_seconds", "as vllm:inter_token_latency_seconds, in finer buckets", gap_);
  for (size_t i = 0; i < kCodes; ++i) {
    page->AddCounter("millrace_requests_total", "Generate calls by status, refused ones included", Value(codes_[i]),
                     {{"code", std::string(kCodeNames[i])}});
  }
  page->AddCounter("millrace_predicted_cached_tokens_total", "cached tokens predicted at placement, ended sequences",
                   Value(predicted_tokens_));
  page->AddCounter("millrace_real_cached_tokens_total", "cached tokens found at admission, ended sequences",
                   Value(cached_tokens_));
  page->AddCounter("millrace_prefix_mismatches_total", "sequences whose prediction and finding differ",
                   Value(mismatches_));
  page->AddCounter("millrace_sequence_moves_total", "times that an ended sequence had gone on at another worker",
                   Value(moves_));
}

}  // namespace millrace
