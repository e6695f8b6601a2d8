// The real Scheduler with simulated workers, in virtual time: arrivals, edits and reports that take their time on the
// wire, faults. Everything follows from the calls, so equal calls give equal runs; `digest` covers every edit.
// Single-threaded.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "router/schedule/scheduler.h"
#include "tests/cluster/sim/virtual_worker.h"

namespace millrace {

struct VirtualRequest {
  std::vector<int32_t> prompt;
  uint32_t output = 1;  // tokens
  std::string tenant;
  Time patience = kNever;  // from arrival to its deadline
  // What became of it:
  Time arrived = 0, first = 0, ended = 0;
  uint32_t received = 0;
  uint32_t cached = 0;
  bool admitted = false;
  absl::Status status;  // of its end, or of its refusal

  bool done() const { return ended != 0 && status.ok() && received == output; }
};

class VirtualCluster {
 public:
  VirtualCluster(const SchedulerOptions& options, Time wire) : scheduler_(options), wire_(wire) {}

  size_t Join(const worker::v1::Ready& ready, const worker::v1::StepCost& real, const Drafting& drafting = {});
  void Lose(size_t worker);
  void At(Time when, std::function<void()> what);
  size_t Arrive(Time when, VirtualRequest request);
  void Run(Time until = kNever);  // kNever: until nothing is left to happen

  Time now() const { return now_; }
  Scheduler& scheduler() { return scheduler_; }
  const std::vector<VirtualRequest>& requests() const { return requests_; }
  uint64_t digest() const { return digest_; }
  uint64_t num_steps() const { return num_steps_; }
  WorkerId id(size_t worker) const { return members_[worker]->id; }
  uint64_t num_drafts_told(size_t worker) const { return members_[worker]->worker.num_drafts_told(); }
  uint64_t computed_tokens(size_t worker) const { return members_[worker]->computed_tokens; }

 private:
  struct Member {
    Member(const worker::v1::Ready& ready, const worker::v1::StepCost& real, const std::vector<uint32_t>* ends,
           const Drafting& drafting)
        : worker(ready, real, ends, drafting) {}
    VirtualWorker worker;
    WorkerId id = 0;
    bool lost = false;
    bool edit_in_flight = false;
    uint64_t computed_tokens = 0;
  };
  struct Event {
    Time at;
    uint64_t serial;
    std::function<void()> what;
    bool operator<(const Event& other) const { return std::tie(other.at, other.serial) < std::tie(at, serial); }
  };

  void Pump();  // takes what the scheduler has decided
  void Deliver(size_t member, const worker::v1::Edit& edit);
  void BeginStep(size_t member);
  void Send(size_t member, worker::v1::StepReport report);
  void Submit(size_t request);

  Scheduler scheduler_;
  const Time wire_;
  Time now_ = 1;
  Time next_advance_ = kNever;
  std::priority_queue<Event> events_;
  uint64_t next_serial_ = 0;
  std::vector<std::unique_ptr<Member>> members_;
  absl::flat_hash_map<WorkerId, size_t> places_;
  std::vector<VirtualRequest> requests_;
  std::vector<uint32_t> ends_;  // by request
  absl::flat_hash_map<SequenceId, size_t> by_sequence_;
  uint64_t digest_ = 1469598103934665603;
  uint64_t num_steps_ = 0;
};

}  // namespace millrace
