// millrace-decider: the router's Scheduler as a child of the judge (shared/traces/sim/external.py). Reads one JSON
// line, writes one JSON line, until "end"; then says on stderr how long the decisions took, in the Scheduler alone and
// with what the judge's protocol adds (ids made into tokens, proofs, JSON objects).
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/cluster/sim/decider.h"

namespace {

void Print(const char* what, std::vector<double> spans) {
  std::sort(spans.begin(), spans.end());
  std::fprintf(stderr, "%s %zu p50 %.1f us p99 %.1f us max %.1f us\n", what, spans.size(), spans[spans.size() / 2],
               spans[spans.size() * 99 / 100], spans.back());
}

}  // namespace

int main() {
  std::ios::sync_with_stdio(false);
  millrace::Decider decider;
  std::vector<double> decisions, answers;  // microseconds
  for (std::string line; std::getline(std::cin, line);) {
    try {
      const nlohmann::json event = nlohmann::json::parse(line);
      const double start = millrace::ThreadMicroseconds();
      const nlohmann::json answer = decider.Answer(event);
      answers.push_back(millrace::ThreadMicroseconds() - start);
      decisions.push_back(decider.scheduler_us());
      std::cout << answer << '\n' << std::flush;
      if (event.at("event") == "end") break;
    } catch (const nlohmann::json::exception& error) {
      std::fprintf(stderr, "millrace-decider: %s in %.200s\n", error.what(), line.c_str());
      return 1;
    }
  }
  if (answers.empty()) return 1;
  Print("decisions", std::move(decisions));
  Print("answers", std::move(answers));
  return 0;
}
