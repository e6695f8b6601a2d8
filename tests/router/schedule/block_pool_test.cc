#include "router/schedule/block_pool.h"

#include <list>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/router/schedule/random_seed.h"

namespace millrace {
namespace {

// Three blocks; what happens, and then in which order they are taken:
//   take 0, 1, 2; name them 10, 11, 12; unpin 2, 1, 0 (deepest first)   → 2, 1, 0
TEST(BlockPool, ReusesTheDeepestBlockFirst) {
  BlockPool pool(3);
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(pool.Take()->block, i);
    pool.SetEntry(i, 10 + i);
  }
  EXPECT_FALSE(pool.Take().has_value());
  for (const BlockId block : {2u, 1u, 0u}) pool.Unpin(block);
  EXPECT_EQ(pool.cached(), 3u);
  for (const BlockId block : {2u, 1u, 0u}) {
    const auto taken = pool.Take();
    EXPECT_EQ(taken->block, block);
    EXPECT_EQ(taken->evicted, 10 + block);
  }
}

TEST(BlockPool, ReusesNamelessBlocksBeforeCachedOnes) {
  BlockPool pool(2);
  EXPECT_EQ(pool.Take()->block, 0u);
  EXPECT_EQ(pool.Take()->block, 1u);
  pool.SetEntry(0, 7);
  pool.Unpin(0);
  pool.Unpin(1);
  EXPECT_EQ(pool.Take()->block, 1u);
  EXPECT_EQ(pool.Take()->evicted, 7u);
}

TEST(BlockPool, DoesNotReuseAQuarantinedBlockButLetsItBeRead) {
  BlockPool pool(1);
  pool.Take();
  pool.SetEntry(0, 7);
  pool.Quarantine(0);
  EXPECT_EQ(pool.quarantined(), 1u);
  EXPECT_FALSE(pool.Take().has_value());
  pool.Pin(0);
  EXPECT_EQ(pool.used(), 1u);
  pool.EndQuarantine(0);
  EXPECT_FALSE(pool.Take().has_value());
  pool.Unpin(0);
  EXPECT_EQ(pool.Take()->evicted, 7u);
}

TEST(BlockPoolDeathTest, AbortsWhenABlockIsUnpinnedTwice) {
  BlockPool pool(1);
  pool.Take();
  pool.Unpin(0);
  EXPECT_DEATH(pool.Unpin(0), "unpinned as often as pinned");
}

TEST(BlockPool, NeverGivesABlockToTwoWritersInAMillionRandomOperations) {
  std::mt19937_64 rng(TestSeed(1));
  constexpr uint32_t kBlocks = 23;
  BlockPool pool(kBlocks);
  struct Model {
    int pins = 0, quarantines = 0;
    EntryId entry = kNone;
  };
  std::vector<Model> model(kBlocks);
  std::list<BlockId> order;  // as it must be taken
  for (BlockId block = 0; block < kBlocks; ++block) order.push_back(block);
  const auto idle = [&](BlockId block) { return model[block].pins == 0 && model[block].quarantines == 0; };
  const auto release = [&](BlockId block) {
    if (!idle(block)) return;
    if (model[block].entry == kNone) {
      order.push_front(block);
    } else {
      order.push_back(block);
    }
  };
  for (int i = 0; i < 1'000'000; ++i) {
    const auto block = static_cast<BlockId>(rng() % kBlocks);
    Model& it = model[block];
    switch (rng() % 6) {
      case 0: {
        const auto taken = pool.Take();
        ASSERT_EQ(taken.has_value(), !order.empty());
        if (!taken.has_value()) break;
        ASSERT_EQ(taken->block, order.front());
        ASSERT_EQ(taken->evicted, model[taken->block].entry);
        order.pop_front();
        model[taken->block] = {1, 0, kNone};
        break;
      }
      case 1:
        if (it.entry == kNone && it.pins == 0) break;  // only findable blocks are pinned again
        if (idle(block)) order.remove(block);
        pool.Pin(block);
        ++it.pins;
        break;
      case 2:
        if (it.pins == 0) break;
        pool.Unpin(block);
        --it.pins;
        release(block);
        break;
      case 3:
        if (it.pins == 0) break;
        pool.Quarantine(block);
        --it.pins;
        ++it.quarantines;
        break;
      case 4:
        if (it.quarantines == 0) break;
        pool.EndQuarantine(block);
        --it.quarantines;
        release(block);
        break;
      default:
        if (it.pins == 0) break;
        it.entry = rng() % 4 == 0 ? kNone : static_cast<EntryId>(rng() % 1000);
        pool.SetEntry(block, it.entry);
    }
    uint32_t free = 0, cached = 0, used = 0, quarantined = 0;
    for (BlockId other = 0; other < kBlocks; ++other) {
      if (model[other].pins > 0)
        ++used;
      else if (model[other].quarantines > 0)
        ++quarantined;
      else if (model[other].entry != kNone)
        ++cached;
      else
        ++free;
    }
    ASSERT_EQ(pool.free(), free);
    ASSERT_EQ(pool.cached(), cached);
    ASSERT_EQ(pool.used(), used);
    ASSERT_EQ(pool.quarantined(), quarantined);
  }
}

}  // namespace
}  // namespace millrace
