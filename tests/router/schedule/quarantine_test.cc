#include "router/schedule/quarantine.h"

#include "gtest/gtest.h"

namespace millrace {
namespace {

constexpr Time kLong = QuarantinedContents::kQuarantine;

TEST(QuarantinedContents, RemembersEachForAWhile) {
  QuarantinedContents contents;
  contents.Add({1, 1}, 100);
  contents.Add({2, 2}, 200);
  EXPECT_EQ(contents.Until({1, 1}, 100 + kLong - 1), 100 + kLong);
  EXPECT_EQ(contents.Until({1, 1}, 100 + kLong), 0);
  EXPECT_EQ(contents.Until({2, 2}, 100 + kLong), 200 + kLong);
  EXPECT_EQ(contents.Until({2, 1}, 100), 0);
  EXPECT_EQ(contents.Until({2, 2}, 200 + kLong), 0);
  EXPECT_TRUE(contents.empty());
}

TEST(QuarantinedContents, OneThatComesAgainStaysLonger) {
  QuarantinedContents contents;
  contents.Add({1, 1}, 0);
  contents.Add({2, 2}, 1);
  contents.Add({1, 1}, 2);
  EXPECT_EQ(contents.Until({1, 1}, 1 + kLong), 2 + kLong);
}

TEST(QuarantinedContents, ForgetsTheOldestWhenFull) {
  QuarantinedContents contents;
  for (uint64_t i = 0; i <= QuarantinedContents::kMaxContents; ++i) contents.Add({i, 0}, static_cast<Time>(i));
  EXPECT_EQ(contents.Until({0, 0}, 2000), 0);
  EXPECT_NE(contents.Until({1, 0}, 2000), 0);
}

}  // namespace
}  // namespace millrace
