// Translates the judge's protocol (one JSON line in, one out) into calls of the router's own Scheduler: events become
// Submit, Apply, AddWorker, RemoveWorker …; edits become actions. It decides nothing. An admission that the judge has
// no room for yet (it counts a few blocks otherwise) stays in the worker's outbox, as an edit that is late on the wire.
// Breaches end the process. Lives as long as the process; single-threaded.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "nlohmann/json.hpp"
#include "router/schedule/scheduler.h"
#include "tests/cluster/sim/ledger.h"

namespace millrace {

double ThreadMicroseconds();  // of work, not of waiting for a processor

class Decider {
 public:
  nlohmann::json Answer(const nlohmann::json& event);
  // Of the latest answer: microseconds within the Scheduler. The rest is the judge's protocol.
  double scheduler_us() const { return scheduler_us_; }

 private:
  using Json = nlohmann::json;

  struct Action {
    TraceRequest* admit;  // null: only a new rank
    int64_t request;
    int64_t rank;
  };
  struct Worker {
    worker::v1::Ready ready;
    std::optional<WorkerId> id;  // none: it has left
    std::unique_ptr<Ledger> ledger;
    std::vector<TraceRequest*> slots;
    std::vector<TraceRequest*> rows;  // decoding
    std::vector<std::vector<BlockName>> evictions;
    std::deque<Action> outbox;
    uint64_t step = 0;
    uint64_t edit = 0;
  };

  Json Hello(const Json& event);
  void Join(size_t place);
  void Arrive(const Json& event);
  void Step(const Json& event);
  Json Need(size_t place);
  void Preempt(const Json& event);
  void Left(size_t place);
  void Lost(size_t place);  // all of its requests have arrived again

  void Submit(TraceRequest* request);
  void SubmitAgain(TraceRequest* request);
  std::vector<int32_t> Prompt(const TraceRequest& request) const;
  void Leave(Worker* worker, TraceRequest* request);  // its slot
  uint32_t AddTokens(TraceRequest* request, uint32_t length, worker::v1::StepReport* report) const;
  void Feed(Worker* worker);  // tokens that the judge has and the Scheduler has not
  bool Starve(Worker* worker);
  worker::v1::StepReport Report(Worker* worker) const;
  void Apply(Worker* worker, const worker::v1::StepReport& report);

  // Calls the Scheduler and counts its time.
  template <class Call>
  auto Ask(const Call& call) {
    const double start = ThreadMicroseconds();
    auto result = call();
    scheduler_us_ += ThreadMicroseconds() - start;
    return result;
  }

  void TakeEdits();
  bool TakeEdit(size_t place);  // true if it releases slots
  void Admit(size_t place, const worker::v1::Admit& admit, std::vector<BlockName>* evicted);
  void Evict(Worker* worker, std::vector<BlockName> names);
  void FlushEvictions(size_t place, Json* answer);
  Json Flush();
  TraceRequest& At(int64_t id);

  std::unique_ptr<Scheduler> scheduler_;
  std::vector<Worker> workers_;
  absl::flat_hash_map<WorkerId, size_t> places_;
  absl::flat_hash_map<int64_t, std::unique_ptr<TraceRequest>> requests_;
  absl::flat_hash_map<SequenceId, TraceRequest*> by_sequence_;
  absl::flat_hash_map<int64_t, BlockName> names_;
  std::vector<int64_t> trace_names_;  // by BlockName
  std::vector<uint32_t> depths_;      // by BlockName: its place in prompts
  size_t leaving_ = 0;                // the worker that was lost
  size_t missing_ = 0;                // and how many of its requests have not arrived again
  Time now_ = 0;
  double scheduler_us_ = 0;
};

}  // namespace millrace
