// NEON primitives (AArch64): 4 floats or 2 doubles.
#pragma once

#include <arm_neon.h>

#include "scalar.h"

namespace rmsnorm {
namespace {

struct NeonF32 {
  using Scalar = float;
  using Reg = float32x4_t;
  static constexpr int kLanes = 4;

  static Reg zero() { return vdupq_n_f32(0.0f); }
  static Reg set1(float value) { return vdupq_n_f32(value); }
  static Reg add(Reg a, Reg b) { return vaddq_f32(a, b); }
  static Reg mul(Reg a, Reg b) { return vmulq_f32(a, b); }
  // a * b + c, rounded once.
  static Reg fma(Reg a, Reg b, Reg c) { return vfmaq_f32(c, a, b); }

  static Reg load(const float* p) { return vld1q_f32(p); }
  static Reg load(const bf16* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16));
  }
  static Reg load(const f16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }

  static void store2(float* p, Reg a, Reg b) {
    vst1q_f32(p, a);
    vst1q_f32(p + 4, b);
  }
  static void store2(bf16* p, Reg a, Reg b) {
    vst1q_u16(&p->bits,
              vcombine_u16(vshrn_n_u32(rounded_bf16(a), 16), vshrn_n_u32(rounded_bf16(b), 16)));
  }
  static void store2(f16* p, Reg a, Reg b) {
    vst1q_u16(&p->bits, vcombine_u16(vreinterpret_u16_f16(vcvt_f16_f32(a)),
                                     vreinterpret_u16_f16(vcvt_f16_f32(b))));
  }
  // AArch64 has no non-temporal store worth using from C++.
  template <class Y>
  static void stream2(Y* p, Reg a, Reg b) {
    store2(p, a, b);
  }
  static void fence() {}

  template <class Mid>
  static Reg round_to(Reg a) {
    if constexpr (sizeof(Mid) == 4) {
      return a;
    } else if constexpr (std::is_same_v<Mid, bf16>) {
      return vreinterpretq_f32_u32(vandq_u32(rounded_bf16(a), vdupq_n_u32(0xffff0000u)));
    } else {
      return vcvt_f32_f16(vcvt_f16_f32(a));
    }
  }

  // Elements 2i of p to lane i of a, elements 2i + 1 to lane i of b.
  static void load_split(const bf16* p, Reg& a, Reg& b) {
    const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(&p->bits));
    a = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
    b = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
  }
  // The inverse, for floats.
  static void store_joined(float* p, Reg a, Reg b) {
    vst1q_f32(p, vzip1q_f32(a, b));
    vst1q_f32(p + 4, vzip2q_f32(a, b));
  }
  // The inverse, rounding to bf16.
  template <bool Stream>
  static void store_split(bf16* p, Reg a, Reg b) {
    vst1q_u16(&p->bits, vreinterpretq_u16_u32(vsriq_n_u32(nearest_bf16(b), nearest_bf16(a), 16)));
  }
  // The same for pairs that are rounded already.
  static void store_rounded_split(bf16* p, Reg a, Reg b) {
    vst1q_u16(&p->bits, vreinterpretq_u16_u32(
                            vsriq_n_u32(vreinterpretq_u32_f32(b), vreinterpretq_u32_f32(a), 16)));
  }
  static Reg round_split(Reg a) {
    return vreinterpretq_f32_u32(vandq_u32(nearest_bf16(a), vdupq_n_u32(0xffff0000u)));
  }

 private:
  // The same as rounded_bf16 below, for lanes that are no NaN or a NaN with a lower half of zero:
  // adding less than 2^16 to that one cannot carry out of its lower half.
  static uint32x4_t nearest_bf16(Reg a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
  }

  // The bf16 nearest to each lane, in the lane's upper half; the lower half is to be dropped.
  static uint32x4_t rounded_bf16(Reg a) {
    const uint32x4_t quiet = vorrq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(0x400000));
    return vbslq_u32(vceqq_f32(a, a), nearest_bf16(a), quiet);
  }
};

struct NeonF64 {
  using Scalar = double;
  using Reg = float64x2_t;
  static constexpr int kLanes = 2;

  static Reg zero() { return vdupq_n_f64(0.0); }
  static Reg set1(double value) { return vdupq_n_f64(value); }
  static Reg add(Reg a, Reg b) { return vaddq_f64(a, b); }
  static Reg mul(Reg a, Reg b) { return vmulq_f64(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return vfmaq_f64(c, a, b); }
  static Reg load(const double* p) { return vld1q_f64(p); }
  static void store2(double* p, Reg a, Reg b) {
    vst1q_f64(p, a);
    vst1q_f64(p + 2, b);
  }
  static void stream2(double* p, Reg a, Reg b) { store2(p, a, b); }
  static void fence() {}
  template <class Mid>
  static Reg round_to(Reg a) {
    return a;
  }
};

struct Neon {
  static constexpr const char* kName = "neon";
  using F32 = NeonF32;
  using F64 = NeonF64;
};

}  // namespace
}  // namespace rmsnorm
