#include "service/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace millrace {
namespace {

using testing::HasSubstr;

size_t LinesWith(const std::string& text, absl::string_view part) {
  size_t count = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) count += absl::StrContains(line, part);
  return count;
}

TEST(LogTest, WritesWhatALevelAllows) {
  testing::internal::CaptureStderr();
  SetLogLevel(LogLevel::kWarning);
  Log(LogLevel::kInfo, "quiet");
  Log(LogLevel::kError, "loud", {{"why", "a \"reason\"\n"}, {"count", 3}});
  SetLogLevel(LogLevel::kInfo);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(LinesWith(text, "quiet"), 0u);
  EXPECT_THAT(text, HasSubstr(R"( error loud why="a \"reason\"\n" count=3)"));
}

TEST(LogTest, KnowsItsLevelsByName) {
  EXPECT_EQ(*ParseLogLevel("debug"), LogLevel::kDebug);
  EXPECT_EQ(*ParseLogLevel("error"), LogLevel::kError);
  EXPECT_THAT(std::string(ParseLogLevel("loud").status().message()), HasSubstr("log level is \"loud\""));
}

TEST(LogTest, AFloodOfOneLevelIsBoundedCountedAndHidesNoOther) {
  const uint64_t before = LogLinesDropped();
  constexpr uint64_t kLines = 20 * kMaxLogLinesPerSecond;
  testing::internal::CaptureStderr();
  for (uint64_t i = 0; i < kLines; ++i) Log(LogLevel::kInfo, "flood");
  Log(LogLevel::kError, "important");
  const std::string text = testing::internal::GetCapturedStderr();
  const uint64_t dropped = LogLinesDropped() - before, written = LinesWith(text, " flood");
  EXPECT_EQ(written + dropped, kLines);
  EXPECT_GT(dropped, 0u);
  EXPECT_EQ(LinesWith(text, " important"), 1u);
  EXPECT_GE(LinesWith(text, "log_lines_dropped count="), 1u);
}

// Nobody reads the pipe: a line more than it holds would wait for ever.
TEST(LogTest, AReaderThatDoesNotReadStopsNobody) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int kept = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  const std::string value(400, 'x');
  const uint64_t before = LogLinesDropped();
  constexpr int kLines = 500;  // of more than 400 bytes each, into 64 KiB
  for (int i = 0; i < kLines; ++i) Log(LogLevel::kError, "unread", {{"value", value}});
  dup2(kept, STDERR_FILENO);
  EXPECT_GT(LogLinesDropped() - before, 300u);
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  std::string text(1 << 20, ' ');
  const ssize_t size = read(ends[0], text.data(), text.size());
  ASSERT_GT(size, 0);
  text.resize(static_cast<size_t>(size));
  EXPECT_EQ(LinesWith(text, " unread value=") + (LogLinesDropped() - before), kLines);
  for (const int fd : {ends[0], ends[1], kept}) close(fd);
}

}  // namespace
}  // namespace millrace
