#include "router/schedule/scheduler.h"

#include <cmath>
#include <functional>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/schedule/quarantine.h"

namespace millrace {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using worker::v1::Edit;
using worker::v1::StepReport;

worker::v1::Ready Ready(uint32_t blocks = 16, uint32_t slots = 4) {
  worker::v1::Ready ready;
  ready.mutable_model()->set_vocab_size(100);
  ready.mutable_model()->set_max_context(60);
  ready.set_num_blocks(blocks);
  ready.set_block_tokens(4);
  ready.set_num_slots(slots);
  ready.set_step_target_us(45'000);
  ready.mutable_step_cost()->set_prefill_token_us(1000);
  ready.add_drafters()->set_method(worker::v1::DRAFT_METHOD_LOOKUP);
  ready.mutable_drafters(0)->set_max_length(8);
  return ready;
}

std::vector<int32_t> Count(int32_t first, int32_t n) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < n; ++i) tokens.push_back(first + i);
  return tokens;
}

SequenceSpec Spec(std::vector<int32_t> prompt, int32_t max_tokens = 8) {
  SequenceSpec spec;
  spec.prompt = std::move(prompt);
  spec.max_tokens = max_tokens;
  spec.sampling.set_repetition_penalty(1);
  return spec;
}

class SchedulerTest : public testing::Test {
 protected:
  explicit SchedulerTest(bool speculation = false) : scheduler_(Options(speculation)) {}
  static SchedulerOptions Options(bool speculation = false) {
    SchedulerOptions options;
    options.lease_tokens_ahead = 4;
    options.speculation = speculation;
    return options;
  }
  WorkerId Join(const worker::v1::Ready& ready = Ready()) { return *scheduler_.AddWorker(ready, 1); }
  SequenceId Submit(SequenceSpec spec) { return scheduler_.Submit({std::move(spec)}, 1)->front(); }
  void Submit(SequenceSpec spec, WorkerId worker) {
    Submit(std::move(spec));
    Take(worker, 1);
  }
  // Takes the worker's edit, with so many admissions, and lets it say that it has.
  void Take(WorkerId worker, int admissions) {
    last_ = worker;
    const Edit edit = scheduler_.TakeEdit(worker);
    EXPECT_EQ(edit.admit_size(), admissions);
    if (edit.admit_size() > 0) slot_ = edit.admit(edit.admit_size() - 1).slot();
    edit_ = edit.edit_id();
    if (acknowledges_) Apply(worker, Heartbeat(edit_));
  }
  // The latest worker is lost and another one takes in what it had; the new one.
  WorkerId Die(Loss loss, int admissions = 1, uint32_t slots = 4) {
    const WorkerId dead = last_;
    const WorkerId heir = Join(Ready(64, slots));
    scheduler_.RemoveWorker(dead, 3, loss);
    if (scheduler_.counts().running > 0) Take(heir, admissions);
    last_ = heir;
    return heir;
  }
  // A report of one row, all tokens but the last of which were guessed, or of one progress.
  StepReport Row(uint64_t applied, uint32_t slot, std::vector<int32_t> tokens,
                 worker::v1::FinishReason reason = worker::v1::FINISH_REASON_UNSPECIFIED) {
    StepReport report = Heartbeat(applied);
    auto* row = report.add_rows();
    row->set_slot(slot);
    row->mutable_token_ids()->Add(tokens.begin(), tokens.end());
    row->set_num_drafted(static_cast<uint32_t>(std::max<size_t>(tokens.size(), 1)) - 1);
    row->set_finish_reason(reason);
    return report;
  }
  StepReport Guessed(uint64_t applied, uint32_t slot, std::vector<int32_t> tokens, uint32_t num_drafted) {
    StepReport report = Row(applied, slot, std::move(tokens));
    report.mutable_rows(0)->set_num_drafted(num_drafted);
    return report;
  }
  StepReport Progress(uint64_t applied, uint32_t slot, uint32_t computed) {
    StepReport report = Heartbeat(applied);
    report.add_prefill()->set_slot(slot);
    report.mutable_prefill(0)->set_num_computed_tokens(computed);
    return report;
  }
  StepReport Heartbeat(uint64_t applied) {
    StepReport report;
    report.set_step(++step_);
    report.set_applied_edit(applied);
    return report;
  }
  void Apply(WorkerId worker, const StepReport& report) {
    const absl::Status status = scheduler_.Apply(worker, report, 2);
    ASSERT_TRUE(status.ok()) << status;
  }

  Scheduler scheduler_;
  uint64_t step_ = 0;
  // Of Take.
  WorkerId last_ = 0;
  uint32_t slot_ = 0;
  uint64_t edit_ = 0;
  bool acknowledges_ = true;
};

// Blocks of 4, a lease of one block ahead, 16 blocks. A: tokens 0 … 9, of which 8 fill blocks 0 and 1.
//   event                              edit
//   submit A (10 + 8 tokens)           1: admit slot 0, cached 0, blocks 0 1 2 | 3
//   A gets tokens 50, 51, 52 (13)      2: extend slot 0 by block 4, which its 18 tokens need at most
//   A ends; submit B = A's first 9     3: admit slot 0, cached 8, token 8, blocks 0 1 5 | 6: nameless blocks first
TEST_F(SchedulerTest, AdmitsExtendsAndFindsThePrefixAgain) {
  const WorkerId worker = Join();
  Submit(Spec(Count(0, 10)));
  ASSERT_THAT(scheduler_.PendingWorkers(), ElementsAre(worker));
  Edit edit = scheduler_.TakeEdit(worker);
  EXPECT_EQ(edit.edit_id(), 1u);
  ASSERT_EQ(edit.admit_size(), 1);
  EXPECT_EQ(edit.admit(0).slot(), 0u);
  EXPECT_EQ(edit.admit(0).num_cached_tokens(), 0u);
  EXPECT_EQ(edit.admit(0).token_ids_size(), 10);
  EXPECT_EQ(edit.admit(0).max_length(), 18u);
  EXPECT_THAT(edit.admit(0).block_table(), ElementsAre(0, 1, 2, 3));
  EXPECT_TRUE(scheduler_.PendingWorkers().empty());

  Apply(worker, Row(1, 0, {50, 51, 52}));
  edit = scheduler_.TakeEdit(worker);
  EXPECT_EQ(edit.edit_id(), 2u);
  ASSERT_EQ(edit.extend_size(), 1);
  EXPECT_THAT(edit.extend(0).block_table(), ElementsAre(4));

  Apply(worker, Row(2, 0, {53}, worker::v1::FINISH_REASON_STOP_TOKEN));
  EXPECT_EQ(scheduler_.worker_counts(worker).used_blocks, 0u);
  EXPECT_EQ(scheduler_.worker_counts(worker).cached_blocks, 3u);
  const SequenceId second = Submit(Spec(Count(0, 9)));
  edit = scheduler_.TakeEdit(worker);
  ASSERT_EQ(edit.admit_size(), 1);
  EXPECT_EQ(edit.admit(0).num_cached_tokens(), 8u);
  EXPECT_THAT(edit.admit(0).token_ids(), ElementsAre(8));
  EXPECT_THAT(edit.admit(0).block_table(0), 0u);
  EXPECT_THAT(edit.admit(0).block_table(1), 1u);
  EXPECT_FALSE(edit.admit(0).has_filling_slot());
  EXPECT_EQ(scheduler_.Report(second).cached_tokens, 8);
}

// 8 tokens fill two blocks, but one token must be computed: only the first is used.
TEST_F(SchedulerTest, LeavesATokenToComputeWhenTheWholePromptIsCached) {
  const WorkerId worker = Join();
  Submit(Spec(Count(0, 8)));
  scheduler_.TakeEdit(worker);
  Apply(worker, Row(1, 0, {50}, worker::v1::FINISH_REASON_STOP_TOKEN));
  Submit(Spec(Count(0, 8)));
  EXPECT_EQ(scheduler_.TakeEdit(worker).admit(0).num_cached_tokens(), 4u);
}

TEST_F(SchedulerTest, ChoicesShareThePromptWhileItIsFilledOnOneWorker) {
  const WorkerId first = Join(), second = Join();
  ASSERT_TRUE(scheduler_.Submit({Spec(Count(0, 10)), Spec(Count(0, 10)), Spec(Count(0, 10))}, 1).ok());
  ASSERT_THAT(scheduler_.PendingWorkers(), ElementsAre(first));
  const Edit edit = scheduler_.TakeEdit(first);
  ASSERT_EQ(edit.admit_size(), 3);
  for (int i = 1; i < 3; ++i) {
    EXPECT_EQ(edit.admit(i).num_cached_tokens(), 8u);
    EXPECT_EQ(edit.admit(i).filling_slot(), edit.admit(0).slot());
    EXPECT_EQ(edit.admit(i).block_table(1), edit.admit(0).block_table(1));
  }
  EXPECT_EQ(scheduler_.worker_counts(second).used_blocks, 0u);
}

TEST_F(SchedulerTest, ReleasesThoseWhoWaitForACancelledFiller) {
  const WorkerId worker = Join();
  const auto ids = *scheduler_.Submit({Spec(Count(0, 10)), Spec(Count(0, 10))}, 1);
  scheduler_.TakeEdit(worker);
  scheduler_.Cancel(ids[0], 2);
  const Edit edit = scheduler_.TakeEdit(worker);
  EXPECT_THAT(edit.release(), testing::UnorderedElementsAre(0, 1));
  ASSERT_EQ(edit.admit_size(), 1);  // the second again, now alone
  EXPECT_EQ(edit.admit(0).num_cached_tokens(), 0u);
  EXPECT_EQ(scheduler_.Report(ids[1]).preemptions, 0);
}

TEST_F(SchedulerTest, AFillerThatIsCancelledAfterFillingStopsNobody) {
  const WorkerId worker = Join();
  const auto ids = *scheduler_.Submit({Spec(Count(0, 10)), Spec(Count(0, 10))}, 1);
  scheduler_.TakeEdit(worker);
  Apply(worker, Progress(1, 0, 8));
  scheduler_.Cancel(ids[0], 2);
  EXPECT_THAT(scheduler_.TakeEdit(worker).release(), ElementsAre(0));
}

TEST_F(SchedulerTest, QuarantinesBlocksUntilTheReleaseIsApplied) {
  const WorkerId worker = Join();
  const SequenceId id = Submit(Spec(Count(0, 10)));
  scheduler_.TakeEdit(worker);
  scheduler_.Cancel(id, 2);
  EXPECT_EQ(scheduler_.worker_counts(worker).quarantined_blocks, 4u);
  scheduler_.TakeEdit(worker);
  Apply(worker, Row(1, 0, {50}));  // an older report about the released slot
  EXPECT_EQ(scheduler_.worker_counts(worker).quarantined_blocks, 4u);
  Apply(worker, Heartbeat(2));
  EXPECT_EQ(scheduler_.worker_counts(worker).free_blocks, 16u);
  EXPECT_TRUE(scheduler_.TakeEvents().empty());
}

TEST_F(SchedulerTest, AnAdmissionThatWasNotTakenLeavesNoTrace) {
  const WorkerId worker = Join();
  scheduler_.Cancel(Submit(Spec(Count(0, 10))), 2);
  EXPECT_TRUE(scheduler_.PendingWorkers().empty());
  EXPECT_EQ(scheduler_.worker_counts(worker).free_blocks, 16u);
}

// Room for two: 20 tokens yield to 12, but nothing yields to 30, and both are told when to come again.
TEST(Scheduler, AFullQueueShedsTheHeaviest) {
  SchedulerOptions options;
  options.max_queued_sequences = 2;
  Scheduler scheduler(options);
  scheduler.RemoveWorker(*scheduler.AddWorker(Ready(), 1), 1);
  const auto submit = [&](int32_t n) { return scheduler.Submit({Spec(Count(0, n))}, 2); };
  ASSERT_TRUE(submit(10).ok());
  const SequenceId heavy = submit(20)->front();
  ASSERT_TRUE(submit(12).ok());
  const std::vector<SequenceEvent> events = scheduler.TakeEvents();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].sequence, heavy);
  EXPECT_EQ(events[0].status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(events[0].status.GetPayload(kRetryAfterMs).has_value());
  const absl::Status refused = submit(30).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(refused.GetPayload(kRetryAfterMs).has_value());
  EXPECT_EQ(scheduler.counts().queued, 2);
  EXPECT_EQ(scheduler.counts().shed, 1u);
}

// 8 blocks of 4. Two prompts of 8 tokens take 3 blocks each (one leased), then 4; when the older needs a fifth, the
// newer yields.
TEST_F(SchedulerTest, PreemptsTheNewestWhenBlocksRunOut) {
  const WorkerId worker = Join(Ready(/*blocks=*/8));
  const SequenceId older = Submit(Spec(Count(0, 8), 16)), newer = Submit(Spec(Count(20, 8), 16));
  scheduler_.TakeEdit(worker);
  StepReport report = Heartbeat(1);
  for (const uint32_t slot : {0u, 1u}) {
    auto* row = report.add_rows();
    row->set_num_drafted(4);
    row->set_slot(slot);
    for (const int32_t token : {50, 51, 52, 53, 54})
      row->add_token_ids(token);  // 13 tokens: four blocks each, all there are
  }
  Apply(worker, report);
  scheduler_.TakeEdit(worker);
  Apply(worker, Row(2, 0, {55, 56, 57, 58}));  // 17
  const Edit edit = scheduler_.TakeEdit(worker);
  EXPECT_THAT(edit.release(), ElementsAre(1));
  EXPECT_EQ(scheduler_.Report(newer).preemptions, 1);
  EXPECT_EQ(scheduler_.Report(older).preemptions, 0);
  Apply(worker, Heartbeat(3));
  EXPECT_THAT(scheduler_.TakeEdit(worker).extend(0).slot(), 0u);
  EXPECT_EQ(scheduler_.counts().queued, 1);
}

TEST_F(SchedulerTest, MovesSequencesOfALostWorkerWithTheirTokens) {
  const WorkerId first = Join();
  SequenceSpec spec = Spec(Count(0, 6));
  spec.sampling.set_prompt_logprobs(0);
  const SequenceId id = Submit(spec);
  EXPECT_TRUE(scheduler_.TakeEdit(first).admit(0).sampling().has_prompt_logprobs());
  StepReport report = Row(1, 0, {50, 51});
  report.add_prefill()->set_num_computed_tokens(6);
  for (int i = 1; i < 6; ++i) report.mutable_prefill(0)->add_prompt_logprobs()->set_token_id(i);
  Apply(first, report);
  EXPECT_EQ(scheduler_.TakeEvents()[0].prompt_logprobs.size(), 5u);
  scheduler_.RemoveWorker(first, 3);
  const WorkerId second = Join();
  const Edit edit = scheduler_.TakeEdit(second);
  ASSERT_EQ(edit.admit_size(), 1);
  EXPECT_THAT(edit.admit(0).token_ids(), ElementsAre(0, 1, 2, 3, 4, 5, 50, 51));
  EXPECT_EQ(edit.admit(0).num_prompt_tokens(), 6u);
  EXPECT_FALSE(edit.admit(0).sampling().has_prompt_logprobs());
  EXPECT_EQ(scheduler_.Report(id).moves, 1);
}

TEST_F(SchedulerTest, RefusesWhatTwoWorkersDiedOfAndItsContentForAWhile) {
  const SequenceSpec spec = Spec(Count(0, 6));
  Submit(spec, Join());
  const WorkerId first = Die(Loss::kFault);
  EXPECT_TRUE(scheduler_.TakeEvents().empty());
  Die(Loss::kFault);
  const auto events = scheduler_.TakeEvents();
  ASSERT_EQ(events.size(), 1u) << "of the worker after " << first;
  EXPECT_EQ(events[0].status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(events[0].status.message(), HasSubstr("it was running on 2 workers when they were lost"));

  Join();
  SequenceSpec again = spec;
  again.sampling.set_seed(77);
  again.max_tokens = 3;
  const absl::Status refused = scheduler_.Submit({again}, 1'000'000).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.message(), HasSubstr("it is refused for another 300 s"));
  SequenceSpec other_prompt = spec, other_sampling = spec, other_tenant = spec;
  other_prompt.prompt.push_back(0);
  other_sampling.sampling.set_temperature(1);
  other_tenant.cache_salt = "tenant";
  for (const SequenceSpec& other : {other_prompt, other_sampling, other_tenant}) {
    EXPECT_TRUE(scheduler_.Submit({other}, 1'000'000).ok());
  }
  EXPECT_TRUE(scheduler_.Submit({spec}, QuarantinedContents::kQuarantine + 3).ok());
}

TEST_F(SchedulerTest, SuspectsNobodyOfAWorkerThatLeft) {
  Submit(Spec(Count(0, 6)), Join());
  for (int i = 0; i < 5; ++i) Die(Loss::kLeft);
  Die(Loss::kFault);
  EXPECT_TRUE(scheduler_.TakeEvents().empty());
  EXPECT_EQ(scheduler_.counts().running, 1);
}

TEST_F(SchedulerTest, SuspectsNobodyWhomTheWorkerHadNotTakenIn) {
  Submit(Spec(Count(0, 6)), Join());
  acknowledges_ = false;
  for (int i = 0; i < 5; ++i) Die(Loss::kFault);
  EXPECT_TRUE(scheduler_.TakeEvents().empty());
  EXPECT_EQ(scheduler_.counts().running, 1);
}

TEST_F(SchedulerTest, ClearsASuspectThatGetsFurther) {
  const WorkerId worker = Join(Ready(64));
  SequenceSpec spec = Spec(Count(0, 6), 40);
  Submit(spec, worker);
  for (int i = 0; i < 5; ++i) {
    const WorkerId here = Die(Loss::kFault);
    Apply(here, Row(1, 0, {50, 51, 52, 53, 54}));
    scheduler_.TakeEdit(here);
    for (const SequenceEvent& event : scheduler_.TakeEvents()) EXPECT_FALSE(event.finished) << event.status;
  }
}

// Six sequences that are lost twice without a token in between are too many to be guilty. One of them, and whoever
// shares its worker then, would be; so each is tried alone, and the worker that dies of it proves it.
TEST_F(SchedulerTest, TriesManySuspectsOneAtATime) {
  WorkerId worker = Join(Ready(64, 8));
  std::vector<SequenceId> ids;
  for (int i = 0; i < 6; ++i) ids.push_back(Submit(Spec(Count(10 * i, 6))));
  Take(worker, 6);
  worker = Die(Loss::kFault, 6, 8);
  Die(Loss::kFault, 1, 8);
  EXPECT_EQ(scheduler_.counts().running, 1);
  EXPECT_EQ(scheduler_.counts().queued, 5);
  worker = last_;
  std::vector<SequenceId> innocent;
  for (int i = 0; i < 3; ++i) {  // these go on, and the next is tried
    Apply(worker, Row(edit_, slot_, {50, 51, 52, 53, 54}));
    for (const SequenceEvent& event : scheduler_.TakeEvents()) innocent.push_back(event.sequence);
    Take(worker, 1);
  }
  EXPECT_EQ(scheduler_.counts().running, 4);
  scheduler_.RemoveWorker(worker, 3);
  const auto events = scheduler_.TakeEvents();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(std::count(innocent.begin(), innocent.end(), events[0].sequence), 0);
  EXPECT_EQ(scheduler_.counts().queued, 5);
}

TEST_F(SchedulerTest, EmptiesADrainedWorkerWithItsTokens) {
  const WorkerId first = Join();
  Submit(Spec(Count(0, 6)), first);
  Apply(first, Row(1, 0, {50, 51}));
  const WorkerId second = Join();
  scheduler_.DrainWorker(first);
  scheduler_.EmptyWorker(first, 3);
  EXPECT_THAT(scheduler_.TakeEdit(first).release(), ElementsAre(0));
  const Edit edit = scheduler_.TakeEdit(second);
  ASSERT_EQ(edit.admit_size(), 1);
  EXPECT_THAT(edit.admit(0).token_ids(), ElementsAre(0, 1, 2, 3, 4, 5, 50, 51));
  Apply(first, Row(1, 0, {52}));  // of a step that had begun: nobody wants it
  EXPECT_EQ(scheduler_.TakeEvents().size(), 1u);
  EXPECT_EQ(scheduler_.worker_counts(first).used_slots, 0u);
}

// 64 wait because the only worker is full. Each prompt takes 6 ms, so that 41 would fit into what may be sent ahead.
TEST_F(SchedulerTest, ANewcomerIsNotFlooded) {
  const WorkerId full = Join(Ready(64, 1));
  for (int i = 0; i < 65; ++i) Submit(Spec(Count(i, 6)));
  ASSERT_EQ(scheduler_.counts().queued, 64);
  const WorkerId newcomer = Join(Ready(1024, 128));
  int admitted = 0, most = 0;
  for (int round = 0; round < 64 && scheduler_.counts().queued > 0; ++round) {
    const Edit edit = scheduler_.TakeEdit(newcomer);
    if (round == 0) {
      EXPECT_EQ(edit.admit_size(), 1);
    }
    most = std::max(most, edit.admit_size());
    StepReport report = Heartbeat(edit.edit_id());
    for (const auto& admit : edit.admit()) {
      ++admitted;
      auto* row = report.add_rows();
      row->set_slot(admit.slot());
      row->add_token_ids(50);
    }
    Apply(newcomer, report);
  }
  EXPECT_EQ(scheduler_.counts().queued, 0) << "and it does not starve either: " << admitted << " of 64 in 64 steps";
  EXPECT_GT(most, 8) << "its share grows";
  EXPECT_EQ(scheduler_.worker_counts(full).used_slots, 1u);
}

TEST_F(SchedulerTest, KnowsWhetherAWorkerHasSomethingToCompute) {
  const WorkerId worker = Join();
  EXPECT_FALSE(scheduler_.WorkLeft(worker).has_value());
  Submit(Spec(Count(0, 10)), worker);
  EXPECT_DOUBLE_EQ(*scheduler_.WorkLeft(worker), 0.01);
  Apply(worker, Row(1, 0, {50}));
  EXPECT_DOUBLE_EQ(*scheduler_.WorkLeft(worker), 0);
  Apply(worker, Row(1, 0, {51}, worker::v1::FINISH_REASON_STOP_TOKEN));
  EXPECT_FALSE(scheduler_.WorkLeft(worker).has_value());
}

// 6 tokens in two blocks and one ahead: room for 12, so 13 can be reached.
TEST_F(SchedulerTest, APausedSequenceKeepsItsBlocksAndGetsNoMoreUntilItIsResumed) {
  const WorkerId worker = Join();
  const SequenceId id = Submit(Spec(Count(0, 6), 30));
  EXPECT_EQ(scheduler_.TakeEdit(worker).admit(0).block_table_size(), 3);
  scheduler_.SetPaused(id, true, 1);
  Apply(worker, Row(1, 0, {50, 51, 52, 53, 54, 55, 56}));
  StepReport stalled = Heartbeat(1);
  stalled.add_stalled_slots(0);
  Apply(worker, stalled);
  EXPECT_TRUE(scheduler_.PendingWorkers().empty());
  EXPECT_EQ(scheduler_.worker_counts(worker).used_blocks, 3u);
  EXPECT_EQ(scheduler_.counts().paused, 1);
  Submit(Spec(Count(20, 6)));
  EXPECT_EQ(scheduler_.TakeEdit(worker).admit_size(), 1) << "others are admitted meanwhile";
  scheduler_.SetPaused(id, false, 2);
  scheduler_.SetPaused(id, false, 2);
  const Edit edit = scheduler_.TakeEdit(worker);
  ASSERT_EQ(edit.extend_size(), 1);
  EXPECT_EQ(edit.extend(0).slot(), 0u);
  EXPECT_EQ(edit.extend(0).block_table_size(), 2);
  EXPECT_EQ(scheduler_.counts().paused, 0);
  EXPECT_EQ(scheduler_.NextDeadline(), kNever);
}

TEST_F(SchedulerTest, APausedSequenceIsTheFirstToYieldAndThenWaitsToBeResumed) {
  const WorkerId worker = Join(Ready(/*blocks=*/8));
  const SequenceId older = Submit(Spec(Count(0, 8), 16)), newer = Submit(Spec(Count(20, 8), 16));
  scheduler_.TakeEdit(worker);
  scheduler_.SetPaused(older, true, 1);
  StepReport report = Heartbeat(1);
  for (const uint32_t slot : {0u, 1u}) {
    auto* row = report.add_rows();
    row->set_slot(slot);
    for (const int32_t token : {50, 51, 52, 53, 54}) row->add_token_ids(token);
    row->set_num_drafted(4);
  }
  Apply(worker, report);
  scheduler_.TakeEdit(worker);
  Apply(worker, Row(2, 1, {55, 56, 57, 58, 59, 60, 61, 62}));  // 21 tokens in five blocks; the other holds three
  EXPECT_THAT(scheduler_.TakeEdit(worker).release(), ElementsAre(0));
  EXPECT_EQ(scheduler_.Report(newer).preemptions, 0);
  Apply(worker, Heartbeat(3));
  EXPECT_EQ(scheduler_.TakeEdit(worker).extend(0).slot(), 1u);
  Apply(worker, Row(4, 1, {63}, worker::v1::FINISH_REASON_STOP_TOKEN));
  EXPECT_TRUE(scheduler_.PendingWorkers().empty()) << "nobody reads what it would generate";
  EXPECT_EQ(scheduler_.counts().queued, 1);
  scheduler_.SetPaused(older, false, 2);
  const Edit edit = scheduler_.TakeEdit(worker);
  ASSERT_EQ(edit.admit_size(), 1);
  EXPECT_EQ(edit.admit(0).num_cached_tokens() + static_cast<uint32_t>(edit.admit(0).token_ids_size()), 13u);
  EXPECT_EQ(edit.admit(0).num_prompt_tokens(), 8u);
  EXPECT_EQ(scheduler_.counts().queued, 0);
}

TEST_F(SchedulerTest, APauseHasAnEnd) {
  const WorkerId worker = Join();
  SequenceSpec spec = Spec(Count(0, 6));
  spec.deadline = 40'000'000;
  const SequenceId first = Submit(spec), second = Submit(spec);
  scheduler_.TakeEdit(worker);
  scheduler_.SetPaused(first, true, 5);
  scheduler_.SetPaused(second, true, 15'000'000);
  EXPECT_EQ(scheduler_.NextDeadline(), 30'000'005);
  scheduler_.Advance(30'000'005);
  const auto paused = scheduler_.TakeEvents();
  ASSERT_EQ(paused.size(), 1u);
  EXPECT_EQ(paused[0].sequence, first);
  EXPECT_EQ(paused[0].status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(scheduler_.NextDeadline(), 40'000'000);
  scheduler_.Advance(40'000'000);
  EXPECT_EQ(scheduler_.TakeEvents()[0].status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(scheduler_.NextDeadline(), kNever);
  EXPECT_EQ(scheduler_.counts().paused, 0);
}

worker::v1::CachedBlock Cached(uint32_t block, int parent, std::vector<int32_t> tokens, const char* salt = "") {
  worker::v1::CachedBlock cached;
  cached.set_block(block);
  if (parent >= 0) cached.set_parent(static_cast<uint32_t>(parent));
  cached.set_cache_salt(salt);
  cached.mutable_token_ids()->Add(tokens.begin(), tokens.end());
  return cached;
}

// Kept: 0 … 7 in blocks 9 and 3, 0 … 3 of tenant t in block 5; the last listed, deepest first, is the first to be
// reused.
TEST_F(SchedulerTest, FindsWhatAWorkerHasKeptFromAnEarlierRouter) {
  worker::v1::CachedBlocks first, second;
  *first.add_blocks() = Cached(9, -1, Count(0, 4));
  *first.add_blocks() = Cached(3, 9, Count(4, 4));
  *second.add_blocks() = Cached(5, -1, Count(0, 4), "t");
  const absl::StatusOr<WorkerId> worker = scheduler_.AddWorker(Ready(), 1, {first, second});
  ASSERT_TRUE(worker.ok()) << worker.status();
  EXPECT_EQ(scheduler_.worker_counts(*worker).cached_blocks, 3u);
  EXPECT_EQ(scheduler_.worker_counts(*worker).free_blocks, 13u);
  const SequenceId id = Submit(Spec(Count(0, 9)));
  SequenceSpec tenant = Spec(Count(0, 9));
  tenant.cache_salt = "t";
  Submit(tenant);
  tenant.cache_salt = "u";
  Submit(tenant);
  const Edit edit = scheduler_.TakeEdit(*worker);
  ASSERT_EQ(edit.admit_size(), 3);
  EXPECT_EQ(edit.admit(0).num_cached_tokens(), 8u);
  EXPECT_THAT(edit.admit(0).block_table(0), 9u);
  EXPECT_THAT(edit.admit(0).block_table(1), 3u);
  EXPECT_EQ(edit.admit(1).num_cached_tokens(), 4u);
  EXPECT_EQ(edit.admit(1).cache_salt(), "t");
  EXPECT_THAT(edit.admit(1).block_table(0), 5u);
  EXPECT_EQ(edit.admit(2).num_cached_tokens(), 0u);
  EXPECT_EQ(scheduler_.Report(id).predicted_cached_tokens, 8);
  EXPECT_EQ(scheduler_.Report(id).cached_tokens, 8);
}

TEST_F(SchedulerTest, RefusesAWorkerWhoseCacheCannotBe) {
  const auto refusal = [&](std::vector<worker::v1::CachedBlock> blocks) {
    worker::v1::CachedBlocks cached;
    for (const auto& block : blocks) *cached.add_blocks() = block;
    return std::string(scheduler_.AddWorker(Ready(), 1, {cached}).status().message());
  };
  EXPECT_EQ(refusal({Cached(16, -1, Count(0, 4))}), "cached block 16: the limit is 15");
  EXPECT_EQ(refusal({Cached(1, -1, Count(0, 3))}), "cached block 1: it holds 3 tokens; the limit is 4");
  EXPECT_EQ(refusal({Cached(1, -1, Count(97, 4))}), "cached block 1: token 100 is not within 0 … 99");
  EXPECT_EQ(refusal({Cached(1, 2, Count(0, 4))}), "cached block 1: its parent, 2, has not come before it");
  EXPECT_EQ(refusal({Cached(1, 1, Count(0, 4))}), "cached block 1: its parent, 1, has not come before it");
  EXPECT_THAT(refusal({Cached(1, -1, Count(0, 4)), Cached(1, -1, Count(4, 4))}), HasSubstr("it comes twice"));
  EXPECT_THAT(refusal({Cached(1, -1, Count(0, 4)), Cached(2, 1, Count(4, 4), "t")}), HasSubstr("cache_salt has 1"));
  const WorkerId worker = Join();
  Submit(Spec(Count(0, 9)));
  EXPECT_EQ(scheduler_.TakeEdit(worker).admit(0).num_cached_tokens(), 0u) << "nothing of the refused is left";
}

TEST_F(SchedulerTest, DeadlinesStopQueuedAndRunningSequences) {
  Join(Ready(16, /*slots=*/1));
  SequenceSpec running = Spec(Count(0, 6)), queued = Spec(Count(0, 6));
  running.deadline = 100;
  queued.deadline = 50;
  Submit(running);
  Submit(queued);
  EXPECT_EQ(scheduler_.NextDeadline(), 50);
  scheduler_.Advance(100);
  const auto events = scheduler_.TakeEvents();
  ASSERT_EQ(events.size(), 2u);
  for (const SequenceEvent& event : events) EXPECT_EQ(event.status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(scheduler_.NextDeadline(), kNever);
}

TEST_F(SchedulerTest, ADrainingWorkerGetsNothingNew) {
  const WorkerId first = Join(), second = Join();
  scheduler_.DrainWorker(first);
  Submit(Spec(Count(0, 6)));
  EXPECT_THAT(scheduler_.PendingWorkers(), ElementsAre(second));
}

TEST_F(SchedulerTest, CachedTokensTravelOnlyForPenalties) {
  const WorkerId worker = Join();
  Submit(Spec(Count(0, 9)));
  Apply(worker, Row(scheduler_.TakeEdit(worker).edit_id(), 0, {50}, worker::v1::FINISH_REASON_STOP_TOKEN));
  SequenceSpec spec = Spec(Count(0, 9));
  Submit(spec);
  spec.sampling.set_presence_penalty(0.5f);
  Submit(spec);
  const Edit edit = scheduler_.TakeEdit(worker);
  ASSERT_EQ(edit.admit_size(), 2);
  EXPECT_EQ(edit.admit(0).cached_token_ids_size(), 0);
  EXPECT_THAT(edit.admit(1).cached_token_ids(), testing::ElementsAreArray(Count(0, 8)));
}

// 1 ms a token, 0.25 s ahead: of five prompts of 200 tokens the worker is sent two (the second while 0.2 s are before
// it).
TEST_F(SchedulerTest, SendsAWorkerOnlySoMuchPrefillAhead) {
  worker::v1::Ready ready = Ready(1000, 16);
  ready.mutable_model()->set_max_context(1000);
  Join(ready);
  for (int i = 0; i < 5; ++i) {
    SequenceSpec spec = Spec(std::vector<int32_t>(200, i));
    ASSERT_TRUE(scheduler_.Submit({spec}, 10 + i).ok());
  }
  EXPECT_EQ(scheduler_.counts().running, 2);
  EXPECT_EQ(scheduler_.counts().queued, 3);
}

TEST_F(SchedulerTest, RefusesWhatCanNeverRunAndNamesTheLimit) {
  const auto refusal = [&](SequenceSpec spec) { return scheduler_.Submit({std::move(spec)}, 1).status(); };
  EXPECT_EQ(refusal(Spec({1})).code(), absl::StatusCode::kUnavailable);
  Join(Ready(/*blocks=*/10));
  EXPECT_EQ(refusal(Spec({})).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal(Spec({1}, 0)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refusal(Spec({1, 100})).message()), HasSubstr("prompt[1] = 100 is not within 0 … 99"));
  EXPECT_THAT(std::string(refusal(Spec({1, -1})).message()), HasSubstr("prompt[1] = -1 is not within 0 … 99"));
  EXPECT_THAT(std::string(refusal(Spec({1, INT32_MIN})).message()),
              HasSubstr("prompt[1] = -2147483648 is not within 0 … 99"));
  EXPECT_EQ(refusal(Spec(Count(0, 50), 11)).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(refusal(Spec(Count(0, 30), 11)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(refusal(Spec(Count(0, 30), 10)).ok());
}

TEST_F(SchedulerTest, RefusesDraftersThatCannotBe) {
  const struct {
    const char* what;
    std::function<void(worker::v1::Ready*)> breach;
    const char* error;
  } cases[] = {
      {"no method", [](auto* it) { it->mutable_drafters(0)->clear_method(); }, "method 0, which is not within 1 … 2"},
      {"an unknown one", [](auto* it) { it->mutable_drafters(0)->set_method(static_cast<worker::v1::DraftMethod>(3)); },
       "method 3"},
      {"one twice", [](auto* it) { *it->add_drafters() = it->drafters(0); }, "method 1 twice"},
      {"no length", [](auto* it) { it->mutable_drafters(0)->set_max_length(0); }, "max_length 0"},
      {"too long", [](auto* it) { it->mutable_drafters(0)->set_max_length(17); },
       "max_length 17, which is not within 1 … 16"},
      {"a negative cost", [](auto* it) { it->mutable_drafters(0)->set_row_us(-1); }, "drafters holds -1"},
      {"an endless one", [](auto* it) { it->mutable_drafters(0)->set_context_ns(INFINITY); }, "drafters holds inf"},
  };
  for (const auto& it : cases) {
    SCOPED_TRACE(it.what);
    worker::v1::Ready ready = Ready();
    it.breach(&ready);
    EXPECT_THAT(scheduler_.AddWorker(ready, 1).status().message(), HasSubstr(it.error));
  }
}

// A worker that drafts with a small model, and whose steps cost their floor however many rows they have.
class SpeculationTest : public SchedulerTest {
 protected:
  SpeculationTest() : SchedulerTest(true), worker_(Join(Drafting())) {}
  static worker::v1::Ready Drafting() {
    worker::v1::Ready ready = Ready(64);
    ready.mutable_step_cost()->set_step_us(10'000);
    ready.mutable_step_cost()->set_row_us(1);
    ready.mutable_drafters(0)->set_method(worker::v1::DRAFT_METHOD_MODEL);
    ready.mutable_drafters(0)->set_step_us(500);
    return ready;
  }
  // Of the only draft of an edit.
  static worker::v1::Draft Only(const Edit& edit) {
    return edit.draft_size() == 1 ? edit.draft(0) : worker::v1::Draft();
  }

  const WorkerId worker_;
};

// The length comes when the prefill is over, and goes in the edit that brings the next one.
TEST_F(SpeculationTest, DraftsOnlyWhileNobodyWaits) {
  Submit(Spec(Count(0, 10), 40));
  Edit edit = scheduler_.TakeEdit(worker_);
  EXPECT_EQ(edit.draft_size(), 0);
  Apply(worker_, Row(1, 0, {50}));
  edit = scheduler_.TakeEdit(worker_);
  EXPECT_EQ(Only(edit).slot(), 0u);
  EXPECT_EQ(Only(edit).method(), worker::v1::DRAFT_METHOD_MODEL);
  EXPECT_GT(Only(edit).length(), 1u);
  const uint32_t length = Only(edit).length();
  EXPECT_EQ(scheduler_.worker_counts(worker_).draft_length, length);
  Apply(worker_, Guessed(2, 0, {51, 52}, length));
  EXPECT_EQ(scheduler_.TakeEdit(worker_).draft_size(), 0) << "nothing but the lease has changed";

  Submit(Spec(Count(40, 10), 40));
  edit = scheduler_.TakeEdit(worker_);
  EXPECT_EQ(edit.admit_size(), 1);
  EXPECT_EQ(Only(edit).slot(), 0u);
  EXPECT_EQ(Only(edit).length(), 0u);
  EXPECT_EQ(Only(edit).method(), worker::v1::DRAFT_METHOD_UNSPECIFIED);
  Apply(worker_, Guessed(3, 0, {53}, length));  // of a step before that
  Apply(worker_, Row(4, 1, {54}));
  edit = scheduler_.TakeEdit(worker_);
  EXPECT_EQ(edit.draft_size(), 2);
  EXPECT_EQ(scheduler_.counts().drafts.drafts, 2u);
  EXPECT_EQ(scheduler_.counts().drafts.drafted, 2 * length);
  EXPECT_EQ(scheduler_.counts().drafts.accepted, 1u);
  EXPECT_EQ(scheduler_.counts().drafts.accepted_at[0], 1u);
  EXPECT_EQ(scheduler_.counts().drafts.accepted_at[1], 0u);
}

TEST_F(SpeculationTest, ASlotThatIsTakenAgainDraftsNothingAtFirst) {
  const SequenceId first = Submit(Spec(Count(0, 10), 40));
  scheduler_.TakeEdit(worker_);
  Apply(worker_, Row(1, 0, {50}));
  EXPECT_GT(Only(scheduler_.TakeEdit(worker_)).length(), 0u);
  scheduler_.Requeue(first, 2);
  Edit edit = scheduler_.TakeEdit(worker_);
  ASSERT_EQ(edit.admit_size(), 1);
  EXPECT_EQ(edit.draft_size(), 0);
  EXPECT_EQ(scheduler_.worker_counts(worker_).draft_length, 0);
  Apply(worker_, Row(edit.edit_id(), edit.admit(0).slot(), {51}));
  edit = scheduler_.TakeEdit(worker_);
  EXPECT_GT(Only(edit).length(), 0u);
  scheduler_.Cancel(first, 3);
  edit = scheduler_.TakeEdit(worker_);
  EXPECT_EQ(edit.release_size(), 1);
  EXPECT_EQ(edit.draft_size(), 0);
}

TEST_F(SpeculationTest, WhatWasLearntGoesWithTheSequence) {
  Submit(Spec(Count(0, 10), 40));
  scheduler_.TakeEdit(worker_);
  Apply(worker_, Row(1, 0, {50}));
  const uint32_t hopeful = Only(scheduler_.TakeEdit(worker_)).length();
  ASSERT_GT(hopeful, 3u);
  uint32_t length = hopeful;
  uint64_t edit_id = 2;
  for (int i = 0; i < 20 && length > 0; ++i) {  // every guess is wrong
    StepReport report = Guessed(edit_id, 0, {51}, length);
    report.set_step_us(10'000);
    Apply(worker_, report);
    if (scheduler_.PendingWorkers().empty()) continue;
    const Edit edit = scheduler_.TakeEdit(worker_);
    edit_id = edit.edit_id();
    if (edit.draft_size() > 0) length = Only(edit).length();
  }
  EXPECT_LT(length, hopeful - 1);
  const WorkerId other = Join(Drafting());
  scheduler_.RemoveWorker(worker_, 3, Loss::kLeft);
  Edit edit = scheduler_.TakeEdit(other);
  ASSERT_EQ(edit.admit_size(), 1);
  step_ = 0;
  Apply(other, Row(1, edit.admit(0).slot(), {52}));
  if (scheduler_.PendingWorkers().empty()) return;
  EXPECT_LT(Only(scheduler_.TakeEdit(other)).length(), hopeful - 1);
}

TEST(Scheduler, DraftsNothingWhenSpeculationIsOffOrCannotBe) {
  for (const bool off : {true, false}) {
    SchedulerOptions options;
    options.speculation = !off;
    Scheduler scheduler(options);
    worker::v1::Ready ready = Ready(64);
    ready.mutable_step_cost()->set_step_us(10'000);
    if (!off) ready.clear_drafters();
    const WorkerId worker = *scheduler.AddWorker(ready, 1);
    ASSERT_TRUE(scheduler.Submit({Spec(Count(0, 10), 40)}, 1).ok());
    scheduler.TakeEdit(worker);
    StepReport report;
    report.set_step(1);
    report.set_applied_edit(1);
    report.add_rows()->add_token_ids(5);
    ASSERT_TRUE(scheduler.Apply(worker, report, 2).ok());
    EXPECT_TRUE(scheduler.PendingWorkers().empty());
  }
}

TEST_F(SchedulerTest, RefusesAWorkerOfAnotherModel) {
  Join();
  worker::v1::Ready other = Ready();
  other.mutable_model()->set_fingerprint("other");
  EXPECT_THAT(std::string(scheduler_.AddWorker(other, 1).status().message()), HasSubstr("fingerprint"));
  EXPECT_EQ(scheduler_.AddWorker(Ready(0), 1).status().code(), absl::StatusCode::kInvalidArgument);
}

// Slot 0 runs 10 prompt tokens of at most 18 in 4 blocks; edit 1 is taken.
TEST_F(SchedulerTest, RefusesReportsThatBreakTheContract) {
  const struct {
    const char* what;
    std::function<StepReport()> report;
    const char* message;
  } cases[] = {
      {"an empty slot", [&] { return Row(1, 1, {5}); }, "slot 1 is empty"},
      {"no such slot", [&] { return Row(1, 4, {5}); }, "slot 4 of 4"},
      {"before its admission", [&] { return Row(0, 0, {5}); }, "slot 0 is empty as of edit 0"},
      {"a token past the vocabulary", [&] { return Row(1, 0, {100}); }, "token 100, which is not within 0 … 99"},
      {"a negative token", [&] { return Row(1, 0, {-1}); }, "token -1"},
      {"beyond the lease", [&] { return Row(1, 0, Count(0, 8)); }, "reached 18 tokens; its limit is 17"},
      {"an edit from the future", [&] { return Heartbeat(2); }, "applied_edit 2 is not within 0 … 1"},
      {"more than there is", [&] { return Progress(1, 0, 11); }, "computed 11 tokens"},
      {"a length that is not reached", [&] { return Row(1, 0, {5}, worker::v1::FINISH_REASON_LENGTH); }, "limit is 18"},
      {"nothing", [&] { return Row(1, 0, {}); }, "without a token"},
      {"more guesses than it can make", [&] { return Guessed(1, 0, {5}, 9); },
       "drafted 9 tokens; its worker drafts at most 8"},
      {"tokens that nobody guessed",
       [&] {
         return Guessed(1, 0, {5, 6, 7}, 1);
       },
       "has 3 tokens after 1 drafted"},
  };
  for (const auto& breach : cases) {
    const WorkerId worker = Join();
    const SequenceId id = Submit(Spec(Count(0, 10)));
    scheduler_.TakeEdit(worker);
    const absl::Status status = scheduler_.Apply(worker, breach.report(), 2);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << breach.what;
    EXPECT_THAT(std::string(status.message()), HasSubstr(breach.message)) << breach.what;
    scheduler_.Cancel(id, 3);
    scheduler_.RemoveWorker(worker, 3);
    scheduler_.TakeEvents();
  }
  const WorkerId worker = Join();
  Submit(Spec(Count(0, 10)));
  scheduler_.TakeEdit(worker);
  Apply(worker, Progress(1, 0, 8));
  EXPECT_FALSE(scheduler_.Apply(worker, Progress(1, 0, 7), 2).ok());
}

}  // namespace
}  // namespace millrace
