// The builds of the kernels, one per instruction set, and the table through which they are called. All builds give the
// same bits. A function works on one range and runs on one thread; cpu/ops.cc splits the work.
#pragma once

#include <cstdint>

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace millrace::cpu {

enum class Isa : uint8_t { kPortable, kAvx2, kAvx512 };

bool Supports(Isa isa);
Isa BestIsa();
// For tests: the stream's ops use this build from now on. REQUIRES: Supports(isa)
void ForceIsa(Stream& stream, Isa isa);

struct Range {
  int64_t begin;
  int64_t end;
};

// Query vectors that share the K and V they read: rows of one sequence times query heads of one kv head.
inline constexpr int kMaxTileRows = 8;

// Some queries of one kv head: query i is head i % group of row i / group.
template <class A>
struct AttentionTile {
  const A* q;  // query 0 of the sequence; [rows, q_stride], a head every head_dim
  A* out;      // likewise, [rows, out_stride]
  int64_t q_stride;
  int64_t out_stride;
  int group;              // query heads of this kv head
  Range queries;          // at most kMaxTileRows
  int64_t first_visible;  // tokens that row 0 sees; row r sees r more
  const int32_t* blocks;
  int kv_head;
  float scale;
  float* scratch;  // AttentionScratchFloats(head_dim)
};
constexpr int64_t AttentionScratchFloats(int64_t head_dim) { return kMaxTileRows * (2 * head_dim + kBlockTokens); }

template <class A>
struct ActivationKernels {
  void (*linear)(Mat<A> y, Mat<const A> x, PackedWeight w, Vec<const float> bias, float* scratch, Range panels);
  void (*logits)(Mat<float> y, Mat<const A> x, PackedWeight w, Vec<const float> bias, float* scratch, Range panels);
  void (*rms_norm)(Mat<A> out, Mat<const float> x, Vec<const float> weight, float eps, Range rows);
  void (*add_rms_norm)(Mat<A> out, Mat<float> residual, Mat<const float> delta, Vec<const float> weight, float eps,
                       Range rows);
  void (*rope_append)(Mat<A> qkv, KvLayer<A> kv, Vec<const float> q_norm, Vec<const float> k_norm, float eps,
                      RopeTable rope, Vec<const int32_t> positions, Vec<const int32_t> slots, Range rows);
  void (*attention)(const AttentionTile<A>& tile, KvLayer<A> kv);
  void (*silu_mul)(Mat<A> out, Mat<const A> gate_up, Range rows);
  void (*add)(A* x, const A* delta, int64_t count);
};

struct Kernels {
  int tile_rows;  // <= kMaxTileRows
  ActivationKernels<float> f32;
  ActivationKernels<bf16> bf;
  bool (*is_finite)(const float* x, int64_t count);
  float (*max)(const float* x, int64_t count);
  // y[i] = e^(x[i] - shift), unless y is null; returns their sum, in double, in a fixed order
  double (*exp_sum)(float* y, const float* x, float shift, int64_t count);
  // words[4 * i + j] = word j of Philox4x32-10 with counter (first_group + i, position), key seed, low words first, i <
  // 16
  void (*philox)(uint32_t* words, uint64_t seed, int64_t position, uint64_t first_group);

  template <class A>
  const ActivationKernels<A>& Of() const {
    if constexpr (sizeof(A) == sizeof(float)) {
      return f32;
    } else {
      return bf;
    }
  }
};

const Kernels& KernelsFor(Isa isa);

}  // namespace millrace::cpu
