// An output element's bits depend neither on the rows that share the call, nor on threads, nor on the instruction set.
#include "tests/kernels/paged.h"

namespace millrace {
namespace {

constexpr float kEps = 1e-6f;
constexpr int kDim = 48, kHeads = 6, kKvHeads = 2, kTokens = 200, kIn = 300, kOut = 555;

template <class A>
class BitInvariance : public testing::Test {};
using Activations = testing::Types<float, bf16>;
TYPED_TEST_SUITE(BitInvariance, Activations);

template <class A>
struct Outputs {
  std::vector<A> linear, norm, silu, attention;
  std::vector<float> logits;
};

template <class T>
void Append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

// Every op over kTokens rows, `chunk` rows a call; attention as a prefill in chunks of one sequence.
template <class A>
Outputs<A> RunChunked(int64_t chunk, int threads, cpu::Isa isa) {
  Stream stream = TestStream(threads, isa);
  auto x = Array<A>::Random(kTokens, kIn, 1);
  const auto w = Array<bf16>::Random(kOut, kIn, 2);
  const auto residual = Array<float>::Random(kTokens, kIn, 8);
  const auto weight = Array<float>::Random(1, kIn, 3), bias = Array<float>::Random(1, kOut, 4);
  const auto cos = Array<float>::Random(kTokens, kDim / 2, 5), sin = Array<float>::Random(kTokens, kDim / 2, 6);
  const auto head_norm = Array<float>::Random(1, kDim, 7);
  const Packed packed(w, stream);
  PagedBatch<A> pages(kHeads, kKvHeads, kDim, {kTokens}, {kTokens});
  Outputs<A> all;
  for (int64_t begin = 0; begin < kTokens; begin += chunk) {
    const int64_t rows = std::min(chunk, kTokens - begin);
    Array<A> y(rows, kOut), norm(rows, kIn), silu(rows, kIn / 2), attention(rows, kHeads * kDim);
    Array<float> logits(rows, kOut);
    const Mat<const A> part = x.view().Rows(begin, rows);
    Linear(y.mat(), part, packed.weight, bias.vec(), stream);
    Linear(logits.mat(), part, packed.weight, {}, stream);
    RmsNorm(norm.mat(), residual.view().Rows(begin, rows), weight.vec(), kEps, stream);
    SiluMul(silu.mat(), part, stream);
    std::vector<int32_t> positions, slots;
    for (int64_t t = begin; t < begin + rows; ++t) {
      positions.push_back(static_cast<int32_t>(t));
      slots.push_back(pages.block_table.values[t / kBlockTokens] * kBlockTokens +
                      static_cast<int32_t>(t % kBlockTokens));
    }
    const Mat<A> qkv = pages.qkv.mat().Rows(begin, rows);
    RopeAppend(qkv, pages.kv(), head_norm.vec(), head_norm.vec(), kEps, RopeTable{cos.view(), sin.view()},
               View(positions), View(slots), stream);
    const std::vector<int32_t> start = {0, static_cast<int32_t>(rows)}, context = {static_cast<int32_t>(begin + rows)};
    PagedAttention(attention.mat(), Mat<const A>(qkv), pages.kv(),
                   AttentionBatch{View(start), View(context), pages.block_table.view()}, 0.2f, stream);
    Append(all.linear, y.values);
    Append(all.logits, logits.values);
    Append(all.norm, norm.values);
    Append(all.silu, silu.values);
    Append(all.attention, attention.values);
  }
  return all;
}

template <class A>
void ExpectSame(const Outputs<A>& a, const Outputs<A>& b) {
  EXPECT_TRUE(SameBits(a.linear, b.linear));
  EXPECT_TRUE(SameBits(a.logits, b.logits));
  EXPECT_TRUE(SameBits(a.norm, b.norm));
  EXPECT_TRUE(SameBits(a.silu, b.silu));
  EXPECT_TRUE(SameBits(a.attention, b.attention));
}

TYPED_TEST(BitInvariance, HoldsUnderChunkingThreadsAndInstructionSets) {
  const auto whole = RunChunked<TypeParam>(kTokens, 1, cpu::BestIsa());
  for (const cpu::Isa isa : SupportedIsas()) {
    for (const int threads : {1, 2, 3}) {
      for (const int64_t chunk : {1, 7, 64, kTokens}) {
        SCOPED_TRACE(testing::Message() << "isa " << static_cast<int>(isa) << ", " << threads << " threads, chunks of "
                                        << chunk);
        ExpectSame(whole, RunChunked<TypeParam>(chunk, threads, isa));
      }
    }
  }
}

TYPED_TEST(BitInvariance, HoldsForADecodingRowAloneAndAmong64) {
  std::vector<int> rows(64, 1), contexts;
  for (int s = 0; s < 64; ++s) contexts.push_back(1 + s * 37 % 300);
  PagedBatch<TypeParam> b(kHeads, kKvHeads, kDim, rows, contexts);
  Stream stream = TestStream(3);
  Array<TypeParam> together(64, kHeads * kDim), alone(64, kHeads * kDim);
  PagedAttention(together.mat(), b.qkv.view(), b.kv(), b.batch(), 0.2f, stream);
  for (int s = 0; s < 64; ++s) {
    const std::vector<int32_t> start = {0, 1}, context = {contexts[s]};
    PagedAttention(alone.mat().Rows(s, 1), b.qkv.view().Rows(s, 1), b.kv(),
                   AttentionBatch{View(start), View(context), b.block_table.view().Rows(s, 1)}, 0.2f, stream);
  }
  EXPECT_TRUE(SameBits(together.values, alone.values));
}

TEST(SamplingInvariance, HoldsUnderThreadsAndInstructionSets) {
  constexpr int64_t kRows = 64, kVocab = 989;
  const auto logits = Array<float>::Random(kRows, kVocab, 1, 3);
  std::vector<SamplingRow> rows(kRows);
  for (int r = 0; r < kRows; ++r) {
    rows[r].temperature = 0.5f + static_cast<float>(r % 4);
    rows[r].top_k = r % 3 == 0 ? 40 : 0;
    rows[r].top_p = r % 2 == 0 ? 0.9f : 1;
    rows[r].seed = 99;
    rows[r].position = r;
  }
  std::vector<int32_t> first;
  std::vector<float> first_processed;
  for (const cpu::Isa isa : SupportedIsas()) {
    for (const int threads : {1, 2, 3}) {
      Stream stream = TestStream(threads, isa);
      std::vector<int32_t> tokens(kRows);
      Array<float> processed(kRows, kVocab);
      Sample({tokens.data(), kRows}, logits.view(), View(rows), {}, {}, stream);
      ProcessLogits(processed.mat(), logits.view(), View(rows), {}, {}, stream);
      if (first.empty()) {
        first = tokens;
        first_processed = processed.values;
      }
      EXPECT_EQ(tokens, first);
      EXPECT_TRUE(SameBits(processed.values, first_processed));
    }
  }
}

}  // namespace
}  // namespace millrace
