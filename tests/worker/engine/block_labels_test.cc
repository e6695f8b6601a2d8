#include "worker/engine/block_labels.h"

#include <map>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/engine/edits.h"

namespace millrace {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A slot as an admission leaves it; `cached` leading blocks were there before.
Slot MakeSlot(const std::vector<int32_t>& tokens, const std::vector<int32_t>& table, int cached = 0,
              const char* salt = "") {
  Slot slot;
  slot.active = true;
  slot.num_cached_tokens = cached * kBlockTokens;
  slot.token_ids.assign(tokens.begin() + slot.num_cached_tokens, tokens.end());
  slot.block_table = table;
  slot.cache_salt = salt;
  return slot;
}

class BlockLabelsTest : public ::testing::Test {
 protected:
  // Blocks in the order of the list; checks that each comes after its parent.
  std::vector<uint32_t> Listed() {
    by_block_.clear();
    std::vector<uint32_t> blocks;
    for (const worker::v1::CachedBlocks& message : labels_.List()) {
      for (const worker::v1::CachedBlock& it : message.blocks()) {
        EXPECT_TRUE(!it.has_parent() || by_block_.contains(it.parent())) << it.block();
        EXPECT_EQ(it.token_ids_size(), kBlockTokens);
        EXPECT_TRUE(by_block_.emplace(it.block(), it).second) << it.block();
        blocks.push_back(it.block());
      }
    }
    return blocks;
  }

  BlockLabels labels_{testing::SmallLimits()};
  std::map<uint32_t, worker::v1::CachedBlock> by_block_;
};

TEST_F(BlockLabelsTest, KnowsABlockOnlyOnceItIsFullOfComputedTokens) {
  const std::vector<int32_t> tokens = testing::Prompt(3 * kBlockTokens);
  const Slot slot = MakeSlot(tokens, {7, 2, 9, 4}, 0, "salt");
  labels_.Admitted(0, slot);
  EXPECT_THAT(Listed(), IsEmpty());
  labels_.Computed(0, slot, kBlockTokens - 1);
  EXPECT_THAT(Listed(), IsEmpty());
  labels_.Computed(0, slot, 2 * kBlockTokens + 1);
  EXPECT_THAT(Listed(), ElementsAre(7, 2));
  EXPECT_EQ(by_block_[7].cache_salt(), "salt");
  EXPECT_FALSE(by_block_[7].has_parent());
  EXPECT_EQ(by_block_[2].parent(), 7u);
  EXPECT_EQ(by_block_[2].cache_salt(), "");
  for (int i = 0; i < kBlockTokens; ++i)
    EXPECT_EQ(by_block_[2].token_ids(i), tokens[static_cast<size_t>(kBlockTokens + i)]);
}

TEST_F(BlockLabelsTest, ForgetsWhatIsWrittenOverAndWhatCameAfterIt) {
  const Slot slot = MakeSlot(testing::Prompt(3 * kBlockTokens), {0, 1, 2});
  labels_.Admitted(0, slot);
  labels_.Computed(0, slot, 3 * kBlockTokens);
  ASSERT_THAT(Listed(), ElementsAre(0, 1, 2));
  const Slot other = MakeSlot(testing::Prompt(kBlockTokens, 50), {1});
  labels_.Admitted(1, other);
  EXPECT_THAT(Listed(), ElementsAre(0)) << "block 2 came after what block 1 no longer holds";
  labels_.Computed(1, other, kBlockTokens);
  EXPECT_THAT(Listed(), ElementsAre(1, 0)) << "nor does it come after what block 1 holds now";
  google::protobuf::RepeatedField<uint32_t> blocks;
  blocks.Add(0);
  labels_.Extended(1, blocks);
  EXPECT_THAT(Listed(), ElementsAre(1));
}

TEST_F(BlockLabelsTest, ListsTheMostRecentlyUsedFirstAndParentsBeforeTheirChildren) {
  const Slot first = MakeSlot(testing::Prompt(2 * kBlockTokens), {0, 1});
  const Slot second = MakeSlot(testing::Prompt(2 * kBlockTokens, 50), {2, 3});
  labels_.Admitted(0, first);
  labels_.Admitted(1, second);
  labels_.Computed(1, second, 2 * kBlockTokens);
  labels_.Computed(0, first, 2 * kBlockTokens);
  EXPECT_THAT(Listed(), ElementsAre(2, 3, 0, 1));
  const Slot third = MakeSlot(testing::Prompt(3 * kBlockTokens), {0, 1, 5}, 2);
  labels_.Admitted(2, third);
  labels_.Computed(2, third, 3 * kBlockTokens);
  EXPECT_THAT(Listed(), ElementsAre(0, 1, 5, 2, 3));
  EXPECT_EQ(by_block_[5].parent(), 1u);
}

TEST_F(BlockLabelsTest, NothingOfASequenceThatIsNotFiniteIsFoundAgain) {
  const Slot good = MakeSlot(testing::Prompt(kBlockTokens), {0});
  labels_.Admitted(0, good);
  labels_.Computed(0, good, kBlockTokens);
  const Slot bad = MakeSlot(testing::Prompt(3 * kBlockTokens), {0, 1, 2}, 1);
  labels_.Admitted(1, bad);
  labels_.Computed(1, bad, 3 * kBlockTokens);
  labels_.Forget(bad);
  EXPECT_THAT(Listed(), ElementsAre(0));
}

}  // namespace
}  // namespace millrace
