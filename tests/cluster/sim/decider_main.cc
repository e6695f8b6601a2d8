// millrace-decider: the router's Scheduler as a child of the judge (shared/traces/sim/external.py). Reads one JSON
// line, writes one JSON line, until "end"; then says on stderr how long the decisions took.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/cluster/sim/decider.h"

namespace {

// Of work, not of waiting for a processor.
double ThreadMicroseconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

}  // namespace

int main() {
  std::ios::sync_with_stdio(false);
  millrace::Decider decider;
  std::vector<double> spans;  // microseconds
  for (std::string line; std::getline(std::cin, line);) {
    try {
      const nlohmann::json event = nlohmann::json::parse(line);
      const double start = ThreadMicroseconds();
      const nlohmann::json answer = decider.Answer(event);
      spans.push_back(ThreadMicroseconds() - start);
      std::cout << answer << '\n' << std::flush;
      if (event.at("event") == "end") break;
    } catch (const nlohmann::json::exception& error) {
      std::fprintf(stderr, "millrace-decider: %s in %.200s\n", error.what(), line.c_str());
      return 1;
    }
  }
  if (spans.empty()) return 1;
  std::sort(spans.begin(), spans.end());
  std::fprintf(stderr, "decisions %zu p50 %.1f us p99 %.1f us max %.1f us\n", spans.size(), spans[spans.size() / 2],
               spans[spans.size() * 99 / 100], spans.back());
  return 0;
}
