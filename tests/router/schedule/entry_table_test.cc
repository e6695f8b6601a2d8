#include "router/schedule/entry_table.h"

#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/router/schedule/random_seed.h"

namespace millrace {
namespace {

constexpr uint32_t kNobody = UINT32_MAX;

// Few different hashes, many of them at both ends, so that runs are long, wrap around and hold equal hashes.
TEST(EntryTable, AgreesWithANaiveMapInAMillionRandomOperations) {
  std::mt19937_64 rng(TestSeed(1));
  EntryTable table;
  std::multimap<uint64_t, uint32_t> held;
  std::vector<uint64_t> hashes;
  for (uint64_t i = 0; i < 200; ++i) hashes.push_back(i % 3 == 0 ? rng() : i % 3 == 1 ? i << 28 : ~(i << 28));
  uint32_t next = 0;
  for (int i = 0; i < 1'000'000; ++i) {
    const uint64_t hash = hashes[rng() % hashes.size()];
    const auto [begin, end] = held.equal_range(hash);
    const uint64_t dice = rng() % 4;
    if (dice == 0 && held.size() < 300) {
      table.Insert(hash, next);
      held.emplace(hash, next++);
    } else if (dice == 1 && begin != end) {
      table.Erase(hash, begin->second);
      held.erase(begin);
    } else {
      size_t found = 0;
      for (auto it = begin; it != end; ++it) {
        ASSERT_EQ(table.Find(hash, kNobody, [&](uint32_t id) { return id == it->second; }), it->second);
      }
      table.Find(hash, kNobody, [&](uint32_t) { return ++found == SIZE_MAX; });
      ASSERT_EQ(found, static_cast<size_t>(std::distance(begin, end)));
    }
    ASSERT_EQ(table.size(), held.size());
  }
}

}  // namespace
}  // namespace millrace
