// Four real tokenizers against what the Hugging Face library computed.
#include <memory>
#include <string>
#include <vector>

#include "router/text/detokenizer.h"
#include "router/text/tokenizer.h"
#include "tests/router/text/golden_file.h"

namespace millrace {
namespace {

using Ids = std::vector<int32_t>;

class GoldenTokenizer : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    MILLRACE_NEEDS_GOLDEN("tokenizers");
    dir_ = Golden("tokenizers") / GetParam();
    auto tokenizer = Tokenizer::FromJson(ReadGzip(dir_ / "tokenizer.json.gz"));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = *std::move(tokenizer);
  }

  Ids Encode(const std::string& text, Tokenizer::EncodeOptions options) {
    auto ids = tokenizer_->Encode(text, options);
    EXPECT_TRUE(ids.ok()) << ids.status();
    return ids.ok() ? *ids : Ids();
  }

  std::filesystem::path dir_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_P(GoldenTokenizer, EncodesAndDecodesEveryCase) {
  const auto golden = ReadJson(dir_ / "encode.json");
  ASSERT_GE(golden["cases"].size(), 300u);
  for (const auto& row : golden["cases"]) {
    const std::string text = row["text"];
    const Ids ids = row["ids"];
    SCOPED_TRACE(row["group"].get<std::string>() + ": " + testing::PrintToString(text.substr(0, 80)));
    EXPECT_EQ(Encode(text, {}), ids);
    EXPECT_EQ(Encode(text, {.add_special_tokens = true}), row.value("ids_with_special", ids));
    EXPECT_EQ(Encode(text, {.special_as_text = true}), row.value("ids_text_only", ids));
    const std::string decoded = row.value("decoded", text);
    EXPECT_EQ(tokenizer_->Decode(ids, false), decoded);
    EXPECT_EQ(tokenizer_->Decode(ids, true), row.value("decoded_skip_special", decoded));
  }
}

TEST_P(GoldenTokenizer, EncodesUserTextAloneAsTextOnly) {
  const auto golden = ReadJson(dir_ / "encode.json");
  for (const auto& row : golden["cases"]) {
    const std::string text = row["text"];
    const auto ids = tokenizer_->EncodePieces({{text, true}});
    ASSERT_TRUE(ids.ok());
    EXPECT_EQ(*ids, row.value("ids_text_only", row["ids"].get<Ids>())) << text;
  }
}

TEST_P(GoldenTokenizer, StreamsPrefixesThatNeverChange) {
  const auto golden = ReadJson(dir_ / "stream.json");
  for (const auto& row : golden["cases"]) {
    const Ids ids = row["ids"];
    Detokenizer detokenizer(*tokenizer_, false);
    std::string text;
    for (size_t i = 0; i < ids.size(); ++i) {
      text += detokenizer.Append(ids[i]);
      const std::string prefix = row["prefix_text"][i];
      // The stream may wait with one unfinished character, which the golden prefix shows as U+FFFD.
      EXPECT_TRUE(text == prefix || text + "\xEF\xBF\xBD" == prefix) << text << " | " << prefix;
    }
    text += detokenizer.Finish();
    EXPECT_EQ(text, ids.empty() ? "" : row["prefix_text"].back().get<std::string>());
  }
}

TEST_P(GoldenTokenizer, KnowsTheBytesOfTokens) {
  const auto golden = ReadJson(dir_ / "tokens.json");
  int checked = 0;
  for (const auto& row : golden["cases"]) {
    if (row["bytes"].is_null()) {
      EXPECT_EQ(tokenizer_->TokenId(row["text"].get<std::string>()), row["id"].get<int32_t>());
      EXPECT_EQ(tokenizer_->IsSpecial(row["id"]), row["special"].get<bool>());
      continue;
    }
    std::string bytes;
    const std::string hex = row["bytes"];
    for (size_t i = 0; i < hex.size(); i += 2)
      bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    EXPECT_EQ(tokenizer_->TokenBytes(row["id"]), bytes) << row["id"];
    EXPECT_FALSE(tokenizer_->IsSpecial(row["id"])) << row["id"];
    ++checked;
  }
  EXPECT_GT(checked, 50);
}

INSTANTIATE_TEST_SUITE_P(All, GoldenTokenizer,
                         testing::Values("smollm2", "qwen3", "mistral-nemo-tekken", "llama3-style"),
                         [](const auto& test) {
                           std::string name = test.param;
                           for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           return name;
                         });

TEST(GoldenModelFolder, LoadsEveryTinyModel) {
  MILLRACE_NEEDS_GOLDEN("tiny");
  for (const auto& dir : std::filesystem::directory_iterator(Golden("tiny"))) {
    if (!dir.is_directory()) continue;
    const auto tokenizer = Tokenizer::Load(dir.path());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    EXPECT_EQ((*tokenizer)->vocab_size(), 700);
    EXPECT_EQ((*tokenizer)->eos_id(), 2);
    EXPECT_EQ((*tokenizer)->Decode({699, 700, 5000, -1}, false), (*tokenizer)->TokenBytes(699));
  }
}

}  // namespace
}  // namespace millrace
