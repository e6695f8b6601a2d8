// What each build of the kernels defines; kernels.cc gathers it into the table of isa.h.
#pragma once

#include "kernels/cpu/isa.h"

namespace millrace::cpu::MILLRACE_ISA {

template <class Y, class A>
void LinearPanels(Mat<Y> y, Mat<const A> x, PackedWeight w, Vec<const float> bias, float* scratch, Range panels);
template <class A>
void RmsNormRows(Mat<A> out, Mat<const float> x, Vec<const float> weight, float eps, Range rows);
template <class A>
void AddRmsNormRows(Mat<A> out, Mat<float> residual, Mat<const float> delta, Vec<const float> weight, float eps,
                    Range rows);
template <class A>
void RopeAppendRows(Mat<A> qkv, KvLayer<A> kv, Vec<const float> q_norm, Vec<const float> k_norm, float eps,
                    RopeTable rope, Vec<const int32_t> positions, Vec<const int32_t> slots, Range rows);
template <class A>
void AttendTile(const AttentionTile<A>& tile, KvLayer<A> kv);
template <class A>
void SiluMulRows(Mat<A> out, Mat<const A> gate_up, Range rows);
template <class A>
void AddElements(A* x, const A* delta, int64_t count);

bool IsFinite(const float* x, int64_t count);
float MaxOf(const float* x, int64_t count);
double ExpSum(float* y, const float* x, float shift, int64_t count);
void PhiloxGroups(uint32_t* words, uint64_t seed, int64_t position, uint64_t first_group);

}  // namespace millrace::cpu::MILLRACE_ISA
