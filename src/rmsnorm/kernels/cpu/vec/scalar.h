// Scalar primitives: conversions between storage types and arithmetic types, one element at a time.
// Every instruction set uses them for the ends of rows. Everything is in an unnamed namespace: each
// kernel file is compiled with its own instruction flags, and the linker must never let one file's
// copy serve another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../types.h"

namespace rmsnorm {
namespace {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(bf16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }
inline float widen(f16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return float_of(sign | ((magnitude << 13) + (112u << 23)));
  // Subnormal: magnitude * 2^-24, exact in float.
  const float small = static_cast<float>(magnitude) * 0x1p-24f;
  return float_of(sign | bits_of(small));
}

// Round to nearest even; a NaN stays a NaN.
template <class To>
To narrow(float value);

template <>
inline float narrow<float>(float value) {
  return value;
}
template <>
inline double narrow<double>(float value) {
  return value;
}
template <>
inline bf16 narrow<bf16>(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
inline f16 narrow<f16>(float value) {
  const std::uint32_t bits = bits_of(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal in half precision: 2^-14 and above
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  } else {
    // Adding 0.5 leaves the value's multiple of 2^-24 in the last bits, rounded to nearest even.
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

// A double goes to a half type through float, as it does in PyTorch.
template <class To>
To narrow(double value) {
  return narrow<To>(static_cast<float>(value));
}
template <>
inline double narrow<double>(double value) {
  return value;
}

// a * b + c, rounded once, by whatever means.
inline float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fused_multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }

template <class T>
struct ScalarVec {
  using Scalar = T;
  using Reg = T;
  static constexpr int kLanes = 1;

  static Reg zero() { return T(0); }
  static Reg set1(T value) { return value; }
  static Reg add(Reg a, Reg b) { return a + b; }
  static Reg mul(Reg a, Reg b) { return a * b; }
  // a * b + c, rounded once.
  static Reg fma(Reg a, Reg b, Reg c) { return fused_multiply_add(a, b, c); }
  template <class X>
  static Reg load(const X* p) {
    return widen(*p);
  }
  template <class Y>
  static void store(Y* p, Reg a) {
    *p = narrow<Y>(a);
  }
  template <class Y>
  static void store2(Y* p, Reg a, Reg b) {
    store(p, a);
    store(p + 1, b);
  }
  template <class Y>
  static void stream2(Y* p, Reg a, Reg b) {
    store2(p, a, b);
  }
  static void fence() {}
  template <class Mid>
  static Reg round_to(Reg a) {
    return widen(narrow<Mid>(a));
  }
  static void load_split(const bf16* p, Reg& a, Reg& b) {
    a = widen(p[0]);
    b = widen(p[1]);
  }
  static void store_joined(T* p, Reg a, Reg b) { store2(p, a, b); }
  template <bool Stream>
  static void store_split(bf16* p, Reg a, Reg b) {
    store2(p, a, b);
  }
  static void store_rounded_split(bf16* p, Reg a, Reg b) { store2(p, a, b); }
  static Reg round_split(Reg a) { return round_to<bf16>(a); }
};

struct Scalar {
  static constexpr const char* kName = "scalar";
  using F32 = ScalarVec<float>;
  using F64 = ScalarVec<double>;
};

}  // namespace
}  // namespace rmsnorm
