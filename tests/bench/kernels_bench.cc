// Each op at the shapes of SmolLM2-135M, with its share of what this machine can do, measured first in the same run:
// reading memory, and fp32 multiply-adds. The number of threads is MILLRACE_BENCH_THREADS, or the machine's.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/buffer.h"
#include "kernels/cpu/state.h"
#include "kernels/ops.h"

namespace millrace {
namespace {

constexpr int64_t kC = 576, kF = 1536, kV = 49152, kLayers = 30;
constexpr int kHeads = 9, kKvHeads = 3, kDim = 64;

int Threads() {
  const char* asked = std::getenv("MILLRACE_BENCH_THREADS");
  return asked != nullptr ? std::max(1, std::atoi(asked)) : static_cast<int>(std::thread::hardware_concurrency());
}

Stream& TheStream() {
  static Stream stream = [] {
    Stream s = Stream::OpenCpu(Threads());
    s.ReserveWorkspace(64u << 20);
    return s;
  }();
  return stream;
}

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Best of several passes over 128 MiB, by all threads.
double ReadBandwidth() {
  static const double best = [] {
    const int64_t words = int64_t{16} << 20;
    const DeviceBuffer memory(static_cast<size_t>(words) * 8, TheStream());
    const uint64_t* data = memory.At<uint64_t>(0, words);
    std::fill_n(memory.At<uint64_t>(0, words), words, 1u);
    double fastest = 0;
    for (int pass = 0; pass < 20; ++pass) {
      const double begin = Seconds();
      cpu::StateOf(TheStream()).threads.ParallelFor(words, 1, [&](int64_t from, int64_t to, int) {
        typedef uint64_t Words __attribute__((vector_size(32), aligned(8), may_alias));
        Words sums[8] = {};
        for (int64_t i = from; i + 32 <= to; i += 32) {
          for (int j = 0; j < 8; ++j) sums[j] ^= *reinterpret_cast<const Words*>(data + i + 4 * j);
        }
        benchmark::DoNotOptimize(sums);
      });
      fastest = std::max(fastest, static_cast<double>(words) * 8 / (Seconds() - begin));
    }
    return fastest;
  }();
  return best;
}

struct Weight {
  DeviceBuffer memory;
  PackedWeight weight;
  Weight(int64_t out, int64_t in) : memory(PackedWeightBytes(out, in, Device::kCpu), TheStream()) {
    weight = {memory.At<bf16>(0, out * in), out, in};
    for (int64_t i = 0; i < static_cast<int64_t>(memory.bytes() / sizeof(bf16)); ++i) {
      weight.data[i] = bf16(static_cast<float>(i % 251 - 125) / 1024);
    }
  }
};

std::vector<float> Numbers(int64_t count) {
  std::mt19937 bits(1);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& v : x) v = normal(bits);
  return x;
}

// Multiply-adds of register tiles on a problem that stays in the first-level cache: the peak that Linear can approach.
double MultiplyAddPeak() {
  static const double best = [] {
    const Weight w(16 * 2 * Threads(), 128);
    const auto x = Numbers(48 * 128);
    std::vector<float> y(48 * w.weight.out);
    double fastest = 0;
    for (int pass = 0; pass < 50; ++pass) {
      const double begin = Seconds();
      cpu::StateOf(TheStream()).threads.ParallelFor(Threads(), 1, [&](int64_t from, int64_t to, int) {
        for (int again = 0; again < 100; ++again) {
          cpu::StateOf(TheStream())
              .kernels->f32.linear({y.data(), 48, w.weight.out}, {x.data(), 48, 128}, w.weight, {}, nullptr,
                                   {2 * from, 2 * to});
        }
      });
      fastest = std::max(fastest, 100 * 2.0 * 48 * 128 * static_cast<double>(w.weight.out) / (Seconds() - begin));
    }
    return fastest;
  }();
  return best;
}

// Times fn. The counters are of the fastest iteration, so that other load on the machine tells least.
template <class Fn>
void Measure(benchmark::State& state, double bytes, double flops, const Fn& fn) {
  double fastest = 1e9;
  for (auto _ : state) {
    const double begin = Seconds();
    fn();
    const double seconds = Seconds() - begin;
    state.SetIterationTime(seconds);
    fastest = std::min(fastest, seconds);
  }
  state.counters["best_us"] = fastest * 1e6;
  state.counters["GB/s"] = bytes / fastest * 1e-9;
  state.counters["of_read"] = bytes / fastest / ReadBandwidth();
  if (flops == 0) return;
  state.counters["GFLOP/s"] = flops / fastest * 1e-9;
  state.counters["of_fma"] = flops / fastest / MultiplyAddPeak();
}

void BM_Peaks(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(ReadBandwidth() + MultiplyAddPeak());
  state.counters["read_GB/s"] = ReadBandwidth() * 1e-9;
  state.counters["fma_GFLOP/s"] = MultiplyAddPeak() * 1e-9;
  state.counters["threads"] = Threads();
}
BENCHMARK(BM_Peaks)->Iterations(1);

// One product. Its weights come from as many copies as exceed the caches, as in a step over all layers.
void BM_Linear(benchmark::State& state) {
  const int64_t out = state.range(0), in = state.range(1), rows = state.range(2);
  std::vector<Weight> weights;
  const int64_t copies = std::max<int64_t>(1, (int64_t{192} << 20) / (out * in * 2));
  for (int64_t i = 0; i < copies; ++i) weights.emplace_back(out, in);
  const auto x = Numbers(rows * in);
  std::vector<float> y(static_cast<size_t>(rows * out));
  size_t next = 0;
  Measure(state, static_cast<double>(out * in * 2), 2.0 * static_cast<double>(rows * out * in), [&] {
    Linear(Mat<float>{y.data(), rows, out}, Mat<const float>(x.data(), rows, in), weights[next].weight, {},
           TheStream());
    next = (next + 1) % weights.size();
  });
}
BENCHMARK(BM_Linear)
    ->ArgNames({"out", "in", "rows"})
    ->ArgsProduct({{960}, {kC}, {1, 16, 512}})
    ->ArgsProduct({{2 * kF}, {kC}, {1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 512}})
    ->ArgsProduct({{kC}, {kF}, {1, 2, 4, 8, 16, 512}})
    ->ArgsProduct({{kV}, {kC}, {1, 16}})
    ->UseManualTime();

// All products of a step, as the model runs them: the rate of tokens that the Linears alone allow.
void BM_StepLinears(benchmark::State& state) {
  const int64_t rows = state.range(0);
  struct Layer {
    Weight qkv{960, kC}, o{kC, kC}, gate_up{2 * kF, kC}, down{kC, kF};
  };
  std::vector<Layer> layers(kLayers);
  const Weight head(kV, kC);
  const auto x = Numbers(rows * kF);
  std::vector<float> y(static_cast<size_t>(rows * 2 * kF)), logits(static_cast<size_t>(rows * kV));
  const auto multiply = [&](const Weight& w, float* to) {
    Linear(Mat<float>{to, rows, w.weight.out}, Mat<const float>(x.data(), rows, w.weight.in), w.weight, {},
           TheStream());
  };
  const double weights = static_cast<double>(kLayers * kC * (960 + kC + 3 * kF) + kV * kC);
  Measure(state, 2 * weights, 2 * weights * static_cast<double>(rows), [&] {
    for (const Layer& layer : layers) {
      for (const Weight* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) multiply(*w, y.data());
    }
    multiply(head, logits.data());
  });
  state.counters["tokens/s"] = static_cast<double>(rows) / (state.counters["best_us"] * 1e-6);
}
BENCHMARK(BM_StepLinears)->ArgName("rows")->Arg(1)->Arg(2)->Arg(4)->Arg(8)->Arg(16)->UseManualTime();

// Sequences of one context length, with `rows` new tokens each.
void BM_PagedAttention(benchmark::State& state) {
  const int64_t sequences = state.range(0), rows = state.range(1), context = state.range(2);
  const int64_t blocks = (context + kBlockTokens - 1) / kBlockTokens, q_rows = sequences * rows;
  const int64_t block_floats = int64_t{kKvHeads} * kDim * kBlockTokens;
  auto k = Numbers(sequences * blocks * block_floats), v = k;
  const auto qkv = Numbers(q_rows * (kHeads + 2 * kKvHeads) * kDim);
  std::vector<float> out(static_cast<size_t>(q_rows * kHeads * kDim));
  std::vector<int32_t> table(static_cast<size_t>(sequences * blocks)), start(static_cast<size_t>(sequences + 1));
  std::iota(table.begin(), table.end(), 0);
  for (int64_t s = 0; s <= sequences; ++s) start[static_cast<size_t>(s)] = static_cast<int32_t>(s * rows);
  const std::vector<int32_t> lengths(static_cast<size_t>(sequences), static_cast<int32_t>(context));
  const AttentionBatch batch{
      {start.data(), sequences + 1}, {lengths.data(), sequences}, {table.data(), sequences, blocks}};
  const double seen = static_cast<double>(q_rows) * (static_cast<double>(context) - static_cast<double>(rows - 1) / 2);
  Measure(state, 2.0 * 4 * static_cast<double>(sequences * context) * kKvHeads * kDim, 4.0 * seen * kHeads * kDim, [&] {
    PagedAttention(Mat<float>{out.data(), q_rows, kHeads * kDim}, {qkv.data(), q_rows, (kHeads + 2 * kKvHeads) * kDim},
                   {k.data(), v.data(), sequences * blocks, kKvHeads, kDim}, batch, 0.125f, TheStream());
  });
}
BENCHMARK(BM_PagedAttention)
    ->ArgNames({"sequences", "rows", "context"})
    ->Args({1, 1, 512})
    ->Args({1, 1, 4096})
    ->Args({16, 1, 512})
    ->Args({1, 512, 512})
    ->UseManualTime();

void BM_RmsNorm(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const auto x = Numbers(rows * kC), weight = Numbers(kC);
  std::vector<float> out(x.size());
  Measure(state, 8.0 * static_cast<double>(rows * kC), 0, [&] {
    RmsNorm(Mat<float>{out.data(), rows, kC}, Mat<const float>(x.data(), rows, kC), {weight.data(), kC}, 1e-5f,
            TheStream());
  });
}
BENCHMARK(BM_RmsNorm)->ArgName("rows")->Arg(1)->Arg(16)->Arg(512)->UseManualTime();

void BM_SiluMul(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const auto x = Numbers(rows * 2 * kF);
  std::vector<float> out(static_cast<size_t>(rows * kF));
  Measure(state, 12.0 * static_cast<double>(rows * kF), 0, [&] {
    SiluMul(Mat<float>{out.data(), rows, kF}, Mat<const float>(x.data(), rows, 2 * kF), TheStream());
  });
}
BENCHMARK(BM_SiluMul)->ArgName("rows")->Arg(1)->Arg(16)->Arg(512)->UseManualTime();

void BM_Embedding(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const Weight table(kV, kC);
  std::vector<float> out(static_cast<size_t>(rows * kC));
  std::vector<int32_t> tokens(static_cast<size_t>(rows));
  std::mt19937 bits(1);
  for (auto& token : tokens) token = static_cast<int32_t>(bits() % kV);
  Measure(state, 6.0 * static_cast<double>(rows * kC), 0, [&] {
    Embedding(Mat<float>{out.data(), rows, kC}, table.weight, {tokens.data(), rows}, TheStream());
  });
}
BENCHMARK(BM_Embedding)->ArgName("rows")->Arg(1)->Arg(512)->UseManualTime();

// kind 0: greedy, 1: temperature 1, 2: with top_k 50, 3: with top_p 0.9
void BM_Sample(benchmark::State& state) {
  const int64_t vocab = state.range(0), rows = state.range(1), kind = state.range(2);
  auto logits = Numbers(rows * vocab);
  for (float& l : logits) l *= 3;
  std::vector<SamplingRow> how(static_cast<size_t>(rows));
  for (SamplingRow& row : how) {
    row.temperature = kind == 0 ? 0.0f : 1.0f;
    if (kind == 2) row.top_k = 50;
    if (kind == 3) row.top_p = 0.9f;
  }
  std::vector<int32_t> tokens(static_cast<size_t>(rows));
  Measure(state, 4.0 * static_cast<double>(rows * vocab), 0, [&] {
    Sample({tokens.data(), rows}, {logits.data(), rows, vocab}, {how.data(), rows}, {}, {}, TheStream());
    for (SamplingRow& row : how) ++row.position;
  });
}
BENCHMARK(BM_Sample)
    ->ArgNames({"vocab", "rows", "kind"})
    ->ArgsProduct({{kV, 151936}, {1, 16}, {0, 1, 2, 3}})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

// What a parallel region costs: one with nothing to do, back to back and after a pause of 20 us.
void BM_ParallelFor(benchmark::State& state) {
  double fastest = 1e9;
  for (auto _ : state) {
    for (const double until = Seconds() + 1e-6 * static_cast<double>(state.range(0)); Seconds() < until;) {
    }
    const double begin = Seconds();
    cpu::StateOf(TheStream()).threads.ParallelFor(Threads(), 1, [](int64_t i, int64_t, int) {
      benchmark::DoNotOptimize(i);
    });
    const double seconds = Seconds() - begin;
    state.SetIterationTime(seconds);
    fastest = std::min(fastest, seconds);
  }
  state.counters["best_us"] = fastest * 1e6;
}
BENCHMARK(BM_ParallelFor)->ArgName("pause_us")->Arg(0)->Arg(5)->Arg(20)->Arg(100)->UseManualTime();

}  // namespace
}  // namespace millrace
