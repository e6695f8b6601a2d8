// Sixteen floats, the same operations in three builds: AVX-512, AVX2 with FMA, and plain C++. Every operation is one
// IEEE operation per lane, so the builds agree bit for bit. Included only by files compiled once per build, which name
// their namespace MILLRACE_ISA; nothing inline may leave that namespace (the linker would keep one build's copy for
// all).
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/tensor.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define MILLRACE_LANES inline __attribute__((always_inline))
#if defined(__clang__)
#define MILLRACE_UNROLL _Pragma("unroll")
#else
#define MILLRACE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace millrace::cpu::MILLRACE_ISA {

inline constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct F16 {
  __m512 v;
};
MILLRACE_LANES F16 Broadcast(float x) { return {_mm512_set1_ps(x)}; }
MILLRACE_LANES F16 Load(const float* p) { return {_mm512_loadu_ps(p)}; }
MILLRACE_LANES F16 Load(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
MILLRACE_LANES void Store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
MILLRACE_LANES F16 Add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
MILLRACE_LANES F16 Sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
MILLRACE_LANES F16 Mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
MILLRACE_LANES F16 Div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
MILLRACE_LANES F16 Fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// a > b ? a : b, so a NaN in b stays
MILLRACE_LANES F16 Max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
MILLRACE_LANES F16 Min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// a < b ? x : y
MILLRACE_LANES F16 IfLess(F16 a, F16 b, F16 x, F16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// a == a ? x : a
MILLRACE_LANES F16 UnlessNan(F16 a, F16 x) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), x.v, a.v)};
}
// a * 2^n, n being the integer in the low mantissa bits of `shifted`
MILLRACE_LANES F16 ScaleByBits(F16 a, F16 shifted) {
  return {_mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23)))};
}

#elif defined(__AVX2__)

struct F16 {
  __m256 lo;
  __m256 hi;
};
MILLRACE_LANES F16 Broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
MILLRACE_LANES F16 Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
MILLRACE_LANES __m256 LoadHalf(const bf16* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
MILLRACE_LANES F16 Load(const bf16* p) { return {LoadHalf(p), LoadHalf(p + 8)}; }
MILLRACE_LANES void Store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
MILLRACE_LANES F16 Add(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
MILLRACE_LANES F16 Sub(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
MILLRACE_LANES F16 Mul(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
MILLRACE_LANES F16 Div(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
MILLRACE_LANES F16 Fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
MILLRACE_LANES F16 Max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
MILLRACE_LANES F16 Min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
MILLRACE_LANES F16 IfLess(F16 a, F16 b, F16 x, F16 y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
MILLRACE_LANES F16 UnlessNan(F16 a, F16 x) {
  return {_mm256_blendv_ps(x.lo, a.lo, _mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q)),
          _mm256_blendv_ps(x.hi, a.hi, _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))};
}
MILLRACE_LANES __m256 ScaleHalfByBits(__m256 a, __m256 shifted) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}
MILLRACE_LANES F16 ScaleByBits(F16 a, F16 shifted) {
  return {ScaleHalfByBits(a.lo, shifted.lo), ScaleHalfByBits(a.hi, shifted.hi)};
}
// See LoadWeights: even lanes in lo and odd ones in hi take two cheap operations where order takes four.
MILLRACE_LANES F16 LoadWeights(const bf16* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
MILLRACE_LANES F16 ToWeightOrder(F16 a, const bf16*) {
  const __m256 low = _mm256_permute2f128_ps(a.lo, a.hi, 0x20), high = _mm256_permute2f128_ps(a.lo, a.hi, 0x31);
  const __m256 even = _mm256_shuffle_ps(low, high, 0x88), odd = _mm256_shuffle_ps(low, high, 0xdd);
  return {even, odd};
}
MILLRACE_LANES F16 FromWeightOrder(F16 a, const bf16*) {
  const __m256 low = _mm256_unpacklo_ps(a.lo, a.hi), high = _mm256_unpackhi_ps(a.lo, a.hi);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}

#else

struct F16 {
  float v[kLanes];
};
template <class Fn>
MILLRACE_LANES F16 EachLane(const Fn& fn) {
  F16 r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = fn(i);
  return r;
}
MILLRACE_LANES F16 Broadcast(float x) {
  return EachLane([&](int) { return x; });
}
MILLRACE_LANES F16 Load(const float* p) {
  return EachLane([&](int i) { return p[i]; });
}
MILLRACE_LANES F16 Load(const bf16* p) {
  return EachLane([&](int i) { return std::bit_cast<float>(static_cast<uint32_t>(p[i].bits) << 16); });
}
MILLRACE_LANES void Store(float* p, F16 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = a.v[i];
}
MILLRACE_LANES F16 Add(F16 a, F16 b) {
  return EachLane([&](int i) { return a.v[i] + b.v[i]; });
}
MILLRACE_LANES F16 Sub(F16 a, F16 b) {
  return EachLane([&](int i) { return a.v[i] - b.v[i]; });
}
MILLRACE_LANES F16 Mul(F16 a, F16 b) {
  return EachLane([&](int i) { return a.v[i] * b.v[i]; });
}
MILLRACE_LANES F16 Div(F16 a, F16 b) {
  return EachLane([&](int i) { return a.v[i] / b.v[i]; });
}
MILLRACE_LANES F16 Fma(F16 a, F16 b, F16 c) {
  return EachLane([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
MILLRACE_LANES F16 Max(F16 a, F16 b) {
  return EachLane([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
MILLRACE_LANES F16 Min(F16 a, F16 b) {
  return EachLane([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
MILLRACE_LANES F16 IfLess(F16 a, F16 b, F16 x, F16 y) {
  return EachLane([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
}
MILLRACE_LANES F16 UnlessNan(F16 a, F16 x) {
  return EachLane([&](int i) { return a.v[i] == a.v[i] ? x.v[i] : a.v[i]; });
}
MILLRACE_LANES F16 ScaleByBits(F16 a, F16 shifted) {
  return EachLane([&](int i) {
    return std::bit_cast<float>(std::bit_cast<uint32_t>(a.v[i]) + (std::bit_cast<uint32_t>(shifted.v[i]) << 23));
  });
}

#endif

// Sixteen weights in the order that is cheapest to load, which differs by type and build; accumulators of products with
// them are brought into that order before and out of it after. Lanes never mix, so their bits do not depend on it.
template <class W>
MILLRACE_LANES F16 LoadWeights(const W* p) {
  return Load(p);
}
template <class W>
MILLRACE_LANES F16 ToWeightOrder(F16 a, const W*) {
  return a;
}
template <class W>
MILLRACE_LANES F16 FromWeightOrder(F16 a, const W*) {
  return a;
}

MILLRACE_LANES float ToFloat(float x) { return x; }
MILLRACE_LANES float ToFloat(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
MILLRACE_LANES void Round(float* p, float x) { *p = x; }
MILLRACE_LANES void Round(bf16* p, float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  p->bits = static_cast<uint16_t>(is_nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
MILLRACE_LANES void Store(bf16* p, F16 a) {
  float lanes[kLanes];
  Store(lanes, a);
  for (int i = 0; i < kLanes; ++i) Round(p + i, lanes[i]);
}

// The first n lanes, n < 16; the others are zero.
template <class T>
MILLRACE_LANES F16 LoadSome(const T* p, int64_t n) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = ToFloat(p[i]);
  return Load(lanes);
}
template <class T>
MILLRACE_LANES void StoreSome(T* p, F16 a, int64_t n) {
  float lanes[kLanes];
  Store(lanes, a);
  for (int64_t i = 0; i < n; ++i) Round(p + i, lanes[i]);
}

// Calls fn(i, load, store) for i = 0, 16, … < count; load(p) and store(p, lanes) touch only elements below count.
template <class Fn>
MILLRACE_LANES void ForLanes(int64_t count, const Fn& fn) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    fn(
        i, [](const auto* p) __attribute__((always_inline)) { return Load(p); },
        [](auto* p, F16 a) __attribute__((always_inline)) { Store(p, a); });
  }
  const int64_t n = count - i;
  if (n > 0) {
    fn(
        i, [n](const auto* p) __attribute__((always_inline)) { return LoadSome(p, n); },
        [n](auto* p, F16 a) __attribute__((always_inline)) { StoreSome(p, a, n); });
  }
}

// A fixed tree: lane i with lane i + 8, then + 4, + 2, + 1.
template <class Fn>
MILLRACE_LANES float Reduce(F16 a, const Fn& fn) {
  float lanes[kLanes];
  Store(lanes, a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = fn(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}
MILLRACE_LANES float Sum(F16 a) {
  return Reduce(a, [](float x, float y) { return x + y; });
}
MILLRACE_LANES float Largest(F16 a) {
  return Reduce(a, [](float x, float y) { return x > y ? x : y; });
}

// e^x to within 1 ulp or so: x = n ln 2 + r, |r| <= ln(2) / 2, a polynomial in r, and n added to the exponent. Below
// the smallest normal number it is 0, above the largest it is infinity, of a NaN it is that NaN; e^0 is exactly 1.
MILLRACE_LANES F16 Exp(F16 x) {
  const F16 least = Broadcast(-87.0f), most = Broadcast(88.37f);
  const F16 y = Min(most, Max(least, x));
  const F16 magic = Broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low mantissa bits
  const F16 shifted = Fma(y, Broadcast(1.44269504088896341f), magic);
  const F16 n = Sub(shifted, magic);
  F16 r = Fma(n, Broadcast(-0.693145751953125f), y);  // ln 2 in two parts, the first with trailing zeros
  r = Fma(n, Broadcast(-1.42860682030941723e-6f), r);
  F16 p = Broadcast(1.0f / 5040);
  p = Fma(p, r, Broadcast(1.0f / 720));
  p = Fma(p, r, Broadcast(1.0f / 120));
  p = Fma(p, r, Broadcast(1.0f / 24));
  p = Fma(p, r, Broadcast(1.0f / 6));
  p = Fma(p, r, Broadcast(0.5f));
  p = Fma(p, r, Broadcast(1.0f));
  p = Fma(p, r, Broadcast(1.0f));
  F16 e = ScaleByBits(p, shifted);
  e = IfLess(x, least, Broadcast(0.0f), e);
  e = IfLess(most, x, Broadcast(__builtin_inff()), e);
  return UnlessNan(x, e);
}

}  // namespace millrace::cpu::MILLRACE_ISA
