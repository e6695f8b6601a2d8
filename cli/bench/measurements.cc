#include "cli/bench/measurements.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace millrace {
namespace {

using Json = nlohmann::ordered_json;

// The smallest value that at least `share` of them do not exceed (nearest rank).
float Percentile(const std::vector<float>& sorted, double share) {
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::clamp<size_t>(rank, 1, sorted.size()) - 1];
}

Json Distribution(std::vector<float> values) {
  if (values.empty()) return nullptr;
  std::sort(values.begin(), values.end());
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return {{"mean", sum / static_cast<double>(values.size())},
          {"p50", Percentile(values, 0.5)},
          {"p90", Percentile(values, 0.9)},
          {"p99", Percentile(values, 0.99)},
          {"max", values.back()}};
}

double MeanItl(const RequestRecord& record) {
  return record.output_tokens > 1 ? (record.end_to_end_ms - record.ttft_ms) / (record.output_tokens - 1) : 0;
}

}  // namespace

void Measurements::Add(RequestRecord record) {
  ++num_;
  if (record.status.ok()) {
    good_.push_back(std::move(record));
    return;
  }
  const std::string name = absl::StatusCodeToString(record.status.code());
  if (++errors_[name] == 1) first_message_[name] = std::string(record.status.message());
}

Json Measurements::Summary(double seconds, Slo slo) const {
  std::vector<float> ttft, gaps, end_to_end, late;
  uint64_t input = 0, cached = 0, output = 0, within = 0;
  for (const RequestRecord& record : good_) {
    ttft.push_back(record.ttft_ms);
    end_to_end.push_back(record.end_to_end_ms);
    late.push_back(record.late_ms);
    gaps.insert(gaps.end(), record.gaps_ms.begin(), record.gaps_ms.end());
    input += record.prompt_tokens;
    cached += record.cached_tokens;
    output += record.output_tokens;
    within += (slo.ttft_ms <= 0 || record.ttft_ms <= slo.ttft_ms) && (slo.itl_ms <= 0 || MeanItl(record) <= slo.itl_ms);
  }
  Json json = {{"requests", num_},
               {"completed", good_.size()},
               {"failed", num_ - good_.size()},
               {"errors", Json::object()},
               {"duration_s", seconds},
               {"requests_per_s", good_.size() / seconds},
               {"input_tokens", input},
               {"output_tokens", output},
               {"input_tokens_per_s", input / seconds},
               {"output_tokens_per_s", output / seconds},
               {"hit_rate", input > 0 ? static_cast<double>(cached) / input : 0},
               {"ttft_ms", Distribution(std::move(ttft))},
               {"itl_ms", Distribution(std::move(gaps))},
               {"end_to_end_ms", Distribution(std::move(end_to_end))},
               {"late_ms", Distribution(std::move(late))}};
  for (const auto& [name, count] : errors_)
    json["errors"][name] = {{"count", count}, {"first", first_message_.at(name)}};
  if (slo.ttft_ms > 0 || slo.itl_ms > 0) {
    json["slo"] = {{"ttft_ms", slo.ttft_ms}, {"itl_ms", slo.itl_ms}};
    json["goodput_per_s"] = within / seconds;
    json["within_slo"] = num_ > 0 ? static_cast<double>(within) / num_ : 0;  // of all requests, failed ones included
  }
  return json;
}

std::string SummaryTable(const Json& summary) {
  const auto number = [&](const char* name) { return summary[name].get<double>(); };
  std::string text = absl::StrFormat(
      "requests      %.0f, %.0f completed, %.0f failed in %.2f s\n"
      "throughput    %.2f requests/s, %.1f output tokens/s, %.1f input tokens/s\n"
      "cached        %.1f %% of the input tokens\n",
      number("requests"), number("completed"), number("failed"), number("duration_s"), number("requests_per_s"),
      number("output_tokens_per_s"), number("input_tokens_per_s"), 100 * number("hit_rate"));
  if (summary.contains("goodput_per_s")) {
    text += absl::StrFormat("goodput       %.2f requests/s, %.1f %% of the requests\n", number("goodput_per_s"),
                            100 * number("within_slo"));
  }
  text += absl::StrFormat("%-13s %10s %10s %10s %10s %10s\n", "ms", "mean", "p50", "p90", "p99", "max");
  for (const auto& [label, key] :
       {std::pair{"TTFT", "ttft_ms"}, {"ITL", "itl_ms"}, {"end to end", "end_to_end_ms"}, {"late start", "late_ms"}}) {
    const Json& row = summary[key];
    if (row.is_null()) continue;
    text += absl::StrFormat("%-13s %10.2f %10.2f %10.2f %10.2f %10.2f\n", label, row["mean"].get<double>(),
                            row["p50"].get<double>(), row["p90"].get<double>(), row["p99"].get<double>(),
                            row["max"].get<double>());
  }
  for (const auto& [name, error] : summary["errors"].items()) {
    absl::StrAppend(&text, name, " ", error["count"].get<uint64_t>(),
                    " times, first: ", error["first"].get<std::string>(), "\n");
  }
  return text;
}

}  // namespace millrace
