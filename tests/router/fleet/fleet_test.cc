#include "router/fleet/fleet.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/router/fleet/fake_worker.h"

namespace millrace {
namespace {

using testing::HasSubstr;

class Collector final : public SequenceSink {
 public:
  void Push(SequenceUpdate update) override {
    absl::MutexLock lock(&mutex_);
    for (const int32_t token : update.event.token_ids) tokens_[update.choice].push_back(token);
    if (!update.event.status.ok()) status_ = update.event.status;
    num_finished_ += update.outcome.has_value();
  }
  void Wake() override {}
  void AwaitFinished(int choices) {
    absl::MutexLock lock(&mutex_);
    awaited_ = choices;
    mutex_.Await(absl::Condition(
        +[](Collector* self) ABSL_NO_THREAD_SAFETY_ANALYSIS { return self->num_finished_ == self->awaited_; }, this));
  }
  std::vector<int32_t> tokens(int choice) {
    absl::MutexLock lock(&mutex_);
    return tokens_[choice];
  }
  absl::Status status() {
    absl::MutexLock lock(&mutex_);
    return status_;
  }

 private:
  absl::Mutex mutex_;
  std::map<int, std::vector<int32_t>> tokens_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  int num_finished_ ABSL_GUARDED_BY(mutex_) = 0;
  int awaited_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Waits for what the fleet says about its workers; a status has no condition to wait on, so this reads it again and
// again.
template <class Predicate>
std::vector<v1::WorkerStatus> AwaitWorkers(const Fleet& fleet, Predicate predicate) {
  while (true) {
    std::vector<v1::WorkerStatus> workers = fleet.workers();
    if (predicate(workers)) return workers;
    std::this_thread::yield();
  }
}

FleetOptions Options(const std::vector<FakeWorker*>& workers, absl::Mutex* mutex = nullptr, bool* ready = nullptr) {
  FleetOptions options;
  options.router_id = "test";
  for (const FakeWorker* worker : workers) options.addresses.push_back(worker->address());
  if (ready != nullptr) {
    options.on_first_ready = [=] {
      absl::MutexLock lock(mutex);
      *ready = true;
    };
  }
  return options;
}

class FleetTest : public testing::Test {
 protected:
  void Start(const std::vector<FakeWorker*>& workers, uint32_t vocab = 0) {
    FleetOptions options = Options(workers, &mutex_, &ready_);
    options.tokenizer_vocab = vocab;
    fleet_ = std::make_unique<Fleet>(options);
    fleet_->Start();
  }
  void AwaitReady() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&ready_));
  }
  static std::vector<SequenceSpec> Specs(int count, int max_tokens, size_t prompt_tokens = 5) {
    SequenceSpec spec;
    for (size_t i = 0; i < prompt_tokens; ++i) spec.prompt.push_back(static_cast<int32_t>(20 + i));
    spec.sampling.set_top_p(1);
    spec.sampling.set_repetition_penalty(1);
    spec.max_tokens = max_tokens;
    std::vector<SequenceSpec> specs(static_cast<size_t>(count), spec);
    for (size_t i = 0; i < specs.size(); ++i) specs[i].sampling.set_seed(i);
    return specs;
  }
  static std::vector<int32_t> Expected(uint64_t seed, uint32_t prompt_tokens, int count) {
    std::vector<int32_t> tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(DefaultToken(seed, prompt_tokens + static_cast<uint32_t>(i)));
    return tokens;
  }

  absl::Mutex mutex_;
  bool ready_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<Fleet> fleet_;
};

TEST_F(FleetTest, DeliversEverySequencesTokensInOrder) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  auto sink = std::make_shared<Collector>();
  ASSERT_TRUE(fleet_->Submit(Specs(4, 100), sink).ok());
  sink->AwaitFinished(4);
  for (int choice = 0; choice < 4; ++choice)
    EXPECT_EQ(sink->tokens(choice), Expected(static_cast<uint64_t>(choice), 5, 100));
  EXPECT_EQ(fleet_->counts().running, 0);
}

TEST_F(FleetTest, ContinuesTokenExactWhenTheStreamBreaks) {
  FakeWorker worker("w");
  worker.SetSteps(7);
  Start({&worker});
  AwaitReady();
  auto sink = std::make_shared<Collector>();
  ASSERT_TRUE(fleet_->Submit(Specs(2, 60), sink).ok());
  worker.AwaitStepsUsed();
  worker.Break();
  worker.SetSteps(FakeWorker::kFree);
  sink->AwaitFinished(2);
  EXPECT_TRUE(sink->status().ok());
  for (int choice = 0; choice < 2; ++choice)
    EXPECT_EQ(sink->tokens(choice), Expected(static_cast<uint64_t>(choice), 5, 60));
  EXPECT_GE(worker.num_hellos(), 2);
}

TEST_F(FleetTest, MovesSequencesToAnotherWorker) {
  FakeWorker first("first"), second("second");
  first.SetSteps(3);
  second.SetSteps(3);
  Start({&first, &second});
  AwaitWorkers(*fleet_, [](const auto& workers) {
    return workers[0].state() == v1::WorkerStatus::STATE_READY && workers[1].state() == v1::WorkerStatus::STATE_READY;
  });
  auto sink = std::make_shared<Collector>();
  ASSERT_TRUE(fleet_->Submit(Specs(6, 40), sink).ok());
  // Equal prompts go where the first one went.
  AwaitWorkers(*fleet_, [&](const auto&) { return first.admits().size() + second.admits().size() == 6; });
  FakeWorker& loser = first.admits().empty() ? second : first;
  FakeWorker& winner = first.admits().empty() ? first : second;
  ASSERT_TRUE(winner.admits().empty());
  loser.AwaitStepsUsed();
  loser.Stop();
  winner.SetSteps(FakeWorker::kFree);
  sink->AwaitFinished(6);
  EXPECT_TRUE(sink->status().ok()) << sink->status();
  for (int choice = 0; choice < 6; ++choice)
    EXPECT_EQ(sink->tokens(choice), Expected(static_cast<uint64_t>(choice), 5, 40));
}

TEST_F(FleetTest, CancelFreesWhatASequenceHeld) {
  FakeWorker worker("w");
  worker.SetSteps(2);
  Start({&worker});
  AwaitReady();
  auto sink = std::make_shared<Collector>();
  const auto ids = fleet_->Submit(Specs(1, 400), sink);
  ASSERT_TRUE(ids.ok());
  worker.AwaitStepsUsed();
  const auto outcome = fleet_->Cancel(ids->front());
  ASSERT_TRUE(outcome.has_value());
  EXPECT_EQ(outcome->worker_id, "w");
  EXPECT_FALSE(fleet_->Cancel(ids->front()).has_value());
  EXPECT_EQ(fleet_->counts().running, 0);
  const auto workers = AwaitWorkers(
      *fleet_, [](const auto& list) { return list[0].used_slots() == 0 && list[0].quarantined_blocks() == 0; });
  EXPECT_EQ(workers[0].used_blocks(), 0u);
}

TEST_F(FleetTest, RefusesAWorkerOfAnotherVocabularyAndSaysWhy) {
  FakeWorker worker("w");
  Start({&worker}, 338);
  const auto workers =
      AwaitWorkers(*fleet_, [](const auto& list) { return list[0].state() == v1::WorkerStatus::STATE_LOST; });
  EXPECT_THAT(workers[0].last_error(),
              HasSubstr("ready.model.vocab_size is 337; this router's tokenizer needs at least 338"));
  EXPECT_EQ(fleet_->num_ready_workers(), 0u);
}

TEST_F(FleetTest, DropsAWorkerWhoseReportBreaksTheContract) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  worker.SendJunk();
  AwaitWorkers(*fleet_, [&](const auto& list) {
    return worker.num_hellos() >= 2 && list[0].state() == v1::WorkerStatus::STATE_READY;
  });
}

TEST_F(FleetTest, EndsAQueuedSequenceAtItsDeadline) {
  FakeWorker worker("w");
  worker.SetSteps(0);
  Start({&worker});
  AwaitReady();
  auto sink = std::make_shared<Collector>();
  std::vector<SequenceSpec> specs = Specs(1, 10);
  specs[0].deadline = 1;
  ASSERT_TRUE(fleet_->Submit(specs, sink).ok());
  sink->AwaitFinished(1);
  EXPECT_EQ(sink->status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(FleetTest, GivesADrainingWorkerNothingNewAndRemembersAcrossStreams) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  EXPECT_EQ(fleet_->DrainWorker("other", 0).code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(fleet_->DrainWorker("w", 0).ok());
  worker.Break();
  AwaitWorkers(*fleet_, [&](const auto& list) {
    return worker.num_hellos() >= 2 && list[0].state() == v1::WorkerStatus::STATE_DRAINING;
  });
  auto sink = std::make_shared<Collector>();
  const auto ids = fleet_->Submit(Specs(1, 10), sink);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(fleet_->counts().queued, 1);
  EXPECT_TRUE(worker.admits().empty());
}

TEST_F(FleetTest, MovesWhatDoesNotEndWithinTheBudgetOfADrain) {
  FakeWorker leaving("leaving"), other("other");
  leaving.SetSteps(3);
  other.SetSteps(0);
  Start({&leaving, &other});
  AwaitWorkers(*fleet_, [](const auto& list) {
    return list[0].state() == v1::WorkerStatus::STATE_READY && list[1].state() == v1::WorkerStatus::STATE_READY;
  });
  ASSERT_TRUE(fleet_->DrainWorker("other", 3'600'000'000).ok());
  auto sink = std::make_shared<Collector>();
  ASSERT_TRUE(fleet_->Submit(Specs(2, 40), sink).ok());
  leaving.AwaitStepsUsed();
  EXPECT_EQ(fleet_->counts().running, 2);
  ASSERT_TRUE(fleet_->DrainWorker("leaving", 0).ok());
  AwaitWorkers(*fleet_, [&](const auto& list) { return list[0].used_slots() == 0; });
  EXPECT_EQ(fleet_->counts().queued, 2) << "nobody is left who may take them";
  EXPECT_EQ(fleet_->workers()[0].faults(), 0u);
}

TEST_F(FleetTest, AWorkerThatSaysGoodbyeIsEmptiedAndIsNoFault) {
  FakeWorker leaving("leaving");
  leaving.SetSteps(3);
  Start({&leaving});
  AwaitReady();
  auto sink = std::make_shared<Collector>();
  ASSERT_TRUE(fleet_->Submit(Specs(2, 40), sink).ok());
  leaving.AwaitStepsUsed();
  leaving.SayGoodbye(0);
  AwaitWorkers(*fleet_, [](const auto& list) {
    return list[0].state() == v1::WorkerStatus::STATE_DRAINING && list[0].used_slots() == 0;
  });
  EXPECT_EQ(fleet_->counts().queued, 2);
  leaving.Break();
  AwaitWorkers(*fleet_, [&](const auto& list) {
    return leaving.num_hellos() == 2 && list[0].state() == v1::WorkerStatus::STATE_DRAINING;
  });
  EXPECT_EQ(fleet_->counts().queued, 2) << "it is the same instance";
  leaving.ready().set_instance_id("another");
  leaving.Break();
  AwaitWorkers(*fleet_, [](const auto& list) { return list[0].state() == v1::WorkerStatus::STATE_READY; });
  leaving.SetSteps(FakeWorker::kFree);
  sink->AwaitFinished(2);
  EXPECT_TRUE(sink->status().ok()) << sink->status();
  for (int choice = 0; choice < 2; ++choice)
    EXPECT_EQ(sink->tokens(choice), Expected(static_cast<uint64_t>(choice), 5, 40));
  EXPECT_EQ(fleet_->workers()[0].faults(), 1u) << "the second stream broke without a goodbye";
}

TEST_F(FleetTest, AWorkerThatKeepsDyingRests) {
  FakeWorker worker("w");
  Start({&worker});
  for (int life = 1; life <= 3; ++life) {
    AwaitWorkers(*fleet_, [&](const auto& list) {
      return worker.num_hellos() >= life && list[0].state() == v1::WorkerStatus::STATE_READY;
    });
    worker.Break();
    AwaitWorkers(*fleet_, [&](const auto& list) { return list[0].faults() == static_cast<uint32_t>(life); });
  }
  const auto workers = AwaitWorkers(*fleet_, [](const auto& list) { return list[0].retry_in_us() > 0; });
  EXPECT_GT(workers[0].retry_in_us(), 300'000u) << "at most 200 ms would follow three attempts";
}

TEST_F(FleetTest, RefusesOneWorkerBehindTwoAddresses) {
  FakeWorker first("same"), second("same");
  Start({&first, &second});
  const auto workers = AwaitWorkers(
      *fleet_, [](const auto& list) { return !list[0].last_error().empty() || !list[1].last_error().empty(); });
  const size_t refused = workers[0].last_error().empty() ? 1 : 0;
  EXPECT_THAT(workers[refused].last_error(), HasSubstr("instance instance, is connected already, at 127.0.0.1:"));
  EXPECT_EQ(fleet_->num_ready_workers(), 1u);
}

TEST_F(FleetTest, FollowsTheAddressesBehindAName) {
  FakeWorker first("first"), second("second");
  absl::Mutex mutex;
  std::vector<std::string> behind = {first.address()};
  FleetOptions options = Options({});
  options.services = {{"workers", 1}};
  options.resolve_period = absl::Milliseconds(1);
  options.lookup = [&](const Address&) -> absl::StatusOr<std::vector<std::string>> {
    absl::MutexLock lock(&mutex);
    return behind;
  };
  const auto change = [&](std::vector<std::string> now) {
    absl::MutexLock lock(&mutex);
    behind = std::move(now);
  };
  fleet_ = std::make_unique<Fleet>(options);
  fleet_->Start();
  const auto ready = [](const v1::WorkerStatus& worker) { return worker.state() == v1::WorkerStatus::STATE_READY; };
  AwaitWorkers(*fleet_, [&](const auto& list) { return list.size() == 1 && ready(list[0]); });
  change({first.address(), second.address()});
  AwaitWorkers(*fleet_, [&](const auto& list) { return list.size() == 2 && ready(list[0]) && ready(list[1]); });

  // The first one's address is gone; its stream goes on until it ends.
  first.SetSteps(3);
  second.SetSteps(0);
  auto sink = std::make_shared<Collector>();
  ASSERT_TRUE(fleet_->DrainWorker("second", 3'600'000'000).ok());
  ASSERT_TRUE(fleet_->Submit(Specs(1, 40), sink).ok());
  first.AwaitStepsUsed();
  change({second.address()});
  first.SetSteps(FakeWorker::kFree);
  sink->AwaitFinished(1);
  EXPECT_EQ(sink->tokens(0), Expected(0, 5, 40));
  first.Break();
  const auto left = AwaitWorkers(*fleet_, [](const auto& list) { return list.size() == 1; });
  EXPECT_EQ(left[0].worker_id(), "second");
  EXPECT_EQ(first.num_hellos(), 1);
  fleet_.reset();  // before what the lookup uses
}

TEST_F(FleetTest, StopsWhileWorkRuns) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  ASSERT_TRUE(fleet_->Submit(Specs(8, 500), std::make_shared<Collector>()).ok());
  fleet_->Stop();
  EXPECT_EQ(fleet_->Submit(Specs(1, 5), std::make_shared<Collector>()).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace millrace
