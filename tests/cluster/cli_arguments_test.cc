#include "cli/arguments.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace millrace {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Values {
  std::string name = "none", text;
  bool loud = false;
  int64_t count = 3;
  double rate = 0.5;
};

struct ArgumentsTest : testing::Test {
  ArgumentsTest() {
    arguments.TakePositional(&values.text);
    arguments.Add("name", &values.name, "a name");
    arguments.Add("loud", &values.loud, "say it loud");
    arguments.Add("count", &values.count, 1, 10, "how many");
    arguments.Add("rate", &values.rate, 0, 2, "how fast");
  }
  std::string Error(std::vector<std::string> words) { return std::string(arguments.Parse(words).message()); }

  Values values;
  Arguments arguments{"test [TEXT]", "Tests.", "millrace test"};
};

TEST_F(ArgumentsTest, TakesAValueAfterASpaceOrAnEqualsSign) {
  ASSERT_TRUE(arguments.Parse({"--name", "a=b", "--count=7", "some text", "--loud", "--rate", "1e-1"}).ok());
  EXPECT_EQ(values.name, "a=b");
  EXPECT_EQ(values.count, 7);
  EXPECT_EQ(values.rate, 0.1);
  EXPECT_EQ(values.text, "some text");
  EXPECT_TRUE(values.loud);
  EXPECT_TRUE(arguments.given("count"));
}

TEST_F(ArgumentsTest, LeavesDefaultsAlone) {
  ASSERT_TRUE(arguments.Parse({"--loud=false"}).ok());
  EXPECT_EQ(values.name, "none");
  EXPECT_EQ(values.count, 3);
  EXPECT_FALSE(values.loud);
  EXPECT_FALSE(arguments.given("count"));
}

TEST_F(ArgumentsTest, NamesAnUnknownFlagAndItsNeighbour) {
  EXPECT_THAT(Error({"--cuont", "4"}), AllOf(HasSubstr("--cuont"), HasSubstr("did you mean --count?")));
  EXPECT_EQ(Error({"--zzzzzz"}), "unknown flag --zzzzzz");
}

TEST_F(ArgumentsTest, NamesFlagValueAndLimit) {
  EXPECT_EQ(Error({"--count", "11"}), "--count takes 1 … 10, not '11'");
  EXPECT_EQ(Error({"--count=x"}), "--count takes an integer, not 'x'");
  EXPECT_EQ(Error({"--count=99999999999999999999"}), "--count takes an integer, not '99999999999999999999'");
  EXPECT_EQ(Error({"--rate", "nan"}), "--rate takes a number, not 'nan'");
  EXPECT_EQ(Error({"--rate", "2.5"}), "--rate takes 0 … 2, not '2.5'");
  EXPECT_EQ(Error({"--loud=maybe"}), "--loud takes true or false, not 'maybe'");
  EXPECT_EQ(Error({"--name"}), "--name needs a value");
}

TEST_F(ArgumentsTest, TakesOneTextAndAnythingAfterTwoDashes) {
  EXPECT_EQ(Error({"one", "two"}), "unexpected argument 'two'");
  ASSERT_TRUE(arguments.Parse({"--", "--name"}).ok());
  EXPECT_EQ(values.text, "--name");
}

TEST_F(ArgumentsTest, HelpShowsFlagsDefaultsAndExample) {
  ASSERT_TRUE(arguments.Parse({"--help"}).ok());
  EXPECT_TRUE(arguments.help_wanted());
  EXPECT_THAT(arguments.Help(), AllOf(HasSubstr("usage: millrace test [TEXT]"), HasSubstr("--count"),
                                      HasSubstr("how many [3]"), HasSubstr("example:\n  millrace test")));
}

TEST(CheckAddress, WantsHostAndPort) {
  for (const char* good : {"127.0.0.1:1", "localhost:65535", "[::1]:80"})
    EXPECT_TRUE(CheckAddress("router", good).ok()) << good;
  for (const char* bad : {"", "host", ":80", "host:", "host:0", "host:65536", "host:x", "::1:80"}) {
    EXPECT_FALSE(CheckAddress("router", bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace millrace
