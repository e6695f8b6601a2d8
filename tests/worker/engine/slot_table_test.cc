#include "worker/engine/slot_table.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/engine/edits.h"

namespace millrace::testing {
namespace {

using ::testing::HasSubstr;
using worker::v1::Admit;

class SlotTableTest : public ::testing::Test {
 protected:
  std::string Try(const Admit& admit) { return std::string(table_.Admit(admit).message()); }
  std::string TryExtend(uint32_t slot, const std::vector<uint32_t>& blocks) {
    worker::v1::Edit edit;
    AddExtend(edit, slot, blocks);
    return std::string(table_.Extend(edit.extend(0)).message());
  }
  static Admit Filling(Admit admit, uint32_t slot) {
    admit.set_filling_slot(slot);
    return admit;
  }

  SlotTable table_{SmallLimits()};
};

TEST_F(SlotTableTest, NeverTakesASlotTwice) {
  EXPECT_EQ(Try(MakeAdmit(3, Prompt(10), {5}, 20)), "");
  EXPECT_THAT(Try(MakeAdmit(3, Prompt(10), {6}, 20)), HasSubstr("admit.slot is 3"));
}

TEST_F(SlotTableTest, NeverLetsTwoSlotsWriteABlock) {
  EXPECT_EQ(Try(MakeAdmit(0, Prompt(10), {5}, 20)), "");
  EXPECT_THAT(Try(MakeAdmit(1, Prompt(10), {5}, 20)), HasSubstr("block 5"));
}

TEST_F(SlotTableTest, NeverLetsASlotWriteABlockTwice) {
  EXPECT_THAT(Try(MakeAdmit(0, Prompt(40), {5, 5}, 50)), HasSubstr("block 5"));
}

TEST_F(SlotTableTest, NeverLetsALeaseTakeAnothersBlock) {
  EXPECT_EQ(Try(MakeAdmit(0, Prompt(10), {5}, 20)), "");
  EXPECT_EQ(Try(MakeAdmit(1, Prompt(40), {6, 7}, 50, 32)), "");
  EXPECT_THAT(TryExtend(1, {5}), HasSubstr("block 5"));
  EXPECT_THAT(TryExtend(0, {6}), HasSubstr("block 6")) << "another slot reads it";
}

TEST_F(SlotTableTest, SharesCachedBlocks) {
  EXPECT_EQ(Try(MakeAdmit(0, Prompt(40), {5, 6}, 50, 32)), "");
  EXPECT_EQ(Try(MakeAdmit(1, Prompt(40), {5, 7}, 50, 32)), "");
}

TEST_F(SlotTableTest, FreesBlocksWithTheirSlot) {
  EXPECT_EQ(Try(MakeAdmit(0, Prompt(40), {5, 6}, 50, 32)), "");
  table_.Release(0);
  EXPECT_EQ(Try(MakeAdmit(1, Prompt(40), {6, 5}, 50)), "");
  EXPECT_EQ(table_.num_active(), 1);
}

TEST_F(SlotTableTest, RefusesToReadWhatIsStillWritten) {
  EXPECT_EQ(Try(MakeAdmit(0, Prompt(40), {5, 6}, 50)), "");
  EXPECT_THAT(Try(MakeAdmit(1, Prompt(40), {5, 7}, 50, 32)), HasSubstr("slot 0 still writes"));
  table_.at(0).num_computed_tokens = 32;
  EXPECT_EQ(Try(MakeAdmit(2, Prompt(40), {5, 8}, 50, 32)), "");
}

TEST_F(SlotTableTest, RefusesToShareABlockAtAnotherPosition) {
  EXPECT_EQ(Try(MakeAdmit(0, Prompt(70), {5, 6, 7}, 80)), "");
  table_.at(0).num_computed_tokens = 70;
  EXPECT_THAT(Try(MakeAdmit(1, Prompt(40), {6, 8}, 50, 32)), HasSubstr("slot 0 still writes"));
}

TEST_F(SlotTableTest, WaitsForTheSlotThatFillsItsBlocks) {
  EXPECT_EQ(Try(MakeAdmit(0, Prompt(70), {5, 6, 7}, 80)), "");
  EXPECT_EQ(Try(Filling(MakeAdmit(1, Prompt(70), {5, 6, 8}, 80, 64), 0)), "");
  EXPECT_FALSE(table_.IsReady(1));
  table_.at(0).num_computed_tokens = 63;
  EXPECT_FALSE(table_.IsReady(1));
  table_.at(0).num_computed_tokens = 64;
  EXPECT_TRUE(table_.IsReady(1));
}

TEST_F(SlotTableTest, WaitsThroughAChain) {
  EXPECT_EQ(Try(MakeAdmit(0, Prompt(70), {5, 6, 7}, 80)), "");
  EXPECT_EQ(Try(Filling(MakeAdmit(1, Prompt(100), {5, 6, 8, 9}, 110, 64), 0)), "");
  EXPECT_EQ(Try(Filling(MakeAdmit(2, Prompt(70), {5, 6, 10}, 80, 64), 1)), "");
  EXPECT_FALSE(table_.IsReady(2)) << "slot 1 counts 64 tokens, which slot 0 has yet to compute";
  table_.at(0).num_computed_tokens = 64;
  EXPECT_TRUE(table_.IsReady(2));
}

TEST_F(SlotTableTest, NeverProceedsWhenItsFillerEndedTooEarly) {
  EXPECT_EQ(Try(MakeAdmit(0, Prompt(70), {5, 6, 7}, 80)), "");
  EXPECT_EQ(Try(Filling(MakeAdmit(1, Prompt(70), {5, 6, 8}, 80, 64), 0)), "");
  table_.at(0).num_computed_tokens = 40;
  table_.Release(0);
  EXPECT_FALSE(table_.IsReady(1));
  EXPECT_EQ(Try(MakeAdmit(0, Prompt(70), {15, 16, 17}, 80)), "");
  table_.at(0).num_computed_tokens = 70;
  EXPECT_FALSE(table_.IsReady(1)) << "the slot's next sequence is another one";
}

TEST_F(SlotTableTest, ProceedsWhenItsFillerEndedLateEnough) {
  EXPECT_EQ(Try(MakeAdmit(0, Prompt(70), {5, 6, 7}, 80)), "");
  EXPECT_EQ(Try(Filling(MakeAdmit(1, Prompt(70), {5, 6, 8}, 80, 64), 0)), "");
  table_.at(0).num_computed_tokens = 70;
  table_.Release(0);
  EXPECT_TRUE(table_.IsReady(1));
  // The router may not know yet that slot 0 has ended.
  EXPECT_EQ(Try(Filling(MakeAdmit(2, Prompt(70), {5, 6, 9}, 80, 64), 0)), "");
  EXPECT_TRUE(table_.IsReady(2));
  EXPECT_THAT(Try(Filling(MakeAdmit(3, Prompt(70), {5, 7, 10}, 80, 64), 0)), HasSubstr("filling_slot is 0"));
}

TEST_F(SlotTableTest, RefusesAFillerThatIsEmpty) {
  EXPECT_THAT(Try(Filling(MakeAdmit(1, Prompt(40), {5, 6}, 50, 32), 0)), HasSubstr("filling_slot is 0"));
}

TEST_F(SlotTableTest, IgnoresWhatComesTooLateForASlot) {
  EXPECT_EQ(TryExtend(0, {5}), "");
  worker::v1::Rank rank;
  rank.set_slot(0);
  table_.SetRank(rank);
  table_.Release(0);
  EXPECT_EQ(Try(MakeAdmit(1, Prompt(10), {5}, 20)), "") << "an ignored lease takes no block";
}

TEST_F(SlotTableTest, BoundsATableByTheContext) {
  EXPECT_EQ(Try(MakeAdmit(0, Prompt(10), Blocks(0, 16), 20)), "");
  EXPECT_THAT(TryExtend(0, {16}), HasSubstr("17 blocks long; the limit is 16"));
}

TEST_F(SlotTableTest, ForbidsStopTokensBelowMinLengthWhateverTheirBias) {
  Admit admit = MakeAdmit(0, Prompt(10), {0}, 20);
  admit.add_stop_token_ids(4);
  admit.add_stop_token_ids(5);
  admit.mutable_sampling()->add_bias_token_ids(5);
  admit.mutable_sampling()->add_bias_values(3);
  EXPECT_EQ(Try(admit), "");
  ASSERT_EQ(table_.at(0).biases.size(), 1u);
  ASSERT_EQ(table_.at(0).biases_below_min.size(), 2u) << "tokens of a bias range are distinct";
  for (const LogitBias& bias : table_.at(0).biases_below_min) EXPECT_EQ(bias.value, -INFINITY);
}

}  // namespace
}  // namespace millrace::testing
