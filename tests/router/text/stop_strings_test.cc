#include "router/text/stop_strings.h"

#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace millrace {
namespace {

TEST(StopStrings, HoldBackWhatMayBecomeAStop) {
  StopStrings stops({"<end>"}, false);
  EXPECT_EQ(stops.Append("hello <e").text, "hello ");
  EXPECT_EQ(stops.Append("n").text, "");
  EXPECT_EQ(stops.Append("joy").text, "<enjoy");
  EXPECT_EQ(stops.Append("<<en").text, "<");
  const auto result = stops.Append("d> more");
  EXPECT_EQ(result.text, "");
  EXPECT_TRUE(result.stopped);
  EXPECT_EQ(result.matched, 0);
  EXPECT_EQ(stops.Append("later").text, "");
  EXPECT_TRUE(stops.Append("later").stopped);
  EXPECT_EQ(stops.Finish(), "");
}

TEST(StopStrings, GiveTheRestWhenTheStreamEnds) {
  StopStrings stops({"abc"}, false);
  EXPECT_EQ(stops.Append("xab").text, "x");
  EXPECT_EQ(stops.Finish(), "ab");
}

TEST(StopStrings, IncludeTheStopOnRequest) {
  StopStrings stops({"abc"}, true);
  EXPECT_EQ(stops.Append("xa").text, "x");
  EXPECT_EQ(stops.Append("bcd").text, "abc");
}

TEST(StopStrings, ReportTheLongestOfThoseThatEndTogether) {
  StopStrings stops({"c", "abc", "bc"}, false);
  const auto result = stops.Append("zabcz");
  EXPECT_EQ(result.text, "z");
  EXPECT_EQ(result.matched, 1);
}

TEST(StopStrings, WithoutStopsPassEverything) {
  StopStrings stops({}, false);
  EXPECT_EQ(stops.Append("abc").text, "abc");
  EXPECT_FALSE(stops.Append("d").stopped);
}

// The first byte that completes a stop ends the stream, whatever the cuts; what was sent is the text before it.
TEST(StopStrings, DoNotDependOnHowTheTextIsCut) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto word = [&](size_t longest) {
    std::string out;
    for (size_t i = 1 + random() % longest; i > 0; --i) out.push_back("ab"[random() % 2]);
    return out;
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops;
    for (size_t i = random() % 4; i > 0; --i) stops.push_back(word(6));
    const std::string text = word(40);
    std::string expected = text;
    bool expected_stop = false;
    for (size_t end = 1; end <= text.size() && !expected_stop; ++end) {
      size_t longest = 0;
      for (const std::string& stop : stops) {
        if (stop.size() <= end && text.compare(end - stop.size(), stop.size(), stop) == 0)
          longest = std::max(longest, stop.size());
      }
      expected_stop = longest > 0;
      if (expected_stop) expected = text.substr(0, end - longest);
    }
    StopStrings watch(stops, false);
    std::string sent;
    bool stopped = false;
    for (size_t at = 0; at < text.size();) {
      const size_t length = 1 + random() % 5;
      const auto result = watch.Append(std::string_view(text).substr(at, length));
      sent += result.text;
      stopped = result.stopped;
      at += length;
    }
    EXPECT_EQ(sent + watch.Finish(), expected) << text << " " << testing::PrintToString(stops);
    EXPECT_EQ(stopped, expected_stop);
  }
}

}  // namespace
}  // namespace millrace
