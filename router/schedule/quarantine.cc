#include "router/schedule/quarantine.h"

#include <algorithm>

namespace millrace {

void QuarantinedContents::Add(const PrefixHash& content, Time now) {
  std::erase_if(contents_, [&](const Content& other) { return other.until <= now || other.hash == content; });
  if (contents_.size() == kMaxContents) contents_.pop_front();
  contents_.push_back({content, now + kQuarantine});
}

Time QuarantinedContents::Until(const PrefixHash& content, Time now) {
  while (!contents_.empty() && contents_.front().until <= now) contents_.pop_front();
  const auto found =
      std::find_if(contents_.begin(), contents_.end(), [&](const Content& other) { return other.hash == content; });
  return found == contents_.end() ? 0 : found->until;
}

}  // namespace millrace
