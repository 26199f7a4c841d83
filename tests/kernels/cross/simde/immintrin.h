// Stands in for the compiler's <immintrin.h>: every AVX-512 intrinsic that the kernels use, as
// plain C++ by SIMDe (Debian: libsimde-dev), so that the AVX-512 kernels run on any x86-64
// processor. What SIMDe 0.7.4 lacks is written here, from the operation that Intel's manual gives.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

using __mmask16 = simde__mmask16;
using __mmask32 = simde__mmask32;

#if !defined(_MM_FROUND_NO_EXC)
#define _MM_FROUND_NO_EXC SIMDE_MM_FROUND_NO_EXC
#endif

namespace emulated {

template <class To, class From>
To reinterpret(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// The lanes of a register.
template <class T, std::size_t N>
struct Lanes {
  T at[N];
};

using Words = Lanes<std::uint16_t, 16>;
using DoubleWords = Lanes<std::uint32_t, 16>;

// VPMOVZXWD
inline __m512i cvtepu16_epi32(__m256i a) {
  const auto from = reinterpret<Words>(a);
  DoubleWords to;
  for (int i = 0; i < 16; ++i) to.at[i] = from.at[i];
  return reinterpret<__m512i>(to);
}

// VPMOVDW: the lower half of each lane.
inline __m256i cvtepi32_epi16(__m512i a) {
  const auto from = reinterpret<DoubleWords>(a);
  Words to;
  for (int i = 0; i < 16; ++i) to.at[i] = static_cast<std::uint16_t>(from.at[i]);
  return reinterpret<__m256i>(to);
}

// VCVTPH2PS
inline __m512 cvtph_ps(__m256i a) {
  const auto from = reinterpret<Words>(a);
  DoubleWords to;
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t sign = from.at[i] & 0x8000u;
    std::uint32_t exponent = (from.at[i] >> 10) & 0x1fu;
    std::uint32_t fraction = from.at[i] & 0x3ffu;
    if (exponent == 0x1f) {
      exponent = 0xff;
      if (fraction) fraction |= 0x200u;
    } else if (exponent) {
      exponent += 127 - 15;
    } else if (fraction) {
      exponent = 127 - 15 + 1;
      for (; !(fraction & 0x400u); fraction <<= 1) --exponent;
      fraction &= 0x3ffu;
    }
    to.at[i] = sign << 16 | exponent << 23 | fraction << 13;
  }
  return reinterpret<__m512>(to);
}

// VCVTPS2PH with rounding to nearest even, whatever MXCSR says.
template <int Control>
__m256i cvtps_ph(__m512 a) {
  static_assert((Control & 7) == 0, "only rounding to nearest is emulated");
  const auto from = reinterpret<DoubleWords>(a);
  Words to;
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t sign = from.at[i] >> 31 << 15;
    const int exponent = static_cast<int>((from.at[i] >> 23) & 0xffu);
    const std::uint32_t fraction = from.at[i] & 0x7fffffu;
    std::uint32_t half;
    if (exponent == 0xff) {
      half = fraction ? 0x7e00u | fraction >> 13 : 0x7c00u;
    } else {
      // The significand, then shifted down to the half's unit; what falls off decides.
      std::uint64_t significand = exponent ? fraction | 0x800000u : fraction;
      const int field = (exponent ? exponent : 1) - 127 + 15;
      const int shift = field >= 1 ? 13 : 14 - field > 40 ? 40 : 14 - field;
      const std::uint64_t lost = significand & ((std::uint64_t{1} << shift) - 1);
      const std::uint64_t tie = std::uint64_t{1} << (shift - 1);
      significand >>= shift;
      if (lost > tie || (lost == tie && (significand & 1))) ++significand;
      half = static_cast<std::uint32_t>(significand);
      // A significand of a normal number brings the 1 that the exponent field lacks.
      if (field >= 1) half += static_cast<std::uint32_t>(field - 1) << 10;
      if (half > 0x7c00u) half = 0x7c00u;
    }
    to.at[i] = static_cast<std::uint16_t>(sign | half);
  }
  return reinterpret<__m256i>(to);
}

// VFMADD213PS, VFMADD213PD: SIMDe rounds the product and the sum apart.
template <class T, class Register>
Register fmadd(Register a, Register b, Register c) {
  using Values = Lanes<T, sizeof(Register) / sizeof(T)>;
  auto result = reinterpret<Values>(c);
  const auto x = reinterpret<Values>(a);
  const auto y = reinterpret<Values>(b);
  for (std::size_t i = 0; i < sizeof(Register) / sizeof(T); ++i) {
    result.at[i] = std::fma(x.at[i], y.at[i], result.at[i]);
  }
  return reinterpret<Register>(result);
}

// VFPCLASSPS, category 0x20: subnormal, unless MXCSR.DAZ makes it zero.
template <int Category>
__mmask16 fpclass_ps_mask(__m512 a) {
  static_assert(Category == 0x20, "only the category of subnormals is emulated");
  const auto from = reinterpret<DoubleWords>(a);
  const bool daz = _mm_getcsr() & 0x40u;
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) {
    const bool zero_exponent = (from.at[i] & 0x7f800000u) == 0;
    if (zero_exponent && (from.at[i] & 0x7fffffu) && !daz) mask |= 1u << i;
  }
  return static_cast<__mmask16>(mask);
}

// VCVTNEPS2BF16: to nearest even; subnormals become zero, whatever MXCSR says.
inline __m256bh cvtneps_pbh(__m512 a) {
  const auto from = reinterpret<DoubleWords>(a);
  Words to;
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t bits = from.at[i];
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    std::uint32_t result;
    if (magnitude < 0x800000u) {
      result = bits >> 31 << 15;
    } else if (magnitude > 0x7f800000u) {
      result = bits >> 16 | 0x40u;
    } else if (magnitude == 0x7f800000u) {
      result = bits >> 16;
    } else {
      result = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    }
    to.at[i] = static_cast<std::uint16_t>(result);
  }
  return reinterpret<__m256bh>(to);
}

// VMOVNTPS and its like. They fault on an address that is no multiple of 64: so does this.
template <class Register>
void stream(void* p, const Register& a) {
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof a != 0) __builtin_trap();
  std::memcpy(p, &a, sizeof a);
}

}  // namespace emulated

#define _mm512_cvtepu16_epi32(a) emulated::cvtepu16_epi32(a)
#define _mm512_cvtepi32_epi16(a) emulated::cvtepi32_epi16(a)
#define _mm512_cvtph_ps(a) emulated::cvtph_ps(a)
#define _mm512_cvtps_ph(a, control) emulated::cvtps_ph<(control)>(a)
#undef _mm512_fmadd_ps
#undef _mm512_fmadd_pd
#define _mm512_fmadd_ps(a, b, c) emulated::fmadd<float>(a, b, c)
#define _mm512_fmadd_pd(a, b, c) emulated::fmadd<double>(a, b, c)
#define _mm512_fpclass_ps_mask(a, category) emulated::fpclass_ps_mask<(category)>(a)
#define _mm512_cvtneps_pbh(a) emulated::cvtneps_pbh(a)
#define _mm512_stream_ps(p, a) emulated::stream(p, a)
#define _mm512_stream_pd(p, a) emulated::stream(p, a)
#define _mm512_stream_si512(p, a) emulated::stream(p, a)

// After SIMDe, which would take these for the processor's own.
#define __AVX512F__ 1
#define __AVX512BF16__ 1
