#include <numeric>

#include "tests/gpu/device_arrays.h"

namespace millrace {
namespace {

constexpr float kEps = 1e-6f;

// Sequences whose whole contexts pass through RopeAppend and PagedAttention in steps of at most `step` rows each.
struct Sequences {
  int heads, kv_heads, dim;
  std::vector<int> contexts;
  bool with_norms = true;
  int nan_from = 1 << 30;      // tokens from here on are NaN …
  bool nan_in_v_only = false;  // … or their v alone

  int64_t width() const { return (heads + 2 * kv_heads) * dim; }
  Array<bf16> Qkv(size_t s) const {
    Array<bf16> qkv = Array<bf16>::Random(contexts[s], width(), 100 + static_cast<uint32_t>(s));
    for (int64_t t = nan_from; t < contexts[s]; ++t) {
      const int64_t first = nan_in_v_only ? int64_t{heads + kv_heads} * dim : 0;
      std::memset(static_cast<void*>(qkv.mat().row(t) + first), 0xff,
                  static_cast<size_t>(width() - first) * sizeof(bf16));
    }
    return qkv;
  }
};

struct Step {
  std::vector<int> first;  // of each sequence that takes part
  std::vector<int> end;
  std::vector<size_t> sequence;
};

// Runs steps on a device; Store<T> is OnGpu<T> or Array<T> with the interface of OnGpu.
template <class T>
struct OnCpu {
  Array<T> array;
  explicit OnCpu(const Array<T>& host) : array(host) {}
  explicit OnCpu(const std::vector<T>& host) : array(1, static_cast<int64_t>(host.size())) { array.values = host; }
  OnCpu(int64_t rows, int64_t cols) : array(rows, cols) {
    std::memset(static_cast<void*>(array.values.data()), 0xff, array.values.size() * sizeof(T));
  }
  Mat<T> mat() { return array.mat(); }
  Vec<T> vec() { return {array.values.data(), array.rows * array.cols}; }
  const Array<T>& Host() const { return array; }
};

// [sequence][token, H D], as each token's row came out of the step that computed it.
template <template <class> class Store>
std::vector<Array<bf16>> Compute(const Sequences& q, const std::vector<Step>& steps, Stream& stream) {
  int64_t blocks = 0, most = 0;
  for (const int context : q.contexts) {
    blocks += (context + kBlockTokens - 1) / kBlockTokens;
    most = std::max<int64_t>(most, (context + kBlockTokens - 1) / kBlockTokens);
  }
  std::vector<int32_t> ids(static_cast<size_t>(blocks));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(7));
  std::vector<std::vector<int32_t>> tables;
  std::vector<Array<bf16>> qkv, out;
  for (size_t s = 0, next = 0; s < q.contexts.size(); ++s) {
    const size_t count = static_cast<size_t>((q.contexts[s] + kBlockTokens - 1) / kBlockTokens);
    tables.emplace_back(ids.begin() + static_cast<int64_t>(next), ids.begin() + static_cast<int64_t>(next + count));
    next += count;
    qkv.push_back(q.Qkv(s));
    out.emplace_back(q.contexts[s], q.heads * q.dim);
  }
  Array<float> cos(most * kBlockTokens, q.dim / 2), sin(most * kBlockTokens, q.dim / 2);
  for (size_t i = 0; i < cos.values.size(); ++i) {
    cos.values[i] = std::cos(0.01f * static_cast<float>(i));
    sin.values[i] = std::sin(0.01f * static_cast<float>(i));
  }
  Store<float> gcos(cos), gsin(sin), norm(Array<float>::Random(1, q.dim, 3));
  Store<bf16> k(blocks, int64_t{q.kv_heads} * q.dim * kBlockTokens),
      v(blocks, int64_t{q.kv_heads} * q.dim * kBlockTokens);
  const KvLayer<bf16> kv{k.mat().data, v.mat().data, blocks, q.kv_heads, q.dim};
  for (const Step& step : steps) {
    std::vector<int32_t> query_start{0}, context_len, positions, slots;
    Array<int32_t> table(static_cast<int64_t>(step.sequence.size()), most);
    std::vector<bf16> rows;
    for (size_t i = 0; i < step.sequence.size(); ++i) {
      const size_t s = step.sequence[i];
      std::copy(tables[s].begin(), tables[s].end(), table.mat().row(static_cast<int64_t>(i)));
      for (int t = step.first[i]; t < step.end[i]; ++t) {
        positions.push_back(t);
        slots.push_back(tables[s][static_cast<size_t>(t / kBlockTokens)] * kBlockTokens + t % kBlockTokens);
        rows.insert(rows.end(), qkv[s].mat().row(t), qkv[s].mat().row(t) + q.width());
      }
      query_start.push_back(static_cast<int32_t>(positions.size()));
      context_len.push_back(step.end[i]);
    }
    Array<bf16> step_qkv(static_cast<int64_t>(positions.size()), q.width());
    step_qkv.values = rows;
    Store<bf16> gqkv(step_qkv), gout(step_qkv.rows, q.heads * q.dim);
    Store<int32_t> gpositions(positions), gslots(slots), gstart(query_start), gcontext(context_len), gtable(table);
    const Vec<const float> norms = q.with_norms ? Vec<const float>(norm.vec()) : Vec<const float>{};
    RopeAppend<bf16>(gqkv.mat(), kv, norms, norms, kEps, {gcos.mat(), gsin.mat()}, gpositions.vec(), gslots.vec(),
                     stream);
    const AttentionBatch batch{gstart.vec(), gcontext.vec(), gtable.mat()};
    PagedAttention<bf16>(gout.mat(), gqkv.mat(), kv, batch, 1 / std::sqrt(static_cast<float>(q.dim)), stream);
    stream.Synchronize();  // copies are another stream's
    const Array<bf16> result = gout.Host();
    for (size_t i = 0, row = 0; i < step.sequence.size(); ++i) {
      for (int t = step.first[i]; t < step.end[i]; ++t, ++row) {
        std::copy_n(result.view().row(static_cast<int64_t>(row)), result.cols, out[step.sequence[i]].mat().row(t));
      }
    }
  }
  return out;
}

// All sequences advance together, `step` rows at a time.
std::vector<Step> Together(const Sequences& q, int step) {
  std::vector<Step> steps;
  for (int first = 0;; first += step) {
    Step s;
    for (size_t i = 0; i < q.contexts.size(); ++i) {
      if (first >= q.contexts[i]) continue;
      s.sequence.push_back(i);
      s.first.push_back(first);
      s.end.push_back(std::min(first + step, q.contexts[i]));
    }
    if (s.sequence.empty()) return steps;
    steps.push_back(s);
  }
}

std::vector<Step> OneByOne(const Sequences& q, size_t sequence, int step) {
  std::vector<Step> steps;
  for (int first = 0; first < q.contexts[sequence]; first += step) {
    steps.push_back({{first}, {std::min(first + step, q.contexts[sequence])}, {sequence}});
  }
  return steps;
}

void ExpectAgrees(const Sequences& q, int step) {
  SCOPED_TRACE(testing::Message() << q.heads << " heads, " << q.kv_heads << " kv heads of " << q.dim << ", steps of "
                                  << step);
  const auto gpu = Compute<OnGpu>(q, Together(q, step), GpuStream());
  const auto cpu = Compute<OnCpu>(q, Together(q, step), CpuStream());
  for (size_t s = 0; s < cpu.size(); ++s) {
    for (int64_t t = 0; t < cpu[s].rows; ++t) {
      for (int64_t c = 0; c < cpu[s].cols; ++c) {
        // Values are normal: their mean magnitude is below one; p, q and k are rounded to bf16 where they were not
        // before.
        ASSERT_NEAR(gpu[s].at(t, c), cpu[s].at(t, c), 0x1p-6 + Between<bf16>(q.dim + t, 1, cpu[s].at(t, c)))
            << "sequence " << s << " token " << t << " column " << c;
      }
    }
  }
}

TEST(GpuAttention, AgreesWithTheCpuOverRaggedBatches) {
  MILLRACE_NEEDS_GPU();
  ExpectAgrees({16, 8, 128, {1, 33, 700, 7, 128, 129, 300}}, 1000);  // Qwen3-0.6B
  ExpectAgrees({32, 8, 128, {257, 5, 111}, false}, 100);             // Llama-3.1-8B
  ExpectAgrees({9, 3, 64, {1, 140, 989}, false}, 1000);              // SmolLM2
  ExpectAgrees({5, 5, 16, {31, 290}}, 7);
  ExpectAgrees({6, 2, 32, {31, 290}}, 300);
  ExpectAgrees({3, 1, 48, {64, 200}}, 300);
  ExpectAgrees({4, 4, 96, {64, 200}}, 300);
}

TEST(GpuAttention, GivesARowTheSameBitsInAnyBatchAndChunking) {
  MILLRACE_NEEDS_GPU();
  for (const Sequences& q : {Sequences{16, 8, 128, {419, 64, 33, 130, 257}}, Sequences{9, 3, 64, {300, 31, 129}, false},
                             Sequences{3, 1, 48, {200, 65}}}) {
    const auto whole = Compute<OnGpu>(q, Together(q, 1000), GpuStream());
    for (const int step : {1, 5, 17, 64, 111}) {
      const auto parts = Compute<OnGpu>(q, Together(q, step), GpuStream());
      for (size_t s = 0; s < whole.size(); ++s)
        EXPECT_TRUE(SameBits(whole[s].values, parts[s].values)) << step << ", " << s;
    }
    for (const int step : {1, 40}) {
      const auto alone = Compute<OnGpu>(q, OneByOne(q, 0, step), GpuStream());
      EXPECT_TRUE(SameBits(whole[0].values, alone[0].values)) << "alone, " << step;
    }
  }
}

// Each token by decode, by one prefill, and by prefills that end on every side of a block's and a chunk's end; groups
// of one, of more queries than a tile has, and of a number that divides nothing.
TEST(GpuAttention, GivesARowTheSameBitsAroundTheEndsOfBlocksAndChunks) {
  MILLRACE_NEEDS_GPU();
  const std::vector<int> contexts{31, 32, 33, 127, 128, 129, 257};
  for (const Sequences& q : {Sequences{4, 4, 128, contexts}, Sequences{14, 2, 64, contexts},
                             Sequences{18, 1, 128, contexts}, Sequences{4, 2, 96, contexts}}) {
    SCOPED_TRACE(testing::Message() << q.heads << " heads, " << q.kv_heads << " kv heads of " << q.dim);
    const auto whole = Compute<OnGpu>(q, Together(q, 1000), GpuStream());
    for (const int step : {1, 31, 128, 129}) {
      const auto parts = Compute<OnGpu>(q, Together(q, step), GpuStream());
      for (size_t s = 0; s < whole.size(); ++s)
        EXPECT_TRUE(SameBits(whole[s].values, parts[s].values)) << step << ", " << q.contexts[s];
    }
  }
}

// A long context's chunks are spread over blocks by decode, alone and among others, and walked by one in a prefill;
// with the least workspace they are not spread.
TEST(GpuAttention, GivesARowOfALongContextTheSameBits) {
  MILLRACE_NEEDS_GPU();
  for (const Sequences& q :
       {Sequences{4, 2, 128, {2301, 40, 1025, 1500}}, Sequences{7, 1, 64, {2301, 40, 1025, 1500}}}) {
    const auto whole = Compute<OnGpu>(q, Together(q, 3000), GpuStream());
    Stream small = Stream::OpenCuda(0);
    small.ReserveWorkspace(PagedAttentionWorkspaceBytes(0, q.heads, q.kv_heads, q.dim, small));
    for (const int step : {1020, 2295}) {
      for (size_t s = 0; s < whole.size(); ++s) {
        const auto alone = Compute<OnGpu>(q, OneByOne(q, s, std::min(step, q.contexts[s] - 1)), GpuStream());
        EXPECT_TRUE(SameBits(whole[s].values, alone[s].values)) << "alone, " << step << ", " << s;
      }
      const auto together = Compute<OnGpu>(q, Together(q, step), GpuStream());
      const auto limited = Compute<OnGpu>(q, Together(q, step), small);
      for (size_t s = 0; s < whole.size(); ++s) {
        EXPECT_TRUE(SameBits(whole[s].values, together[s].values)) << step << ", " << s;
        EXPECT_TRUE(SameBits(whole[s].values, limited[s].values)) << "least workspace, " << step << ", " << s;
      }
    }
  }
}

// Decode without company has a kernel of its own: a block has no chunk, a part of one, one, or many, and with the least
// workspace one block has all.
TEST(GpuAttention, GivesOneSequenceTheBitsOfAPrefill) {
  MILLRACE_NEEDS_GPU();
  const std::vector<int> contexts{1, 2, 127, 128, 129, 1024, 1025, 2301};
  for (const Sequences& q : {Sequences{16, 8, 128, contexts}, Sequences{8, 8, 64, contexts},
                             Sequences{128, 8, 128, {1, 300, 1025}}, Sequences{136, 8, 64, {300}}}) {
    SCOPED_TRACE(testing::Message() << q.heads << " heads, " << q.kv_heads << " kv heads of " << q.dim);
    const auto whole = Compute<OnGpu>(q, Together(q, 5000), GpuStream());
    Stream small = Stream::OpenCuda(0);
    small.ReserveWorkspace(PagedAttentionWorkspaceBytes(0, q.heads, q.kv_heads, q.dim, small));
    std::vector<Step> steps;
    for (size_t s = 0; s < whole.size(); ++s) {
      for (const Step& step : OneByOne(q, s, std::max(1, q.contexts[s] - 1))) steps.push_back(step);
    }
    const auto alone = Compute<OnGpu>(q, steps, GpuStream());
    const auto limited = Compute<OnGpu>(q, steps, small);
    for (size_t s = 0; s < whole.size(); ++s) {
      EXPECT_TRUE(SameBits(whole[s].values, alone[s].values)) << q.contexts[s];
      EXPECT_TRUE(SameBits(whole[s].values, limited[s].values)) << "least workspace, " << q.contexts[s];
    }
  }
}

// Sequences without rows or context are padding: nothing is done for them, and the others are as they are alone.
TEST(GpuAttention, PassesOverEmptySequences) {
  MILLRACE_NEEDS_GPU();
  for (const int dim : {16, 48, 64, 128}) {
    const int heads = 16, kv_heads = 8, context = 300, blocks = 10;
    const Array<bf16> pool = Array<bf16>::Random(blocks, int64_t{kv_heads} * dim * kBlockTokens, 1);
    const Array<bf16> qkv = Array<bf16>::Random(200, (heads + 2 * kv_heads) * dim, 2);
    const OnGpu<bf16> k(pool), v(pool), gqkv(qkv);
    const KvLayer<bf16> kv{k.mat().data, v.mat().data, blocks, kv_heads, dim};
    // The rows of sequence s; rows beyond all sequences are padding, too.
    const auto attend = [&](const std::vector<int>& rows, int all_rows) {
      std::vector<int32_t> start{0}, contexts;
      Array<int32_t> table(static_cast<int64_t>(rows.size()), blocks);
      for (size_t s = 0; s < rows.size(); ++s) {
        start.push_back(start.back() + rows[s]);
        contexts.push_back(rows[s] > 0 ? context : 0);
        int32_t* const ids = table.mat().row(static_cast<int64_t>(s));
        std::iota(ids, ids + blocks, rows[s] > 0 ? 0 : -blocks);
      }
      const OnGpu<int32_t> gstart(start), gcontexts(contexts), gtable(table);
      const OnGpu<bf16> out(all_rows, heads * dim);
      PagedAttention<bf16>(out.mat(), gqkv.mat().Rows(0, all_rows), kv, {gstart.vec(), gcontexts.vec(), gtable.mat()},
                           0.1f, GpuStream());
      return out.Host();
    };
    for (const int rows : {1, 3, 100}) {
      const Array<bf16> alone = attend({rows}, rows);
      for (const int count : {1, 3, 40, 256}) {
        SCOPED_TRACE(testing::Message() << dim << ": " << rows << " rows, " << count);
        std::vector<int> none(static_cast<size_t>(count), 0);
        attend(none, 1);
        attend(none, std::min(count, 200));
        for (const size_t at : {size_t{0}, none.size() / 2, none.size() - 1}) {
          std::vector<int> one = none;
          one[at] = rows;
          Array<bf16> found = attend(one, 200);
          found.values.resize(alone.values.size());
          EXPECT_TRUE(SameBits(found.values, alone.values)) << at;
        }
      }
    }
  }
}

// A token that is NaN reaches the rows that see it, and no other, in one step and in many.
TEST(GpuAttention, KeepsWhatIsNotFiniteFromRowsThatDoNotSeeIt) {
  MILLRACE_NEEDS_GPU();
  for (Sequences q :
       {Sequences{16, 8, 128, {300, 170}}, Sequences{14, 2, 64, {300, 170}}, Sequences{3, 1, 48, {200, 170}}}) {
    const auto clean = Compute<OnGpu>(q, Together(q, 1000), GpuStream());
    for (const bool in_v_only : {false, true}) {
      q.nan_from = 165;
      q.nan_in_v_only = in_v_only;
      for (const int step : {1000, 7}) {
        const auto soiled = Compute<OnGpu>(q, Together(q, step), GpuStream());
        for (size_t s = 0; s < clean.size(); ++s) {
          const auto seen = clean[s].values.begin() + q.nan_from * clean[s].cols;
          EXPECT_TRUE(SameBits(
              std::vector<bf16>(clean[s].values.begin(), seen),
              std::vector<bf16>(soiled[s].values.begin(), soiled[s].values.begin() + q.nan_from * soiled[s].cols)))
              << step << ", " << s;
          for (int64_t i = q.nan_from * soiled[s].cols; i < soiled[s].rows * soiled[s].cols; ++i) {
            ASSERT_TRUE(std::isnan(static_cast<float>(soiled[s].values[static_cast<size_t>(i)]))) << step << ", " << i;
          }
        }
      }
    }
  }
}

// 256 sequences decode together; one of them alone gives the same bits.
TEST(GpuAttention, GivesARowTheSameBitsAmong256) {
  MILLRACE_NEEDS_GPU();
  Sequences q{8, 2, 128, {}};
  for (int s = 0; s < 256; ++s) q.contexts.push_back(1 + s * 37 % 700);
  std::vector<Step> steps = Together(q, 699);
  const auto together = Compute<OnGpu>(q, steps, GpuStream());
  for (const size_t s : {size_t{0}, size_t{3}, size_t{101}, size_t{255}}) {
    const auto alone = Compute<OnGpu>(q, OneByOne(q, s, std::max(1, q.contexts[s] - 1)), GpuStream());
    EXPECT_TRUE(SameBits(together[s].values, alone[s].values)) << s;
  }
}

}  // namespace
}  // namespace millrace
