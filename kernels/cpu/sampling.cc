#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/cpu/ops.h"
#include "kernels/cpu/state.h"
#include "kernels/gumbel.h"

namespace millrace::cpu {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

int64_t FirstLargest(const Kernels& kernels, Vec<const float> x) {
  return std::find(x.data, x.data + x.size, kernels.max(x.data, x.size)) - x.data;
}

void Penalise(Vec<float> z, const SamplingRow& row, Mat<const TokenCount> history) {
  if (row.history < 0) return;
  const TokenCount* seen = history.row(row.history);
  for (int64_t v = 0; v < z.size; ++v) {
    if (seen[v] == 0) continue;
    if (z[v] > 0) {
      z[v] /= row.repetition_penalty;
    } else {
      z[v] *= row.repetition_penalty;
    }
    const TokenCount count = seen[v] & ~kPromptToken;
    z[v] -= row.frequency_penalty * static_cast<float>(count);
    if (count > 0) z[v] -= row.presence_penalty;
  }
}

// Where the weight of the values from the largest down reaches a target.
struct Boundary {
  float value;   // the value at which it does
  double above;  // the weight of all larger values
};

// Three passes over ever finer buckets of the values' order-preserving bits. Values of weight zero count as absent.
template <class Weight>
Boundary FindBoundary(Vec<const float> z, double target, const Weight& weight) {
  const auto key_of = [](float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
  };
  uint64_t prefix = 0;  // of the boundary's key
  double above = 0;
  for (int bits_left = 32; bits_left > 0;) {
    const int bits = bits_left > 10 ? 11 : 10;
    double bucket_weight[1 << 11] = {};
    for (int64_t v = 0; v < z.size; ++v) {
      const uint64_t key = key_of(z[v]);
      if (key >> bits_left != prefix) continue;
      bucket_weight[key >> (bits_left - bits) & ((1u << bits) - 1)] += weight(v);
    }
    uint64_t chosen = 0;
    double above_chosen = above, total = above;
    for (int64_t b = (int64_t{1} << bits) - 1; b >= 0; --b) {
      if (bucket_weight[b] == 0) continue;
      chosen = static_cast<uint64_t>(b);
      above_chosen = total;
      total += bucket_weight[b];
      if (total >= target) break;
    }
    prefix = prefix << bits | chosen;
    above = above_chosen;
    bits_left -= bits;
  }
  const uint32_t key = static_cast<uint32_t>(prefix);
  return {std::bit_cast<float>((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key), above};
}

void KeepFrom(Vec<float> z, float least) {
  for (int64_t v = 0; v < z.size; ++v) z[v] = z[v] < least ? kForbidden : z[v];
}

void KeepTopP(const Kernels& kernels, Vec<float> z, float top_p, float* weights) {
  const double target = top_p * kernels.exp_sum(weights, z.data, 0, z.size);
  const Boundary boundary = FindBoundary(z, target, [&](int64_t v) { return static_cast<double>(weights[v]); });
  KeepFrom(z, boundary.value);
  // Of equals at the boundary the lowest ids stay, as many as it takes.
  double kept = boundary.above;
  for (int64_t v = 0; v < z.size; ++v) {
    if (z[v] != boundary.value) continue;
    if (kept < target || kept == 0) {
      kept += weights[v];
    } else {
      z[v] = kForbidden;
    }
  }
}

// `weights` is scratch of the row's size.
void ProcessRow(const Kernels& kernels, Vec<float> z, const float* logits, const SamplingRow& row,
                Vec<const LogitBias> biases, Mat<const TokenCount> history, float* weights) {
  std::copy_n(logits, z.size, z.data);
  Penalise(z, row, history);
  for (int32_t b = row.bias_begin; b < row.bias_end; ++b) z[biases[b].token] += biases[b].value;
  const float max = kernels.max(z.data, z.size);
  if (max == kForbidden) return;
  if (row.temperature == 0) {
    const int64_t best = FirstLargest(kernels, z);
    std::fill_n(z.data, z.size, kForbidden);
    z[best] = max;
    return;
  }
  for (int64_t v = 0; v < z.size; ++v) z[v] = (z[v] - max) / row.temperature;
  if (row.min_p > 0) KeepFrom(z, static_cast<float>(NaturalLog(row.min_p)));
  if (row.top_k > 0 && row.top_k < z.size) {
    KeepFrom(z, FindBoundary(z, row.top_k, [&](int64_t v) { return z[v] == kForbidden ? 0.0 : 1.0; }).value);
  }
  if (row.top_p < 1) KeepTopP(kernels, z, row.top_p, weights);
}

// argmax of z + noise. Only tokens whose noise could lift them over the best so far get theirs computed: -ln u >= 1 -
// u, so a token that trails by d needs ~word < 2^32 e^-d.
int32_t NoisyArgmax(const Kernels& kernels, Vec<const float> z, uint64_t seed, int64_t position) {
  constexpr int64_t kTokens = 64;  // of one call for random words
  uint32_t words[kTokens];
  int64_t best = FirstLargest(kernels, z);
  if (z[best] == kForbidden) return -1;
  kernels.philox(words, seed, position, static_cast<uint64_t>(best / 4));
  double best_score = z[best] + GumbelNoise(words[best % 4]);
  for (int64_t begin = 0; begin < z.size; begin += kTokens) {
    const int64_t count = std::min(kTokens, z.size - begin);
    const double behind = best_score - kernels.max(z.data + begin, count);
    if (behind > kLargestGumbelNoise) continue;
    kernels.philox(words, seed, position, static_cast<uint64_t>(begin / 4));
    const double bound = 0x1p32 * std::exp(-behind) * 1.001 + 1;
    const uint32_t limit = bound < 0x1p32 ? static_cast<uint32_t>(bound) : ~0u;
    for (int64_t i = 0; i < count; ++i) {
      if (~words[i] > limit) continue;
      const double score = z[begin + i] + GumbelNoise(words[i]);
      if (score > best_score || (score == best_score && begin + i < best)) {
        best_score = score;
        best = begin + i;
      }
    }
  }
  return static_cast<int32_t>(best);
}

// Calls fn(r, scratch) for each row; scratch holds two rows of floats.
template <class Fn>
void ForLogitRows(int64_t rows, int64_t vocab, Stream& stream, const Fn& fn) {
  StateOf(stream).threads.ParallelFor(rows, 1, [&](int64_t begin, int64_t end, int thread) {
    float* const scratch = reinterpret_cast<float*>(stream.workspace()) + 2 * vocab * thread;
    for (int64_t r = begin; r < end; ++r) fn(r, scratch);
  });
}

}  // namespace

void ProcessLogits(Mat<float> out, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
                   Mat<const TokenCount> history, Stream& stream) {
  const Kernels& kernels = *StateOf(stream).kernels;
  ForLogitRows(logits.rows, logits.cols, stream, [&](int64_t r, float* scratch) {
    ProcessRow(kernels, {out.row(r), out.cols}, logits.row(r), rows[r], biases, history, scratch);
  });
}

void Sample(Vec<int32_t> tokens, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
            Mat<const TokenCount> history, Stream& stream) {
  const Kernels& kernels = *StateOf(stream).kernels;
  const int64_t vocab = logits.cols;
  ForLogitRows(logits.rows, vocab, stream, [&](int64_t r, float* scratch) {
    const SamplingRow& row = rows[r];
    tokens[r] = -1;
    if (!kernels.is_finite(logits.row(r), vocab)) return;
    const Vec<float> z{scratch, vocab};
    if (row.temperature == 0 && row.history < 0 && row.bias_begin == row.bias_end) {
      tokens[r] = static_cast<int32_t>(FirstLargest(kernels, {logits.row(r), vocab}));
      return;
    }
    ProcessRow(kernels, z, logits.row(r), row, biases, history, scratch + vocab);
    tokens[r] = NoisyArgmax(kernels, z, row.seed, row.position);
  });
}

void CountTokens(Mat<TokenCount> history, Vec<const SamplingRow> rows, Vec<const int32_t> tokens, Stream&) {
  for (int64_t r = 0; r < rows.size; ++r) {
    if (rows[r].history >= 0 && tokens[r] >= 0) ++history.row(rows[r].history)[tokens[r]];
  }
}

void LogProbs(Vec<float> chosen, Mat<float> top_values, Mat<int32_t> top_tokens, Mat<const float> logits,
              Vec<const int32_t> tokens, Stream& stream) {
  const Kernels& kernels = *StateOf(stream).kernels;
  ForLogitRows(logits.rows, 0, stream, [&](int64_t r, float*) {
    const Vec<const float> x{logits.row(r), logits.cols};
    const float max = kernels.max(x.data, x.size);
    const double log_sum = max + NaturalLog(kernels.exp_sum(nullptr, x.data, max, x.size));
    chosen[r] = tokens[r] < 0 ? kForbidden : static_cast<float>(x[tokens[r]] - log_sum);

    const int64_t n = top_values.cols;
    const Vec<float> values{top_values.row(r), n};
    const Vec<int32_t> ids{top_tokens.row(r), n};
    int64_t held = 0;
    for (int64_t v = 0; v < x.size && n > 0; ++v) {
      if (held == n && !(x[v] > values[n - 1])) continue;
      int64_t place = held < n ? held++ : n - 1;
      for (; place > 0 && x[v] > values[place - 1]; --place) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
      }
      values[place] = x[v];
      ids[place] = static_cast<int32_t>(v);
    }
    for (int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(values[i] - log_sum);
  });
}

size_t SampleWorkspaceBytes(int64_t vocab, int num_threads) {
  return static_cast<size_t>(2 * vocab * num_threads) * sizeof(float);
}

}  // namespace millrace::cpu
