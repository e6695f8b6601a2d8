// Promises of traces: what the W3C's rules call malformed is as if it were not there, and spans carry ids as bytes.
#include <string>

#include "gtest/gtest.h"
#include "service/span.h"
#include "service/trace_context.h"

namespace millrace {
namespace {

constexpr char kGood[] = "00-0123456789abcdef00000000000000ff-00000000000000a1-01";

TEST(TraceContext, ReadsWhatItWrites) {
  const auto context = ParseTraceparent(kGood);
  ASSERT_TRUE(context.has_value());
  EXPECT_EQ(context->trace_high, 0x0123456789abcdefu);
  EXPECT_EQ(context->trace_low, 0xffu);
  EXPECT_EQ(context->span_id, 0xa1u);
  EXPECT_TRUE(context->sampled);
  EXPECT_EQ(FormatTraceparent(*context), kGood);
}

TEST(TraceContext, LooksAtTheSampledFlagAlone) {
  std::string text = kGood;
  for (const auto& [flags, sampled] : {std::pair{"00", false}, {"02", false}, {"03", true}, {"ff", true}}) {
    text.replace(53, 2, flags);
    ASSERT_TRUE(ParseTraceparent(text).has_value()) << flags;
    EXPECT_EQ(ParseTraceparent(text)->sampled, sampled) << flags;
  }
}

TEST(TraceContext, TakesNothingThatIsNotWellFormed) {
  for (size_t i = 0; i < sizeof(kGood) - 1; ++i) {
    for (const char c : {'g', 'A', ' ', '\0', '-', '\xff'}) {
      std::string text = kGood;
      if (text[i] == c) continue;
      text[i] = c;
      EXPECT_FALSE(ParseTraceparent(text).has_value()) << text;
    }
    EXPECT_FALSE(ParseTraceparent(std::string(kGood).substr(0, i)).has_value()) << i;
  }
  EXPECT_FALSE(ParseTraceparent("ff" + std::string(kGood + 2)).has_value());
  EXPECT_FALSE(ParseTraceparent("00-00000000000000000000000000000000-00000000000000a1-01").has_value());
  EXPECT_FALSE(ParseTraceparent("00-0123456789abcdef00000000000000ff-0000000000000000-01").has_value());
  EXPECT_FALSE(ParseTraceparent(std::string(kGood) + "-01").has_value());
}

TEST(TraceContext, ReadsLaterVersionsAsFarAsItKnowsThem) {
  const std::string later = "01" + std::string(kGood + 2);
  EXPECT_TRUE(ParseTraceparent(later).has_value());
  EXPECT_TRUE(ParseTraceparent(later + "-more").has_value());
  EXPECT_FALSE(ParseTraceparent(later + "more").has_value());
}

TEST(Span, CarriesIdsAsBytesMostSignificantFirst) {
  const TraceContext parent = *ParseTraceparent(kGood);
  const otlp::Span span = MakeSpan(parent, 0x1122334455667788, "name", otlp::Span::KIND_SERVER, 5, 7);
  EXPECT_EQ(span.trace_id(), std::string("\x01\x23\x45\x67\x89\xab\xcd\xef\0\0\0\0\0\0\0\xff", 16));
  EXPECT_EQ(span.span_id(), "\x11\x22\x33\x44\x55\x66\x77\x88");
  EXPECT_EQ(span.parent_span_id(), std::string("\0\0\0\0\0\0\0\xa1", 8));
  EXPECT_EQ(span.start_time_unix_nano(), 5000u);
  EXPECT_EQ(span.end_time_unix_nano(), 7000u);
  EXPECT_TRUE(MakeSpan({1, 2, 0, true}, 3, "first", otlp::Span::KIND_SERVER, 5, 7).parent_span_id().empty());
}

}  // namespace
}  // namespace millrace
