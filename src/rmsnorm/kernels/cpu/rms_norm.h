// RMSNorm forward (Zhang & Sennrich 2019), written once over the vector primitives.
//
//     ms   = sum(x^2) / width          in the order of rows.h, in float (double for double)
//     rstd = 1 / sqrt(ms + eps)        correctly rounded square root and division
//     y    = (x * rstd) * weight       rounded where the call says
//
// Rows that need no conversion are read while the ones before them are written.
#pragma once

#include <cfloat>
#include <type_traits>
#include <utility>

#include "rows.h"

namespace rmsnorm {
namespace {

// The default: a sum alone.
struct NothingBeside {
  void operator()(std::int64_t) const {}
};

// sum(x^2) of a row of `width` elements, in PyTorch's order. Each element is read once. Does
// `beside(i)` for each pair of registers, of elements from number i on, in whole_steps(width); what
// lies beyond them is left to the caller. Inlined, as what it is made of: see `cascade`.
template <class Vec, bool Split, class Reader, class Beside = NothingBeside>
[[gnu::always_inline]] inline typename Vec::Scalar sum_of_squares(const Reader& row,
                                                                  std::int64_t width,
                                                                  const Beside& beside = {}) {
  using T = typename Vec::Scalar;
  using Acc = Accumulators<Vec, Split>;
  const auto square = [&row](std::int64_t i) {
    const T x = row.at(i);
    return x * x;
  };
  if (width < Acc::kLanes) return sum_short<T>(width, square);
  // Squares are rounded before they are added: no fused multiply-add.
  const auto add_step = [&](Acc& acc, std::int64_t first) __attribute__((always_inline)) {
    for (int r = 0; r < Acc::kRegs; r += 2) {
      const std::int64_t i = first + r * Vec::kLanes;
      typename Vec::Reg a, b;
      row.template load2<Split>(i, a, b);
      acc.reg[r] = Vec::add(acc.reg[r], Vec::mul(a, a));
      acc.reg[r + 1] = Vec::add(acc.reg[r + 1], Vec::mul(b, b));
      beside(i);
    }
  };
  const std::int64_t whole = whole_steps<T>(width);
  return sum_lanes<T>(cascade<Acc>(whole / Acc::kStep, add_step), whole, width, square);
}

inline float square_root(float value) { return __builtin_sqrtf(value); }
inline double square_root(double value) { return __builtin_sqrt(value); }

// The factor that x is multiplied by, from the sum of the squares.
template <class T>
T inverse_rms(const ForwardCall& call, T sum) {
  const T eps = static_cast<T>(call.eps);
  const T width = static_cast<T>(call.width);
  if (call.eps_in == EpsIn::clamp) {
    const T norm = square_root(sum);
    return square_root(width) / (norm < eps ? eps : norm);
  }
  const T ms = call.divide ? sum / width : sum;
  if (call.eps_in == EpsIn::root) return T(1) / (square_root(ms) + eps);
  return T(1) / square_root(ms + eps);
}

// The constant beside the sum of squares, on the scale of the squares.
inline double squared_eps(const ForwardCall& call) {
  return call.eps_in == EpsIn::mean_square ? call.eps : call.eps * call.eps;
}

// Whether the sum has left the range in which it means something: infinite, or so small that the
// squares lost bits (or vanished) and eps does not outweigh them.
template <class T>
bool out_of_range(const ForwardCall& call, T sum) {
  if (sum == static_cast<T>(INFINITY)) return true;
  constexpr double kSmall = sizeof(T) == 4 ? 0x1p-100 : 0x1p-960;
  if (!(sum < static_cast<T>(kSmall))) return false;
  return squared_eps(call) * (call.divide ? static_cast<double>(call.width) : 1.0) < kSmall;
}

// A row out of range, in double: x * 2^exponent squares without leaving double's range.
struct RescaledRow {
  bool valid = false;  // false: the row is not finite, or 0/0, and the formula holds as it is
  int exponent = 0;
  double rstd = 0.0;  // of the scaled row
};

template <class T, class Reader>
RescaledRow rescale(const ForwardCall& call, const Reader& row, std::int64_t width) {
  RescaledRow result;
  double largest = 0.0;
  for (std::int64_t i = 0; i < width; ++i) {
    const double magnitude = __builtin_fabs(static_cast<double>(row.at(i)));
    if (!(magnitude <= DBL_MAX)) return result;  // inf or nan
    if (magnitude > largest) largest = magnitude;
  }
  if (largest == 0.0 && call.eps == 0.0) return result;
  result.valid = true;
  if constexpr (sizeof(T) == 8) {  // floats square within double's range as they are
    const double floor = call.eps_in == EpsIn::mean_square ? square_root(call.eps) : call.eps;
    result.exponent = -__builtin_ilogb(largest > floor ? largest : floor);
  }
  double sum = 0.0;
  double lost = 0.0;  // Neumaier's compensation: this order of summation must not cost accuracy
  for (std::int64_t i = 0; i < width; ++i) {
    const double x = __builtin_ldexp(static_cast<double>(row.at(i)), result.exponent);
    const double next = sum + x * x;
    lost += sum >= x * x ? (sum - next) + x * x : (x * x - next) + sum;
    sum = next;
  }
  sum += lost;
  const double ms = call.divide ? sum / static_cast<double>(width) : sum;
  switch (call.eps_in) {
    case EpsIn::mean_square:
      result.rstd = 1.0 / square_root(ms + __builtin_ldexp(call.eps, 2 * result.exponent));
      break;
    case EpsIn::root:
      result.rstd = 1.0 / (square_root(ms) + __builtin_ldexp(call.eps, result.exponent));
      break;
    case EpsIn::clamp: {
      const double floor = __builtin_ldexp(call.eps, result.exponent);
      const double norm = square_root(sum);
      result.rstd = square_root(static_cast<double>(width)) / (norm < floor ? floor : norm);
      break;
    }
  }
  return result;
}

constexpr int kChunk = 256;

template <class To, class From>
void convert(const void* from, std::int64_t first, std::int64_t count, To* to) {
  const From* source = static_cast<const From*>(from) + first;
  for (std::int64_t i = 0; i < count; ++i) to[i] = narrow<To>(widen(source[i]));
}

template <class To>
void load_as(DType type, const void* from, std::int64_t first, std::int64_t count, To* to) {
  switch (type) {
    case DType::f32:
      return convert<To, float>(from, first, count, to);
    case DType::f64:
      return convert<To, double>(from, first, count, to);
    case DType::bf16:
      return convert<To, bf16>(from, first, count, to);
    case DType::f16:
      return convert<To, f16>(from, first, count, to);
    case DType::none:
      return;
  }
}

template <class Y, class M>
void store_as(const M* from, std::int64_t count, void* to, std::int64_t first) {
  Y* target = static_cast<Y*>(to) + first;
  for (std::int64_t i = 0; i < count; ++i) target[i] = narrow<Y>(from[i]);
}

template <class M>
void store(DType type, const M* from, std::int64_t count, void* to, std::int64_t first) {
  switch (type) {
    case DType::f32:
      return store_as<float>(from, count, to, first);
    case DType::f64:
      return store_as<double>(from, count, to, first);
    case DType::bf16:
      return store_as<bf16>(from, count, to, first);
    case DType::f16:
      return store_as<f16>(from, count, to, first);
    case DType::none:
      return;
  }
}

template <class M>
void round_in_place(DType type, M* values, std::int64_t count) {
  if (type == DType::bf16) {
    for (std::int64_t i = 0; i < count; ++i) values[i] = widen(narrow<bf16>(values[i]));
  } else if (type == DType::f16) {
    for (std::int64_t i = 0; i < count; ++i) values[i] = widen(narrow<f16>(values[i]));
  } else if (type == DType::f32 && sizeof(M) == 8) {
    for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(values[i]);
  }
}

// xhat times the weight, in M, for any mix of types: `count` elements from column `column` on.
template <class M, class T>
void weigh_chunk(const ForwardCall& call, const T* xhat, std::int64_t count, std::int64_t column,
                 M* values) {
  M operand[kChunk];
  for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<M>(xhat[i]);
  if (call.weight) {
    round_in_place(call.xhat_type, values, count);
    load_as(call.weight_type, call.weight, column, count, operand);
    if (call.offset != 0.0) {
      const T offset = static_cast<T>(call.offset);
      for (std::int64_t i = 0; i < count; ++i) operand[i] = static_cast<T>(operand[i]) + offset;
    }
    for (std::int64_t i = 0; i < count; ++i) values[i] *= operand[i];
  }
}

// Everything after xhat. Never inlined: its many loops, once for each kind of reader, would be most
// of the library.
template <class M, class T>
[[gnu::noinline]] void finish_chunk(const ForwardCall& call, const T* xhat, std::int64_t count,
                                    std::int64_t column, std::int64_t row) {
  M values[kChunk];
  weigh_chunk(call, xhat, count, column, values);
  if (call.bias) {
    M operand[kChunk];
    if (call.bias_after_round) round_in_place(call.y_type, values, count);
    load_as(sizeof(M) == 8 ? DType::f64 : DType::f32, call.bias, column, count, operand);
    for (std::int64_t i = 0; i < count; ++i) values[i] += operand[i];
  }
  store(call.y_type, values, count, call.y, row * call.d + column);
}

// Writes elements [begin, end) of a row, in chunks that fit the first cache; `xhat(i)` gives them.
template <class T, class Xhat>
void finish_slowly(const ForwardCall& call, std::int64_t begin, std::int64_t end, std::int64_t row,
                   const Xhat& xhat) {
  for (std::int64_t column = begin; column < end; column += kChunk) {
    const std::int64_t count = end - column < kChunk ? end - column : kChunk;
    T chunk[kChunk];
    for (std::int64_t i = 0; i < count; ++i) chunk[i] = xhat(column - begin + i);
    if (call.multiply == DType::f64) {
      finish_chunk<double>(call, chunk, count, column, row);
    } else {
      finish_chunk<T>(call, chunk, count, column, row);
    }
  }
}

// Computes a row that is out of range, and its rstd; false if it is not finite, or 0/0, and the
// formula holds as it is. Never inlined, since it is rare.
template <class T, class Reader>
[[gnu::noinline]] bool redo(const ForwardCall& call, const Reader& reader, std::int64_t column,
                            std::int64_t count, std::int64_t row, T& rstd) {
  const RescaledRow rescaled = rescale<T>(call, reader, call.width);
  if (!rescaled.valid) return false;
  rstd = static_cast<T>(__builtin_ldexp(rescaled.rstd, rescaled.exponent));
  finish_slowly<T>(call, column, column + count, row, [&](std::int64_t i) {
    const double x = static_cast<double>(reader.at(i));
    return static_cast<T>(__builtin_ldexp(x, rescaled.exponent) * rescaled.rstd);
  });
  return true;
}

struct NoWeight {};

// y = ((x * rstd) rounded to Xhat) * (weight + offset), rounded to Y; contiguous.
template <class Vec, class X, class W, class Y, class Xhat, bool Offset, bool Stream>
struct Scaling {
  using T = typename Vec::Scalar;
  using Reg = typename Vec::Reg;
  static constexpr int kLanes = Vec::kLanes;
  static constexpr bool kWeighted = !std::is_same_v<W, NoWeight>;
  // In a split pair of registers the even elements come before the odd ones: cheaper to take apart
  // and to join, and no arithmetic here looks at an element's neighbours. The stores of split pairs
  // rely on every NaN coming from a bf16, whose lower half is zero.
  static constexpr bool kSplit =
      std::is_same_v<X, bf16> && std::is_same_v<Y, bf16> && (!kWeighted || std::is_same_v<W, bf16>);

  const X* x;
  const W* weight;
  Y* y;
  T rstd, offset;

  // Two registers of elements, from number i on.
  [[gnu::always_inline]] void pair(std::int64_t i) const {
    const Reg factors = Vec::set1(rstd);
    Reg a, b;
    if constexpr (kSplit) {
      Vec::load_split(x + i, a, b);
    } else {
      a = Vec::load(x + i);
      b = Vec::load(x + i + kLanes);
    }
    a = Vec::mul(a, factors);
    b = Vec::mul(b, factors);
    if constexpr (kWeighted) {
      Reg weight_a, weight_b;
      if constexpr (kSplit) {
        Vec::load_split(weight + i, weight_a, weight_b);
      } else {
        weight_a = Vec::load(weight + i);
        weight_b = Vec::load(weight + i + kLanes);
      }
      if constexpr (Offset) {
        const Reg offsets = Vec::set1(offset);
        weight_a = Vec::add(weight_a, offsets);
        weight_b = Vec::add(weight_b, offsets);
      }
      if constexpr (kSplit && std::is_same_v<Xhat, bf16>) {
        a = Vec::round_split(a);
        b = Vec::round_split(b);
      } else {
        a = Vec::template round_to<Xhat>(a);
        b = Vec::template round_to<Xhat>(b);
      }
      a = Vec::mul(a, weight_a);
      b = Vec::mul(b, weight_b);
    }
    if constexpr (kSplit) {
      Vec::template store_split<Stream>(y + i, a, b);
    } else if constexpr (Stream) {
      Vec::stream2(y + i, a, b);
    } else {
      Vec::store2(y + i, a, b);
    }
  }

  // The elements from number i on.
  void rest(std::int64_t i, std::int64_t count) const {
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) pair(i);
    for (; i < count; ++i) {
      T value = widen(x[i]) * rstd;
      if constexpr (kWeighted) {
        T scale = widen(weight[i]);
        if constexpr (Offset) scale += offset;
        value = widen(narrow<Xhat>(value)) * scale;
      }
      y[i] = narrow<Y>(value);
    }
  }
};

// Whether the sums of the next row are taken while a row is computed, here and in the backward, so
// that the memory is read and written at once. Where elements have to be converted, arithmetic
// takes as long as the memory does, and the registers do not hold both.
template <class Vec, class X>
constexpr bool kOverlapped = std::is_same_v<X, typename Vec::Scalar>;

// Scales a row (see Scaling). Beside it adds up the squares of the row that `next` reads, if that
// is not null: it returns their sum. Otherwise it returns 0, and fetches what lies `ahead` bytes
// from x, where the next statistics will read (0: nowhere): the scaling alone leaves the memory
// idle.
template <class Vec, class X, class Next, class W, class Y, class Xhat, bool Offset, bool Stream>
typename Vec::Scalar scale_row(const void* x, typename Vec::Scalar rstd, const void* weight,
                               typename Vec::Scalar offset, void* y, std::int64_t count,
                               const Next* next, std::uintptr_t ahead) {
  using T = typename Vec::Scalar;
  constexpr std::int64_t kPair = 2 * Vec::kLanes;
  const Scaling<Vec, X, W, Y, Xhat, Offset, Stream> scaling{
      static_cast<const X*>(x), static_cast<const W*>(weight), static_cast<Y*>(y), rstd, offset};
  if constexpr (kOverlapped<Vec, X>) {
    if (next) {
      const Next row = *next;  // a copy: the stores might change it for all the compiler knows
      const auto beside = [&](std::int64_t i) __attribute__((always_inline)) {
        // Where the results are larger than the cache, the rows are in memory too.
        if constexpr (Stream) row.fetch_pair(i);
        scaling.pair(i);
      };
      const T sum = sum_of_squares<Vec, false>(row, count, beside);
      scaling.rest(whole_steps<T>(count), count);
      return sum;
    }
  }
  std::int64_t i = 0;
  for (; i + kPair <= count; i += kPair) {
    fetch<kPair * sizeof(X)>(scaling.x + i, ahead);
    scaling.pair(i);
  }
  scaling.rest(i, count);
  return T(0);
}

template <class T, class Next>
using ScaleRow = T (*)(const void*, T, const void*, T, void*, std::int64_t, const Next*,
                       std::uintptr_t);

template <class Vec, class X, class Next, class W, class Y, class Xhat, bool Offset>
ScaleRow<typename Vec::Scalar, Next> pick_store(bool stream) {
  return stream ? &scale_row<Vec, X, Next, W, Y, Xhat, Offset, true>
                : &scale_row<Vec, X, Next, W, Y, Xhat, Offset, false>;
}

template <class Vec, class X, class Next, class Y, class Xhat>
ScaleRow<typename Vec::Scalar, Next> pick_weight(const ForwardCall& call) {
  using T = typename Vec::Scalar;
  if (!call.weight) return pick_store<Vec, X, Next, NoWeight, Y, T, false>(call.stream);
  if (call.weight_type == dtype_of<T>()) {
    return call.offset == 0.0 ? pick_store<Vec, X, Next, T, Y, Xhat, false>(call.stream)
                              : pick_store<Vec, X, Next, T, Y, Xhat, true>(call.stream);
  }
  if constexpr (!std::is_same_v<X, T>) {
    if (call.weight_type == dtype_of<X>()) {
      return call.offset == 0.0 ? pick_store<Vec, X, Next, X, Y, Xhat, false>(call.stream)
                                : pick_store<Vec, X, Next, X, Y, Xhat, true>(call.stream);
    }
  }
  return nullptr;
}

template <class Vec, class X, class Next, class Y>
ScaleRow<typename Vec::Scalar, Next> pick_xhat(const ForwardCall& call) {
  using T = typename Vec::Scalar;
  if (call.xhat_type == DType::none) return pick_weight<Vec, X, Next, Y, T>(call);
  if (call.xhat_type == dtype_of<X>()) return pick_weight<Vec, X, Next, Y, X>(call);
  if constexpr (std::is_same_v<X, float> && std::is_same_v<T, float>) {
    // A row that is kept in float32 beside results in a half type.
    if constexpr (!std::is_same_v<Y, f16>) {
      if (call.xhat_type == DType::bf16) return pick_weight<Vec, X, Next, Y, bf16>(call);
    }
    if constexpr (!std::is_same_v<Y, bf16>) {
      if (call.xhat_type == DType::f16) return pick_weight<Vec, X, Next, Y, f16>(call);
    }
  }
  return nullptr;
}

// The vector loop for a call whose rows are contiguous and whose types are the usual ones, or null.
// Next: what reads the row that comes after the one that is scaled.
template <class Vec, class X, class Next = RowReader<Vec, X, false>>
ScaleRow<typename Vec::Scalar, Next> pick_scale(const ForwardCall& call) {
  using T = typename Vec::Scalar;
  if (call.bias || call.multiply != dtype_of<T>()) return nullptr;
  if (call.y_type == dtype_of<X>()) return pick_xhat<Vec, X, Next, X>(call);
  if (call.y_type == dtype_of<T>()) return pick_xhat<Vec, X, Next, T>(call);
  if constexpr (std::is_same_v<X, float> && std::is_same_v<T, float>) {
    if (call.y_type == DType::bf16) return pick_xhat<Vec, X, Next, bf16>(call);
    if (call.y_type == DType::f16) return pick_xhat<Vec, X, Next, f16>(call);
  }
  return nullptr;
}

constexpr int kBlock = 8;  // statistics taken together, so that their latencies overlap
constexpr std::int64_t kBlockBytes = 16384;  // of x: a block stays in the first cache

// The rows of a call, one after the other, where they lie.
template <class Vec, class X, bool Strided>
class RowsInPlace {
 public:
  using Reader = RowReader<Vec, X, Strided>;

  RowsInPlace(const ForwardCall& call, std::int64_t begin, int = 0)
      : call_(call), cursor_(call.x_rows.outer, begin) {}

  // Where element `column` of the current row lies.
  const X* at(std::int64_t column) const {
    return static_cast<const X*>(call_.x) + cursor_.offset() + column * call_.x_rows.stride;
  }
  // Where the memory will be read when the sum of the part that begins there is taken.
  const void* source(std::int64_t column) const { return at(column); }
  Reader reader(std::int64_t column) const { return {at(column), call_.x_rows.stride}; }
  typename Vec::Scalar sum(const Reader& part, std::int64_t) const {
    constexpr bool kSplit = !Strided && std::is_same_v<X, bf16>;
    return sum_of_squares<Vec, kSplit>(part, call_.width);
  }
  void next() { cursor_.next(); }

 private:
  const ForwardCall& call_;
  RowCursor cursor_;
};

template <class X>
int parts_of_block(const ForwardCall& call) {
  const std::int64_t part = call.d / call.groups;
  const std::int64_t fitting = kBlockBytes / (part * static_cast<std::int64_t>(sizeof(X)) + 1);
  return static_cast<int>(fitting < 1 ? 1 : fitting > kBlock ? kBlock : fitting);
}

// A whole row, or one group of it, of `size` elements.
template <class Vec, class X, bool Strided>
struct Part {
  RowReader<Vec, X, Strided> reader;
  std::int64_t row, column;
  typename Vec::Scalar sum, rstd;

  // Computes the result, and rstd, in a wider range if the sum left that of T: true if so.
  bool redo_if_needed(const ForwardCall& call, std::int64_t size) {
    return __builtin_expect(out_of_range(call, sum), 0) &&
           redo(call, reader, column, size, row, rstd);
  }

  // What scale_row returns.
  template <class Next>
  typename Vec::Scalar scale(ScaleRow<typename Vec::Scalar, Next> loop, const ForwardCall& call,
                             std::int64_t size, std::type_identity_t<const Next*> next,
                             std::uintptr_t ahead) const {
    // 0 without a weight: nothing else may be added to a null pointer.
    const std::int64_t weight_size = call.weight ? element_size(call.weight_type) : 0;
    const std::int64_t at = (row * call.d + column) * element_size(call.y_type);
    return loop(reader.data, rstd, static_cast<const char*>(call.weight) + column * weight_size,
                static_cast<typename Vec::Scalar>(call.offset), static_cast<char*>(call.y) + at,
                size, next, ahead);
  }
};

// AllRows: where the rows come from, in order. It has at(), sum(), source() and next(), as
// RowsInPlace.
template <class Vec, class X, bool Strided, class AllRows, class Call>
void normalise_rows(const Call& whole, const ForwardCall& call, std::int64_t begin,
                    std::int64_t end) {
  using T = typename Vec::Scalar;
  ScaleRow<T, RowReader<Vec, X, Strided>> scale = nullptr;
  if constexpr (!Strided) scale = pick_scale<Vec, X>(call);
  const std::int64_t part = call.d / call.groups;  // elements that share one rstd
  const std::int64_t groups = call.groups;
  Part<Vec, X, Strided> block[kBlock];
  const int block_size = parts_of_block<X>(call);
  T* rstds = call.rstd ? static_cast<T*>(call.rstd) + begin * groups : nullptr;

  AllRows rows(whole, begin, block_size);
  std::int64_t row = begin;
  std::int64_t group = 0;
  while (row < end) {
    int count = 0;
    for (; count < block_size && row < end; ++count) {
      auto& current = block[count];
      current.row = row;
      current.column = group * part;
      current.reader = {rows.at(current.column), call.x_rows.stride};
      current.sum = rows.sum(current.reader, current.column);
      if (++group == groups) {
        group = 0;
        ++row;
        rows.next();
      }
    }
    for (int i = 0; i < count; ++i) block[i].rstd = inverse_rms<T>(call, block[i].sum);
    const std::uintptr_t ahead =
        row < end ? distance(block[0].reader.data, rows.source(group * part)) : 0;
    for (int i = 0; i < count; ++i) {
      auto& current = block[i];
      if (current.redo_if_needed(call, part)) continue;
      if constexpr (!Strided) {
        if (scale) {
          current.scale(scale, call, part, nullptr, ahead);
          continue;
        }
      }
      finish_slowly<T>(call, current.column, current.column + part, current.row,
                       [&](std::int64_t j) { return current.reader.at(j) * current.rstd; });
    }
    if (rstds) {
      for (int i = 0; i < count; ++i) *rstds++ = block[i].rstd;
    }
  }
  if (call.stream) Vec::fence();
}

// The sum of a row beside which nothing was scaled; rare, so not inlined.
template <class Vec, class Reader>
[[gnu::noinline]] typename Vec::Scalar sum_alone(const Reader& row, std::int64_t width) {
  return sum_of_squares<Vec, false>(row, width);
}

// As normalise_rows, but the sums of a block are taken while the one before it is scaled. AllRows:
// it has at(), reader() and next(), as RowsInPlace.
template <class Vec, class X, class AllRows, class Call>
void normalise_overlapped(const Call& whole, const ForwardCall& call,
                          ScaleRow<typename Vec::Scalar, typename AllRows::Reader> scale,
                          std::int64_t begin, std::int64_t end) {
  using T = typename Vec::Scalar;
  const std::int64_t part = call.d / call.groups;
  Part<Vec, X, false> blocks[2][kBlock];
  auto* block = blocks[0];
  auto* following = blocks[1];
  typename AllRows::Reader readers[kBlock];  // of the following block
  const int block_size = parts_of_block<X>(call);
  T* rstds = call.rstd ? static_cast<T*>(call.rstd) + begin * call.groups : nullptr;

  AllRows rows(whole, begin);
  std::int64_t row = begin;
  std::int64_t group = 0;
  int count = 0;
  do {
    int next_count = 0;
    for (; next_count < block_size && row < end; ++next_count) {
      auto& current = following[next_count];
      current.row = row;
      current.column = group * part;
      current.reader = {rows.at(current.column), 1};
      readers[next_count] = rows.reader(current.column);
      if (++group == call.groups) {
        group = 0;
        ++row;
        rows.next();
      }
    }
    for (int i = 0; i < count; ++i) {
      const bool redone = block[i].redo_if_needed(call, part);
      if (i < next_count) {
        following[i].sum = redone ? sum_alone<Vec>(readers[i], part)
                                  : block[i].scale(scale, call, part, &readers[i], 0);
      } else if (!redone) {
        block[i].scale(scale, call, part, nullptr, 0);
      }
    }
    for (int i = count; i < next_count; ++i) {  // of the first block
      following[i].sum = sum_alone<Vec>(readers[i], part);
    }
    if (rstds) {
      for (int i = 0; i < count; ++i) *rstds++ = block[i].rstd;
    }
    for (int i = 0; i < next_count; ++i) {
      following[i].rstd = inverse_rms<T>(call, following[i].sum);
    }
    std::swap(block, following);
    count = next_count;
  } while (count > 0);
  if (call.stream) Vec::fence();
}

// Computes the rows so if a vector loop serves the call and counts every element; false if not.
template <class Vec, class X, class AllRows, class Call>
bool try_overlapped(const Call& whole, const ForwardCall& call, std::int64_t begin,
                    std::int64_t end) {
  const auto scale = pick_scale<Vec, X, typename AllRows::Reader>(call);
  if (!scale || call.width != call.d / call.groups) return false;
  normalise_overlapped<Vec, X, AllRows>(whole, call, scale, begin, end);
  return true;
}

template <class Vec, class X, bool Strided>
void forward_rows(const ForwardCall& call, std::int64_t begin, std::int64_t end) {
  if constexpr (!Strided && kOverlapped<Vec, X>) {
    if (try_overlapped<Vec, X, RowsInPlace<Vec, X, false>>(call, call, begin, end)) return;
  }
  normalise_rows<Vec, X, Strided, RowsInPlace<Vec, X, Strided>>(call, call, begin, end);
}

// Never inlined, so that no arithmetic can move out of the scope of its caller's KeepSubnormals.
template <class Isa, class X>
[[gnu::noinline]] void forward_of(const ForwardCall& call, std::int64_t begin, std::int64_t end) {
  if constexpr (std::is_same_v<X, double>) {
    if (call.compute == DType::f32) {
      forward_rows<typename Isa::F32, X, true>(call, begin, end);
    } else if (call.x_rows.stride != 1) {
      forward_rows<typename Isa::F64, X, true>(call, begin, end);
    } else {
      forward_rows<typename Isa::F64, X, false>(call, begin, end);
    }
  } else {
    if (call.x_rows.stride != 1) {
      forward_rows<typename Isa::F32, X, true>(call, begin, end);
    } else {
      forward_rows<typename Isa::F32, X, false>(call, begin, end);
    }
  }
}

template <class Isa>
void forward(const ForwardCall& call, std::int64_t begin, std::int64_t end) {
  const KeepSubnormals keep;
  switch (call.x_type) {
    case DType::f32:
      return forward_of<Isa, float>(call, begin, end);
    case DType::f64:
      return forward_of<Isa, double>(call, begin, end);
    case DType::bf16:
      return forward_of<Isa, bf16>(call, begin, end);
    case DType::f16:
      return forward_of<Isa, f16>(call, begin, end);
    case DType::none:
      return;
  }
}

// Widens a weight, in T, adds the offset, and stores it as To.
template <class Vec, class W, class To>
void prepare(const W* weight, std::int64_t count, double offset, To* result) {
  using T = typename Vec::Scalar;
  constexpr int kLanes = Vec::kLanes;
  const T shift = static_cast<T>(offset);
  std::int64_t i = 0;
  // The vector loads read what widens to T: doubles as doubles, everything else as floats.
  if constexpr (std::is_same_v<To, T> && std::is_same_v<W, double> == std::is_same_v<T, double>) {
    // Adding zero would lose the sign of a weight of -0.
    const typename Vec::Reg shifts = Vec::set1(shift);
    const auto load = [&](std::int64_t j) {
      const typename Vec::Reg value = Vec::load(weight + j);
      return offset == 0.0 ? value : Vec::add(value, shifts);
    };
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      Vec::store2(result + i, load(i), load(i + kLanes));
    }
  }
  for (; i < count; ++i) {
    const auto value = widen(weight[i]);
    result[i] = offset == 0.0 ? narrow<To>(value) : narrow<To>(narrow<T>(value) + shift);
  }
}

template <class Isa, class W>
[[gnu::noinline]] void prepare_of(const W* weight, std::int64_t count, double offset, DType compute,
                                  DType to, void* result) {
  if (to == DType::f32) {
    prepare<typename Isa::F32>(weight, count, offset, static_cast<float*>(result));
  } else if (compute == DType::f32) {
    prepare<typename Isa::F32>(weight, count, offset, static_cast<double*>(result));
  } else {
    prepare<typename Isa::F64>(weight, count, offset, static_cast<double*>(result));
  }
}

template <class Isa>
void prepare_weight(DType type, const void* weight, std::int64_t count, double offset,
                    DType compute, DType to, void* result) {
  const KeepSubnormals keep;
  switch (type) {
    case DType::f32:
      return prepare_of<Isa>(static_cast<const float*>(weight), count, offset, compute, to, result);
    case DType::f64:
      return prepare_of<Isa>(static_cast<const double*>(weight), count, offset, compute, to,
                             result);
    case DType::bf16:
      return prepare_of<Isa>(static_cast<const bf16*>(weight), count, offset, compute, to, result);
    case DType::f16:
      return prepare_of<Isa>(static_cast<const f16*>(weight), count, offset, compute, to, result);
    case DType::none:
      return;
  }
}

}  // namespace
}  // namespace rmsnorm
