// h = residual + alpha * x and the norm of h, in one pass: the sum is rounded to its own type and
// stored, and squared while it is still in a register. Where nothing needs a conversion, that is
// done while the rows before are scaled.
#pragma once

#include "rms_norm.h"

namespace rmsnorm {
namespace {

// Elements of x and the residual that become elements of h, which are stored and handed on: each
// element must be read once. Scaled: alpha is not 1.
template <class Vec, class X, class R, class H, bool Scaled>
struct AddReader {
  using T = typename Vec::Scalar;
  using Reg = typename Vec::Reg;
  static constexpr bool kSplit =
      std::is_same_v<X, bf16> && std::is_same_v<R, bf16> && sizeof(H) <= sizeof(float);

  const X* x;
  const R* residual;
  H* sum;
  T alpha;
  std::uintptr_t ahead;  // bytes from the residual to what `load2` fetches of it

  T at(std::int64_t i) const {
    const T value = Scaled ? fused_multiply_add(alpha, widen(x[i]), widen(residual[i]))
                           : widen(residual[i]) + widen(x[i]);
    sum[i] = narrow<H>(value);
    return widen(sum[i]);
  }

  // As RowReader's, of x; `load2` fetches the residual.
  void fetch_pair(std::int64_t i) const { fetch<2 * Vec::kLanes * sizeof(X)>(x + i, kFetchBytes); }

  template <bool Split>
  void load2(std::int64_t i, Reg& a, Reg& b) const {
    static_assert(Split == kSplit);
    fetch<2 * Vec::kLanes * sizeof(R)>(residual + i, ahead);
    Reg x_a, x_b;
    if constexpr (Split) {
      Vec::load_split(x + i, x_a, x_b);
      Vec::load_split(residual + i, a, b);
    } else {
      x_a = Vec::load(x + i);
      x_b = Vec::load(x + i + Vec::kLanes);
      a = Vec::load(residual + i);
      b = Vec::load(residual + i + Vec::kLanes);
    }
    if constexpr (Scaled) {
      const Reg factors = Vec::set1(alpha);
      a = Vec::fma(factors, x_a, a);
      b = Vec::fma(factors, x_b, b);
    } else {
      a = Vec::add(a, x_a);
      b = Vec::add(b, x_b);
    }
    if constexpr (Split && std::is_same_v<H, bf16>) {
      a = Vec::round_split(a);
      b = Vec::round_split(b);
      Vec::store_rounded_split(sum + i, a, b);
    } else if constexpr (Split) {
      Vec::store_joined(sum + i, a, b);
    } else {
      Vec::store2(sum + i, a, b);
      a = Vec::template round_to<H>(a);
      b = Vec::template round_to<H>(b);
    }
  }
};

// One part of a row: where it lies in x and in the residual.
struct AddPart {
  std::int64_t x_offset, residual_offset;  // of the row, in elements
  std::int64_t column;
  void* sum;  // of the part
  std::uintptr_t ahead;
};

// Computes one part of h and returns the sum of its squares.
template <class T>
using AddAndSum = T (*)(const AddCall&, const AddPart&);

template <class Vec, class X, class R, class H, bool Scaled>
typename Vec::Scalar add_and_sum(const AddCall& call, const AddPart& part) {
  using T = typename Vec::Scalar;
  using Reader = AddReader<Vec, X, R, H, Scaled>;
  const Reader reader{
      static_cast<const X*>(call.x.data) + part.x_offset + part.column,
      static_cast<const R*>(call.residual.data) + part.residual_offset + part.column,
      static_cast<H*>(part.sum), static_cast<T>(call.alpha), part.ahead};
  const std::int64_t width = call.norm.width;
  const T sum = sum_of_squares<Vec, Reader::kSplit>(reader, width);
  for (std::int64_t i = width; i < call.norm.d / call.norm.groups; ++i) reader.at(i);
  return sum;
}

// The sum alone, for any types and strides: A is the type of the addition.
template <class Vec>
[[gnu::noinline]] void add_slowly(const AddCall& call, const AddPart& part) {
  using A = typename Vec::Scalar;
  const std::int64_t count = call.norm.d / call.norm.groups;
  const A alpha = static_cast<A>(call.alpha);
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t size = count - begin < kChunk ? count - begin : kChunk;
    A x[kChunk], sum[kChunk];
    read_part<Vec>(call.x, part.x_offset, part.column + begin, size, x);
    read_part<Vec>(call.residual, part.residual_offset, part.column + begin, size, sum);
    for (std::int64_t i = 0; i < size; ++i) {
      sum[i] = call.alpha == 1.0 ? sum[i] + x[i] : fused_multiply_add(alpha, x[i], sum[i]);
    }
    store(call.norm.x_type, sum, size, part.sum, begin);
  }
}

template <class Isa, class Vec, class H, bool Strided>
typename Vec::Scalar add_and_sum_slowly(const AddCall& call, const AddPart& part) {
  if (call.add_type == DType::f64) {
    add_slowly<typename Isa::F64>(call, part);
  } else {
    add_slowly<typename Isa::F32>(call, part);
  }
  constexpr bool kSplit = !Strided && std::is_same_v<H, bf16>;
  const RowReader<Vec, H, Strided> reader{static_cast<const H*>(part.sum), 1};
  return sum_of_squares<Vec, kSplit>(reader, call.norm.width);
}

// The single pass where rows are contiguous and the types are the usual ones, or null.
template <class Vec, class H>
AddAndSum<typename Vec::Scalar> pick_add(const AddCall& call) {
  using T = typename Vec::Scalar;
  if (call.x.rows.stride != 1 || call.residual.rows.stride != 1) return nullptr;
  const auto pick = [&call]<class X, class R>() -> AddAndSum<T> {
    if (call.x.type != dtype_of<X>() || call.residual.type != dtype_of<R>()) return nullptr;
    return call.alpha == 1.0 ? &add_and_sum<Vec, X, R, H, false> : &add_and_sum<Vec, X, R, H, true>;
  };
  AddAndSum<T> found = pick.template operator()<H, H>();
  if constexpr (std::is_same_v<H, float>) {  // a residual that is kept in float32
    if (!found) found = pick.template operator()<bf16, float>();
    if (!found) found = pick.template operator()<bf16, bf16>();
    if (!found) found = pick.template operator()<f16, float>();
    if (!found) found = pick.template operator()<f16, f16>();
  }
  return found;
}

// Where the rows of x, the residual and h lie.
template <class H>
class AddedRows {
 public:
  AddedRows(const AddCall& call, std::int64_t begin)
      : call_(call),
        x_(call.x.rows.outer, begin),
        residual_(call.residual.rows.outer, begin),
        sum_(static_cast<H*>(call.sum) + begin * call.norm.d) {}

  const H* at(std::int64_t column) const { return sum_ + column; }
  void next() {
    x_.next();
    residual_.next();
    sum_ += call_.norm.d;
  }

 protected:
  const AddCall& call_;
  RowCursor x_, residual_;
  H* sum_;
};

// The rows of h, each of which is computed when its sum is taken.
template <class Isa, class Vec, class H, bool Strided>
class SummedRows : public AddedRows<H> {
  using T = typename Vec::Scalar;

 public:
  SummedRows(const AddCall& call, std::int64_t begin, int block_size) : AddedRows<H>(call, begin) {
    // Not of doubles that accumulate in float32.
    if constexpr (std::is_same_v<H, double> == std::is_same_v<T, double>) {
      add_and_sum_ = pick_add<Vec, H>(call);
    }
    if (!add_and_sum_) add_and_sum_ = &add_and_sum_slowly<Isa, Vec, H, Strided>;
    ahead_ = static_cast<std::uintptr_t>(block_size * (call.norm.d / call.norm.groups) *
                                         element_size(call.residual.type));
  }

  const void* source(std::int64_t column) const {
    const Operand& x = this->call_.x;
    return static_cast<const char*>(x.data) +
           (this->x_.offset() + column * x.rows.stride) * element_size(x.type);
  }
  T sum(const RowReader<Vec, H, Strided>&, std::int64_t column) const {
    return add_and_sum_(this->call_, {this->x_.offset(), this->residual_.offset(), column,
                                      this->sum_ + column, ahead_});
  }

 private:
  AddAndSum<T> add_and_sum_ = nullptr;
  std::uintptr_t ahead_;
};

// Rows that are added while others are scaled: x, the residual and h are of one type, alpha is 1.
template <class Vec, class H>
class RowsToAdd : public AddedRows<H> {
 public:
  using Reader = AddReader<Vec, H, H, H, false>;
  using AddedRows<H>::AddedRows;

  static bool serves(const AddCall& call) {
    return call.x.type == dtype_of<H>() && call.residual.type == dtype_of<H>() &&
           call.alpha == 1.0 && call.x.rows.stride == 1 && call.residual.rows.stride == 1;
  }
  Reader reader(std::int64_t column) const {
    const H* x = static_cast<const H*>(this->call_.x.data) + this->x_.offset();
    const H* residual = static_cast<const H*>(this->call_.residual.data) + this->residual_.offset();
    return {.x = x + column,
            .residual = residual + column,
            .sum = this->sum_ + column,
            .alpha = 1,
            .ahead = kFetchBytes};
  }
};

// Never inlined, as forward_of.
template <class Isa, class Vec, class H, bool Strided>
[[gnu::noinline]] void add_rows(const AddCall& call, std::int64_t begin, std::int64_t end) {
  if constexpr (!Strided && kOverlapped<Vec, H>) {
    if (RowsToAdd<Vec, H>::serves(call) &&
        try_overlapped<Vec, H, RowsToAdd<Vec, H>>(call, call.norm, begin, end)) {
      return;
    }
  }
  normalise_rows<Vec, H, Strided, SummedRows<Isa, Vec, H, Strided>>(call, call.norm, begin, end);
}

template <class Isa>
void add_forward(const AddCall& call, std::int64_t begin, std::int64_t end) {
  using F32 = typename Isa::F32;
  const KeepSubnormals keep;
  switch (call.norm.x_type) {
    case DType::f32:
      return add_rows<Isa, F32, float, false>(call, begin, end);
    case DType::f64:
      if (call.norm.compute == DType::f32)
        return add_rows<Isa, F32, double, true>(call, begin, end);
      return add_rows<Isa, typename Isa::F64, double, false>(call, begin, end);
    case DType::bf16:
      return add_rows<Isa, F32, bf16, false>(call, begin, end);
    case DType::f16:
      return add_rows<Isa, F32, f16, false>(call, begin, end);
    case DType::none:
      return;
  }
}

}  // namespace
}  // namespace rmsnorm
