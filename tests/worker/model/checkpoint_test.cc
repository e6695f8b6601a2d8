#include "worker/model/checkpoint.h"

#include <cmath>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fixtures.h"
#include "tests/worker/model/temp_folder.h"
#include "worker/model/model_config.h"
#include "worker/model/weights.h"

namespace millrace {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

template <class T>
std::string Bytes(std::vector<T> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::string File(const std::string& header, const std::string& data) {
  return Bytes<uint64_t>({header.size()}) + header + data;
}

absl::StatusOr<SafetensorsFile> Open(const std::string& bytes) {
  const TempFolder folder;
  folder.Write("model.safetensors", bytes);
  return SafetensorsFile::Open(folder.path() / "model.safetensors");
}
std::string Complaint(const std::string& header, size_t data_bytes) {
  return std::string(Open(File(header, std::string(data_bytes, '\0'))).status().message());
}

std::vector<float> Values(const SafetensorsFile& file, const std::string& name, int64_t size) {
  std::vector<float> values(static_cast<size_t>(size));
  const auto tensor = file.Get(name, {size});
  EXPECT_TRUE(tensor.ok()) << tensor.status();
  if (tensor.ok()) tensor->CopyTo({values.data(), size});
  return values;
}

TEST(Safetensors, ReadsEveryWeightType) {
  const auto file = Open(File(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},)"
      R"("h":{"dtype":"F16","shape":[4],"data_offsets":[4,12]},"f":{"dtype":"F32","shape":[2],"data_offsets":[12,20]},)"
      R"("empty":{"dtype":"F32","shape":[0,7],"data_offsets":[12,12]}})",
      Bytes<uint16_t>({0x3f80, 0xc000, 0x3c00, 0xfbff, 0x0001, 0x8400}) + Bytes<float>({0.1f, -3e38f})));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(Values(*file, "b", 2), ElementsAre(1, -2));
  EXPECT_THAT(Values(*file, "h", 4), ElementsAre(1, -65504, std::ldexp(1.0f, -24), -std::ldexp(1.0f, -14)));
  EXPECT_THAT(Values(*file, "f", 2), ElementsAre(0.1f, -3e38f));
}

TEST(Safetensors, RoundsMatricesToNearestEven) {
  // Halfway between the bf16 numbers 1 and 1 + 2^-7, and between 1 + 2^-7 and 1 + 2^-6; the header's length leaves them
  // unaligned.
  const auto file = Open(File(R"({"f":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]} })",
                              Bytes<float>({1 + std::ldexp(1.0f, -8), 1 + 3 * std::ldexp(1.0f, -8)})));
  ASSERT_TRUE(file.ok()) << file.status();
  std::vector<bf16> staging;
  const Mat<const bf16> matrix = file->Get("f", {1, 2})->AsMatrix(staging);
  EXPECT_EQ(matrix.data[0].bits, 0x3f80);
  EXPECT_EQ(matrix.data[1].bits, 0x3f82);
}

TEST(Safetensors, AMatrixOfUnalignedBf16IsCopied) {
  const std::string header = R"({"b":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}})";
  for (const char* padding : {"", " "}) {
    const auto file = Open(File(header + padding, Bytes<uint16_t>({0x3f80, 0xc000})));
    std::vector<bf16> staging;
    const Mat<const bf16> matrix = file->Get("b", {1, 2})->AsMatrix(staging);
    EXPECT_EQ(matrix.data[1].bits, 0xc000);
  }
}

TEST(Safetensors, ProvesTheShape) {
  const auto file = Open(File(
      R"({"w":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]},"i":{"dtype":"I8","shape":[2],"data_offsets":[12,14]}})",
      std::string(14, '\0')));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(std::string(file->Get("w", {2, 3}).status().message()),
              AllOf(HasSubstr("[3, 2]"), HasSubstr("needs [2, 3]")));
  EXPECT_EQ(file->Get("v", {2, 3}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(file->Get("i", {2}).status().message()), HasSubstr("BF16, F16 or F32"));
}

TEST(Safetensors, RefusesEveryInconsistentHeader) {
  EXPECT_THAT(std::string(Open("short").status().message()), HasSubstr("5 bytes"));
  EXPECT_THAT(std::string(Open(Bytes<uint64_t>({UINT64_MAX}) + "{}").status().message()),
              HasSubstr("18446744073709551615"));
  EXPECT_THAT(std::string(Open(Bytes<uint64_t>({3}) + "{}").status().message()), HasSubstr("the limit is 2"));
  EXPECT_THAT(Complaint("[]", 0), HasSubstr("not a JSON object"));
  EXPECT_THAT(Complaint(R"({"a":[1]})", 0), HasSubstr("is not an object"));
  EXPECT_THAT(Complaint(R"({"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}})", 1),
              HasSubstr("unknown dtype \"Q4\""));
  EXPECT_THAT(Complaint(R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,1]}})", 1), HasSubstr("unknown dtype 7"));
  EXPECT_THAT(Complaint(R"({"a":{"dtype":"I8","shape":[-1],"data_offsets":[0,1]}})", 1), HasSubstr("dimension -1"));
  EXPECT_THAT(Complaint(R"({"a":{"dtype":"I8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0),
              HasSubstr("impossible dimension"));
  EXPECT_THAT(Complaint(R"({"a":{"dtype":"I8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1),
              HasSubstr("8 dimensions"));
  EXPECT_THAT(Complaint(R"({"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}})", 3), HasSubstr("0 to 4 in 3 bytes"));
  EXPECT_THAT(Complaint(R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[3,2]}})", 4), HasSubstr("3 to 2"));
  EXPECT_THAT(Complaint(R"({"a":{"dtype":"I8","shape":[3],"data_offsets":[0,4]}})", 4),
              HasSubstr("4 bytes; its shape and dtype need 3"));
  EXPECT_THAT(Complaint(R"({"a":{"dtype":"I8","shape":[3],"data_offsets":[0,3,4]}})", 4), HasSubstr("not two numbers"));
  EXPECT_THAT(
      Complaint(
          R"({"a":{"dtype":"I8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"I8","shape":[2],"data_offsets":[2,4]}})",
          4),
      HasSubstr("begins at 2; the one before it ends at 3"));
  EXPECT_THAT(
      Complaint(
          R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"I8","shape":[2],"data_offsets":[2,4]}})",
          4),
      HasSubstr("begins at 2; the one before it ends at 1"));
  EXPECT_THAT(Complaint(R"({"a":{"dtype":"I8","shape":[3],"data_offsets":[0,3]}})", 4),
              HasSubstr("4 bytes of data; its header describes 3"));
  EXPECT_THAT(
      Complaint(
          R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}})",
          1),
      HasSubstr("twice"));
  EXPECT_THAT(Complaint(std::string(100000, '['), 0), HasSubstr("nested"));
}

TEST(Safetensors, ATruncatedFileIsRefusedAtOpen) {
  const std::string whole = ReadBytes(Fixture("qwen2-tiny-5x16") / "model.safetensors");
  for (const size_t bytes : {size_t{0}, size_t{7}, size_t{8}, size_t{100}, whole.size() / 2, whole.size() - 1}) {
    EXPECT_FALSE(Open(whole.substr(0, bytes)).ok()) << bytes;
  }
  EXPECT_FALSE(Open(whole + '\0').ok());
}

// Whatever one byte of the header becomes, opening succeeds or says why not; what it gives can be read to its last
// byte.
TEST(Safetensors, SurvivesEveryFlippedHeaderByte) {
  const std::string header =
      R"({"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})";
  const std::string whole = File(header, std::string(16, '\1'));
  const TempFolder folder;
  for (size_t at = 0; at < 8 + header.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << bit));
      folder.Write("model.safetensors", flipped);
      const auto file = SafetensorsFile::Open(folder.path() / "model.safetensors");
      if (!file.ok()) continue;
      for (const auto& [name, tensor] : file->tensors()) {
        if (tensor.type == Tensor::Type::kOther) continue;
        int64_t size = 1;
        for (const int64_t n : tensor.shape) size *= n;
        std::vector<float> values(static_cast<size_t>(size));
        tensor.CopyTo({values.data(), size});
      }
    }
  }
}

class Shards : public testing::Test {
 protected:
  Shards() { folder_.CopyFrom(Fixture("qwen3-tiny-untied")); }
  std::string Complaint() const { return std::string(Checkpoint::Open(folder_.path()).status().message()); }
  void WriteIndex(const std::string& shard) const {
    folder_.Write("model.safetensors.index.json", R"({"weight_map":{"model.norm.weight":)" + shard + "}}");
  }
  TempFolder folder_;
};

TEST_F(Shards, GiveTensorsOfEveryShard) {
  const auto checkpoint = Checkpoint::Open(folder_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_TRUE(checkpoint->Get("lm_head.weight", {1024, 128}).ok());
  EXPECT_TRUE(checkpoint->Get("model.embed_tokens.weight", {1024, 128}).ok());
  EXPECT_EQ(checkpoint->Get("model.layers.3.input_layernorm.weight", {128}).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(Shards, AMissingShardIsNamed) {
  std::filesystem::remove(folder_.path() / "model-00002-of-00002.safetensors");
  EXPECT_THAT(Complaint(), HasSubstr("model-00002-of-00002.safetensors is not a file"));
}

TEST_F(Shards, AShardIsAFileOfTheFolder) {
  for (const char* name : {R"("../model.safetensors")", R"("/etc/passwd")", R"("..")", R"("")", R"("a/b")", R"("a\\b")",
                           R"("a\u0000b")", "7"}) {
    WriteIndex(name);
    EXPECT_THAT(Complaint(), HasSubstr("must be a file name")) << name;
  }
}

TEST_F(Shards, ATensorMustBeInTheShardThatTheIndexNames) {
  const std::string lm_head_only = File(R"({"lm_head.weight":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}})", "");
  folder_.Write("other.safetensors", lm_head_only);
  WriteIndex(R"("other.safetensors")");
  EXPECT_THAT(Complaint(), HasSubstr("is not in its shard other.safetensors"));
}

TEST_F(Shards, AnIndexWithoutAMapIsRefused) {
  for (const char* text : {"", "[]", "{}", R"({"weight_map":[]})", "{\"weight_map\":{\"a\":\"b\",\"a\":\"c\"}}"}) {
    folder_.Write("model.safetensors.index.json", text);
    EXPECT_FALSE(Checkpoint::Open(folder_.path()).ok()) << text;
  }
}

TEST(Weights, AMissingOrMisshapenTensorIsNamedBeforeMemoryIsTaken) {
  const auto config = ModelConfig::Load(Fixture("qwen2-tiny-5x16"));
  const auto checkpoint = Checkpoint::Open(Fixture("qwen2-tiny-5x16"));
  Stream stream = Stream::OpenCpu(1);
  ASSERT_TRUE(LoadWeights(*config, *checkpoint, stream).ok());

  ModelConfig larger = *config;
  larger.num_layers = 512;
  EXPECT_THAT(std::string(LoadWeights(larger, *checkpoint, stream).status().message()),
              HasSubstr("no tensor model.layers.2."));
  larger = *config;
  larger.intermediate_size = 1 << 18;
  EXPECT_THAT(std::string(LoadWeights(larger, *checkpoint, stream).status().message()),
              HasSubstr("needs [262144, 80]"));
  larger = *config;
  larger.tied_embeddings = false;
  EXPECT_THAT(std::string(LoadWeights(larger, *checkpoint, stream).status().message()), HasSubstr("lm_head.weight"));
}

}  // namespace
}  // namespace millrace
