#include "router/text/stop_strings.h"

#include <algorithm>
#include <utility>

namespace millrace {

StopStrings::StopStrings(std::vector<std::string> stops, bool include_stop) : include_stop_(include_stop) {
  for (std::string& stop : stops) {
    Watch watch;
    watch.fallback.assign(stop.size() + 1, 0);
    for (uint32_t n = 1, border = 0; n < stop.size(); ++n) {
      while (border > 0 && stop[n] != stop[border]) border = watch.fallback[border];
      if (stop[n] == stop[border]) ++border;
      watch.fallback[n + 1] = border;
    }
    watch.stop = std::move(stop);
    watches_.push_back(std::move(watch));
  }
}

StopStrings::Result StopStrings::Append(std::string_view text) {
  if (end_.stopped) return {"", true, end_.matched};
  for (const char c : text) {
    held_.push_back(c);
    for (size_t i = 0; i < watches_.size(); ++i) {
      Watch& watch = watches_[i];
      if (watch.stop.empty()) continue;
      while (watch.matched > 0 && watch.stop[watch.matched] != c) watch.matched = watch.fallback[watch.matched];
      if (watch.stop[watch.matched] == c) ++watch.matched;
      if (watch.matched < watch.stop.size()) continue;
      if (end_.matched < 0 || watch.stop.size() > watches_[end_.matched].stop.size())
        end_.matched = static_cast<int>(i);
    }
    if (end_.matched < 0) continue;
    end_.stopped = true;
    if (!include_stop_) held_.resize(held_.size() - watches_[end_.matched].stop.size());
    return {std::exchange(held_, ""), true, end_.matched};
  }
  size_t keep = 0;
  for (const Watch& watch : watches_) keep = std::max<size_t>(keep, watch.matched);
  Result result;
  result.text = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return result;
}

std::string StopStrings::Finish() { return std::exchange(held_, ""); }

}  // namespace millrace
