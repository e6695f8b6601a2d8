#include "worker/engine/engine.h"

#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/engine/edits.h"
#include "tests/worker/engine/fake_model.h"
#include "tests/worker/engine/recorder.h"

namespace millrace::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using worker::v1::Admit;
using worker::v1::Edit;
using View = Recorder::View;

// With one step at a time, and with one launched ahead of the other's results.
class EngineTest : public ::testing::TestWithParam<int> {
 protected:
  EngineTest() {
    EngineOptions options;
    options.limits = SmallLimits();
    options.step_cost.set_prefill_token_us(100);
    auto model = std::make_unique<FakeModel>(options.limits, GetParam());
    model_ = model.get();
    engine_ = std::make_unique<Engine>(std::move(model), options);
    engine_->Attach(router_);
  }
  ~EngineTest() override {
    if (engine_ != nullptr) model_->OpenGate();
  }

  void Post(const Edit& edit) {
    const absl::Status status = engine_->Post(router_.get(), edit);
    EXPECT_TRUE(status.ok()) << status;
  }

  FakeModel* model_;
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<Recorder> router_ = std::make_shared<Recorder>();
};

TEST_P(EngineTest, GeneratesToMaxLength) {
  Post(MakeEdit(1, {MakeAdmit(2, Prompt(100), Blocks(3, 4), 110)}));
  const View view = router_->AwaitFinished({2});
  EXPECT_EQ(view.slots.at(2).tokens, FakeModel::Generate(Prompt(100), 10));
  EXPECT_EQ(view.slots.at(2).finish, worker::v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(view.slots.at(2).num_computed_tokens, 100u);
}

TEST_P(EngineTest, ReportsWhatAStepCost) {
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(70), Blocks(0, 4), 72)}));
  const View view = router_->AwaitFinished({0});
  std::vector<worker::v1::StepReport> steps;
  for (const auto& report : view.reports) {
    if (report.step_us() > 0) steps.push_back(report);
  }
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0].prefill_tokens(), 64u);
  EXPECT_EQ(steps[0].prefill_context(), 64u * 63 / 2);
  EXPECT_EQ(steps[1].prefill_tokens(), 6u);
  EXPECT_EQ(steps[1].prefill_context(), 6u * 64 + 15);
  EXPECT_EQ(steps[2].decode_rows(), 1u);
  EXPECT_EQ(steps[2].decode_context(), 71u);
  EXPECT_EQ(steps[2].step(), 3u);
  EXPECT_EQ(steps[2].applied_edit(), 1u);
}

TEST_P(EngineTest, EndsWithAStopToken) {
  const std::vector<int32_t> expected = FakeModel::Generate(Prompt(10), 20);
  Admit admit = MakeAdmit(0, Prompt(10), {0}, 30);
  admit.add_stop_token_ids(expected[4]);
  Post(MakeEdit(1, {admit}));
  const View view = router_->AwaitFinished({0});
  EXPECT_EQ(view.slots.at(0).finish, worker::v1::FINISH_REASON_STOP_TOKEN);
  EXPECT_EQ(view.slots.at(0).tokens.back(), expected[4]);
  EXPECT_LE(view.slots.at(0).tokens.size(), 5u);
}

TEST_P(EngineTest, SamplesNoStopTokenBelowMinLength) {
  Admit admit = MakeAdmit(0, Prompt(10), {0}, 30);
  for (int32_t token = 0; token < 64; ++token) admit.add_stop_token_ids(token);
  admit.set_min_length(20);
  Post(MakeEdit(1, {admit}));
  const View view = router_->AwaitFinished({0});
  const auto& tokens = view.slots.at(0).tokens;
  ASSERT_GE(tokens.size(), 10u);
  for (size_t i = 0; i < 10; ++i) EXPECT_GE(tokens[i], 64) << i;
  EXPECT_EQ(view.slots.at(0).finish == worker::v1::FINISH_REASON_STOP_TOKEN, tokens.back() < 64);
}

TEST_P(EngineTest, StallsWithoutALeaseAndGoesOnWithOne) {
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(30), {9}, 70)}));
  const View stalled = router_->Await([](const View& view) { return view.last.stalled_slots_size() == 1; });
  EXPECT_EQ(stalled.last.stalled_slots(0), 0u);
  EXPECT_EQ(stalled.slots.at(0).tokens.size(), 3u) << "positions 0 to 31 have room, the token at 32 has none";
  Edit edit = MakeEdit(2);
  AddExtend(edit, 0, {4, 7});
  Post(edit);
  EXPECT_EQ(router_->AwaitFinished({0}).slots.at(0).tokens, FakeModel::Generate(Prompt(30), 40));
}

// The step that it stalled in may end after the edit that releases it: what acknowledges that must not name it.
TEST_P(EngineTest, NamesNoStalledSlotThatIsReleasedMeanwhile) {
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(30), {9}, 70), MakeAdmit(1, Prompt(20), Blocks(20, 10), 300)}));
  router_->Await([](const View& view) { return view.last.stalled_slots_size() == 1; });
  model_->CloseGate();
  Post(MakeEdit(2, {}, {0}));
  model_->LetSteps(6);
  router_->AwaitApplied(2);
  model_->OpenGate();
  const View view = router_->AwaitFinished({1});
  for (const auto& report : view.reports) {
    if (report.applied_edit() >= 2) {
      EXPECT_EQ(report.stalled_slots_size(), 0) << "of step " << report.step();
    }
  }
}

TEST_P(EngineTest, ReleasesAndReusesASlot) {
  model_->CloseGate();
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(30), Blocks(0, 4), 120)}));
  model_->LetSteps(5);
  router_->Await([](const View& view) { return view.last.step() == 5; });
  Post(MakeEdit(2, {MakeAdmit(0, Prompt(20, 5), Blocks(0, 4), 25)}, {0}));
  model_->OpenGate();
  const std::vector<int32_t> both = router_->AwaitFinished({0}).slots.at(0).tokens;
  ASSERT_GE(both.size(), 5u);
  EXPECT_EQ(std::vector<int32_t>(both.end() - 5, both.end()), FakeModel::Generate(Prompt(20, 5), 5));
  EXPECT_LE(both.size(), 5u + 6u) << "at most the step that was packed when the release came";
}

TEST_P(EngineTest, AcknowledgesAnEditWithoutWork) {
  Post(MakeEdit(1, {}, {0, 1, 7}));
  EXPECT_EQ(router_->AwaitApplied(1).last.step(), 0u);
}

TEST_P(EngineTest, AcknowledgesAnAdmissionBeforeItsFirstStepEnds) {
  model_->CloseGate();
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(30), {0, 1}, 40)}));
  const View view = router_->AwaitApplied(1);
  EXPECT_EQ(view.last.step(), 0u);
  EXPECT_EQ(view.last.step_us(), 0u);
  model_->OpenGate();
}

TEST_P(EngineTest, IsEmptyOnceEverySequenceHasEnded) {
  EXPECT_TRUE(engine_->AwaitEmpty(absl::Seconds(60)));
  model_->CloseGate();
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(30), {0, 1}, 40)}));
  EXPECT_FALSE(engine_->AwaitEmpty(absl::ZeroDuration()));
  model_->OpenGate();
  EXPECT_TRUE(engine_->AwaitEmpty(absl::Seconds(60)));
  EXPECT_TRUE(router_->AwaitFinished({0}).Finished(0));
}

TEST_P(EngineTest, OnePrefillServesIdenticalPrompts) {
  Admit second = MakeAdmit(1, Prompt(100), {0, 1, 2, 10}, 105, 96);
  second.set_filling_slot(0);
  second.set_rank(-1);
  second.mutable_sampling()->set_seed(7);
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(100), Blocks(0, 4), 105), second}));
  const View view = router_->AwaitFinished({0, 1});
  EXPECT_EQ(view.slots.at(0).tokens, FakeModel::Generate(Prompt(100), 5));
  EXPECT_EQ(view.slots.at(1).tokens, FakeModel::Generate(Prompt(100), 5, 7));
  uint32_t prefilled = 0;
  for (const auto& report : view.reports) prefilled += report.prefill_tokens();
  EXPECT_EQ(prefilled, 104u);
}

TEST_P(EngineTest, ContinuesAMovedSequence) {
  const std::vector<int32_t> output = FakeModel::Generate(Prompt(40), 20);
  std::vector<int32_t> so_far = Prompt(40);
  so_far.insert(so_far.end(), output.begin(), output.begin() + 8);
  Admit admit = MakeAdmit(0, so_far, Blocks(0, 3), 60);
  admit.set_num_prompt_tokens(40);
  Post(MakeEdit(1, {admit}));
  EXPECT_EQ(router_->AwaitFinished({0}).slots.at(0).tokens, std::vector<int32_t>(output.begin() + 8, output.end()));
}

TEST_P(EngineTest, GivesPenaltiesTheirHistory) {
  Admit warm = MakeAdmit(1, Prompt(40), Blocks(0, 2), 41);
  Post(MakeEdit(1, {warm}));
  router_->AwaitFinished({1});
  Admit admit = MakeAdmit(0, Prompt(40), {0, 5}, 43, 32);
  admit.set_num_prompt_tokens(35);
  const std::vector<int32_t> all = Prompt(40);
  admit.mutable_cached_token_ids()->Assign(all.begin(), all.begin() + 32);
  admit.mutable_sampling()->set_repetition_penalty(1.5f);
  Post(MakeEdit(2, {admit}));
  const auto tokens = router_->AwaitFinished({0}).slots.at(0).tokens;
  const FakeModel::History history = model_->history(0);
  EXPECT_EQ(history.prompt, std::vector<int32_t>(all.begin(), all.begin() + 35));
  std::vector<int32_t> output(all.begin() + 35, all.end());
  output.insert(output.end(), tokens.begin(), tokens.end());
  EXPECT_EQ(history.output, output);
}

TEST_P(EngineTest, ReportsLogprobsOfEveryPositionOnce) {
  Admit admit = MakeAdmit(0, Prompt(40), Blocks(0, 2), 43);
  admit.mutable_sampling()->set_prompt_logprobs(2);
  admit.mutable_sampling()->set_logprobs(3);
  Post(MakeEdit(1, {admit}));
  const View view = router_->AwaitFinished({0});
  const auto& slot = view.slots.at(0);
  ASSERT_EQ(slot.prompt_logprobs.size(), 39u);
  for (int i = 0; i < 39; ++i) {
    const auto& logprobs = slot.prompt_logprobs[static_cast<size_t>(i)];
    EXPECT_EQ(logprobs.token_id(), Prompt(40)[static_cast<size_t>(i + 1)]);
    EXPECT_EQ(logprobs.logprob(), -static_cast<float>(i + 1));
    EXPECT_EQ(logprobs.top_token_ids_size(), 2);
  }
  ASSERT_EQ(slot.logprobs.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(slot.logprobs[i].token_id(), slot.tokens[i]);
    EXPECT_EQ(slot.logprobs[i].logprob(), -static_cast<float>(40 + i));
    EXPECT_EQ(slot.logprobs[i].top_logprobs_size(), 3);
  }
}

TEST_P(EngineTest, EndsOnlyTheSequenceThatIsNotFinite) {
  std::vector<int32_t> poisoned = Prompt(20);
  poisoned.back() = kPoison;
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(30), Blocks(0, 2), 40), MakeAdmit(1, poisoned, {5}, 30)}));
  const View view = router_->AwaitFinished({0, 1});
  EXPECT_EQ(view.slots.at(1).finish, worker::v1::FINISH_REASON_NON_FINITE);
  EXPECT_EQ(view.slots.at(1).tokens.size(), 0u);
  EXPECT_EQ(view.slots.at(0).tokens, FakeModel::Generate(Prompt(30), 10));
}

TEST_P(EngineTest, RefusesABadEditAtOnce) {
  const absl::Status status = engine_->Post(router_.get(), MakeEdit(1, {}, {8}));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(EngineTest, RefusesEditIdsWithAGap) {
  Post(MakeEdit(2));
  const View view = router_->AwaitError();
  EXPECT_EQ(view.error.message(), "edit_id is 2; the limit is 1");
}

TEST_P(EngineTest, ABadEditReleasesEverySlotOfItsStream) {
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(30), {0}, 100)}));
  router_->AwaitApplied(1);
  Post(MakeEdit(2, {MakeAdmit(1, Prompt(30), {0}, 100)}));
  EXPECT_THAT(std::string(router_->AwaitError().error.message()), HasSubstr("block 0"));
  router_ = std::make_shared<Recorder>();
  engine_->Attach(router_);
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(50), {0, 1}, 55)}));
  EXPECT_EQ(router_->AwaitFinished({0}).slots.at(0).tokens, FakeModel::Generate(Prompt(50), 5));
}

TEST_P(EngineTest, ANewStreamFindsEverySlotEmpty) {
  const auto old = router_;
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(30), {0}, 100)}));
  old->AwaitApplied(1);
  router_ = std::make_shared<Recorder>();
  engine_->Attach(router_);
  EXPECT_TRUE(engine_->Post(old.get(), MakeEdit(2, {MakeAdmit(0, Prompt(30), {1}, 100)})).ok()) << "ignored";
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(50), {0, 1}, 55)}));
  EXPECT_EQ(router_->AwaitFinished({0}).slots.at(0).tokens, FakeModel::Generate(Prompt(50), 5));
  engine_->Detach(old.get());  // no longer attached: no effect
  Post(MakeEdit(2));
  router_->AwaitApplied(2);
}

TEST_P(EngineTest, BoundsTheMailbox) {
  model_->CloseGate();
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(30), {0}, 100)}));
  absl::Status status;
  for (uint64_t id = 2; status.ok() && id < 3 * Engine::kMaxPendingEdits; ++id)
    status = engine_->Post(router_.get(), MakeEdit(id));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
}

TEST_P(EngineTest, ShutsDownInTheMiddleOfWork) {
  for (uint32_t slot = 0; slot < 8; ++slot) {
    Post(MakeEdit(slot + 1, {MakeAdmit(slot, Prompt(100), Blocks(slot * 8, 8), 250)}));
  }
  engine_.reset();
}

TEST_P(EngineTest, TakesEditsFromSeveralThreadsWhileStreamsComeAndGo) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([this] {
      for (int i = 0; i < 30; ++i) {
        const auto router = std::make_shared<Recorder>();
        engine_->Attach(router);
        (void)engine_->Post(router.get(), MakeEdit(1, {MakeAdmit(0, Prompt(30), Blocks(0, 2), 60)}));
        (void)engine_->Post(router.get(), MakeEdit(2, {}, {0}));
        engine_->Detach(router.get());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  router_ = std::make_shared<Recorder>();
  engine_->Attach(router_);
  Post(MakeEdit(1, {MakeAdmit(0, Prompt(50), {0, 1}, 55)}));
  EXPECT_EQ(router_->AwaitFinished({0}).slots.at(0).tokens, FakeModel::Generate(Prompt(50), 5));
}

INSTANTIATE_TEST_SUITE_P(StepsInFlight, EngineTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace millrace::testing
