// The whole Scheduler against simulated workers, with delays of edits and reports, cancels, deadlines, lost and new
// workers and pools that are far too small.
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "router/schedule/scheduler.h"
#include "tests/router/schedule/random_seed.h"
#include "tests/router/schedule/simulated_worker.h"

namespace millrace {
namespace {

struct Shape {
  const char* name;
  uint32_t block_tokens;
  uint32_t num_blocks;
  uint32_t num_slots;
  uint32_t chunk;
  size_t max_workers;
  int prompt_blocks;  // of the longest prompts
  int max_output;
  int iterations;
  double lost_workers;  // per iteration
  uint64_t non_finite_one_in;
  double right;  // guesses
};

class Simulation {
 public:
  Simulation(const Shape& shape, uint64_t seed) : shape_(shape), rng_(seed) {
    model_.non_finite_one_in = shape.non_finite_one_in;
    SchedulerOptions options;
    options.max_queued_sequences = 200;
    options.hash_key[0] = seed;
    options.lease_tokens_ahead = static_cast<int>(Below(3) * shape.block_tokens);
    options.max_pause = kMaxPause;
    scheduler_ = std::make_unique<Scheduler>(options);
    max_preemptions_ = options.max_preemptions;
    for (int i = 0; i < 4; ++i) {
      families_.emplace_back();
      for (int n = 0; n < shape.prompt_blocks * static_cast<int>(shape.block_tokens); ++n)
        families_.back().push_back(Token());
    }
  }

  void Run() {
    Join();
    for (int i = 0; i < shape_.iterations && Healthy(); ++i) {
      now_ += static_cast<Time>(Below(2000));
      const uint64_t dice = Below(100);
      if (dice < 12 && live_.size() < 60) {
        Submit();
      } else if (dice < 14) {
        CancelOne();
      } else if (dice < 15) {
        scheduler_->Advance(now_);
      } else if (dice < 18) {
        PauseOrResumeOne();
      }
      if (Chance(shape_.lost_workers)) Lose();
      if (Chance(shape_.lost_workers) || workers_.empty()) Join();
      if (Chance(shape_.lost_workers / 8) && workers_.size() > 1) scheduler_->DrainWorker(workers_.begin()->first);
      Round();
    }
    for (auto& [id, expected] : live_) SetPaused(id, &expected, false);
    for (int i = 0; !live_.empty() && Healthy(); ++i) {
      ASSERT_LT(i, 200'000) << live_.size() << " sequences never end, the first is " << live_.begin()->first;
      now_ += 1000;
      if (workers_.empty()) Join();
      if (i % 1000 == 999) Join();
      Round();
    }
    for (int i = 0; i < 50 && Healthy(); ++i) Round();
    if (!Healthy()) return;
    CheckNothingLeft();
    std::printf(
        "%s: %llu steps, %zu sequences, %d cancelled, %d failed, %llu preemptions, %llu of %llu prompt tokens cached\n",
        shape_.name, static_cast<unsigned long long>(steps_), finished_ + cancelled_ + failed_,
        static_cast<int>(cancelled_), static_cast<int>(failed_),
        static_cast<unsigned long long>(scheduler_->counts().preemptions),
        static_cast<unsigned long long>(scheduler_->counts().cached_tokens),
        static_cast<unsigned long long>(scheduler_->counts().prompt_tokens));
  }
  uint64_t steps() const { return steps_; }
  uint64_t preemptions() const { return scheduler_->counts().preemptions; }
  size_t finished() const { return finished_; }
  uint64_t drafted() const { return drafted_; }

 private:
  static constexpr Time kMaxPause = 300'000;

  struct Expected {
    std::vector<int32_t> prompt;
    std::vector<int32_t> output;  // of a solo run
    worker::v1::FinishReason reason = worker::v1::FINISH_REASON_UNSPECIFIED;
    size_t received = 0;
    Time deadline = kNever;
    Time paused_at = kNever;
    bool wants_logprobs = false;
    bool wants_prompt_logprobs = false;
  };
  struct Link {
    std::unique_ptr<SimulatedWorker> worker;
    std::deque<worker::v1::Edit> edits;
    std::deque<worker::v1::StepReport> reports;
    uint64_t delivered = 0;                                        // applied_edit that the scheduler has seen
    std::map<uint32_t, std::set<uint32_t>> slot_blocks;            // what the scheduler gave, by slot
    std::map<uint32_t, uint64_t> released_slots, released_blocks;  // by which edit
  };

  bool Healthy() const { return !testing::Test::HasFailure(); }
  uint64_t Below(uint64_t n) { return rng_() % n; }
  bool Chance(double p) { return static_cast<double>(rng_() % 1'000'000) < p * 1e6; }
  int32_t Token() { return static_cast<int32_t>(Below(static_cast<uint64_t>(model_.vocab))); }

  void Join() {
    if (workers_.size() >= shape_.max_workers) return;
    auto worker = std::make_unique<SimulatedWorker>(model_, shape_.num_blocks, shape_.block_tokens, shape_.num_slots,
                                                    shape_.chunk);
    const absl::StatusOr<WorkerId> id = scheduler_->AddWorker(worker->Ready(), now_);
    ASSERT_TRUE(id.ok()) << id.status();
    workers_[*id].worker = std::move(worker);
  }

  void Lose() {
    if (workers_.empty()) return;
    const auto it = std::next(workers_.begin(), static_cast<ptrdiff_t>(Below(workers_.size())));
    scheduler_->RemoveWorker(it->first, now_);
    workers_.erase(it);
    ++losses_;
  }

  void Submit() {
    SequenceSpec spec;
    const std::vector<int32_t>& family = families_[Below(families_.size())];
    const size_t shared =
        Chance(0.2) ? family.size() / shape_.block_tokens * shape_.block_tokens : Below(family.size() + 1);
    spec.prompt.assign(family.begin(), family.begin() + static_cast<ptrdiff_t>(shared));
    const size_t own = Below(shape_.block_tokens * 2);
    for (size_t i = 0; i < own || spec.prompt.empty(); ++i) spec.prompt.push_back(Token());
    spec.max_tokens = static_cast<int32_t>(1 + Below(static_cast<uint64_t>(shape_.max_output)));
    spec.min_tokens = static_cast<int32_t>(Below(static_cast<uint64_t>(spec.max_tokens)));
    spec.priority = Chance(0.1) ? static_cast<int>(Below(3)) - 1 : 0;
    if (Chance(0.1)) spec.stop_token_ids = {Token(), Token(), Token()};
    if (Chance(0.05)) spec.deadline = now_ + static_cast<Time>(Below(500'000));
    if (Chance(0.1)) spec.cache_salt = "tenant";
    spec.sampling.set_repetition_penalty(Chance(0.2) ? 1.5f : 1.0f);
    spec.sampling.set_seed(Below(3));
    if (Chance(0.1)) spec.sampling.set_logprobs(0);
    if (Chance(0.1)) spec.sampling.set_prompt_logprobs(0);
    const size_t choices = Chance(0.2) ? 1 + Below(5) : 1;
    std::vector<SequenceSpec> specs(choices, spec);
    for (size_t i = 0; i < choices; ++i) specs[i].sampling.set_seed(spec.sampling.seed() + i);
    const bool fits =
        static_cast<int64_t>(spec.prompt.size()) + spec.max_tokens <= int64_t{shape_.num_blocks} * shape_.block_tokens;
    const absl::StatusOr<std::vector<SequenceId>> ids = scheduler_->Submit(specs, now_);
    if (ids.status().code() == absl::StatusCode::kFailedPrecondition) {
      ASSERT_GE(losses_, 2) << ids.status();
      return;
    }
    if (!ids.ok()) {
      ASSERT_EQ(ids.status().code(), absl::StatusCode::kResourceExhausted) << ids.status();
      ASSERT_TRUE(!fits || scheduler_->counts().queued > 150) << ids.status();
      return;
    }
    ASSERT_TRUE(fits);
    for (size_t i = 0; i < choices; ++i) live_[(*ids)[i]] = Solo(specs[i]);
  }

  Expected Solo(const SequenceSpec& spec) const {
    Expected expected;
    expected.prompt = spec.prompt;
    expected.deadline = spec.deadline;
    expected.wants_logprobs = spec.sampling.has_logprobs();
    expected.wants_prompt_logprobs = spec.sampling.has_prompt_logprobs();
    uint64_t kv = 1;
    for (const int32_t token : spec.prompt) kv = NextKv(kv, token);
    while (expected.reason == worker::v1::FINISH_REASON_UNSPECIFIED) {
      const std::optional<int32_t> token = model_.Sample(kv, spec.sampling.seed());
      if (!token.has_value()) {
        expected.reason = worker::v1::FINISH_REASON_NON_FINITE;
        break;
      }
      expected.output.push_back(*token);
      kv = NextKv(kv, *token);
      const auto length = static_cast<int32_t>(expected.output.size());
      const auto& stops = spec.stop_token_ids;
      if ((spec.min_tokens == 0 || length > spec.min_tokens) &&
          std::find(stops.begin(), stops.end(), *token) != stops.end()) {
        expected.reason = worker::v1::FINISH_REASON_STOP_TOKEN;
      } else if (length == spec.max_tokens) {
        expected.reason = worker::v1::FINISH_REASON_LENGTH;
      }
    }
    return expected;
  }

  void CancelOne() {
    if (live_.empty()) return;
    const auto it = std::next(live_.begin(), static_cast<ptrdiff_t>(Below(live_.size())));
    scheduler_->Cancel(it->first, now_);
    live_.erase(it);
    ++cancelled_;
  }

  void PauseOrResumeOne() {
    if (live_.empty()) return;
    const auto it = std::next(live_.begin(), static_cast<ptrdiff_t>(Below(live_.size())));
    SetPaused(it->first, &it->second, it->second.paused_at == kNever);
  }

  void SetPaused(SequenceId id, Expected* expected, bool paused) {
    scheduler_->SetPaused(id, paused, now_);
    if (paused != (expected->paused_at != kNever)) expected->paused_at = paused ? now_ : kNever;
  }

  // Everything that is in flight moves a little.
  void Round() {
    for (const WorkerId id : scheduler_->PendingWorkers()) {
      if (!Chance(0.8)) continue;
      Link& link = workers_.at(id);
      link.edits.push_back(scheduler_->TakeEdit(id));
      CheckQuarantine(&link, link.edits.back());
      if (!Healthy()) return;
    }
    for (auto& [id, link] : workers_) {
      while (!link.edits.empty() && Chance(0.6)) {
        link.worker->Apply(link.edits.front());
        link.edits.pop_front();
        if (!Healthy()) return;
      }
      if (Chance(0.7)) {
        const uint64_t before = link.worker->num_drafted();
        link.reports.push_back(link.worker->Step([&] { return Chance(shape_.right); }));
        drafted_ += link.worker->num_drafted() - before;
        ++steps_;
      }
      while (!link.reports.empty() && (Chance(0.5) || link.reports.size() > 8)) {
        const absl::Status status = scheduler_->Apply(id, link.reports.front(), now_);
        ASSERT_TRUE(status.ok()) << status;
        link.delivered = link.reports.front().applied_edit();
        for (const auto& row : link.reports.front().rows()) {
          if (row.finish_reason() == worker::v1::FINISH_REASON_UNSPECIFIED) continue;
          if (link.released_slots.count(row.slot()) == 0) link.slot_blocks.erase(row.slot());
        }
        link.reports.pop_front();
      }
      const WorkerCounts counts = scheduler_->worker_counts(id);
      ASSERT_EQ(counts.free_blocks + counts.used_blocks + counts.cached_blocks + counts.quarantined_blocks,
                counts.blocks);
    }
    TakeEvents();
  }

  // What an edit gives out was not released by an edit that the scheduler has not seen applied.
  void CheckQuarantine(Link* link, const worker::v1::Edit& edit) {
    const auto check = [&](std::map<uint32_t, uint64_t>& released, uint32_t id, const char* what) {
      const auto found = released.find(id);
      if (found == released.end()) return;
      ASSERT_LE(found->second, link->delivered) << what << " " << id << " is used too early";
      released.erase(found);
    };
    for (const uint32_t slot : edit.release()) {
      link->released_slots[slot] = edit.edit_id();
      for (const uint32_t block : link->slot_blocks[slot]) link->released_blocks[block] = edit.edit_id();
      link->slot_blocks.erase(slot);
    }
    for (const auto& admit : edit.admit()) {
      check(link->released_slots, admit.slot(), "slot");
      auto& blocks = link->slot_blocks[admit.slot()];
      blocks.clear();
      for (int i = static_cast<int>(admit.num_cached_tokens() / shape_.block_tokens); i < admit.block_table_size();
           ++i) {
        check(link->released_blocks, admit.block_table(i), "block");
        blocks.insert(admit.block_table(i));
      }
    }
    for (const auto& extend : edit.extend()) {
      for (const uint32_t block : extend.block_table()) {
        check(link->released_blocks, block, "block");
        link->slot_blocks[extend.slot()].insert(block);
      }
    }
  }

  void TakeEvents() {
    for (const SequenceEvent& event : scheduler_->TakeEvents()) {
      const auto found = live_.find(event.sequence);
      ASSERT_NE(found, live_.end()) << "an event of sequence " << event.sequence << ", which has ended";
      Expected& expected = found->second;
      const SequenceReport report = scheduler_->Report(event.sequence);
      if (expected.wants_prompt_logprobs && expected.received == 0 && !event.token_ids.empty()) {
        ASSERT_EQ(event.prompt_logprobs.size(), expected.prompt.size() - 1);
        for (size_t i = 1; i < expected.prompt.size(); ++i)
          ASSERT_EQ(event.prompt_logprobs[i - 1].token_id(), expected.prompt[i]);
      } else {
        ASSERT_TRUE(event.prompt_logprobs.empty() || !event.status.ok());
      }
      ASSERT_EQ(event.logprobs.size(), expected.wants_logprobs ? event.token_ids.size() : 0);
      for (const int32_t token : event.token_ids) {
        ASSERT_LT(expected.received, expected.output.size());
        ASSERT_EQ(token, expected.output[expected.received])
            << "token " << expected.received << " of sequence " << event.sequence;
        ++expected.received;
      }
      ASSERT_EQ(static_cast<size_t>(report.generated_tokens) >= expected.received, true);
      if (!event.finished) continue;
      if (event.status.ok() || event.finish_reason == worker::v1::FINISH_REASON_NON_FINITE) {
        ASSERT_EQ(event.finish_reason, expected.reason);
        ASSERT_EQ(expected.received, expected.output.size());
        ++finished_;
      } else if (event.status.code() == absl::StatusCode::kResourceExhausted) {
        ASSERT_NE(expected.paused_at, kNever);
        ASSERT_LE(expected.paused_at + kMaxPause, now_);
        ++failed_;
      } else if (event.status.code() == absl::StatusCode::kDeadlineExceeded) {
        ASSERT_LE(expected.deadline, now_);
        ++failed_;
      } else {
        ASSERT_EQ(event.status.code(), absl::StatusCode::kInternal) << event.status;
        ASSERT_GE(losses_, 2);
        ++failed_;
      }
      live_.erase(found);
    }
  }

  void CheckNothingLeft() {
    EXPECT_EQ(scheduler_->counts().queued, 0);
    EXPECT_EQ(scheduler_->counts().running, 0);
    EXPECT_EQ(scheduler_->counts().paused, 0);
    EXPECT_EQ(scheduler_->NextDeadline(), kNever);
    for (auto& [id, link] : workers_) {
      const WorkerCounts counts = scheduler_->worker_counts(id);
      EXPECT_EQ(counts.used_slots, 0u);
      EXPECT_EQ(counts.used_blocks, 0u);
      EXPECT_EQ(counts.quarantined_blocks, 0u);
      EXPECT_TRUE(link.worker->idle());
    }
  }

  const Shape shape_;
  std::mt19937_64 rng_;
  SimulatedModel model_;
  std::unique_ptr<Scheduler> scheduler_;
  std::map<WorkerId, Link> workers_;
  std::map<SequenceId, Expected> live_;
  std::vector<std::vector<int32_t>> families_;
  Time now_ = 1;
  uint64_t steps_ = 0, drafted_ = 0;
  int losses_ = 0;
  int max_preemptions_ = 0;
  size_t finished_ = 0, cancelled_ = 0, failed_ = 0;
};

// name, block, blocks, slots, chunk, workers, prompt blocks, output, iterations, loss, non-finite, right
constexpr Shape kShapes[] = {
    {"roomy", 4, 200, 16, 24, 3, 6, 30, 20'000, 0.0005, 0, 0.8},
    {"tiny pool", 4, 14, 8, 9, 1, 5, 24, 60'000, 0, 0, 0.6},
    {"tiny pools, unreliable", 2, 24, 6, 7, 3, 6, 16, 20'000, 0.002, 300, 0.9},
    {"one token a block", 1, 40, 5, 6, 2, 10, 20, 20'000, 0.0005, 0, 0.7},
    {"many workers", 4, 40, 8, 16, 6, 6, 20, 10'000, 0.002, 500, 0.4},
};

TEST(ScheduleSimulation, OutputsAreThoseOfSoloRunsAndNothingIsLeft) {
  const uint64_t seed = TestSeed(20);
  uint64_t steps = 0, preemptions = 0, drafted = 0;
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(shape.name);
    Simulation simulation(shape, seed);
    simulation.Run();
    ASSERT_FALSE(HasFailure());
    steps += simulation.steps();
    EXPECT_GT(simulation.finished(), 100u);
    preemptions += simulation.preemptions();
    drafted += simulation.drafted();
  }
  EXPECT_GE(steps, 100'000u);
  EXPECT_GE(preemptions, 100u);
  EXPECT_GE(drafted, 1000u);
}

}  // namespace
}  // namespace millrace
