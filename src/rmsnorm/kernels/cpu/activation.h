// The activations of a gated norm and their derivatives, for a chunk of gates at a time:
//
//     s = 1 / (1 + exp(-g))     sigmoid: a = s        da/dg = s (1 - s)
//                               silu:    a = g s      da/dg = s + g s (1 - s)
//
// For floats everything is done in double and rounded once, with an exponential of its own: plain
// loops without branches, which the compiler turns into vectors, and nothing but additions,
// multiplications and divisions, whose bits are the same on every instruction set.
#pragma once

#include "types.h"

namespace rmsnorm {
namespace {

// `yes` where all bits of `mask` are set, `no` where none is. Written out, because the compiler
// makes a branch of a conditional expression, and then no vectors of the loop around it.
inline double select(std::uint64_t mask, double yes, double no) {
  return __builtin_bit_cast(double, (__builtin_bit_cast(std::uint64_t, yes) & mask) |
                                        (__builtin_bit_cast(std::uint64_t, no) & ~mask));
}

// exp(z) for z <= 0, with a relative error below 2^-45; 0 where it is below double's normal range.
inline double exp_of_negative(double z) {
  constexpr double kLowest = -0x1.628b76e3a7b61p+9;  // -1023 ln(2)
  constexpr double kLog2E = 0x1.71547652b82fep+0;
  constexpr double kLn2 = 0x1.62e42fefa39efp-1;
  // Adding it leaves an integer in the last bits of the sum.
  constexpr double kInteger = 0x1.8p52;
  const double clamped = select(-static_cast<std::uint64_t>(z < kLowest), kLowest, z);
  const double shifted = clamped * kLog2E + kInteger;
  const double n = shifted - kInteger;
  const double r = clamped - n * kLn2;  // |r| <= ln(2) / 2
  // The polynomial of degree 10 with the least relative error on that interval: 2^-52. Its odd and
  // even powers apart, so that half as many operations wait for one another.
  const double r2 = r * r;
  double even = 0x1.27279dc78beabp-22;
  double odd = 0x1.72f993bfcf4d6p-19;
  even = even * r2 + 0x1.a01b6d09ecb4ep-16;
  odd = odd * r2 + 0x1.a0197a40c8b5dp-13;
  even = even * r2 + 0x1.6c16c0c091fa2p-10;
  odd = odd * r2 + 0x1.1111112d4dca0p-7;
  even = even * r2 + 0x1.555555559348fp-5;
  odd = odd * r2 + 0x1.555555554bbeap-3;
  even = even * r2 + 0x1.ffffffffffe17p-2;
  odd = odd * r2 + 0x1.000000000001dp+0;
  even = even * r2 + 1.0;
  // 2^n from its bits, 0 for the lowest n: the shift drops all but the last twelve of n + 1023.
  const std::uint64_t exponent = (__builtin_bit_cast(std::uint64_t, shifted) + 1023) << 52;
  return (odd * r + even) * __builtin_bit_cast(double, exponent);
}

struct Activated {
  double value;
  double derivative;
};

template <bool Silu>
inline Activated activated(float g) {
  const double gate = static_cast<double>(g);
  const double e = exp_of_negative(-__builtin_fabs(gate));
  const double inverse = 1.0 / (1.0 + e);
  const std::uint64_t negative = -(__builtin_bit_cast(std::uint64_t, gate) >> 63);
  const double s = select(negative, e, 1.0) * inverse;
  const double rest = select(negative, 1.0, e) * inverse;  // 1 - s
  if constexpr (!Silu) return {s, s * rest};
  return {gate * s, s + gate * s * rest};
}

template <bool Silu>
inline Activated activated(double g) {
  const double divisor = 1.0 + __builtin_exp(-g);
  const double s = 1.0 / divisor;
  const double rest = 1.0 / (1.0 + __builtin_exp(g));
  if constexpr (!Silu) return {s, s * rest};
  const double value = g / divisor;
  return {value, s + value * rest};
}

// One gate. T: the type that it is computed for.
template <class T>
Activated activated(Gate gate, T g) {
  return gate == Gate::silu ? activated<true>(g) : activated<false>(g);
}

template <bool Silu, class T>
void activate_all(const T* __restrict g, std::int64_t count, T* __restrict a) {
  for (std::int64_t i = 0; i < count; ++i) a[i] = static_cast<T>(activated<Silu>(g[i]).value);
}

template <bool Silu, class T>
void activate_all(const T* __restrict g, std::int64_t count, T* __restrict a, T* __restrict da) {
  for (std::int64_t i = 0; i < count; ++i) {
    const Activated result = activated<Silu>(g[i]);
    a[i] = static_cast<T>(result.value);
    da[i] = static_cast<T>(result.derivative);
  }
}

// a[i] = act(g[i]). The arrays must not overlap.
template <class T>
[[gnu::noinline]] void activate(Gate gate, const T* g, std::int64_t count, T* a) {
  if (gate == Gate::silu) return activate_all<true>(g, count, a);
  activate_all<false>(g, count, a);
}

// Beside it da[i] = act'(g[i]).
template <class T>
[[gnu::noinline]] void activate_with_derivative(Gate gate, const T* g, std::int64_t count, T* a,
                                                T* da) {
  if (gate == Gate::silu) return activate_all<true>(g, count, a, da);
  activate_all<false>(g, count, a, da);
}

}  // namespace
}  // namespace rmsnorm
