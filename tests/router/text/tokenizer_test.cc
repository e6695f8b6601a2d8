#include "router/text/tokenizer.h"

#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "router/text/detokenizer.h"
#include "tests/router/text/golden_file.h"
#include "tests/router/text/thread_seconds.h"

namespace millrace {
namespace {

using Ids = std::vector<int32_t>;
using nlohmann::json;

std::unique_ptr<Tokenizer> LoadFixture() {
  auto tokenizer = Tokenizer::Load(Fixture("tokenizer"));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}
json FixtureJson() { return json::parse(ReadText(Fixture("tokenizer") / "tokenizer.json")); }

Ids Encode(const Tokenizer& tokenizer, std::string_view text, Tokenizer::EncodeOptions options = {}) {
  const auto ids = tokenizer.Encode(text, options);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.ok() ? *ids : Ids();
}

int32_t Id(const Tokenizer& tokenizer, std::string_view token) { return tokenizer.TokenId(token).value(); }

TEST(Tokenizer, MergesTheLowestRankFirst) {
  const auto tokenizer = LoadFixture();
  EXPECT_EQ(Encode(*tokenizer, "hello world"), Ids({Id(*tokenizer, "hello"), Id(*tokenizer, " world")}));
  EXPECT_EQ(Encode(*tokenizer, "hell"), Ids({Id(*tokenizer, "hell")}));
  EXPECT_EQ(Encode(*tokenizer, "aaaaa"), Ids({Id(*tokenizer, "aaaa"), 'a'}));
  EXPECT_EQ(Encode(*tokenizer, ""), Ids());
}

// The two merging methods must agree; a plain quadratic merge is the judge.
TEST(Tokenizer, MergesLongPiecesLikeShortOnes) {
  const auto tokenizer = LoadFixture();
  const json file = FixtureJson();
  std::vector<std::pair<std::string, std::string>> merges;
  for (const std::string merge : file["model"]["merges"]) {
    merges.emplace_back(merge.substr(0, merge.find(' ')), merge.substr(merge.find(' ') + 1));
  }
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::string> symbols;
    std::string text;
    const size_t length = 1 + random() % 150;
    for (size_t i = 0; i < length; ++i) {
      text.push_back("helowrding"[random() % 3 == 0 ? random() % 10 : random() % 4]);
      if (random() % 3 == 0) text.back() = 'a';
      symbols.push_back(text.substr(i));
    }
    for (const auto& [left, right] : merges) {
      // One rank after the other, leftmost first: the same result as long as no later merge makes a pair of an earlier
      // rank, and these do not.
      for (size_t i = 0; i + 1 < symbols.size(); ++i) {
        if (symbols[i] != left || symbols[i + 1] != right) continue;
        symbols[i] += symbols[i + 1];
        symbols.erase(symbols.begin() + static_cast<int64_t>(i) + 1);
      }
    }
    Ids expected;
    for (const std::string& symbol : symbols) expected.push_back(Id(*tokenizer, symbol));
    EXPECT_EQ(Encode(*tokenizer, text), expected) << text;
  }
}

TEST(Tokenizer, AddsBosOnlyOnRequest) {
  const auto tokenizer = LoadFixture();
  EXPECT_EQ(Encode(*tokenizer, "hello", {.add_special_tokens = true}),
            Ids({*tokenizer->bos_id(), Id(*tokenizer, "hello")}));
  EXPECT_EQ(tokenizer->eos_id(), Id(*tokenizer, "<|im_end|>"));
}

TEST(Tokenizer, TreatsSpecialTokensAsTextOnRequest) {
  const auto tokenizer = LoadFixture();
  EXPECT_EQ(Encode(*tokenizer, "<|im_end|>"), Ids({Id(*tokenizer, "<|im_end|>")}));
  const Ids ids = Encode(*tokenizer, "<|im_end|><think>", {.special_as_text = true});
  for (const int32_t id : ids) EXPECT_FALSE(tokenizer->IsSpecial(id));
  EXPECT_EQ(ids.back(), Id(*tokenizer, "<think>"));
  EXPECT_EQ(tokenizer->Decode(ids, true), "<|im_end|><think>");
}

TEST(Tokenizer, RespectsTheFlagsOfAddedTokens) {
  const auto tokenizer = LoadFixture();
  const auto id = [&](std::string_view token) { return Id(*tokenizer, token); };
  EXPECT_EQ(Encode(*tokenizer, "h \n<mask> h"), Ids({'h', id("<mask>"), ' ', 'h'}));
  EXPECT_EQ(Encode(*tokenizer, "h <sep> \nh"), Ids({'h', ' ', id("<sep>"), 'h'}));
  EXPECT_EQ(Encode(*tokenizer, "ok"), Ids({id("ok")}));
  EXPECT_EQ(Encode(*tokenizer, "oks"), Ids({'o', 'k', 's'}));
  EXPECT_EQ(Encode(*tokenizer, "_ok"), Ids({'_', 'o', 'k'}));
  EXPECT_EQ(Encode(*tokenizer, "-ok-"), Ids({'-', id("ok"), '-'}));
}

TEST(Tokenizer, NeverTakesAControlTokenFromUserText) {
  const auto tokenizer = LoadFixture();
  const int32_t end = Id(*tokenizer, "<|im_end|>");
  const auto count = [&](const std::vector<Tokenizer::Piece>& pieces) {
    const auto ids = tokenizer->EncodePieces(pieces);
    EXPECT_TRUE(ids.ok());
    return std::count(ids->begin(), ids->end(), end);
  };
  EXPECT_EQ(count({{"hi", true}, {"<|im_end|>", false}}), 1);
  EXPECT_EQ(count({{"<|im_end|>", true}, {"<|im_end|>", false}}), 1);
  EXPECT_EQ(count({{"<|im_", false}, {"end|>", true}}), 0);
  EXPECT_EQ(count({{"<|im_", true}, {"end|>", false}}), 0);
  EXPECT_EQ(count({{"<|im_end|", true}, {"><|im_end|>", false}}), 1);
  EXPECT_EQ(count({{"<|im_", true}, {"", true}, {"end|>", true}}), 0);
}

TEST(Tokenizer, EncodesAcrossThePiecesOfAPrompt) {
  const auto tokenizer = LoadFixture();
  const auto ids = tokenizer->EncodePieces({{"\n", false}, {"\nhel", true}, {"lo", true}});
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(*ids, Encode(*tokenizer, "\n\nhello"));
}

TEST(Tokenizer, NamesTheOffsetOfInvalidUtf8) {
  const auto tokenizer = LoadFixture();
  for (const auto& [text, offset] : std::vector<std::pair<std::string, std::string>>{{"ab\xFF", "2"},
                                                                                     {"\xC0\x80", "0"},
                                                                                     {"a\xED\xA0\x80", "1"},
                                                                                     {"abcdefgh\xE2\x82", "8"},
                                                                                     {"\xF4\x90\x80\x80", "0"}}) {
    const auto ids = tokenizer->Encode(text, {});
    EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(ids.status().message()), testing::EndsWith("offset " + offset));
  }
}

TEST(Tokenizer, NormalisesToFormC) {
  const auto tokenizer = LoadFixture();
  EXPECT_EQ(Encode(*tokenizer, "e\xCC\x81"), Encode(*tokenizer, "\xC3\xA9"));
  // Marks are put in canonical order however long the run is.
  std::string marks = "a";
  for (int i = 0; i < 200'000; ++i) marks += "\xCC\x81\xCC\x96";
  EXPECT_TRUE(tokenizer->Encode(marks, {}).ok());
}

TEST(Tokenizer, DecodesWhatItEncoded) {
  const auto tokenizer = LoadFixture();
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 500; ++round) {
    std::string text;
    for (size_t i = random() % 60; i > 0; --i) {
      static const std::vector<std::string> kParts = {
          "hello", " world", "<|im_end|>", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\n", "\t", "ok", "\xC3\xA9", "1"};
      text += kParts[random() % kParts.size()];
    }
    const Ids ids = Encode(*tokenizer, text);
    EXPECT_EQ(tokenizer->Decode(ids, false), text);
    Detokenizer detokenizer(*tokenizer, false);
    std::string streamed;
    for (const int32_t id : ids) streamed += detokenizer.Append(id);
    EXPECT_EQ(streamed + detokenizer.Finish(), text);
  }
}

TEST(Detokenizer, WaitsForTheRestOfACharacter) {
  const auto tokenizer = LoadFixture();
  Detokenizer detokenizer(*tokenizer, true);
  EXPECT_EQ(detokenizer.Append(Id(*tokenizer, "\xE2\x82")), "");
  EXPECT_EQ(detokenizer.Append(*tokenizer->bos_id()), "");
  EXPECT_EQ(detokenizer.Append(0xAC), "\xE2\x82\xAC");
  EXPECT_EQ(detokenizer.Append(0xE2), "");
  EXPECT_EQ(detokenizer.Append('h'), "\xEF\xBF\xBDh");
  EXPECT_EQ(detokenizer.Append(0xF0), "");
  EXPECT_EQ(detokenizer.Append(1'000'000), "");
  EXPECT_EQ(detokenizer.Append(-1), "");
  EXPECT_EQ(detokenizer.Finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(detokenizer.Finish(), "");
}

TEST(Tokenizer, StaysNearLinearOnLongPieces) {
  const auto tokenizer = LoadFixture();
  const double start = ThreadSeconds();
  for (const char* unit : {"a", " ", "hello", "\xE4\xB8\xAD", "<|im_end|", "<"}) {
    std::string text;
    while (text.size() < 2'000'000) text += unit;
    EXPECT_EQ(tokenizer->Decode(Encode(*tokenizer, text), false).size(), text.size());
  }
  // Quadratic merging would take hours.
  EXPECT_LT(ThreadSeconds() - start, 60);
  EXPECT_EQ(tokenizer->Encode(std::string(Tokenizer::kMaxTextBytes + 1, 'a'), {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Tokenizer, ServesManyThreadsAtOnce) {
  const auto tokenizer = LoadFixture();
  const Ids expected = Encode(*tokenizer, "hello world<|im_end|> e\xCC\x81");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) EXPECT_EQ(Encode(*tokenizer, "hello world<|im_end|> e\xCC\x81"), expected);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Hostile files.

absl::Status LoadStatus(const json& file) {
  return Tokenizer::FromJson(file.dump(-1, ' ', false, json::error_handler_t::replace)).status();
}

TEST(TokenizerFile, IsRefusedWhenCutAnywhere) {
  const std::string text = ReadText(Fixture("tokenizer") / "tokenizer.json");
  for (size_t length = 0; length + 1 < text.size(); length += 37) {
    EXPECT_FALSE(Tokenizer::FromJson(text.substr(0, length)).ok()) << length;
  }
}

TEST(TokenizerFile, SurvivesFlippedBytes) {
  const std::string text = ReadText(Fixture("tokenizer") / "tokenizer.json");
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 400; ++round) {
    std::string broken = text;
    for (int flips = 1 + static_cast<int>(random() % 4); flips > 0; --flips) {
      broken[random() % broken.size()] = static_cast<char>(random());
    }
    const auto tokenizer = Tokenizer::FromJson(broken);
    if (tokenizer.ok()) (void)(*tokenizer)->Encode("hello world ok <mask>", {.add_special_tokens = true});
  }
}

TEST(TokenizerFile, IsRefusedWithImpossibleIds) {
  for (const json& id :
       {json(-1), json(1LL << 40), json(18446744073709551615ULL), json(1.5), json("1"), json(nullptr), json::array()}) {
    json file = FixtureJson();
    file["model"]["vocab"]["zz"] = id;
    EXPECT_EQ(LoadStatus(file).code(), absl::StatusCode::kInvalidArgument) << id;
    file = FixtureJson();
    file["added_tokens"][0]["id"] = id;
    EXPECT_EQ(LoadStatus(file).code(), absl::StatusCode::kInvalidArgument) << id;
  }
  json file = FixtureJson();
  file["post_processor"]["special_tokens"]["<s>"]["ids"] = {5000};
  EXPECT_EQ(LoadStatus(file).code(), absl::StatusCode::kInvalidArgument);
}

TEST(TokenizerFile, IsRefusedWithDuplicates) {
  json file = FixtureJson();
  file["model"]["vocab"]["zz"] = 5;
  EXPECT_EQ(LoadStatus(file).code(), absl::StatusCode::kInvalidArgument);
  file = FixtureJson();
  file["added_tokens"].push_back(file["added_tokens"][0]);
  EXPECT_EQ(LoadStatus(file).code(), absl::StatusCode::kInvalidArgument);
}

TEST(TokenizerFile, IsRefusedWithMergesThatMakeNoToken) {
  for (const json& merge : {json("h"), json("h e x"), json(" h"), json("h "), json("q z"), json({"h"}), json({"h", 1}),
                            json({"", "h"}), json(7), json(nullptr)}) {
    json file = FixtureJson();
    file["model"]["merges"].push_back(merge);
    EXPECT_EQ(LoadStatus(file).code(), absl::StatusCode::kInvalidArgument) << merge;
  }
}

TEST(TokenizerFile, MayRepeatMergesInAnyOrder) {
  json file = FixtureJson();
  for (int i = 0; i < 3; ++i) file["model"]["merges"].push_back("h e");
  const auto tokenizer = Tokenizer::FromJson(file.dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(Encode(**tokenizer, "he").size(), 1u);
}

TEST(TokenizerFile, MayHoldAMillionMerges) {
  std::string text = FixtureJson().dump();
  std::string more;
  for (int i = 0; i < 1'000'000; ++i) more += ",\"a a\"";
  text.insert(text.find("\"a a\"") + 5, more);
  const auto tokenizer = Tokenizer::FromJson(text);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
}

TEST(TokenizerFile, IsRefusedWhenNestedDeeply) {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  EXPECT_EQ(Tokenizer::FromJson(deep).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Tokenizer::FromJson("{\"model\":" + deep + "}").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TokenizerFile, NamesWhatIsNotServed) {
  json file = FixtureJson();
  file["model"]["type"] = "Unigram";
  EXPECT_EQ(LoadStatus(file).code(), absl::StatusCode::kUnimplemented);
  file = FixtureJson();
  file["normalizer"] = {{"type", "Replace"}};
  EXPECT_EQ(LoadStatus(file).code(), absl::StatusCode::kUnimplemented);
  file = FixtureJson();
  file["pre_tokenizer"] = {{"type", "Metaspace"}};
  EXPECT_EQ(LoadStatus(file).code(), absl::StatusCode::kUnimplemented);
  file = FixtureJson();
  file["pre_tokenizer"] = nullptr;
  EXPECT_EQ(LoadStatus(file).code(), absl::StatusCode::kUnimplemented);
}

json WithPattern(const std::string& pattern) {
  json file = FixtureJson();
  file["pre_tokenizer"] = {{"type", "Sequence"},
                           {"pretokenizers",
                            {{{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}},
                             {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  return file;
}

TEST(TokenizerFile, MayNotHangOnItsRegularExpression) {
  for (const char* pattern : {"(", "[", "(?<n>", "\\", "a{99999}", "\\C"}) {
    EXPECT_EQ(LoadStatus(WithPattern(pattern)).code(), absl::StatusCode::kInvalidArgument) << pattern;
  }
  const auto catastrophic = Tokenizer::FromJson(WithPattern("(a+)+[bc]").dump());
  ASSERT_TRUE(catastrophic.ok()) << catastrophic.status();
  EXPECT_EQ((*catastrophic)->Encode(std::string(40, 'a'), {}).status().code(), absl::StatusCode::kResourceExhausted);
  const auto empty = Tokenizer::FromJson(WithPattern("x*").dump());
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_EQ((*empty)->Decode(Encode(**empty, "a\xE2\x82\xACxx"), false), "a\xE2\x82\xACxx");
  const auto behind = Tokenizer::FromJson(WithPattern("(?=a\\K)").dump());
  if (behind.ok()) (void)(*behind)->Encode("aaaa", {});
}

TEST(TokenizerFile, UsesUnicodeWhiteSpace) {
  const auto tokenizer = Tokenizer::FromJson(WithPattern("[^\\s]+|\\s+").dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  // U+180E is no white space: "l", U+180E and "l" are one piece; U+0085 is, and parts the letters.
  EXPECT_TRUE((*tokenizer)->Encode("l\xE1\xA0\x8El", {}).ok());
  EXPECT_EQ(Encode(**tokenizer, "he\xC2\x85llo"), Ids({Id(**tokenizer, "he"), 0xC2, 0x85, Id(**tokenizer, "ll"), 'o'}));
}

}  // namespace
}  // namespace millrace
