// What a benchmark saw, request by request, and its summary. Single-threaded; about 50 bytes per request and 4 per
// piece.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace millrace {

// Milliseconds. Latencies count from when the request should have started, not from when it did: a load generator or a
// server that falls behind cannot hide its delay.
struct RequestRecord {
  absl::Status status;
  float late_ms = 0;  // of the start itself
  float ttft_ms = 0, end_to_end_ms = 0;
  std::vector<float> gaps_ms;  // between pieces
  uint32_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;
};

class Measurements {
 public:
  struct Slo {
    double ttft_ms = 0, itl_ms = 0;  // 0: none. itl: a request's mean over its output tokens
  };

  void Add(RequestRecord record);
  size_t size() const { return num_; }
  nlohmann::ordered_json Summary(double seconds, Slo slo) const;

 private:
  size_t num_ = 0;
  std::vector<RequestRecord> good_;         // those that ended well
  std::map<std::string, uint64_t> errors_;  // by status name
  std::map<std::string, std::string> first_message_;
};

// The summary for people.
std::string SummaryTable(const nlohmann::ordered_json& summary);

}  // namespace millrace
