// A table that the script wrote, read by the worker, and the refusal of what is none. What it must say was counted by
// hand in the fixture's answers.
#include "worker/engine/draft_table.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fixtures.h"
#include "worker/engine/drafting.h"

namespace millrace {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int64_t kVocabulary = 16;

std::filesystem::path FixturePath() { return Fixture("draft_table") / DraftTable::kFileName; }

class DraftTableTest : public testing::Test {
 protected:
  void SetUp() override {
    auto table = DraftTable::Load(FixturePath(), kVocabulary);
    ASSERT_TRUE(table.ok()) << table.status();
    ASSERT_NE(*table, nullptr);
    table_ = *std::move(table);
  }

  std::vector<int32_t> Draft(const std::vector<int32_t>& tokens, int32_t max_count = 8) const {
    return table_->Draft({tokens.data(), std::ssize(tokens)}, max_count);
  }
  std::vector<int32_t> Guessed(const std::vector<int32_t>& tokens) const {
    return Guess({tokens.data(), std::ssize(tokens)}, 2, table_.get());
  }

  std::shared_ptr<const DraftTable> table_;
};

TEST_F(DraftTableTest, LetsTheLongestKnownContextSpeak) {
  EXPECT_THAT(Draft({0, 1, 2, 3}), ElementsAre(4, 5)) << "4 of 7 times after 3";
  EXPECT_THAT(Draft({0, 9, 2, 3}), ElementsAre(6, 7)) << "3 of 3 times after 9 2 3";
  EXPECT_THAT(Draft({0, 9, 2, 3}, 1), ElementsAre(6));
  EXPECT_THAT(Draft({3}), ElementsAre(4, 5)) << "a sequence may be shorter than a context";
}

TEST_F(DraftTableTest, StopsWhereATokenIsUnknownOrAllTogetherAreUnlikely) {
  EXPECT_THAT(Draft({0}), IsEmpty());
  EXPECT_THAT(Draft({}), IsEmpty());
  EXPECT_THAT(Draft({3}, 0), IsEmpty());
  EXPECT_THAT(Draft({10}), ElementsAre(11, 13)) << "15 would be right in one of eight cases";
}

TEST_F(DraftTableTest, YieldsToASequenceThatRepeatsFourTokensAndNotToOneThatRepeatsTwo) {
  EXPECT_THAT(Guessed({0, 1, 2, 3, 8, 9, 0, 1, 2, 3}), ElementsAre(8, 9));
  EXPECT_THAT(Guessed({2, 3, 8, 9, 1, 2, 3}), ElementsAre(4, 5));
  EXPECT_THAT(Guessed({14, 8, 7, 14, 8}), ElementsAre(7, 14)) << "where the table knows nothing";
}

TEST_F(DraftTableTest, IsNothingWhereThereIsNoFile) {
  const auto table = DraftTable::Load(FixturePath().parent_path() / "absent", kVocabulary);
  ASSERT_TRUE(table.ok());
  EXPECT_EQ(*table, nullptr);
  const std::vector<int32_t> tokens = {2, 3, 8, 9, 2, 3};
  EXPECT_THAT(Guess({tokens.data(), std::ssize(tokens)}, 2, nullptr), ElementsAre(8, 9));
}

TEST_F(DraftTableTest, RefusesWhatIsNoTableOfThisVocabulary) {
  std::ifstream file(FixturePath(), std::ios::binary);
  const std::string good((std::istreambuf_iterator<char>(file)), {});
  const auto status = [&](const std::string& bytes, int64_t vocab_size = kVocabulary) {
    const auto path = std::filesystem::path(testing::TempDir()) / "bad.ngrams";
    std::ofstream(path, std::ios::binary) << bytes;
    return std::string(DraftTable::Load(path, vocab_size).status().message());
  };
  EXPECT_EQ(status(good), "");
  EXPECT_THAT(status(good, 17), HasSubstr("its vocabulary has 16 tokens, the model's 17"));
  EXPECT_THAT(status(good.substr(0, 12)), HasSubstr("it cannot be read"));
  EXPECT_THAT(status("x" + good.substr(1)), HasSubstr("it does not begin with MRDRAFT1"));
  EXPECT_THAT(status(good.substr(0, good.size() - 1)), HasSubstr("entries are not"));
  std::string full = good, foreign = good;
  for (size_t at = 16 + 7; at < full.size(); at += 8) full[at] = 1;
  EXPECT_THAT(status(full), HasSubstr("no entry is free"));
  foreign[16 + 4] = 16;
  EXPECT_THAT(status(foreign), HasSubstr("it holds token 16"));
}

}  // namespace
}  // namespace millrace
