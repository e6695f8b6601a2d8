// Watches one output stream for stop strings, over token borders. The stream ends at the first byte that completes any
// of them; of several completed there the longest is reported. Text that may still become a stop is held back. Per byte
// one Knuth-Morris-Pratt step for each stop, so the cost is linear and the result does not depend on how the text was
// cut. Single-threaded.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace millrace {

class StopStrings {
 public:
  StopStrings(std::vector<std::string> stops, bool include_stop);

  struct Result {
    std::string text;      // safe to send
    bool stopped = false;  // the stream has ended; what follows is ignored
    int matched = -1;      // index of the stop
  };
  Result Append(std::string_view text);
  // The end of the stream without a stop: what was held back.
  std::string Finish();

 private:
  struct Watch {
    std::string stop;
    std::vector<uint32_t> fallback;  // fallback[n]: longest proper border of the first n bytes
    uint32_t matched = 0;            // bytes of `stop` that the stream ends with
  };

  std::vector<Watch> watches_;
  const bool include_stop_;
  std::string held_;
  Result end_;  // stopped once a stop was found
};

}  // namespace millrace
