// Times the ops that carry a step, from a graph of many calls over buffers that exceed the second-level cache, and
// prints the rate reached and its share of a copy of the same run (bytes) or of 790 TFLOP/s (products).
#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/cuda/state.h"
#include "kernels/ops.h"

namespace millrace {
namespace {

constexpr int kCalls = 40;
constexpr double kPeakFlops = 790e12;

__global__ void FillKernel(uint16_t* x, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t h = static_cast<uint32_t>(i) * 2654435761u;
    x[i] = static_cast<uint16_t>((h >> 16 & 0x8000u) | 0x3d00u | (h >> 20 & 0x1ffu));  // +-0.03 .. 0.12
  }
}

__global__ void CopyKernel(uint4* to, const uint4* from, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * 1024 + threadIdx.x;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (i + j * 256 < count) to[i + j * 256] = from[i + j * 256];
  }
}

struct Bench {
  Stream stream = Stream::OpenCuda(0);
  double copy_rate = 0;

  cudaStream_t queue() const { return cuda::StateOf(stream).queue; }
  DeviceBuffer Random(size_t bytes) {
    DeviceBuffer buffer(bytes, stream);
    FillKernel<<<1024, 256, 0, queue()>>>(reinterpret_cast<uint16_t*>(buffer.data()), static_cast<int64_t>(bytes / 2));
    cuda::CheckCuda(cudaGetLastError(), "fill");
    return buffer;
  }
  // Median seconds of one call.
  double Time(const std::function<void(int)>& call) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    cuda::CheckCuda(cudaEventCreate(&begin), "event");
    cuda::CheckCuda(cudaEventCreate(&end), "event");
    cuda::CheckCuda(cudaStreamBeginCapture(queue(), cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < kCalls; ++i) call(i);
    cuda::CheckCuda(cudaStreamEndCapture(queue(), &graph), "capture");
    cuda::CheckCuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    std::vector<float> times;
    for (int i = 0; i < 9; ++i) {
      cuda::CheckCuda(cudaEventRecord(begin, queue()), "event");
      cuda::CheckCuda(cudaGraphLaunch(exec, queue()), "launch");
      cuda::CheckCuda(cudaEventRecord(end, queue()), "event");
      cuda::CheckCuda(cudaEventSynchronize(end), "event");
      float milliseconds = 0;
      cuda::CheckCuda(cudaEventElapsedTime(&milliseconds, begin, end), "event");
      if (i >= 2) times.push_back(milliseconds);
    }
    std::sort(times.begin(), times.end());
    cuda::CheckCuda(cudaGraphExecDestroy(exec), "graph");
    cuda::CheckCuda(cudaGraphDestroy(graph), "graph");
    return times[times.size() / 2] * 1e-3 / kCalls;
  }
  void Report(const char* name, double seconds, double bytes, double flops) {
    std::printf("%-52s %9.2f us", name, seconds * 1e6);
    if (bytes > 0)
      std::printf("  %8.1f GB/s = %5.1f %% of the copy", bytes / seconds * 1e-9, 100 * bytes / seconds / copy_rate);
    if (flops > 0)
      std::printf("  %7.1f TFLOP/s = %5.1f %% of 790", flops / seconds * 1e-12, 100 * flops / seconds / kPeakFlops);
    std::printf("\n");
    std::fflush(stdout);
  }
};

void Copy(Bench& b) {
  const size_t bytes = size_t{1} << 30;
  const DeviceBuffer from = b.Random(bytes), to(bytes, b.stream);
  const double seconds = b.Time([&](int) {
    const int64_t count = static_cast<int64_t>(bytes / 16);
    CopyKernel<<<static_cast<unsigned>(count / 1024), 256, 0, b.queue()>>>(
        reinterpret_cast<uint4*>(to.data()), reinterpret_cast<const uint4*>(from.data()), count);
    cuda::CheckCuda(cudaGetLastError(), "copy");
  });
  b.copy_rate = 2.0 * static_cast<double>(bytes) / seconds;
  b.Report("copy, 1 GiB", seconds, 2.0 * static_cast<double>(bytes), 0);
}

void Linears(Bench& b) {
  const size_t pool = size_t{2} << 30;  // more than one vocabulary's weights: none is found in the cache
  const DeviceBuffer weights = b.Random(pool), x = b.Random(8192 * 12288 * 2), y(size_t{8192} * 24576 * 2, b.stream);
  struct Shape {
    const char* name;
    int64_t in, out;
  };
  for (const Shape& s : {Shape{"0.6B qkv", 1024, 4096},
                         {"0.6B o", 2048, 1024},
                         {"0.6B gate_up", 1024, 6144},
                         {"0.6B down", 3072, 1024},
                         {"0.6B lm_head", 1024, 151936},
                         {"8B qkv", 4096, 6144},
                         {"8B o", 4096, 4096},
                         {"8B gate_up", 4096, 24576},
                         {"8B down", 12288, 4096},
                         {"8B lm_head", 4096, 151936}}) {
    const bool logits = s.out > 100000;
    for (const int64_t m : {1, 16, 32, 64, 128, 256, 2048, 8192}) {
      if (m > 256 && logits) continue;
      const int64_t bytes = s.in * s.out * 2, copies = static_cast<int64_t>(pool) / bytes;
      const double seconds = b.Time([&](int i) {
        const PackedWeight w{reinterpret_cast<bf16*>(weights.data() + i % copies * bytes), s.out, s.in};
        const Mat<const bf16> rows(reinterpret_cast<bf16*>(x.data()), m, s.in);
        if (logits) {
          Linear(Mat<float>{reinterpret_cast<float*>(y.data()), m, s.out}, rows, w, {}, b.stream);
        } else {
          Linear(Mat<bf16>{reinterpret_cast<bf16*>(y.data()), m, s.out}, rows, w, {}, b.stream);
        }
      });
      char name[64];
      std::snprintf(name, sizeof(name), "Linear %s, M = %d", s.name, static_cast<int>(m));
      b.Report(name, seconds, m <= 256 ? static_cast<double>(bytes + m * (2 * s.in + (logits ? 4 : 2) * s.out)) : 0,
               m > 64 ? 2.0 * static_cast<double>(m * s.in * s.out) : 0);
    }
  }
}

// The four products of a layer, one after another as in a step.
void LinearsOfALayer(Bench& b) {
  const size_t pool = size_t{1} << 30;
  const DeviceBuffer weights = b.Random(pool), x = b.Random(256 * 12288 * 2), y(size_t{256} * 24576 * 2, b.stream);
  for (const auto& [name, hidden, heads, qkv, ffn] :
       {std::tuple{"0.6B", 1024, 2048, 4096, 3072}, {"8B", 4096, 4096, 6144, 12288}}) {
    const int64_t layer = int64_t{hidden} * (qkv + heads + 3 * ffn) * 2, layers = static_cast<int64_t>(pool) / layer;
    for (const int64_t m : {1, 16, 64, 128, 256}) {
      const double seconds = b.Time([&](int i) {
        bf16* w = reinterpret_cast<bf16*>(weights.data() + i % layers * layer);
        for (const auto& [in, out] : {std::pair{hidden, qkv}, {heads, hidden}, {hidden, 2 * ffn}, {ffn, hidden}}) {
          Linear(Mat<bf16>{reinterpret_cast<bf16*>(y.data()), m, out},
                 Mat<const bf16>(reinterpret_cast<bf16*>(x.data()), m, in), PackedWeight{w, out, in}, {}, b.stream);
          w += int64_t{in} * out;
        }
      });
      char title[64];
      std::snprintf(title, sizeof(title), "Linear %s, a layer's four, M = %d", name, static_cast<int>(m));
      b.Report(title, seconds, static_cast<double>(layer), 0);
    }
  }
}

// Contexts are uniform in [least, most]; each sequence has `rows` rows.
void Attention(Bench& b, int heads, int kv_heads, int dim, int sequences, int least, int most, int rows) {
  std::mt19937 random(1);
  std::vector<int32_t> start{0}, contexts;
  int64_t tokens = 0;
  double pairs = 0;
  for (int s = 0; s < sequences; ++s) {
    contexts.push_back(std::uniform_int_distribution<int32_t>(least, most)(random));
    start.push_back(start.back() + rows);
    tokens += contexts.back();
    pairs += rows * (contexts.back() - (rows - 1) / 2.0);
  }
  const int columns = (most + kBlockTokens - 1) / kBlockTokens, blocks = columns * sequences;
  const size_t layer = static_cast<size_t>(blocks) * kBlockTokens * static_cast<size_t>(kv_heads * dim) * 2;
  const int layers = static_cast<int>(std::clamp<size_t>((size_t{1} << 29) / layer, 1, 40));
  const DeviceBuffer k = b.Random(layer * static_cast<size_t>(layers)),
                     v = b.Random(layer * static_cast<size_t>(layers));
  const int64_t t = int64_t{sequences} * rows;
  const DeviceBuffer qkv = b.Random(static_cast<size_t>(t * (heads + 2 * kv_heads) * dim) * 2),
                     out = b.Random(static_cast<size_t>(t * heads * dim) * 2);
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  const auto upload = [&](const std::vector<int32_t>& host) {
    DeviceBuffer buffer(host.size() * 4, b.stream);
    b.stream.Copy(buffer.data(), host.data(), host.size() * 4);
    return buffer;
  };
  const DeviceBuffer gstart = upload(start), gcontexts = upload(contexts), gtable = upload(table);
  const AttentionBatch batch{{gstart.At<int32_t>(0, sequences + 1), sequences + 1},
                             {gcontexts.At<int32_t>(0, sequences), sequences},
                             {gtable.At<int32_t>(0, blocks), sequences, columns}};
  const double seconds = b.Time([&](int i) {
    const size_t at = static_cast<size_t>(i % layers) * layer;
    const KvLayer<bf16> kv{reinterpret_cast<bf16*>(k.data() + at), reinterpret_cast<bf16*>(v.data() + at), blocks,
                           kv_heads, dim};
    PagedAttention<bf16>({reinterpret_cast<bf16*>(out.data()), t, heads * dim},
                         {reinterpret_cast<bf16*>(qkv.data()), t, (heads + 2 * kv_heads) * dim}, kv, batch, 0.1f,
                         b.stream);
  });
  char name[80];
  std::snprintf(name, sizeof(name), "Attention %d/%d x %d, S = %d, ctx %d..%d, rows %d", heads, kv_heads, dim,
                sequences, least, most, rows);
  b.Report(name, seconds, rows <= 8 ? 4.0 * static_cast<double>(tokens * kv_heads * dim) : 0,
           rows > 8 ? 4.0 * pairs * heads * dim : 0);
}

void Rope(Bench& b, int heads, int kv_heads, int dim) {
  const int64_t pool_blocks = 4096, pool = pool_blocks * kBlockTokens * kv_heads * dim * 2, positions = 4096;
  const DeviceBuffer k = b.Random(static_cast<size_t>(pool)), v = b.Random(static_cast<size_t>(pool)),
                     qkv = b.Random(size_t{1} << 29), table = b.Random(static_cast<size_t>(positions * dim * 4));
  const KvLayer<bf16> kv{reinterpret_cast<bf16*>(k.data()), reinterpret_cast<bf16*>(v.data()), pool_blocks, kv_heads,
                         dim};
  const Vec<const float> norm(table.At<float>(0, dim), dim);
  const Mat<const float> cos(table.At<float>(0, positions * dim / 2), positions, dim / 2);
  for (const int64_t rows : {1, 16, 64, 256, 2048}) {
    std::vector<int32_t> host;
    for (int64_t i = 0; i < rows; ++i) host.push_back(static_cast<int32_t>(rows > 256 ? i : i * 367));
    DeviceBuffer slots(host.size() * 4, b.stream), at(host.size() * 4, b.stream);
    b.stream.Copy(slots.data(), host.data(), host.size() * 4);
    for (int32_t& position : host) position %= static_cast<int32_t>(positions);
    b.stream.Copy(at.data(), host.data(), host.size() * 4);
    const int64_t cols = (heads + 2 * kv_heads) * dim, copies = (int64_t{1} << 29) / (rows * cols * 2);
    const double seconds = b.Time([&](int i) {
      RopeAppend<bf16>({reinterpret_cast<bf16*>(qkv.data()) + i % copies * rows * cols, rows, cols}, kv, norm, norm,
                       1e-6f, {cos, cos}, {at.At<int32_t>(0, rows), rows}, {slots.At<int32_t>(0, rows), rows},
                       b.stream);
    });
    char name[64];
    std::snprintf(name, sizeof(name), "RopeAppend %d/%d x %d, %d rows", heads, kv_heads, dim, static_cast<int>(rows));
    b.Report(name, seconds, 4.0 * static_cast<double>(rows * cols), 0);
  }
}

void Rows(Bench& b) {
  const DeviceBuffer x = b.Random(size_t{1} << 29), y = b.Random(size_t{1} << 29), z = b.Random(size_t{1} << 29);
  const DeviceBuffer weight = b.Random(32768);
  const auto at = [](const DeviceBuffer& buffer, int64_t rows, int64_t cols) {
    return Mat<bf16>{reinterpret_cast<bf16*>(buffer.data()), rows, cols};
  };
  for (const int64_t cols : {1024, 4096}) {
    for (const int64_t rows : {1, 16, 64, 256, 16384}) {
      const double n = static_cast<double>(rows * cols);
      const auto report = [&](const char* name, double bytes, const std::function<void(int)>& call) {
        char line[64];
        std::snprintf(line, sizeof(line), "%s %d x %d", name, static_cast<int>(rows), static_cast<int>(cols));
        b.Report(line, b.Time(call), bytes, 0);
      };
      const Vec<const float> norm{weight.At<float>(0, cols), cols};
      const Mat<float> residual{reinterpret_cast<float*>(y.data()), rows, cols};
      report("RmsNorm", 6 * n, [&](int) { RmsNorm<bf16>(at(x, rows, cols), residual, norm, 1e-6f, b.stream); });
      report("AddRmsNorm", 14 * n, [&](int) {
        AddRmsNorm<bf16>(at(x, rows, cols), residual, {reinterpret_cast<float*>(z.data()), rows, cols}, norm, 1e-6f,
                         b.stream);
      });
      report("SiluMul", 6 * n, [&](int) { SiluMul<bf16>(at(x, rows, cols), at(y, rows, 2 * cols), b.stream); });
    }
  }
}

// Logits of a normal distribution: of deviation 0.1 all tokens are alike, of 4 a few hundred hold the probability.
__global__ void LogitsKernel(float* x, int64_t count, float deviation) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t h = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 31) * 0xd6e8feb86659fd93u;
    h ^= h >> 32;
    const float u = (static_cast<float>(h & 0xffffffu) + 0.5f) * 0x1p-24f;
    x[i] = deviation * sqrtf(-2 * logf(u)) * cospif(static_cast<float>(h >> 40) * 0x1p-23f);
  }
}

void Sampling(Bench& b) {
  const int64_t vocab = 151936;
  struct Kind {
    const char* name;
    SamplingRow row;
  };
  std::vector<Kind> kinds{{"greedy", {}},    {"temperature 1", {}}, {"top-k 50", {}}, {"top-k 20, top-p 0.95", {}},
                          {"top-p 0.9", {}}, {"min-p 0.05", {}},    {"penalties", {}}};
  for (size_t i = 1; i < kinds.size(); ++i) kinds[i].row.temperature = 1;
  kinds[2].row.top_k = 50;
  kinds[3].row.top_k = 20;
  kinds[3].row.top_p = 0.95f;
  kinds[4].row.top_p = 0.9f;
  kinds[5].row.min_p = 0.05f;
  kinds[6].row.presence_penalty = 0.5f;
  kinds[6].row.history = 0;
  const DeviceBuffer history(static_cast<size_t>(vocab) * 4, b.stream);
  for (const float deviation : {0.1f, 4.0f}) {
    for (const int64_t rows : {1, 32, 256}) {
      const int64_t copies = 256 / rows;  // beyond the second-level cache
      const DeviceBuffer logits(static_cast<size_t>(copies * rows * vocab) * 4, b.stream);
      float* const x = logits.At<float>(0, copies * rows * vocab);
      LogitsKernel<<<1024, 256, 0, b.queue()>>>(x, copies * rows * vocab, deviation);
      cuda::CheckCuda(cudaGetLastError(), "logits");
      const auto at = [&](int i) { return Mat<const float>(x + i % copies * rows * vocab, rows, vocab); };
      const auto report = [&](const char* name, double seconds) {
        char line[80];
        std::snprintf(line, sizeof(line), "%s, deviation %.1f, %d rows", name, deviation, static_cast<int>(rows));
        b.Report(line, seconds, static_cast<double>(rows * vocab) * 4, 0);
      };
      const DeviceBuffer sampling(static_cast<size_t>(rows) * sizeof(SamplingRow), b.stream),
          tokens(static_cast<size_t>(rows) * 4, b.stream), values(static_cast<size_t>(rows) * 84, b.stream),
          ids(static_cast<size_t>(rows) * 80, b.stream);
      const Vec<int32_t> chosen{tokens.At<int32_t>(0, rows), rows};
      for (const Kind& kind : kinds) {
        std::vector<SamplingRow> host(static_cast<size_t>(rows), kind.row);
        for (size_t r = 0; r < host.size(); ++r) host[r].seed = r;
        b.stream.Copy(sampling.data(), host.data(), host.size() * sizeof(SamplingRow));
        report(kind.name, b.Time([&](int i) {
          Sample(chosen, at(i), {sampling.At<SamplingRow>(0, rows), rows}, {},
                 {history.At<TokenCount>(0, vocab), 1, vocab}, b.stream);
        }));
      }
      for (const int64_t top : {0, 5, 20}) {
        char name[32];
        std::snprintf(name, sizeof(name), "LogProbs, top %d", static_cast<int>(top));
        report(name, b.Time([&](int i) {
          LogProbs({values.At<float>(0, rows), rows},
                   {values.At<float>(static_cast<size_t>(rows) * 4, rows * top), rows, top},
                   {ids.At<int32_t>(0, rows * top), rows, top}, at(i), chosen, b.stream);
        }));
      }
    }
  }
}

}  // namespace
}  // namespace millrace

int main() {
  using namespace millrace;
  if (Stream::CountCuda() == 0) return std::printf("no GPU: nothing measured\n"), 0;
  Bench b;
  b.stream.ReserveWorkspace(size_t{512} << 20);
  Copy(b);
  Linears(b);
  LinearsOfALayer(b);
  Rope(b, 16, 8, 128);
  Rope(b, 32, 8, 128);
  for (const int context : {128, 1024, 8192}) Attention(b, 16, 8, 128, 1, context, context, 1);
  for (const int sequences : {1, 2, 4, 8, 32, 256}) Attention(b, 32, 8, 128, sequences, 1024, 1024, 1);
  Attention(b, 16, 8, 128, 256, 107, 2011, 1);
  Attention(b, 32, 8, 128, 256, 107, 2011, 1);
  Attention(b, 14, 2, 64, 256, 107, 2011, 1);
  Attention(b, 32, 8, 128, 64, 1024, 1024, 5);
  Attention(b, 16, 8, 128, 4, 1024, 1024, 1024);
  Attention(b, 32, 8, 128, 1, 2048, 2048, 2048);
  Attention(b, 32, 8, 128, 4, 2048, 2048, 2048);
  Attention(b, 14, 2, 64, 4, 2048, 2048, 2048);
  Rows(b);
  Sampling(b);
  return 0;
}
