#include "cli/bench/workload.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "router/text/json.h"

namespace millrace {
namespace {

constexpr uint32_t kTraceBlock = 512;
constexpr uint64_t kMaxLength = 1 << 21;  // tokens of one request
constexpr uint64_t kMaxTimestamp = 1'000'000'000'000;

// SplitMix64's finaliser over both words.
uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a + 0x9e3779b97f4a7c15 * (b + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Poisson arrivals: exponential gaps, a function of the seed.
void SpreadByRate(std::vector<PlannedRequest>& plan, double rate, uint64_t seed) {
  double at = 0;
  for (size_t i = 0; i < plan.size(); ++i) {
    plan[i].start = absl::Seconds(at);
    const double uniform = (static_cast<double>(Mix(seed ^ 0xa11, i) >> 11) + 1) * 0x1p-53;  // (0, 1]
    at -= std::log(uniform) / rate;
  }
}

// Arrivals that share a tick of the trace's clock are spread evenly over it.
void SpreadTicks(std::vector<PlannedRequest>& plan, const std::vector<uint64_t>& times, double speed) {
  uint64_t tick = std::numeric_limits<uint64_t>::max();
  for (size_t i = 1; i < times.size(); ++i) {
    if (times[i] > times[i - 1]) tick = std::min(tick, times[i] - times[i - 1]);
  }
  if (tick == std::numeric_limits<uint64_t>::max()) tick = 0;
  for (size_t begin = 0, end = 0; begin < times.size(); begin = end) {
    while (end < times.size() && times[end] == times[begin]) ++end;
    for (size_t i = begin; i < end; ++i) {
      const double offset = static_cast<double>(tick) * (i - begin) / (end - begin);
      plan[i].start = absl::Milliseconds((times[begin] - times[0] + offset) / speed);
    }
  }
}

absl::StatusOr<uint64_t> Field(const nlohmann::json& line, const char* name, uint64_t most) {
  const auto field = line.find(name);
  if (field == line.end() || !field->is_number())
    return absl::InvalidArgumentError(absl::StrCat(name, ": a number is wanted"));
  const double value = field->get<double>();
  if (!(value >= 0 && value <= static_cast<double>(most))) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", value, " is not in 0 … ", most));
  }
  return static_cast<uint64_t>(value);
}

struct TraceLine {
  PlannedRequest request;
  uint64_t timestamp;  // ms
};

absl::StatusOr<TraceLine> ParseTraceLine(const std::string& text, double scale) {
  const absl::StatusOr<nlohmann::json> line = ParseJson(text, "request");
  if (!line.ok()) return line.status();
  if (!line->is_object()) return absl::InvalidArgumentError("not an object");
  const absl::StatusOr<uint64_t> time = Field(*line, "timestamp", kMaxTimestamp);
  if (!time.ok()) return time.status();
  const absl::StatusOr<uint64_t> input = Field(*line, "input_length", kMaxLength);
  if (!input.ok()) return input.status();
  const absl::StatusOr<uint64_t> output = Field(*line, "output_length", kMaxLength);
  if (!output.ok()) return output.status();
  const auto ids = line->find("hash_ids");
  if (ids == line->end() || !ids->is_array() || ids->size() * kTraceBlock < *input) {
    return absl::InvalidArgumentError(
        absl::StrCat("hash_ids: a list of an id per ", kTraceBlock, " of ", *input, " tokens is wanted"));
  }
  PlannedRequest request;
  request.block_tokens = std::max<uint32_t>(std::lround(kTraceBlock * scale), 1);
  request.input_tokens = std::clamp<uint64_t>(std::llround(*input * scale), 1, ids->size() * request.block_tokens);
  request.output_tokens = std::max<uint64_t>(std::llround(*output * scale), 1);
  for (const nlohmann::json& id : *ids) {
    if (!id.is_number_integer())
      return absl::InvalidArgumentError(absl::StrCat("hash_ids: ", id.dump(), " is no integer"));
    request.blocks.push_back(Mix(0x7ace, id.get<uint64_t>()));
  }
  if (request.blocks.empty()) return absl::InvalidArgumentError("hash_ids: empty");
  return TraceLine{std::move(request), *time};
}

}  // namespace

absl::StatusOr<std::vector<PlannedRequest>> PlanSynthetic(const WorkloadOptions& options) {
  const bool shared = options.workload == "shared_prefix";
  if (shared && options.prefix_tokens >= options.input_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("--prefix_tokens ", options.prefix_tokens,
                                                   " must be below --input_tokens ", options.input_tokens));
  }
  std::vector<PlannedRequest> plan(static_cast<size_t>(options.num_requests));
  for (size_t i = 0; i < plan.size(); ++i) {
    plan[i].input_tokens = static_cast<uint32_t>(options.input_tokens);
    plan[i].output_tokens = static_cast<uint32_t>(options.output_tokens);
    plan[i].block_tokens = static_cast<uint32_t>(shared ? options.prefix_tokens : options.input_tokens);
    const size_t num_blocks = (plan[i].input_tokens + plan[i].block_tokens - 1) / plan[i].block_tokens;
    for (size_t b = 0; b < num_blocks; ++b) plan[i].blocks.push_back(Mix(Mix(options.seed, i), b));
    if (shared) plan[i].blocks[0] = Mix(options.seed ^ 0x9709, i % static_cast<size_t>(options.groups));
  }
  if (options.rate > 0) SpreadByRate(plan, options.rate, options.seed);
  return plan;
}

absl::StatusOr<std::vector<PlannedRequest>> PlanTrace(std::istream& lines, const WorkloadOptions& options) {
  std::vector<PlannedRequest> plan;
  std::vector<uint64_t> times;
  std::string text;
  for (size_t number = 1; plan.size() < static_cast<size_t>(options.num_requests) && std::getline(lines, text);
       ++number) {
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    absl::StatusOr<TraceLine> line = ParseTraceLine(text, options.scale);
    if (!line.ok())
      return absl::InvalidArgumentError(absl::StrCat("trace, line ", number, ": ", line.status().message()));
    if (!times.empty() && line->timestamp < times.back()) {
      return absl::InvalidArgumentError(
          absl::StrCat("trace, line ", number, ": timestamp ", line->timestamp, " goes back"));
    }
    times.push_back(line->timestamp);
    plan.push_back(std::move(line->request));
  }
  if (plan.empty()) return absl::InvalidArgumentError("the trace has no request");
  if (options.rate > 0) {
    SpreadByRate(plan, options.rate, options.seed);
  } else {
    SpreadTicks(plan, times, options.speed);
  }
  return plan;
}

std::vector<int32_t> PromptOf(const PlannedRequest& request, uint32_t vocab_size) {
  std::vector<int32_t> tokens(request.input_tokens);
  for (uint32_t i = 0; i < request.input_tokens; ++i) {
    tokens[i] =
        static_cast<int32_t>(Mix(request.blocks[i / request.block_tokens], i % request.block_tokens) % vocab_size);
  }
  return tokens;
}

}  // namespace millrace
