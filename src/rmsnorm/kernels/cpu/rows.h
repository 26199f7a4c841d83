// Rows, and the sum over one.
//
// The order of summation is that of PyTorch's CPU sum over a contiguous last dimension, so that the
// result has the bits of eager PyTorch. It depends on the width alone: L lanes (8 floats, 4
// doubles), four accumulators of L lanes, and a cascade of up to four levels that keeps the
// rounding error of long rows small. A wide register holds several accumulators side by side, a
// narrow one part of one: the additions of each lane are the same, in the same order.
#pragma once

#include "vec/scalar.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rmsnorm {
namespace {

constexpr std::size_t kCacheLine = 64;
// How far ahead a row is fetched that comes from memory: far enough for it to arrive in time, near
// enough for it to be in the first cache still when it is read.
constexpr std::uintptr_t kFetchBytes = 1024;

// The bytes between two places. Unsigned: it wraps around, and back when it is added.
inline std::uintptr_t distance(const void* from, const void* to) {
  return reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from);
}

// Fetches `Bytes` bytes from `ahead` bytes after `place` on; the sum may wrap around.
template <std::size_t Bytes>
[[gnu::always_inline]] inline void fetch(const void* place, std::uintptr_t ahead) {
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(place) + ahead;
  for (std::size_t byte = 0; byte < Bytes; byte += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(first + byte));
  }
}

// A row (or group), read in place. X is the storage type, T the type that accumulates.
template <class Vec, class X, bool Strided>
struct RowReader {
  using T = typename Vec::Scalar;
  const X* data;
  std::int64_t stride;

  T at(std::int64_t i) const { return narrow<T>(widen(data[Strided ? i * stride : i])); }

  // Fetches what lies kFetchBytes after two registers of elements from number i on.
  void fetch_pair(std::int64_t i) const {
    static_assert(!Strided);
    fetch<2 * Vec::kLanes * sizeof(X)>(data + i, kFetchBytes);
  }

  // Two registers of elements from number i on: in order, or, split, the even ones in a and the
  // odd ones in b.
  template <bool Split>
  void load2(std::int64_t i, typename Vec::Reg& a, typename Vec::Reg& b) const {
    if constexpr (Strided) {
      T lanes[2 * Vec::kLanes];
      for (int lane = 0; lane < 2 * Vec::kLanes; ++lane) lanes[lane] = at(i + lane);
      a = Vec::load(lanes);
      b = Vec::load(lanes + Vec::kLanes);
    } else if constexpr (Split) {
      Vec::load_split(data + i, a, b);
    } else {
      a = Vec::load(data + i);
      b = Vec::load(data + i + Vec::kLanes);
    }
  }
};

// The lanes of one accumulator, and the elements of one step of four accumulators.
template <class T>
constexpr int kLanesOf = sizeof(T) == 4 ? 8 : 4;
template <class T>
constexpr int kStepOf = 4 * kLanesOf<T>;

// How many of `width` elements are in whole steps.
template <class T>
constexpr std::int64_t whole_steps(std::int64_t width) {
  return width - width % kStepOf<T>;
}

// The four accumulators of L lanes, in as many registers as they fill and in whatever order of
// lanes the instruction set loads a step in. Only `store` needs to know that order.
template <class Vec, bool Split>
struct Accumulators {
  using T = typename Vec::Scalar;
  using Reg = typename Vec::Reg;
  static constexpr int kLanes = kLanesOf<T>;
  static constexpr int kStep = kStepOf<T>;
  static constexpr int kRegs = kStep / Vec::kLanes;
  static_assert(kRegs % 2 == 0);

  Reg reg[kRegs];

  Accumulators() { clear(); }
  void clear() {
    for (int r = 0; r < kRegs; ++r) reg[r] = Vec::zero();
  }
  void add(const Accumulators& other) {
    for (int r = 0; r < kRegs; ++r) reg[r] = Vec::add(reg[r], other.reg[r]);
  }
  // Lane l of accumulator j to lanes[j * kLanes + l].
  void store(T* lanes) const {
    for (int r = 0; r < kRegs; r += 2) {
      if constexpr (Split) {
        Vec::store_joined(lanes + r * Vec::kLanes, reg[r], reg[r + 1]);
      } else {
        Vec::store2(lanes + r * Vec::kLanes, reg[r], reg[r + 1]);
      }
    }
  }
};

// Adds `steps` steps in up to four levels of 2^p steps each; `add_step(acc, first)` adds the step
// that begins at element `first`. Acc: Accumulators, or several of them side by side. Inlined, as
// `sum_lanes` is: a call would take the accumulators through memory, a tenth of a short row's time.
template <class Acc, class AddStep>
[[gnu::always_inline]] inline Acc cascade(std::int64_t steps, const AddStep& add_step) {
  constexpr int kShortest = 4;
  // In accumulators of their own, so that these stay in registers.
  const auto add_steps = [&](std::int64_t from, std::int64_t to) __attribute__((always_inline)) {
    Acc acc;
    for (std::int64_t k = from; k < to; ++k) add_step(acc, k * Acc::kStep);
    return acc;
  };
  if (steps <= std::int64_t{1} << kShortest) return add_steps(0, steps);
  int log2 = 0;  // ceil(log2(steps))
  while ((std::int64_t{1} << log2) < steps) ++log2;
  const int p = log2 / 4 > kShortest ? log2 / 4 : kShortest;
  const std::int64_t level_steps = std::int64_t{1} << p;
  const std::int64_t mask = level_steps - 1;
  Acc level1, level2, level3;
  std::int64_t k = 0;
  while (k + level_steps <= steps) {
    level1.add(add_steps(k, k + level_steps));
    k += level_steps;
    if ((k >> p) & mask) continue;
    level2.add(level1);
    level1.clear();
    if ((k >> (2 * p)) & mask) continue;
    level3.add(level2);
    level2.clear();
  }
  Acc sum = add_steps(k, steps);
  sum.add(level1);
  sum.add(level2);
  sum.add(level3);
  return sum;
}

// The sum of a row shorter than L: every element is a vector of its own. `term(i)` gives them.
template <class T, class Term>
T sum_short(std::int64_t width, const Term& term) {
  T acc[4] = {};
  const std::int64_t steps = width / 4;
  for (std::int64_t i = 0; i < steps * 4; ++i) acc[i % 4] += term(i);
  for (std::int64_t i = steps * 4; i < width; ++i) acc[0] += term(i);
  return T(0) + (((acc[0] + acc[1]) + acc[2]) + acc[3]);
}

// The sum of a row from its whole steps and its elements from `i` on.
template <class T, class Acc, class Term>
[[gnu::always_inline]] inline T sum_lanes(const Acc& accumulated, std::int64_t i,
                                          std::int64_t width, const Term& term) {
  constexpr int kLanes = Acc::kLanes;
  // The compiler's own vectors, since L lanes need not be a register of the instruction set. Left
  // to itself it would take the additions of single lanes apart, to follow them with the sum.
  using Lanes __attribute__((vector_size(kLanes * sizeof(T)))) = T;
  alignas(64) Lanes acc[4];
  accumulated.store(reinterpret_cast<T*>(acc));
  for (; i + kLanes <= width; i += kLanes) {
    Lanes terms;
    for (int lane = 0; lane < kLanes; ++lane) terms[lane] = term(i + lane);
    acc[0] += terms;
  }
  const Lanes total = ((acc[0] + acc[1]) + acc[2]) + acc[3];
  T sum = 0;
  for (; i < width; ++i) sum += term(i);
  for (int lane = 0; lane < kLanes; ++lane) sum += total[lane];
  return sum;
}

// Reads `count` elements of a row as T.
template <class Vec, class X>
void read_as(const X* row, std::int64_t stride, std::int64_t count, typename Vec::Scalar* to) {
  using T = typename Vec::Scalar;
  std::int64_t i = 0;
  if constexpr (std::is_same_v<X, double> == std::is_same_v<T, double>) {
    if (stride == 1) {
      for (; i + 2 * Vec::kLanes <= count; i += 2 * Vec::kLanes) {
        Vec::store2(to + i, Vec::load(row + i), Vec::load(row + i + Vec::kLanes));
      }
    }
  }
  if (stride == 0) {
    const T value = count ? narrow<T>(widen(row[0])) : T(0);
    for (; i < count; ++i) to[i] = value;
  }
  for (; i < count; ++i) to[i] = narrow<T>(widen(row[i * stride]));
}

template <class Vec>
[[gnu::noinline]] void read_part(const Operand& operand, std::int64_t row_offset,
                                 std::int64_t column, std::int64_t count,
                                 typename Vec::Scalar* to) {
  const std::int64_t stride = operand.rows.stride;
  const std::int64_t offset = row_offset + column * stride;
  switch (operand.type) {
    case DType::f32:
      return read_as<Vec>(static_cast<const float*>(operand.data) + offset, stride, count, to);
    case DType::f64:
      return read_as<Vec>(static_cast<const double*>(operand.data) + offset, stride, count, to);
    case DType::bf16:
      return read_as<Vec>(static_cast<const bf16*>(operand.data) + offset, stride, count, to);
    case DType::f16:
      return read_as<Vec>(static_cast<const f16*>(operand.data) + offset, stride, count, to);
    case DType::none:
      return;
  }
}

template <class X>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<X, float>) return DType::f32;
  if constexpr (std::is_same_v<X, double>) return DType::f64;
  if constexpr (std::is_same_v<X, bf16>) return DType::bf16;
  if constexpr (std::is_same_v<X, f16>) return DType::f16;
}

// Full subnormal arithmetic while in scope, whatever mode the caller's thread is in: the threads of
// a pool may be in different ones, and a row must not depend on which of them takes it.
class KeepSubnormals {
 public:
#if defined(__x86_64__)
  KeepSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~(kFlushToZero | kZeroInputs)); }
  ~KeepSubnormals() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  KeepSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ & ~kFlushToZero));
  }
  ~KeepSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
  KeepSubnormals() = default;
#endif
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kFlushToZero = 0x8000;  // FTZ: subnormal results
  static constexpr unsigned kZeroInputs = 0x0040;   // DAZ: subnormal operands
  unsigned saved_;
#elif defined(__aarch64__)
  static constexpr std::uint64_t kFlushToZero = std::uint64_t{1} << 24;  // FZ: both
  std::uint64_t saved_ = 0;
#endif
};

// Walks over the rows in order; the offset of each in elements.
class RowCursor {
 public:
  RowCursor(const OuterDims& outer, std::int64_t row) : outer_(outer) {
    for (int dim = outer.rank - 1; dim >= 0; --dim) {
      index_[dim] = row % outer.size[dim];
      row /= outer.size[dim];
      offset_ += index_[dim] * outer.stride[dim];
    }
    enter_last_dim();
  }
  std::int64_t offset() const { return offset_; }
  void next() {
    offset_ += step_;
    if (--left_ == 0) carry();
  }

 private:
  // How far it is to the end of the last dimension. Without any there is one row, and no end.
  void enter_last_dim() {
    const int last = outer_.rank - 1;
    if (last < 0) return;
    step_ = outer_.stride[last];
    left_ = outer_.size[last] - index_[last];
  }
  // From the end of the last dimension to its beginning, and one on in those before it.
  [[gnu::noinline]] void carry() {
    for (int dim = outer_.rank - 1;;) {
      index_[dim] = 0;
      offset_ -= outer_.size[dim] * outer_.stride[dim];
      if (--dim < 0) break;
      offset_ += outer_.stride[dim];
      if (++index_[dim] < outer_.size[dim]) break;
    }
    enter_last_dim();
  }

  const OuterDims& outer_;
  std::int64_t index_[kMaxRank];  // of the last dimension: where it was entered; left_ counts there
  std::int64_t offset_ = 0;
  std::int64_t step_ = 0;
  std::int64_t left_ = 0;
};

}  // namespace
}  // namespace rmsnorm
