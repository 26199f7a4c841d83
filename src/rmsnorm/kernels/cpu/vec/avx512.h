// AVX-512 primitives (F, BW, DQ, VL): 16 floats or 8 doubles, with or without the bf16 conversion
// instruction.
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace rmsnorm {
namespace {

template <bool Bf16Instructions>
struct Avx512F32 {
  using Scalar = float;
  using Reg = __m512;
  static constexpr int kLanes = 16;

  static Reg zero() { return _mm512_setzero_ps(); }
  static Reg set1(float value) { return _mm512_set1_ps(value); }
  static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  // a * b + c, rounded once.
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }

  static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static Reg load(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static Reg load(const f16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  static void store2(float* p, Reg a, Reg b) {
    _mm512_storeu_ps(p, a);
    _mm512_storeu_ps(p + 16, b);
  }
  static void store2(bf16* p, Reg a, Reg b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(a));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), to_bf16(b));
  }
  static void store2(f16* p, Reg a, Reg b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_f16(a));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), to_f16(b));
  }

  // Past the cache; p is aligned to 64 bytes.
  static void stream2(float* p, Reg a, Reg b) {
    _mm512_stream_ps(p, a);
    _mm512_stream_ps(p + 16, b);
  }
  static void stream2(bf16* p, Reg a, Reg b) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), join(to_bf16(a), to_bf16(b)));
  }
  static void stream2(f16* p, Reg a, Reg b) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), join(to_f16(a), to_f16(b)));
  }
  static void fence() { _mm_sfence(); }

  template <class Mid>
  static Reg round_to(Reg a) {
    if constexpr (sizeof(Mid) == 4) {
      return a;
    } else if constexpr (std::is_same_v<Mid, bf16>) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(a)), 16));
    } else {
      return _mm512_cvtph_ps(to_f16(a));
    }
  }

  // Elements 2i of p to lane i of a, elements 2i + 1 to lane i of b.
  static void load_split(const bf16* p, Reg& a, Reg& b) {
    const __m512i pairs = _mm512_loadu_si512(p);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper_halves()));
  }
  // The inverse, for floats.
  static void store_joined(float* p, Reg a, Reg b) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high =
        _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    _mm512_storeu_ps(p, _mm512_permutex2var_ps(a, low, b));
    _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(a, high, b));
  }
  // The inverse, rounding to bf16.
  template <bool Stream>
  static void store_split(bf16* p, Reg a, Reg b) {
    constexpr __mmask32 kOddHalves = 0xaaaaaaaa;
    const __m512i joined = _mm512_mask_blend_epi16(
        kOddHalves, _mm512_srli_epi32(nearest_bf16(a), 16), nearest_bf16(b));
    if constexpr (Stream) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), joined);
    } else {
      _mm512_storeu_si512(p, joined);
    }
  }
  // The same for pairs that are rounded already.
  static void store_rounded_split(bf16* p, Reg a, Reg b) {
    _mm512_storeu_si512(
        p, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b)));
  }
  static Reg round_split(Reg a) {
    return _mm512_castsi512_ps(_mm512_and_si512(nearest_bf16(a), upper_halves()));
  }

 private:
  static __m512i upper_halves() { return _mm512_set1_epi32(static_cast<int>(0xffff0000u)); }

  // The bf16 nearest to each lane, in the lane's upper half, for lanes that are no NaN or a NaN
  // with a lower half of zero: adding less than 2^16 to that one cannot carry out of its lower
  // half.
  static __m512i nearest_bf16(Reg a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  }

  static __m256i to_bf16(Reg a) {
#if defined(__AVX512BF16__)
    if constexpr (Bf16Instructions) {
      // The instruction flushes subnormals to zero, which would lose bits: such vectors are rare
      // and take the integer path.
      constexpr int kSubnormal = 0x20;
      if (__builtin_expect(_mm512_fpclass_ps_mask(a, kSubnormal) == 0, 1)) {
        const __m256bh rounded = _mm512_cvtneps_pbh(a);
        __m256i bits;
        std::memcpy(&bits, &rounded, sizeof bits);
        return bits;
      }
    }
#endif
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x400000));
    const __m512i rounded = _mm512_mask_blend_epi32(nan, nearest_bf16(a), quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  static __m256i to_f16(Reg a) {
    return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static __m512i join(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
};

struct Avx512F64 {
  using Scalar = double;
  using Reg = __m512d;
  static constexpr int kLanes = 8;

  static Reg zero() { return _mm512_setzero_pd(); }
  static Reg set1(double value) { return _mm512_set1_pd(value); }
  static Reg add(Reg a, Reg b) { return _mm512_add_pd(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm512_mul_pd(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_pd(a, b, c); }
  static Reg load(const double* p) { return _mm512_loadu_pd(p); }
  static void store2(double* p, Reg a, Reg b) {
    _mm512_storeu_pd(p, a);
    _mm512_storeu_pd(p + 8, b);
  }
  static void stream2(double* p, Reg a, Reg b) {
    _mm512_stream_pd(p, a);
    _mm512_stream_pd(p + 8, b);
  }
  static void fence() { _mm_sfence(); }
  template <class Mid>
  static Reg round_to(Reg a) {
    return a;
  }
};

struct Avx512 {
  static constexpr const char* kName = "avx512";
  using F32 = Avx512F32<false>;
  using F64 = Avx512F64;
};

struct Avx512Bf16 {
  static constexpr const char* kName = "avx512";
  using F32 = Avx512F32<true>;
  using F64 = Avx512F64;
};

}  // namespace
}  // namespace rmsnorm
