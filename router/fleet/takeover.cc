// From router to router: what a worker has kept for a new one, and how an old one steps back.
#include "absl/strings/str_cat.h"
#include "router/fleet/fleet.h"
#include "service/log.h"

namespace millrace {
namespace {

constexpr size_t kMaxCachedBytes = 64 << 20;

}  // namespace

absl::Status TakenOver() {
  return absl::UnavailableError("a router with a higher epoch has taken over the workers; ask that one");
}

absl::Status Fleet::OnCached(Member& member, worker::v1::CachedBlocks& cached) {
  member.cached_bytes += cached.ByteSizeLong();
  if (member.cached_bytes > kMaxCachedBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("cached blocks: ", member.cached_bytes, " bytes before ready; the limit is ", kMaxCachedBytes));
  }
  member.cached.emplace_back().Swap(&cached);
  return absl::OkStatus();
}

// Its epoch does not rise, so the workers will not come back: its clients can only go on at the other router.
std::vector<std::shared_ptr<SequenceSink>> Fleet::OnTakenOver(Time now) {
  taken_over_ = true;
  std::vector<std::shared_ptr<SequenceSink>> sinks;
  Log(LogLevel::kWarning, "taken_over", {{"epoch", options_.epoch}, {"open_sequences", live_.size()}});
  for (auto& [id, live] : live_) {
    scheduler_.Cancel(id, now);
    SequenceUpdate update;
    update.choice = live.choice;
    update.event.sequence = id;
    update.event.finished = true;
    update.event.status = TakenOver();
    live.sink->Push(std::move(update));
    sinks.push_back(std::move(live.sink));
  }
  live_.clear();
  return sinks;
}

}  // namespace millrace
