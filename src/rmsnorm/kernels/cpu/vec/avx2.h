// AVX2 primitives: 8 floats or 4 doubles.
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace rmsnorm {
namespace {

struct Avx2F32 {
  using Scalar = float;
  using Reg = __m256;
  static constexpr int kLanes = 8;

  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg set1(float value) { return _mm256_set1_ps(value); }
  static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  // a * b + c, rounded once.
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }

  static Reg load(const float* p) { return _mm256_loadu_ps(p); }
  static Reg load(const bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static Reg load(const f16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  static void store2(float* p, Reg a, Reg b) {
    _mm256_storeu_ps(p, a);
    _mm256_storeu_ps(p + 8, b);
  }
  static void store2(bf16* p, Reg a, Reg b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(a, b));
  }
  static void store2(f16* p, Reg a, Reg b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_f16(a, b));
  }

  // Past the cache; p is aligned to 32 bytes.
  static void stream2(float* p, Reg a, Reg b) {
    _mm256_stream_ps(p, a);
    _mm256_stream_ps(p + 8, b);
  }
  static void stream2(bf16* p, Reg a, Reg b) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_bf16(a, b));
  }
  static void stream2(f16* p, Reg a, Reg b) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_f16(a, b));
  }
  static void fence() { _mm_sfence(); }

  template <class Mid>
  static Reg round_to(Reg a) {
    if constexpr (sizeof(Mid) == 4) {
      return a;
    } else if constexpr (std::is_same_v<Mid, bf16>) {
      return _mm256_castsi256_ps(_mm256_and_si256(rounded_bf16(a), upper_halves()));
    } else {
      return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }

  // Elements 2i of p to lane i of a, elements 2i + 1 to lane i of b.
  static void load_split(const bf16* p, Reg& a, Reg& b) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    a = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    b = _mm256_castsi256_ps(_mm256_and_si256(pairs, upper_halves()));
  }
  // The inverse, for floats.
  static void store_joined(float* p, Reg a, Reg b) {
    const Reg low = _mm256_unpacklo_ps(a, b);
    const Reg high = _mm256_unpackhi_ps(a, b);
    _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
  }
  // The inverse, rounding to bf16.
  template <bool Stream>
  static void store_split(bf16* p, Reg a, Reg b) {
    constexpr int kOddHalves = 0xaa;
    const __m256i joined =
        _mm256_blend_epi16(_mm256_srli_epi32(nearest_bf16(a), 16), nearest_bf16(b), kOddHalves);
    if constexpr (Stream) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(p), joined);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), joined);
    }
  }
  // The same for pairs that are rounded already.
  static void store_rounded_split(bf16* p, Reg a, Reg b) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(p),
        _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(a), 16), _mm256_castps_si256(b)));
  }
  static Reg round_split(Reg a) {
    return _mm256_castsi256_ps(_mm256_and_si256(nearest_bf16(a), upper_halves()));
  }

 private:
  static __m256i upper_halves() { return _mm256_set1_epi32(static_cast<int>(0xffff0000u)); }

  // The same as rounded_bf16 below, for lanes that are no NaN or a NaN with a lower half of zero:
  // adding less than 2^16 to that one cannot carry out of its lower half.
  static __m256i nearest_bf16(Reg a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  }

  // The bf16 nearest to each lane, in the lane's upper half; the lower half is to be dropped.
  static __m256i rounded_bf16(Reg a) {
    const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    const __m256 quiet = _mm256_or_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x400000)));
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(nearest_bf16(a)), quiet, nan));
  }
  static __m256i to_bf16(Reg a, Reg b) {
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(rounded_bf16(a), 16),
                                               _mm256_srli_epi32(rounded_bf16(b), 16));
    return _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0));
  }
  static __m256i to_f16(Reg a, Reg b) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_set_m128i(_mm256_cvtps_ph(b, kNearest), _mm256_cvtps_ph(a, kNearest));
  }
};

struct Avx2F64 {
  using Scalar = double;
  using Reg = __m256d;
  static constexpr int kLanes = 4;

  static Reg zero() { return _mm256_setzero_pd(); }
  static Reg set1(double value) { return _mm256_set1_pd(value); }
  static Reg add(Reg a, Reg b) { return _mm256_add_pd(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm256_mul_pd(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_pd(a, b, c); }
  static Reg load(const double* p) { return _mm256_loadu_pd(p); }
  static void store2(double* p, Reg a, Reg b) {
    _mm256_storeu_pd(p, a);
    _mm256_storeu_pd(p + 4, b);
  }
  static void stream2(double* p, Reg a, Reg b) {
    _mm256_stream_pd(p, a);
    _mm256_stream_pd(p + 4, b);
  }
  static void fence() { _mm_sfence(); }
  template <class Mid>
  static Reg round_to(Reg a) {
    return a;
  }
};

struct Avx2 {
  static constexpr const char* kName = "avx2";
  using F32 = Avx2F32;
  using F64 = Avx2F64;
};

}  // namespace
}  // namespace rmsnorm
