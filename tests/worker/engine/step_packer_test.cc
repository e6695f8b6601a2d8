#include "worker/engine/step_packer.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/engine/edits.h"
#include "worker/engine/step_cost.h"

namespace millrace::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

class StepPackerTest : public ::testing::Test {
 protected:
  StepPackerTest() {
    cost_.set_step_us(1000);
    cost_.set_prefill_token_us(100);
    cost_.set_row_us(10);
  }

  // Its blocks start at 8 times the slot.
  void Prefilling(uint32_t slot, int32_t length, int64_t rank = 0) {
    auto admit = MakeAdmit(slot, Prompt(length), Blocks(slot * 8, 8), 250);
    admit.set_rank(rank);
    Take(admit);
  }
  void Decoding(uint32_t slot, int32_t length, int num_blocks = 8) {
    Take(MakeAdmit(slot, Prompt(length - 1), Blocks(slot * 8, num_blocks), 250));
    table_.at(static_cast<int32_t>(slot)).num_computed_tokens = length - 1;
    table_.at(static_cast<int32_t>(slot)).token_ids.push_back(1);
  }
  void Take(const worker::v1::Admit& admit) {
    const absl::Status status = table_.Admit(admit);
    ASSERT_TRUE(status.ok()) << status;
  }

  StepPlan Pack(double target_us) const { return PackStep(table_, limits_, cost_, target_us); }
  static std::vector<std::pair<int32_t, int32_t>> Chunks(const StepPlan& plan) {
    std::vector<std::pair<int32_t, int32_t>> chunks;
    for (const StepPlan::Chunk& chunk : plan.chunks) chunks.emplace_back(chunk.slot, chunk.num_tokens);
    return chunks;
  }

  EngineLimits limits_ = SmallLimits();
  worker::v1::StepCost cost_;
  SlotTable table_{SmallLimits()};
};

TEST_F(StepPackerTest, PacksNothingFromNothing) { EXPECT_THAT(Chunks(Pack(5000)), IsEmpty()); }

TEST_F(StepPackerTest, GivesEveryDecodingSlotItsRowFirst) {
  Prefilling(0, 10);
  Decoding(1, 20);
  Decoding(2, 30);
  const StepPlan plan = Pack(50'000);
  EXPECT_THAT(Chunks(plan), ElementsAre(Pair(1, 1), Pair(2, 1), Pair(0, 10)));
  EXPECT_EQ(plan.num_decode_rows, 2);
}

TEST_F(StepPackerTest, StallsASlotWithoutRoom) {
  Decoding(0, 33, 1);  // position 32 needs a second block
  Decoding(1, 32, 1);
  const StepPlan plan = Pack(50'000);
  EXPECT_THAT(Chunks(plan), ElementsAre(Pair(1, 1)));
  EXPECT_THAT(plan.stalled, ElementsAre(0));
}

TEST_F(StepPackerTest, FillsUpToTheTargetWhenSomethingDecodes) {
  Decoding(0, 20);
  Prefilling(1, 200);
  EXPECT_THAT(Chunks(Pack(4010)), ElementsAre(Pair(0, 1), Pair(1, 40)));
}

TEST_F(StepPackerTest, CountsContextInThePrediction) {
  cost_.set_context_ns(50'000);         // 20 tokens: 1 ms
  cost_.set_prefill_context_ns(2'000);  // n tokens from 0 on: n^2 us
  Decoding(0, 20);
  Prefilling(1, 200);
  // 40 * 100 + 40^2 = 5600
  EXPECT_THAT(Chunks(Pack(1010 + 5600)), ElementsAre(Pair(0, 1), Pair(1, 40)));
  EXPECT_THAT(Chunks(Pack(1010 + 5599)), ElementsAre(Pair(0, 1), Pair(1, 39)));
}

TEST_F(StepPackerTest, TakesWholeStepsWhenNothingDecodes) {
  Prefilling(0, 200);
  EXPECT_THAT(Chunks(Pack(1)), ElementsAre(Pair(0, 64)));
}

TEST_F(StepPackerTest, TakesWholeStepsWhenAllThatDecodesIsStalled) {
  Decoding(0, 33, 1);
  Prefilling(1, 200);
  EXPECT_THAT(Chunks(Pack(1)), ElementsAre(Pair(1, 64)));
}

TEST_F(StepPackerTest, OrdersPrefillByRankThenAdmission) {
  Prefilling(3, 20, 5);
  Prefilling(1, 20, 5);
  Prefilling(2, 20, -7);
  EXPECT_THAT(Chunks(Pack(1)), ElementsAre(Pair(2, 20), Pair(3, 20), Pair(1, 20)));
}

TEST_F(StepPackerTest, NeverStarvesPrefill) {
  Decoding(0, 20);
  Prefilling(1, 200);
  Prefilling(2, 200);
  cost_.set_step_us(0);
  EXPECT_THAT(Chunks(Pack(1)), ElementsAre(Pair(0, 1), Pair(1, kMinPrefillTokens)));
}

TEST_F(StepPackerTest, UsesWhatTheFloorLeaves) {
  cost_.set_step_us(5000);
  Decoding(0, 20);
  Prefilling(1, 200);
  EXPECT_THAT(Chunks(Pack(100)), ElementsAre(Pair(0, 1), Pair(1, 50)));
}

TEST_F(StepPackerTest, PassesOverASlotThatWaitsForItsCachedTokens) {
  Prefilling(0, 100, 9);
  auto admit = MakeAdmit(1, Prompt(100), {0, 1, 8, 9}, 250, 64);
  admit.set_filling_slot(0);
  Take(admit);
  EXPECT_THAT(Chunks(Pack(1)), ElementsAre(Pair(0, 64)));
  table_.at(0).num_computed_tokens = 64;
  EXPECT_THAT(Chunks(Pack(1)), ElementsAre(Pair(1, 36), Pair(0, 28)));
}

TEST_F(StepPackerTest, StaysWithinLogitRows) {
  auto admit = MakeAdmit(0, Prompt(40), Blocks(0, 8), 250);
  admit.mutable_sampling()->set_prompt_logprobs(0);
  Take(admit);
  Prefilling(1, 30);
  EXPECT_THAT(Chunks(Pack(1)), ElementsAre(Pair(0, 16)));  // the limit is 16
  table_.at(0).num_computed_tokens = 30;                   // 9 more, and the one to sample from
  EXPECT_THAT(Chunks(Pack(1)), ElementsAre(Pair(0, 10), Pair(1, 30)));
  EXPECT_EQ(NumLogitRows(table_.at(0), 10), 10);
}

TEST_F(StepPackerTest, HasRoomForEveryDecodingSlot) {
  for (uint32_t slot = 0; slot < 8; ++slot) Decoding(slot, 20);
  EXPECT_EQ(Pack(1).num_decode_rows, 8);
}

TEST_F(StepPackerTest, EverySlotProceedsInTheEnd) {
  for (uint32_t slot = 0; slot < 4; ++slot) Decoding(slot, 20);
  for (uint32_t slot = 4; slot < 8; ++slot) Prefilling(slot, 200, 8 - slot);
  for (int steps = 0; steps < 4 * 200 / kMinPrefillTokens + 4; ++steps) {
    for (const StepPlan::Chunk& chunk : Pack(1).chunks) {
      const int32_t slot = chunk.slot;
      if (!table_.at(slot).is_decoding()) table_.at(slot).num_computed_tokens += chunk.num_tokens;
      if (slot >= 4 && table_.at(slot).num_computed_tokens == 200) table_.at(slot).token_ids.push_back(1);
    }
  }
  for (int32_t slot = 4; slot < 8; ++slot) EXPECT_TRUE(table_.at(slot).is_decoding()) << slot;
}

}  // namespace
}  // namespace millrace::testing
