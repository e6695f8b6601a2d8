// The one product that Linear and PagedAttention share: M rows of x against G panels of 16 columns, each output one
// chain of fused multiply-adds in ascending order. Registers: M * G accumulators, so that weights are read once for M
// rows.
#pragma once

#include <type_traits>

#include "kernels/cpu/lanes.h"

namespace millrace::cpu::MILLRACE_ISA {

// Panels read side by side by m rows: eight chains keep the multipliers busy, more than these would spill.
#if defined(__AVX512F__)
inline constexpr int kTileRows = 8;
constexpr int PanelsAtOnce(int m) { return m <= 3 ? 8 : 24 / m; }
#elif defined(__AVX2__)
inline constexpr int kTileRows = 6;
constexpr int PanelsAtOnce(int m) { return m <= 4 ? 4 / m : 1; }
#else
inline constexpr int kTileRows = 2;
constexpr int PanelsAtOnce(int) { return 1; }
#endif

// Element (c, lane) of panel p is w[p * panel_stride + c * row_stride + lane].
template <class W>
struct Panels {
  const W* w;
  int64_t panel_stride;
  int64_t row_stride;
  int64_t ahead = 512;  // elements between what is read and what is fetched into the cache meanwhile
};

// store(m, p, init(m, p) + sum over c < depth of x[m * x_stride + c] * w[p][c]) for m < M, p in [p, p + G)
template <int M, int G, class W, class Init, class Store>
MILLRACE_LANES void Tile(const float* x, int64_t x_stride, Panels<W> panels, int64_t depth, int64_t p, const Init& init,
                         const Store& store) {
  F16 acc[M][G];
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m) {
    MILLRACE_UNROLL
    for (int g = 0; g < G; ++g) acc[m][g] = ToWeightOrder(init(m, p + g), panels.w);
  }
  const W* w = panels.w + p * panels.panel_stride;
  for (int64_t c = 0; c < depth; ++c, w += panels.row_stride) {
    if constexpr (G < 4) {  // four streams keep the memory busy by themselves
      MILLRACE_UNROLL
      for (int g = 0; g < G; ++g) __builtin_prefetch(w + g * panels.panel_stride + panels.ahead, 0, 2);
    }
    // The fewer operands are held in registers, the more pass through one.
    if constexpr (M <= G) {
      F16 xs[M];
      MILLRACE_UNROLL
      for (int m = 0; m < M; ++m) xs[m] = Broadcast(x[m * x_stride + c]);
      MILLRACE_UNROLL
      for (int g = 0; g < G; ++g) {
        const F16 lanes = LoadWeights(w + g * panels.panel_stride);
        MILLRACE_UNROLL
        for (int m = 0; m < M; ++m) acc[m][g] = Fma(xs[m], lanes, acc[m][g]);
      }
    } else {
      F16 lanes[G];
      MILLRACE_UNROLL
      for (int g = 0; g < G; ++g) lanes[g] = LoadWeights(w + g * panels.panel_stride);
      MILLRACE_UNROLL
      for (int m = 0; m < M; ++m) {
        const F16 xm = Broadcast(x[m * x_stride + c]);
        MILLRACE_UNROLL
        for (int g = 0; g < G; ++g) acc[m][g] = Fma(xm, lanes[g], acc[m][g]);
      }
    }
  }
  MILLRACE_UNROLL
  for (int m = 0; m < M; ++m) {
    MILLRACE_UNROLL
    for (int g = 0; g < G; ++g) store(m, p + g, FromWeightOrder(acc[m][g], panels.w));
  }
}

template <int M, class W, class Init, class Store>
void TilePanels(const float* x, int64_t x_stride, Panels<W> panels, int64_t depth, int64_t begin, int64_t end,
                const Init& init, const Store& store) {
  constexpr int kAtOnce = PanelsAtOnce(M);
  int64_t p = begin;
  for (; p + kAtOnce <= end; p += kAtOnce) Tile<M, kAtOnce>(x, x_stride, panels, depth, p, init, store);
  if constexpr (kAtOnce > 1) {
    for (; p < end; ++p) Tile<M, 1>(x, x_stride, panels, depth, p, init, store);
  }
}

// TilePanels with M = rows, 1 <= rows <= kTileRows.
template <int M = kTileRows, class W, class Init, class Store>
void MultiplyRows(int rows, const float* x, int64_t x_stride, Panels<W> panels, int64_t depth, int64_t begin,
                  int64_t end, const Init& init, const Store& store) {
  if (rows == M) {
    TilePanels<M>(x, x_stride, panels, depth, begin, end, init, store);
  } else if constexpr (M > 1) {
    MultiplyRows<M - 1>(rows, x, x_stride, panels, depth, begin, end, init, store);
  }
}

}  // namespace millrace::cpu::MILLRACE_ISA
