#include "router/schedule/prefix_index.h"

#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "router/schedule/prefix_hash.h"
#include "tests/router/schedule/random_seed.h"

namespace millrace {
namespace {

constexpr uint64_t kKey[2] = {3, 4};
constexpr uint32_t kBlockTokens = 2;

class PrefixIndexTest : public testing::Test {
 protected:
  std::vector<PrefixHash> Hashes(const std::vector<int32_t>& tokens, const char* salt = "") const {
    std::vector<PrefixHash> hashes;
    hasher_.Extend(hashes, hasher_.Root(salt), tokens, kBlockTokens);
    return hashes;
  }
  // Inserts all full blocks of `tokens` as blocks first, first + 1, … of the worker; returns their entries.
  std::vector<EntryId> InsertAll(const std::vector<int32_t>& tokens, uint32_t worker, BlockId first,
                                 uint32_t filler = kNone) {
    std::vector<EntryId> entries;
    const std::vector<PrefixHash> hashes = Hashes(tokens);
    for (uint32_t i = 0; i < hashes.size(); ++i) {
      entries.push_back(index_.Insert(hasher_.Root(""), i == 0 ? kNone : entries.back(), hashes[i],
                                      tokens.data() + i * kBlockTokens, {worker, first + i, filler}));
    }
    return entries;
  }
  std::vector<uint32_t> Depths(const std::vector<int32_t>& tokens, const char* salt = "") {
    index_.Find(hasher_.Root(salt), Hashes(tokens, salt), tokens.data(), 3, &match_);
    return match_.depth;
  }

  const PrefixHasher hasher_{kKey};
  PrefixIndex index_{kBlockTokens};
  PrefixIndex::Match match_;
};

// Worker 0 holds 1 2 | 3 4 | 5 6, worker 1 holds 1 2 | 3 4, worker 2 nothing.
//   1 2 3 4 5 6 7   → 3 2 0      1 2 9 9 → 1 1 0      3 4 → 0 0 0      1 → 0 0 0
TEST_F(PrefixIndexTest, MatchesAllWorkersInOneWalk) {
  InsertAll({1, 2, 3, 4, 5, 6}, 0, 10);
  InsertAll({1, 2, 3, 4}, 1, 20);
  EXPECT_EQ(Depths({1, 2, 3, 4, 5, 6, 7}), (std::vector<uint32_t>{3, 2, 0}));
  EXPECT_EQ(index_.HolderOn(match_.entries[1], 1).block, 21u);
  EXPECT_EQ(Depths({1, 2, 9, 9}), (std::vector<uint32_t>{1, 1, 0}));
  EXPECT_EQ(Depths({3, 4}), (std::vector<uint32_t>{0, 0, 0}));
  EXPECT_EQ(Depths({1}), (std::vector<uint32_t>{0, 0, 0}));
}

TEST_F(PrefixIndexTest, KeepsSaltsApart) {
  InsertAll({1, 2, 3, 4}, 0, 0);
  EXPECT_EQ(Depths({1, 2, 3, 4}, "tenant"), (std::vector<uint32_t>{0, 0, 0}));
}

TEST_F(PrefixIndexTest, BelievesAHashOnlyWhenTheTokensAgree) {
  const std::vector<int32_t> other = {8, 9};
  const PrefixHash forged = Hashes({1, 2})[0];
  ASSERT_NE(index_.Insert(hasher_.Root(""), kNone, forged, other.data(), {0, 5, kNone}), kNone);
  EXPECT_EQ(Depths({1, 2}), (std::vector<uint32_t>{0, 0, 0}));
  const std::vector<int32_t> tokens = {1, 2};
  EXPECT_EQ(index_.Insert(hasher_.Root(""), kNone, forged, tokens.data(), {0, 6, kNone}), kNone);
}

TEST_F(PrefixIndexTest, NeverTakesAChildOfAForgottenParentForAnothers) {
  const auto entries = InsertAll({1, 2, 3, 4}, 0, 0);
  index_.Remove(entries[0], 0, 0);
  EXPECT_EQ(Depths({1, 2, 3, 4}), (std::vector<uint32_t>{0, 0, 0}));
  InsertAll({1, 2}, 0, 7);
  EXPECT_EQ(Depths({1, 2, 3, 4}), (std::vector<uint32_t>{1, 0, 0}));
}

TEST_F(PrefixIndexTest, PrefersAComputedHolderToOneInFlight) {
  InsertAll({1, 2}, 0, 4, /*filler=*/3);
  Depths({1, 2});
  EXPECT_EQ(index_.HolderOn(match_.entries[0], 0).filler, 3u);
  InsertAll({1, 2}, 0, 5);
  EXPECT_EQ(index_.HolderOn(match_.entries[0], 0).block, 5u);
  index_.MarkComputed(match_.entries[0], 0, 4);
  EXPECT_EQ(index_.HolderOn(match_.entries[0], 0).block, 4u);
}

TEST(PrefixHasher, DependsOnEveryTokenTheSaltAndTheKey) {
  const PrefixHasher hasher(kKey);
  std::set<std::pair<uint64_t, uint64_t>> seen;
  const auto add = [&](const PrefixHash& hash) { EXPECT_TRUE(seen.insert({hash.lo, hash.hi}).second); };
  std::vector<int32_t> tokens(19, 0);
  add(hasher.Next(hasher.Root(""), tokens.data(), tokens.size()));
  for (int32_t& token : tokens) {
    for (int bit = 0; bit < 31; ++bit) {
      token = 1 << bit;
      add(hasher.Next(hasher.Root(""), tokens.data(), tokens.size()));
      token = 0;
    }
  }
  for (const char* salt : {"a", "b", "a seventeen bytes", "a seventeen byteS"}) {
    add(hasher.Next(hasher.Root(salt), tokens.data(), tokens.size()));
  }
  const uint64_t other[2] = {3, 5};
  const PrefixHasher hasher2(other);
  add(hasher2.Next(hasher2.Root(""), tokens.data(), tokens.size()));
}

TEST_F(PrefixIndexTest, AgreesWithANaiveMapInAMillionRandomOperations) {
  std::mt19937_64 rng(TestSeed(2));
  struct Chain {
    std::vector<int32_t> tokens;
    uint32_t worker;
    std::vector<EntryId> entries;
    BlockId first;
  };
  std::vector<Chain> chains;                                      // what is held, whole chains
  std::map<std::pair<uint32_t, std::vector<int32_t>>, int> held;  // (worker, prefix) → holders
  BlockId next_block = 0;
  const auto random_tokens = [&] {
    std::vector<int32_t> tokens(2 * (1 + rng() % 5));
    for (int32_t& token : tokens) token = static_cast<int32_t>(rng() % 2);
    return tokens;
  };
  int operations = 0;
  while (operations < 1'000'000) {
    const uint64_t dice = rng() % 4;
    if (dice == 0 && chains.size() < 40) {
      Chain chain{random_tokens(), static_cast<uint32_t>(rng() % 3), {}, next_block};
      chain.entries = InsertAll(chain.tokens, chain.worker, chain.first);
      next_block += static_cast<BlockId>(chain.entries.size());
      for (size_t n = 2; n <= chain.tokens.size(); n += 2) {
        ASSERT_NE(chain.entries[n / 2 - 1], kNone);
        ++held[{chain.worker, {chain.tokens.begin(), chain.tokens.begin() + static_cast<ptrdiff_t>(n)}}];
        ++operations;
      }
      chains.push_back(chain);
    } else if (dice == 1 && !chains.empty()) {
      Chain& chain = chains[rng() % chains.size()];
      const size_t last = chain.entries.size() - 1;
      index_.Remove(chain.entries[last], chain.worker, chain.first + static_cast<BlockId>(last));
      const auto found = held.find({chain.worker, chain.tokens});
      if (--found->second == 0) held.erase(found);
      chain.entries.pop_back();
      chain.tokens.resize(chain.tokens.size() - 2);
      if (chain.entries.empty()) {
        chain = chains.back();
        chains.pop_back();
      }
      ++operations;
    } else {
      const std::vector<int32_t> tokens = random_tokens();
      const std::vector<uint32_t> depths = Depths(tokens);
      for (uint32_t worker = 0; worker < 3; ++worker) {
        uint32_t depth = 0;
        while (depth < tokens.size() / 2 &&
               held.count({worker, {tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(2 * depth + 2)}}) > 0) {
          ++depth;
        }
        ASSERT_EQ(depths[worker], depth);
        for (uint32_t i = 0; i < depth; ++i) ASSERT_EQ(index_.HolderOn(match_.entries[i], worker).worker, worker);
      }
      operations += 3;
    }
  }
  std::set<std::vector<int32_t>> distinct;
  for (const auto& [key, count] : held) distinct.insert(key.second);
  EXPECT_EQ(index_.size(), distinct.size());
}

}  // namespace
}  // namespace millrace
