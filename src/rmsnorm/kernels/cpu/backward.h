// RMSNorm backward (Zhang & Sennrich 2019), written once over the vector primitives. With w the
// weight plus its offset, and xhat = x * rstd not rounded to x's type:
//
//     u         = dy * w
//     dx_i      = rstd * (u_i - xhat_i * k * sum(u * xhat) / c^2)      reference.py derives k and c
//     dweight_i = sum over rows of dy_i * xhat_i
//     dbias_i   = sum over rows of dy_i
//
// A gate before the norm makes x the product x * act(gate), one after it makes dy the product
// dy * act(gate):
//
//     before: dgate = dx * x * act'(gate), then dx = dx * act(gate)
//     after:  dgate = dy * xhat * w * act'(gate)
//
// The sum over a row has the order of rows.h. The sums over rows have one that depends on the
// number of rows alone: in order within a chunk of 16 rows, then the chunks of a block, then the
// blocks, in a tree of pairs.
//
// Where u is nearly parallel to x, the subtraction in dx cancels. Such a row, and one whose values
// leave the range of the type, is computed again in a wider one.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cstring>

#include "activation.h"
#include "rms_norm.h"

namespace rmsnorm {
namespace {

constexpr int kTileRows = 4;  // rows taken together, so that the sums over rows are loaded once
constexpr std::int64_t kTileBytes = std::int64_t{256} << 10;  // of x and dy: they stay in a cache
// Rows this far apart, or a multiple of it, have the same few places in a first-level cache of 4096
// bytes a way. With x, dy and dx of four of them it would hold less than is read and written at
// once.
constexpr std::int64_t kSamePlaces = 2048;
// From this many bytes on a part is read together with the next one's sums (overlapped_gradient):
// x, dy, the weight and dweight of a shorter one stay in a first-level cache of 32 KiB between its
// sums and its gradients.
constexpr std::int64_t kOverlapBytes = 8192;

// Where element i of a part of `count` elements lies in the order of the loops. In split order the
// even elements of each pair of registers come before the odd ones.
template <class Vec>
std::int64_t position(bool split, std::int64_t i, std::int64_t count) {
  constexpr std::int64_t kPair = 2 * Vec::kLanes;
  const std::int64_t within = i % kPair;
  if (!split || i - within + kPair > count) return i;
  return i - within + within % 2 * Vec::kLanes + within / 2;
}

template <class T>
struct GradientSums {
  T along;   // sum(u * xhat)
  T square;  // sum(u * u)
};

template <class Vec, bool Split>
struct GradientAccumulators {
  using Acc = Accumulators<Vec, Split>;
  static constexpr int kLanes = Acc::kLanes;
  static constexpr int kStep = Acc::kStep;
  Acc along, square;

  void clear() {
    along.clear();
    square.clear();
  }
  void add(const GradientAccumulators& other) {
    along.add(other.along);
    square.add(other.square);
  }
};

template <class X, class DY>
constexpr bool kSplitPair = std::is_same_v<X, bf16> && std::is_same_v<DY, bf16>;

// The sums over the first `width` of the `count` elements of a part. `beside`: see sum_of_squares.
template <class Vec, class X, class DY, class Beside = NothingBeside>
[[gnu::always_inline]] inline GradientSums<typename Vec::Scalar> gradient_sums(
    const X* x, const DY* dy, const typename Vec::Scalar* weight, typename Vec::Scalar rstd,
    std::int64_t width, std::int64_t count, const Beside& beside = {}) {
  using T = typename Vec::Scalar;
  using Reg = typename Vec::Reg;
  constexpr bool kSplit = kSplitPair<X, DY>;
  using Acc = GradientAccumulators<Vec, kSplit>;
  const auto u = [=](std::int64_t i) {
    return widen(dy[i]) * weight[position<Vec>(kSplit, i, count)];
  };
  const auto along = [=](std::int64_t i) -> T { return u(i) * (widen(x[i]) * rstd); };
  const auto square = [=](std::int64_t i) -> T { return u(i) * u(i); };
  if (width < Acc::kLanes) return {sum_short<T>(width, along), sum_short<T>(width, square)};

  const RowReader<Vec, X, false> x_row{x, 1};
  const RowReader<Vec, DY, false> dy_row{dy, 1};
  const Reg factors = Vec::set1(rstd);
  const auto add_step = [&](Acc& acc, std::int64_t first) __attribute__((always_inline)) {
    for (int r = 0; r < Acc::Acc::kRegs; r += 2) {
      const std::int64_t i = first + r * Vec::kLanes;
      Reg x_reg[2], u_reg[2];
      x_row.template load2<kSplit>(i, x_reg[0], x_reg[1]);
      dy_row.template load2<kSplit>(i, u_reg[0], u_reg[1]);
      for (int half = 0; half < 2; ++half) {
        const Reg u = Vec::mul(u_reg[half], Vec::load(weight + i + half * Vec::kLanes));
        const Reg xhat = Vec::mul(x_reg[half], factors);
        acc.along.reg[r + half] = Vec::add(acc.along.reg[r + half], Vec::mul(u, xhat));
        acc.square.reg[r + half] = Vec::add(acc.square.reg[r + half], Vec::mul(u, u));
      }
      beside(i);
    }
  };
  const std::int64_t whole = whole_steps<T>(width);
  const Acc acc = cascade<Acc>(whole / Acc::kStep, add_step);
  return {sum_lanes<T>(acc.along, whole, width, along),
          sum_lanes<T>(acc.square, whole, width, square)};
}

// c^2: the number of elements that the sum of squares is divided by.
inline double divisor(const BackwardCall& call) {
  return call.divide || call.eps_in == EpsIn::clamp ? static_cast<double>(call.width) : 1.0;
}

// k / c^2 * sum(u * xhat): what xhat is multiplied by. k has no value at a row of zeros, whose sum
// is 0.
template <class T>
T mean_along(const BackwardCall& call, T c_squared, T rstd, T along) {
  const T mean = along / c_squared;
  if (call.eps_in != EpsIn::root || mean == T(0)) return mean;
  return mean / (T(1) - static_cast<T>(call.eps) * rstd);
}

// Whether x * rstd keeps its accuracy in T.
template <class T>
bool in_range(T rstd) {
  constexpr T kFarthest = sizeof(T) == 4 ? T(0x1p120) : T(0x1p900);
  return rstd >= 1 / kFarthest && rstd <= kFarthest;
}

// Whether a part whose elements all count is plainly not delicate, which holds for most, in few
// instructions: all is well within range, and what is subtracted has at most an eighth of u's
// square, so that more is left than any limit of is_delicate asks for.
template <class T>
[[gnu::always_inline]] inline bool is_plain(const BackwardCall& call, T rstd,
                                            const GradientSums<T>& sums, T mean) {
  constexpr T kWide = sizeof(T) == 4 ? T(0x1p60) : T(0x1p400);
  return call.eps_in == EpsIn::mean_square && rstd >= 1 / kWide && rstd <= kWide &&
         sums.square >= 1 / kWide && sums.square <= kWide && 8 * (mean * sums.along) <= sums.square;
}

// Whether a part must be computed in a wider type: rstd or a sum has left its range, or what is
// left of u after the subtraction is so little that the rounding errors of both show. `counted` is
// the part of sums.along under the mean square, and `mean` that of mean_along.
template <class T>
bool is_delicate(const BackwardCall& call, T rstd, const GradientSums<T>& sums, T counted, T mean) {
  constexpr bool kSingle = sizeof(T) == 4;
  constexpr double kSmallest = kSingle ? 0x1p-110 : 0x1p-960;
  constexpr double kLargest = kSingle ? static_cast<double>(FLT_MAX) : 0x1p1000;
  if (!in_range(rstd)) return true;
  const double r = rstd;
  const double square = sums.square;
  if (!(square >= kSmallest && square <= kLargest)) return true;
  double mean_xhat_square = 1.0;
  switch (call.eps_in) {
    case EpsIn::mean_square:
      mean_xhat_square = 1.0 - call.eps * r * r;
      break;
    case EpsIn::root:  // 1 - eps * rstd cancels too
      if (!(call.eps * r <= 0.5)) return true;
      mean_xhat_square = (1.0 - call.eps * r) * (1.0 - call.eps * r);
      break;
    case EpsIn::clamp:  // at the floor, where xhat does not depend on the norm
      if (rstd >= square_root(static_cast<T>(call.width)) / static_cast<T>(call.eps)) return true;
      break;
  }
  const double m = mean;
  const double subtracted = m * m * divisor(call);
  const double left = square - 2.0 * m * counted + subtracted * mean_xhat_square;
  const double limit = element_size(call.x.type) == 2 ? 0x1p-12 : 0.6;
  return !(left >= limit * (square + subtracted));
}

// Several rows of one part, in the vector loops.
template <class X, class DY, class T>
struct Tile {
  const X* x[kTileRows];
  const DY* dy[kTileRows];
  const X* dresidual[kTileRows];  // or null
  X* dx[kTileRows];               // or null
  T rstd[kTileRows];
  T mean[kTileRows];  // see mean_along
  const T* weight;
  T* dweight;
  std::int64_t count;
  std::uintptr_t ahead_x;  // bytes from a row to the one that will be read next in its place
  std::uintptr_t ahead_dy;
};

// The gradients of a tile.
template <class Vec, class X, class DY, int Rows, bool Dx, bool Dweight, bool Dresidual,
          bool Stream>
struct Gradients {
  using T = typename Vec::Scalar;
  using Reg = typename Vec::Reg;
  static constexpr int kLanes = Vec::kLanes;
  static constexpr bool kSplit = kSplitPair<X, DY>;

  const X* x[Rows];
  const DY* dy[Rows];
  const X* dresidual[Rows];
  X* dx[Rows];
  T rstd[Rows], minus_mean[Rows];
  const T* weight;
  T* dweight;

  // A copy, since the stores might change the tile for all the compiler knows.
  explicit Gradients(const Tile<X, DY, T>& tile) : weight(tile.weight), dweight(tile.dweight) {
    for (int r = 0; r < Rows; ++r) {
      x[r] = tile.x[r];
      dy[r] = tile.dy[r];
      dresidual[r] = tile.dresidual[r];
      dx[r] = tile.dx[r];
      rstd[r] = tile.rstd[r];
      minus_mean[r] = Dx ? -tile.mean[r] : T(0);
    }
  }

  // Two registers of elements of each row, from number i on.
  [[gnu::always_inline]] void pair(std::int64_t i) const {
    Reg w[2], sum[2];
    if constexpr (Dx) {
      w[0] = Vec::load(weight + i);
      w[1] = Vec::load(weight + i + kLanes);
    }
    if constexpr (Dweight) {
      sum[0] = Vec::load(dweight + i);
      sum[1] = Vec::load(dweight + i + kLanes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Reg factors = Vec::set1(rstd[r]);
      Reg xhat[2], g[2];
      RowReader<Vec, X, false>{x[r], 1}.template load2<kSplit>(i, xhat[0], xhat[1]);
      RowReader<Vec, DY, false>{dy[r], 1}.template load2<kSplit>(i, g[0], g[1]);
      for (int half = 0; half < 2; ++half) {
        xhat[half] = Vec::mul(xhat[half], factors);
        if constexpr (Dweight) sum[half] = Vec::add(sum[half], Vec::mul(g[half], xhat[half]));
        if constexpr (Dx) {
          const Reg u = Vec::mul(g[half], w[half]);
          const Reg away = Vec::mul(xhat[half], Vec::set1(minus_mean[r]));
          g[half] = Vec::mul(factors, Vec::add(u, away));
        }
      }
      if constexpr (Dx && Dresidual) {
        Reg besides[2];
        RowReader<Vec, X, false>{dresidual[r], 1}.template load2<kSplit>(i, besides[0], besides[1]);
        g[0] = Vec::add(g[0], besides[0]);
        g[1] = Vec::add(g[1], besides[1]);
      }
      if constexpr (Dx && kSplit) {
        Vec::template store_split<Stream>(dx[r] + i, g[0], g[1]);
      } else if constexpr (Dx && Stream) {
        Vec::stream2(dx[r] + i, g[0], g[1]);
      } else if constexpr (Dx) {
        Vec::store2(dx[r] + i, g[0], g[1]);
      }
    }
    if constexpr (Dweight) Vec::store2(dweight + i, sum[0], sum[1]);
  }

  // The elements from number i on.
  void rest(std::int64_t i, std::int64_t count) const {
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) pair(i);
    for (; i < count; ++i) {
      T sum = Dweight ? dweight[i] : T(0);
      for (int r = 0; r < Rows; ++r) {
        const T xhat = widen(x[r][i]) * rstd[r];
        const T g = widen(dy[r][i]);
        if constexpr (Dweight) sum += g * xhat;
        if constexpr (Dx) {
          T result = rstd[r] * (g * weight[i] + xhat * minus_mean[r]);
          if constexpr (Dresidual) result += widen(dresidual[r][i]);
          dx[r][i] = narrow<X>(result);
        }
      }
      if constexpr (Dweight) dweight[i] = sum;
    }
  }
};

template <class Vec, class X, class DY, int Rows, bool Dx, bool Dweight, bool Dresidual,
          bool Stream>
void gradient_tile(const Tile<X, DY, typename Vec::Scalar>& tile) {
  constexpr int kPair = 2 * Vec::kLanes;
  const Gradients<Vec, X, DY, Rows, Dx, Dweight, Dresidual, Stream> gradients(tile);
  const std::int64_t count = tile.count;
  const std::uintptr_t ahead_x = tile.ahead_x;
  const std::uintptr_t ahead_dy = tile.ahead_dy;
  std::int64_t i = 0;
#pragma GCC unroll 2  // its bookkeeping shows in short rows
  for (; i + kPair <= count; i += kPair) {
    for (int r = 0; r < Rows; ++r) {
      fetch<kPair * sizeof(X)>(gradients.x[r] + i, ahead_x);
      fetch<kPair * sizeof(DY)>(gradients.dy[r] + i, ahead_dy);
    }
    gradients.pair(i);
  }
  gradients.rest(i, count);
}

template <class Vec, class X, class DY>
using TileLoop = void (*)(const Tile<X, DY, typename Vec::Scalar>&);

// A part that comes after a tile of one row.
template <class X, class DY, class T>
struct NextPart {
  const X* x;  // or null: there is none
  const DY* dy;
  const T* weight;
  T rstd;
};

// The gradients of a tile of one row, and beside them the sums of the next part, so that the memory
// is read and written at once.
template <class Vec, class X, class DY, bool Dweight, bool Dresidual, bool Stream>
GradientSums<typename Vec::Scalar> overlapped_gradient(
    const Tile<X, DY, typename Vec::Scalar>& tile,
    const NextPart<X, DY, typename Vec::Scalar>& next) {
  using T = typename Vec::Scalar;
  const Gradients<Vec, X, DY, 1, true, Dweight, Dresidual, Stream> gradients(tile);
  const X* x = next.x;
  const DY* dy = next.dy;
  const std::int64_t count = tile.count;
  const auto beside = [&](std::int64_t i) __attribute__((always_inline)) {
    if constexpr (Stream) {  // as in scale_row
      RowReader<Vec, X, false>{x, 1}.fetch_pair(i);
      RowReader<Vec, DY, false>{dy, 1}.fetch_pair(i);
    }
    gradients.pair(i);
  };
  const GradientSums<T> sums =
      gradient_sums<Vec>(x, dy, next.weight, next.rstd, count, count, beside);
  gradients.rest(whole_steps<T>(count), count);
  return sums;
}

template <class Vec, class X, class DY, class T = typename Vec::Scalar>
using OverlappedLoop = GradientSums<T> (*)(const Tile<X, DY, T>&, const NextPart<X, DY, T>&);

// What a loop over a tile has to do.
struct Wanted {
  bool dx, dweight, dresidual, stream;
};

inline Wanted wanted(const BackwardCall& call) {
  return {.dx = call.dx != nullptr,
          .dweight = call.dweight != nullptr,
          .dresidual = call.dresidual.data != nullptr,
          .stream = call.stream};
}

// `pick` with what is wanted beside dx as template arguments.
template <class Loop, class Pick>
Loop pick_gradients(const Wanted& wanted, const Pick& pick) {
  const auto with_store = [&]<bool Stream>() -> Loop {
    if (wanted.dresidual) {
      return wanted.dweight ? pick.template operator()<true, true, Stream>()
                            : pick.template operator()<false, true, Stream>();
    }
    return wanted.dweight ? pick.template operator()<true, false, Stream>()
                          : pick.template operator()<false, false, Stream>();
  };
  return wanted.stream ? with_store.template operator()<true>()
                       : with_store.template operator()<false>();
}

template <class Vec, class X, class DY, int Rows>
TileLoop<Vec, X, DY> pick_tile(const Wanted& wanted) {
  using Loop = TileLoop<Vec, X, DY>;
  if (!wanted.dx) return &gradient_tile<Vec, X, DY, Rows, false, true, false, false>;
  return pick_gradients<Loop>(wanted, []<bool Dweight, bool Dresidual, bool Stream>() -> Loop {
    return &gradient_tile<Vec, X, DY, Rows, true, Dweight, Dresidual, Stream>;
  });
}

// dbias += dy, for one row of one part.
template <class Vec, class DY, bool Split>
void add_to_bias(const DY* dy, std::int64_t count, typename Vec::Scalar* dbias) {
  using Reg = typename Vec::Reg;
  constexpr int kLanes = Vec::kLanes;
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    Reg a, b;
    RowReader<Vec, DY, false>{dy, 1}.template load2<Split>(i, a, b);
    Vec::store2(dbias + i, Vec::add(Vec::load(dbias + i), a),
                Vec::add(Vec::load(dbias + i + kLanes), b));
  }
  for (; i < count; ++i) dbias[i] += widen(dy[i]);
}

// A type in which what cancels in T still has digits, and in which no square of a T overflows.
template <class T>
struct Wider {
  using Type = double;
};
template <>
struct Wider<double> {
#if defined(__SIZEOF_FLOAT128__)
  using Type = __float128;
#else
  using Type = long double;
#endif
};

// The square root, for values whose double is neither 0 nor infinite; Newton's step doubles the
// digits of the first guess.
template <class W>
W wide_square_root(W value) {
  const W guess = square_root(static_cast<double>(value));
  return guess == 0 ? guess : (guess + value / guess) / 2;
}

// One part of one row, in T and in order. With a gate before the norm, x * act(gate) is the row
// that is normalised, with one after it dy * act(gate) is the gradient of the normalised row.
template <class T>
struct PlainPart {
  const T* x;
  const T* dy;
  const T* weight;
  const T* dresidual;  // or null
  const T* gate;       // or null
  bool gate_before;
  T rstd;  // as the forward rounded it
  T* dx;
  T* dgate;  // written where the gate comes first
  T* xhat;
};

template <class T>
bool all_finite(const T* values, std::int64_t count) {
  bool finite = true;
  for (std::int64_t i = 0; i < count; ++i) finite &= values[i] - values[i] == T(0);
  return finite;
}

inline int exponent_of(double value) { return value == 0.0 ? -3000 : __builtin_ilogb(value); }

// Whether u is finite and not all 0, and x is finite.
template <class T>
bool has_gradient(const PlainPart<T>& part, std::int64_t count) {
  bool any = false;
  for (std::int64_t i = 0; i < count; ++i) any |= part.dy[i] != T(0) && part.weight[i] != T(0);
  return any && all_finite(part.x, count) && all_finite(part.dy, count) &&
         all_finite(part.weight, count) && (!part.gate || all_finite(part.gate, count));
}

// What a norm is linearised to, in the wider type and for a row that is scaled.
template <class W>
struct Linearised {
  W rstd;
  W rest;  // of alpha * x: see redo_gradient
  W pull;  // -d(log rstd)/dx_i = pull * x_i
};

// `square` is the sum of the squares of x * first * second.
template <class W>
Linearised<W> linearise(const BackwardCall& call, W square, W first, W second) {
  const W n = static_cast<W>(divisor(call));
  const W eps = static_cast<W>(call.eps) * first * second;
  switch (call.eps_in) {
    case EpsIn::mean_square: {
      const W scaled = eps * first * second;
      const W shifted = square / n + scaled;
      return {1 / wide_square_root(shifted), scaled / shifted, 1 / (shifted * n)};
    }
    case EpsIn::root: {
      const W rms = wide_square_root(square / n);
      const W shifted = rms + eps;
      return {1 / shifted, eps / shifted, rms == 0 ? W(0) : 1 / (rms * shifted * n)};
    }
    case EpsIn::clamp:
      break;
  }
  const W norm = wide_square_root(square);
  const W root = wide_square_root(n);
  if (norm < eps) return {root / eps, W(1), W(0)};
  return {root / norm, W(0), square == 0 ? W(0) : 1 / square};
}

// Computes dx and xhat of a delicate part, and dgate where the gate comes first; false where the
// formula holds as it is: the part is not finite, or 0/0, or u is 0. With u = alpha * x + v, where
// v is orthogonal to x,
//
//     dx = rstd * (v + alpha * x * rest)        rest = eps / (ms + eps), for eps in the mean square
//
// which subtracts nothing from alpha * x.
template <class T>
[[gnu::noinline]] bool redo_gradient(const BackwardCall& call, const PlainPart<T>& part,
                                     std::int64_t count) {
  using W = typename Wider<T>::Type;
  constexpr int kLanes = 8;
  const std::int64_t width = call.width;
  const bool gated_x = part.gate && part.gate_before;
  const bool gated_dy = part.gate && !part.gate_before;
  const auto act_at = [&](std::int64_t i) { return activated(call.activation, part.gate[i]); };
  if (!has_gradient(part, count)) return false;
  int top = exponent_of(0.0);
  for (std::int64_t i = 0; i < width; ++i) {
    int exponent = exponent_of(static_cast<double>(part.x[i]));
    if (gated_x) exponent += exponent_of(act_at(i).value);
    if (exponent > top) top = exponent;
  }
  if (top <= exponent_of(0.0) / 2 && call.eps == 0.0) return false;

  // x * 2^-top has its largest element, or eps, near 1. In two factors: one may overflow.
  const int floor =
      exponent_of(call.eps_in == EpsIn::mean_square ? square_root(call.eps) : call.eps);
  if (floor > top) top = floor;
  const W first = __builtin_ldexp(1.0, -top / 2);
  const W second = __builtin_ldexp(1.0, -top - -top / 2);
  const auto x_at = [&](std::int64_t i) {
    const W x = static_cast<W>(part.x[i]) * first * second;
    return gated_x ? x * act_at(i).value : x;
  };
  const auto u_at = [&](std::int64_t i) {
    const W u = static_cast<W>(part.dy[i]) * part.weight[i];
    return gated_dy ? u * act_at(i).value : u;
  };
  W squares[kLanes] = {};
  W products[kLanes] = {};
  for (std::int64_t i = 0; i < width; i += kLanes) {
    const int lanes = width - i < kLanes ? static_cast<int>(width - i) : kLanes;
    for (int lane = 0; lane < lanes; ++lane) {
      const W x = x_at(i + lane);
      squares[lane] += x * x;
      products[lane] += u_at(i + lane) * x;
    }
  }
  W uncounted = 0;  // of sum(u * x): the elements that the mean square does not count
  for (std::int64_t i = width; i < count; ++i) uncounted += u_at(i) * x_at(i);
  W square = 0;
  W product = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    square += squares[lane];
    product += products[lane];
  }

  const Linearised<W> norm = linearise(call, square, first, second);
  const W alpha = square == 0 ? W(0) : product / square;
  // dweight must not depend on whether dx is computed, and so not on what is delicate in dx alone.
  const bool exact_rstd = !in_range(part.rstd);
  for (std::int64_t i = 0; i < count; ++i) {
    const W x = x_at(i);
    const W u = u_at(i);
    const T plain = gated_x ? part.x[i] * static_cast<T>(act_at(i).value) : part.x[i];
    part.xhat[i] = exact_rstd ? static_cast<T>(x * norm.rstd) : plain * part.rstd;
    W gradient = u;
    if (i < width) {
      // A single element has no direction orthogonal to it.
      const W along = alpha * x;
      gradient = width == 1 ? (square == 0 ? u : u * norm.rest) : u - along + along * norm.rest;
      gradient -= norm.pull * uncounted * x;
    }
    gradient *= norm.rstd * first * second;
    if (part.dresidual) gradient += part.dresidual[i];
    if (gated_x) {
      const Activated act = act_at(i);
      part.dgate[i] = static_cast<T>(gradient * part.x[i] * act.derivative);
      gradient *= act.value;
    }
    part.dx[i] = static_cast<T>(gradient);
  }
  return true;
}

// One part in T, an array for each of its operands: kPartRows of them.
template <class T>
struct PartArrays {
  T *x, *dy, *weight, *dresidual, *dx, *xhat, *normed, *gate, *act, *slope;

  PartArrays(T* memory, std::int64_t count) {
    const auto take = [&memory, count] {
      T* const taken = memory;
      memory += count;
      return taken;
    };
    x = take();
    dy = take();
    weight = take();
    dresidual = take();
    dx = take();
    xhat = take();
    normed = take();
    gate = take();
    act = take();
    slope = take();
  }
};

// The memory of one thread: the sums over the rows of a chunk, where a block has several, and the
// arrays of a part, where all of them are staged.
template <class T>
struct Scratch {
  T* dweight;
  T* dbias;
  T* parts;

  Scratch(const BackwardCall& call, void* memory)
      : dweight(static_cast<T*>(memory)),
        dbias(dweight + call.d),
        parts(dweight + (call.block_rows > kChunkRows ? kSumRows * call.d : 0)) {}
};

// The cursors over the operands' rows, moved together.
struct Cursors {
  RowCursor x, dy, dresidual, gate;

  Cursors(const BackwardCall& call, std::int64_t row)
      : x(call.x.rows.outer, row),
        dy(call.dy.rows.outer, row),
        dresidual(call.dresidual.rows.outer, row),
        gate(call.gate.rows.outer, row) {}
  void next() {
    x.next();
    dy.next();
    dresidual.next();
    gate.next();
  }
};

template <class T>
T rstd_of(const BackwardCall& call, std::int64_t row, std::int64_t group) {
  return static_cast<const T*>(call.rstd)[row * call.groups + group];
}

// Where the rows of a chunk add up.
template <class T>
struct ChunkSums {
  T* dweight;
  T* dbias;
};

// A part of one row whose xhat and dy are at hand in order adds to dweight.
template <class Vec, class T>
void add_products(const T* dy, const T* xhat, bool split, std::int64_t count, T* dweight) {
  for (std::int64_t i = 0; i < count; ++i) {
    dweight[position<Vec>(split, i, count)] += dy[i] * xhat[i];
  }
}

// Rows that the vector loops read and write in place.
template <class Vec, class X, class DY>
class DirectRows {
  using T = typename Vec::Scalar;
  static constexpr bool kSplit = kSplitPair<X, DY>;
  // Of wide elements a row takes so long that what is loaded once for several is not missed.
  static constexpr int kMostRows = sizeof(X) == 2 ? kTileRows : 1;
  static constexpr bool kMayOverlap = kOverlapped<Vec, X> && kOverlapped<Vec, DY>;

 public:
  // For rows up to number `end`.
  DirectRows(const BackwardCall& call, const Scratch<T>&, std::int64_t end)
      : call_(call),
        end_(end),
        part_(call.d / call.groups),
        one_(pick_tile<Vec, X, DY, 1>(wanted(call))),
        several_(pick_tile<Vec, X, DY, kMostRows>(wanted(call))) {
    const std::int64_t row_bytes = part_ * static_cast<std::int64_t>(sizeof(X) + sizeof(DY));
    const bool fits = kMostRows * row_bytes <= kTileBytes;
    const bool spread = call.d * static_cast<std::int64_t>(sizeof(X)) % kSamePlaces != 0;
    tile_rows_ = fits && spread ? kMostRows : 1;
    if constexpr (kMayOverlap) {
      if (call.dx && part_ * static_cast<std::int64_t>(sizeof(X)) >= kOverlapBytes) {
        using Loop = OverlappedLoop<Vec, X, DY>;
        const auto pick = []<bool Dweight, bool Dresidual, bool Stream>() -> Loop {
          return &overlapped_gradient<Vec, X, DY, Dweight, Dresidual, Stream>;
        };
        overlapped_ = pick_gradients<Loop>(wanted(call), pick);
      }
    }
  }

  // Rows [begin, end) of a chunk; the cursors stand at `begin`, and at `end` afterwards.
  void run(std::int64_t begin, std::int64_t end, Cursors& cursors, const ChunkSums<T>& sums) {
    std::int64_t row = begin;
    if constexpr (kMostRows > 1) {
      for (; tile_rows_ > 1 && row + kMostRows <= end; row += kMostRows) {
        compute_rows<kMostRows>(row, cursors, sums);
      }
    }
    for (; row < end; ++row) compute_rows<1>(row, cursors, sums);
  }

 private:
  // The next `Rows` rows; moves the cursors past them.
  template <int Rows>
  void compute_rows(std::int64_t row, Cursors& cursors, const ChunkSums<T>& sums) {
    const X* x = static_cast<const X*>(call_.x.data);
    const DY* dy = static_cast<const DY*>(call_.dy.data);
    const X* dresidual = static_cast<const X*>(call_.dresidual.data);
    Tile<X, DY, T> tile;
    for (int r = 0; r < Rows; ++r) {
      tile.x[r] = x + cursors.x.offset();
      tile.dy[r] = dy + cursors.dy.offset();
      tile.dresidual[r] = dresidual ? dresidual + cursors.dresidual.offset() : nullptr;
      tile.dx[r] = call_.dx ? static_cast<X*>(call_.dx) + (row + r) * call_.d : nullptr;
      cursors.next();
    }
    tile.count = part_;
    const bool more = row + Rows < end_;
    const X* next_x = more ? x + cursors.x.offset() : tile.x[0];
    const DY* next_dy = more ? dy + cursors.dy.offset() : tile.dy[0];
    tile.ahead_x = distance(tile.x[0], next_x);
    tile.ahead_dy = distance(tile.dy[0], next_dy);

    for (std::int64_t group = 0;; ++group) {
      const std::int64_t column = group * part_;
      const bool last = group + 1 == call_.groups;
      tile.weight = weight_ + column;
      tile.dweight = sums.dweight ? sums.dweight + column : nullptr;
      NextPart<X, DY, T> next{};
      if constexpr (kMayOverlap) {
        static_assert(Rows == 1);
        if (overlapped_ && !last) {
          next = {tile.x[0] + part_, tile.dy[0] + part_, tile.weight + part_,
                  rstd_of<T>(call_, row, group + 1)};
        } else if (overlapped_ && more) {
          next = {next_x, next_dy, weight_, rstd_of<T>(call_, row + 1, 0)};
        }
      }
      if (call_.dx || sums.dweight) one_part<Rows>(tile, row, group, next);
      for (int r = 0; r < Rows && sums.dbias; ++r) {
        add_to_bias<Vec, DY, kSplit>(tile.dy[r], part_, sums.dbias + column);
      }
      if (last) return;
      for (int r = 0; r < Rows; ++r) {
        tile.x[r] += part_;
        tile.dy[r] += part_;
        if (dresidual) tile.dresidual[r] += part_;
        if (call_.dx) tile.dx[r] += part_;
      }
    }
  }

  // One part of the rows of a tile, and the sums of the next part, if there is one and it overlaps.
  template <int Rows>
  void one_part(Tile<X, DY, T>& tile, std::int64_t row, std::int64_t group,
                const NextPart<X, DY, T>& next) {
    bool delicate[Rows];
    bool any_delicate = false;
    for (int r = 0; r < Rows; ++r) {
      const T rstd = rstd_of<T>(call_, row + r, group);
      tile.rstd[r] = rstd;
      if (call_.dx) {
        const GradientSums<T> found =
            next_sums_known_ ? next_sums_ : sums_of(tile.x[r], tile.dy[r], tile.weight, rstd);
        next_sums_known_ = false;
        tile.mean[r] = mean_along(call_, divisor_, rstd, found.along);
        delicate[r] = !is_plain(call_, rstd, found, tile.mean[r]) &&
                      is_delicate(call_, rstd, found, found.along, tile.mean[r]);
      } else {
        delicate[r] = !in_range(rstd);
      }
      any_delicate |= delicate[r];
    }
    if (__builtin_expect(any_delicate, 0)) {
      for (int r = 0; r < Rows; ++r) one_row(tile, r, delicate[r]);
    } else if (kMayOverlap && next.x) {
      next_sums_ = overlapped_(tile, next);
      next_sums_known_ = true;
    } else {
      (Rows == 1 ? one_ : several_)(tile);
    }
  }

  [[gnu::noinline]] GradientSums<T> sums_of(const X* x, const DY* dy, const T* weight,
                                            T rstd) const {
    return gradient_sums<Vec>(x, dy, weight, rstd, part_, part_);
  }

  // Row `r` of the tile alone.
  void one_row(const Tile<X, DY, T>& tile, int r, bool delicate) {
    Tile<X, DY, T> single;
    single.x[0] = tile.x[r];
    single.dy[0] = tile.dy[r];
    single.dresidual[0] = tile.dresidual[r];
    single.dx[0] = tile.dx[r];
    single.rstd[0] = tile.rstd[r];
    if (call_.dx) single.mean[0] = tile.mean[r];
    single.weight = tile.weight;
    single.dweight = tile.dweight;
    single.count = tile.count;
    single.ahead_x = tile.ahead_x;
    single.ahead_dy = tile.ahead_dy;
    if (delicate && redo(single)) return;
    one_(single);
  }

  [[gnu::noinline]] bool redo(const Tile<X, DY, T>& tile) {
    // Rare: no call pays for this memory in advance.
    struct Memory {
      T* data;
      ~Memory() { delete[] data; }
    } const memory{new T[static_cast<std::size_t>(kPartRows * part_)]};
    const PartArrays<T> arrays(memory.data, part_);
    read_as<Vec>(tile.x[0], 1, part_, arrays.x);
    read_as<Vec>(tile.dy[0], 1, part_, arrays.dy);
    for (std::int64_t i = 0; i < part_; ++i) {
      arrays.weight[i] = tile.weight[position<Vec>(kSplit, i, part_)];
    }
    const T* dresidual = nullptr;
    if (tile.dresidual[0]) {
      read_as<Vec>(tile.dresidual[0], 1, part_, arrays.dresidual);
      dresidual = arrays.dresidual;
    }
    const PlainPart<T> plain{.x = arrays.x,
                             .dy = arrays.dy,
                             .weight = arrays.weight,
                             .dresidual = dresidual,
                             .gate = nullptr,
                             .gate_before = false,
                             .rstd = tile.rstd[0],
                             .dx = arrays.dx,
                             .dgate = nullptr,
                             .xhat = arrays.xhat};
    if (!redo_gradient(call_, plain, part_)) return false;
    if (tile.dx[0]) store_as<X>(arrays.dx, part_, tile.dx[0], 0);
    if (tile.dweight) {
      add_products<Vec>(arrays.dy, arrays.xhat, kSplit, part_, tile.dweight);
    }
    return true;
  }

  const BackwardCall& call_;
  const std::int64_t end_;
  const std::int64_t part_;
  const T* const weight_ = static_cast<const T*>(call_.weight);
  const T divisor_ = static_cast<T>(divisor(call_));
  const TileLoop<Vec, X, DY> one_;
  const TileLoop<Vec, X, DY> several_;
  OverlappedLoop<Vec, X, DY> overlapped_ = nullptr;
  GradientSums<T> next_sums_{};  // of the part that comes next
  bool next_sums_known_ = false;
  int tile_rows_;
};

// Rows of any types and strides, with or without a gate: each part is brought to T and in order.
template <class Vec>
class StagedRows {
  using T = typename Vec::Scalar;

 public:
  StagedRows(const BackwardCall& call, const Scratch<T>& scratch, std::int64_t)
      : call_(call),
        part_(call.d / call.groups),
        arrays_(scratch.parts, part_),
        // It writes dx in any case, to the arrays: dgate is made of it.
        tile_(pick_tile<Vec, T, T, 1>({.dx = true,
                                       .dweight = call.dweight != nullptr,
                                       .dresidual = call.dresidual.data != nullptr,
                                       .stream = false})) {}

  void run(std::int64_t begin, std::int64_t end, Cursors& cursors, const ChunkSums<T>& sums) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t group = 0; group < call_.groups; ++group) {
        one_part(row, group, cursors, sums);
      }
      cursors.next();
    }
  }

 private:
  void one_part(std::int64_t row, std::int64_t group, const Cursors& cursors,
                const ChunkSums<T>& sums) {
    const std::int64_t column = group * part_;
    const T* weight = static_cast<const T*>(call_.weight) + column;
    const T rstd = rstd_of<T>(call_, row, group);
    read_part<Vec>(call_.x, cursors.x.offset(), column, part_, arrays_.x);
    read_part<Vec>(call_.dy, cursors.dy.offset(), column, part_, arrays_.dy);
    if (sums.dbias) {
      add_to_bias<Vec, T, false>(arrays_.dy, part_, sums.dbias + column);
    }
    const T* x = arrays_.x;
    const T* dy = arrays_.dy;
    if (call_.gate.data) {
      read_part<Vec>(call_.gate, cursors.gate.offset(), column, part_, arrays_.gate);
      activate_with_derivative(call_.activation, arrays_.gate, part_, arrays_.act, arrays_.slope);
      T* gated = arrays_.normed;
      const T* plain = call_.gate_before ? arrays_.x : arrays_.dy;
      for (std::int64_t i = 0; i < part_; ++i) gated[i] = plain[i] * arrays_.act[i];
      (call_.gate_before ? x : dy) = gated;
    }
    const T* dresidual = nullptr;
    if (call_.dresidual.data) {
      read_part<Vec>(call_.dresidual, cursors.dresidual.offset(), column, part_, arrays_.dresidual);
      dresidual = arrays_.dresidual;
    }

    const std::int64_t width = call_.width;
    T* dweight = sums.dweight ? sums.dweight + column : nullptr;
    const GradientSums<T> found = gradient_sums<Vec>(x, dy, weight, rstd, part_, part_);
    const T counted =
        width == part_ ? found.along : gradient_sums<Vec>(x, dy, weight, rstd, width, part_).along;
    const T mean = mean_along(call_, static_cast<T>(divisor(call_)), rstd, found.along);
    const PlainPart<T> plain{.x = arrays_.x,
                             .dy = arrays_.dy,
                             .weight = weight,
                             .dresidual = dresidual,
                             .gate = call_.gate.data ? arrays_.gate : nullptr,
                             .gate_before = call_.gate_before,
                             .rstd = rstd,
                             .dx = arrays_.dx,
                             .dgate = arrays_.slope,
                             .xhat = arrays_.xhat};
    const bool redone =
        is_delicate(call_, rstd, found, counted, mean) && redo_gradient(call_, plain, part_);
    if (redone) {
      if (dweight) add_products<Vec>(dy, arrays_.xhat, false, part_, dweight);
    } else {
      Tile<T, T, T> tile;
      tile.x[0] = x;
      tile.dy[0] = dy;
      tile.dresidual[0] = dresidual;
      tile.dx[0] = arrays_.dx;
      tile.rstd[0] = rstd;
      tile.mean[0] = mean;
      tile.weight = weight;
      tile.dweight = dweight;
      tile.count = width;
      tile.ahead_x = tile.ahead_dy = 0;
      tile_(tile);
      for (std::int64_t i = 0; i < part_; ++i) arrays_.xhat[i] = x[i] * rstd;
      // Elements that the mean square does not count.
      for (std::int64_t i = width; i < part_; ++i) {
        arrays_.dx[i] = rstd * (dy[i] * weight[i]);
        if (dresidual) arrays_.dx[i] += dresidual[i];
        if (dweight) dweight[i] += dy[i] * arrays_.xhat[i];
      }
    }
    finish(row, column, weight, redone && plain.gate && plain.gate_before);
  }

  // The gate's derivative, unless that is there already, and the results in their own types.
  void finish(std::int64_t row, std::int64_t column, const T* weight, bool gated) {
    const std::int64_t at = row * call_.d + column;
    T* dx = arrays_.dx;
    if (call_.dgate) {
      T* dgate = arrays_.slope;
      for (std::int64_t i = 0; i < part_ && !gated; ++i) {
        const T towards = call_.gate_before ? dx[i] * arrays_.x[i]
                                            : arrays_.dy[i] * (arrays_.xhat[i] * weight[i]);
        dgate[i] *= towards;
      }
      store(call_.gate.type, dgate, part_, call_.dgate, at);
    }
    if (!call_.dx) return;
    if (call_.gate.data && call_.gate_before && !gated) {
      for (std::int64_t i = 0; i < part_; ++i) dx[i] *= arrays_.act[i];
    }
    store(call_.x.type, dx, part_, call_.dx, at);
  }

  const BackwardCall& call_;
  const std::int64_t part_;
  const PartArrays<T> arrays_;
  const TileLoop<Vec, T, T> tile_;
};

template <class T>
void add_to(T* sums, const T* more, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) sums[i] += more[i];
}

template <class T, class RowsOfCall>
void backward_blocks(const BackwardCall& call, std::int64_t begin, std::int64_t end,
                     const Scratch<T>& scratch) {
  const std::int64_t end_row = end * call.block_rows;
  RowsOfCall rows(call, scratch, end_row < call.rows ? end_row : call.rows);
  Cursors cursors(call, begin * call.block_rows);
  for (std::int64_t block = begin; block < end; ++block) {
    const std::int64_t first = block * call.block_rows;
    const std::int64_t last =
        first + call.block_rows < call.rows ? first + call.block_rows : call.rows;
    T* dweight = call.dweight ? static_cast<T*>(call.dweight) + block * call.d : nullptr;
    T* dbias = call.dbias ? static_cast<T*>(call.dbias) + block * call.d : nullptr;
    for (std::int64_t row = first; row < last; row += kChunkRows) {
      const std::int64_t until = row + kChunkRows < last ? row + kChunkRows : last;
      // The block's first chunk starts its sums, the others are added to them.
      const bool opens = row == first;
      const ChunkSums<T> sums{dweight ? (opens ? dweight : scratch.dweight) : nullptr,
                              dbias ? (opens ? dbias : scratch.dbias) : nullptr};
      if (dweight) std::fill_n(sums.dweight, call.d, T(0));
      if (dbias) std::fill_n(sums.dbias, call.d, T(0));
      rows.run(row, until, cursors, sums);
      if (!opens && dweight) add_to(dweight, scratch.dweight, call.d);
      if (!opens && dbias) add_to(dbias, scratch.dbias, call.d);
    }
  }
}

template <class Vec, class X>
[[gnu::noinline]] void backward_direct(const BackwardCall& call, std::int64_t begin,
                                       std::int64_t end,
                                       const Scratch<typename Vec::Scalar>& scratch) {
  using T = typename Vec::Scalar;
  if (call.dy.type == dtype_of<X>()) {
    backward_blocks<T, DirectRows<Vec, X, X>>(call, begin, end, scratch);
  } else {
    backward_blocks<T, DirectRows<Vec, X, T>>(call, begin, end, scratch);
  }
  if (call.stream) Vec::fence();
}

// Never inlined, so that no arithmetic can move out of the scope of its caller's KeepSubnormals.
template <class Vec>
[[gnu::noinline]] void backward_of(const BackwardCall& call, std::int64_t begin, std::int64_t end,
                                   void* memory) {
  using T = typename Vec::Scalar;
  const Scratch<T> scratch(call, memory);
  if (!call.direct) return backward_blocks<T, StagedRows<Vec>>(call, begin, end, scratch);
  if constexpr (sizeof(T) == 8) {
    backward_direct<Vec, double>(call, begin, end, scratch);
  } else if (call.x.type == DType::bf16) {
    backward_direct<Vec, bf16>(call, begin, end, scratch);
  } else if (call.x.type == DType::f16) {
    backward_direct<Vec, f16>(call, begin, end, scratch);
  } else {
    backward_direct<Vec, float>(call, begin, end, scratch);
  }
}

template <class Isa>
void backward(const BackwardCall& call, std::int64_t begin, std::int64_t end, void* scratch) {
  const KeepSubnormals keep;
  if (call.compute == DType::f64) {
    backward_of<typename Isa::F64>(call, begin, end, scratch);
  } else {
    backward_of<typename Isa::F32>(call, begin, end, scratch);
  }
}

template <class Isa>
void order_weight(const BackwardCall& call, void* memory) {
  if (!call.split) return;
  using Vec = typename Isa::F32;
  constexpr int kPair = 2 * Vec::kLanes;
  const std::int64_t part = call.d / call.groups;
  for (std::int64_t group = 0; group < call.groups; ++group) {
    float* weight = static_cast<float*>(memory) + group * part;
    for (std::int64_t i = 0; i + kPair <= part; i += kPair) {
      float pair[kPair];
      for (int lane = 0; lane < kPair; ++lane) {
        // The stores of split pairs take the lower half of every NaN for zero.
        const float value = weight[i + lane];
        pair[position<Vec>(true, lane, kPair)] = value == value ? value : __builtin_nanf("");
      }
      std::memcpy(weight + i, pair, sizeof pair);
    }
  }
}

template <class T>
[[gnu::noinline]] void add_blocks_of(T* sums, std::int64_t blocks, std::int64_t d,
                                     std::int64_t begin, std::int64_t end) {
  for (std::int64_t step = 1; step < blocks; step *= 2) {
    for (std::int64_t block = 0; block + step < blocks; block += 2 * step) {
      add_to(sums + block * d + begin, sums + (block + step) * d + begin, end - begin);
    }
  }
}

template <class Isa>
void add_blocks(const BackwardCall& call, void* sums, std::int64_t begin, std::int64_t end) {
  const KeepSubnormals keep;
  const std::int64_t blocks = (call.rows + call.block_rows - 1) / call.block_rows;
  if (call.compute == DType::f64) {
    add_blocks_of(static_cast<double*>(sums), blocks, call.d, begin, end);
  } else {
    add_blocks_of(static_cast<float*>(sums), blocks, call.d, begin, end);
  }
}

template <class Isa>
void store_sums(const BackwardCall& call, const void* sums, DType type, void* result) {
  const KeepSubnormals keep;
  if (call.compute == DType::f64) {
    return store(type, static_cast<const double*>(sums), call.d, result, 0);
  }
  using Vec = typename Isa::F32;
  constexpr int kPair = 2 * Vec::kLanes;
  static_assert(kChunk % kPair == 0);
  const float* from = static_cast<const float*>(sums);
  if (!call.split) return store(type, from, call.d, result, 0);
  const std::int64_t part = call.d / call.groups;
  for (std::int64_t column = 0; column < call.d; column += part) {
    for (std::int64_t i = 0; i < part; i += kChunk) {
      const std::int64_t count = part - i < kChunk ? part - i : kChunk;
      float chunk[kChunk];
      std::int64_t j = 0;
      for (; j + kPair <= count; j += kPair) {
        const float* pair = from + column + i + j;
        Vec::store_joined(chunk + j, Vec::load(pair), Vec::load(pair + Vec::kLanes));
      }
      for (; j < count; ++j) chunk[j] = from[column + i + j];
      store(type, chunk, count, result, column + i);
    }
  }
}

}  // namespace
}  // namespace rmsnorm
