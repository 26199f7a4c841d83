// The gated norm: that of x * act(gate), or that of x times act(gate). Each row is staged: the
// gated row in the first case, the activations in the second.
#pragma once

#include "activation.h"
#include "rms_norm.h"

namespace rmsnorm {
namespace {

// The activations of `count` elements of the gate's row, in T.
template <class Vec>
void activate_part(const GatedCall& call, std::int64_t gate_offset, std::int64_t column,
                   std::int64_t count, typename Vec::Scalar* act) {
  typename Vec::Scalar gates[kChunk];
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t size = count - begin < kChunk ? count - begin : kChunk;
    read_part<Vec>(call.gate, gate_offset, column + begin, size, gates);
    activate(call.activation, gates, size, act + begin);
  }
}

// A part of x * act(gate), in T.
template <class Vec>
void gate_part(const GatedCall& call, std::int64_t x_offset, std::int64_t gate_offset,
               std::int64_t column, std::int64_t count, typename Vec::Scalar* product) {
  typename Vec::Scalar act[kChunk];
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t size = count - begin < kChunk ? count - begin : kChunk;
    activate_part<Vec>(call, gate_offset, column + begin, size, act);
    read_part<Vec>(call.x, x_offset, column + begin, size, product + begin);
    for (std::int64_t i = 0; i < size; ++i) product[begin + i] *= act[i];
  }
}

template <class T>
T element(const Operand& operand, std::int64_t row_offset, std::int64_t i) {
  T value;
  load_as(operand.type, operand.data, row_offset + i * operand.rows.stride, 1, &value);
  return value;
}

// A part of x * act(gate) in double, for a part that leaves the range of float.
template <class T>
struct WideGatedReader {
  const GatedCall& call;
  std::int64_t x_offset, gate_offset, column;

  double at(std::int64_t i) const {
    const double gate = static_cast<double>(element<T>(call.gate, gate_offset, column + i));
    double act;
    activate(call.activation, &gate, 1, &act);
    return static_cast<double>(element<T>(call.x, x_offset, column + i)) * act;
  }
};

// The gate comes first.
template <class Vec>
[[gnu::noinline]] void gate_then_normalise(const GatedCall& call, std::int64_t begin,
                                           std::int64_t end, typename Vec::Scalar* staged) {
  using T = typename Vec::Scalar;
  const ForwardCall& norm = call.norm;
  const std::int64_t part = norm.d / norm.groups;
  const auto scale = pick_scale<Vec, T>(norm);
  RowCursor x(call.x.rows.outer, begin);
  RowCursor gate(call.gate.rows.outer, begin);
  for (std::int64_t row = begin; row < end; ++row, x.next(), gate.next()) {
    for (std::int64_t group = 0; group < norm.groups; ++group) {
      const std::int64_t column = group * part;
      gate_part<Vec>(call, x.offset(), gate.offset(), column, part, staged);
      const RowReader<Vec, T, false> reader{staged, 1};
      const T sum = sum_of_squares<Vec, false>(reader, norm.width);
      Part<Vec, T, false> current{reader, row, column, sum, inverse_rms<T>(norm, sum)};
      const WideGatedReader<T> wide{call, x.offset(), gate.offset(), column};
      const bool redone = __builtin_expect(out_of_range<T>(norm, sum), 0) &&
                          redo<T>(norm, wide, column, part, row, current.rstd);
      if (!redone && scale) {
        current.scale(scale, norm, part, nullptr, 0);
      } else if (!redone) {
        finish_slowly<T>(norm, column, column + part, row,
                         [&](std::int64_t i) { return staged[i] * current.rstd; });
      }
      if (norm.rstd) static_cast<T*>(norm.rstd)[row * norm.groups + group] = current.rstd;
    }
  }
  if (norm.stream) Vec::fence();
}

// y = ((x * rstd, rounded to Xhat) * weight, rounded to Product) * act, rounded to Y.
template <class Vec, class X, bool Weighted, class Xhat, class Product, class Y>
void scale_gated_row(const void* x_, typename Vec::Scalar rstd, const void* weight_,
                     const typename Vec::Scalar* act, void* y_, std::int64_t count) {
  using T = typename Vec::Scalar;
  using Reg = typename Vec::Reg;
  constexpr int kLanes = Vec::kLanes;
  const X* x = static_cast<const X*>(x_);
  const T* weight = static_cast<const T*>(weight_);
  Y* y = static_cast<Y*>(y_);
  const Reg factors = Vec::set1(rstd);
  const auto load = [&](std::int64_t i) {
    Reg value = Vec::template round_to<Xhat>(Vec::mul(Vec::load(x + i), factors));
    if constexpr (Weighted) {
      value = Vec::template round_to<Product>(Vec::mul(value, Vec::load(weight + i)));
    }
    return Vec::mul(value, Vec::load(act + i));
  };
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    Vec::store2(y + i, load(i), load(i + kLanes));
  }
  for (; i < count; ++i) {
    T value = widen(narrow<Xhat>(widen(x[i]) * rstd));
    if constexpr (Weighted) value = widen(narrow<Product>(value * weight[i]));
    y[i] = narrow<Y>(value * act[i]);
  }
}

template <class T>
using ScaleGatedRow = void (*)(const void*, T, const void*, const T*, void*, std::int64_t);

// The vector loop for a call whose rows are contiguous and whose types are the usual ones, or null.
template <class Vec, class X>
ScaleGatedRow<typename Vec::Scalar> pick_gated_scale(const GatedCall& call) {
  using T = typename Vec::Scalar;
  const ForwardCall& norm = call.norm;
  const DType type = dtype_of<T>();
  if (norm.multiply != type || call.act_multiply != type) return nullptr;
  if (norm.weight && (norm.weight_type != type || norm.offset != 0.0)) return nullptr;
  const auto pick_y = [&norm]<bool Weighted, class Xhat, class Product>() -> ScaleGatedRow<T> {
    if (norm.y_type == dtype_of<X>()) return &scale_gated_row<Vec, X, Weighted, Xhat, Product, X>;
    if (norm.y_type == dtype_of<T>()) return &scale_gated_row<Vec, X, Weighted, Xhat, Product, T>;
    return nullptr;
  };
  const bool plain = norm.xhat_type == DType::none;
  if (!plain && norm.xhat_type != dtype_of<X>()) return nullptr;
  if (!norm.weight) {
    return plain ? pick_y.template operator()<false, T, T>()
                 : pick_y.template operator()<false, X, T>();
  }
  const bool whole = call.product_type == DType::none;
  if (!whole && call.product_type != dtype_of<X>()) return nullptr;
  if (plain) return whole ? pick_y.template operator()<true, T, T>() : nullptr;
  return whole ? pick_y.template operator()<true, X, T>()
               : pick_y.template operator()<true, X, X>();
}

// Everything after xhat, for any mix of types: weights in M, activations in G.
template <class M, class G, class T>
[[gnu::noinline]] void finish_gated_chunk(const GatedCall& call, const T* xhat, const T* act,
                                          std::int64_t count, std::int64_t column,
                                          std::int64_t row) {
  M values[kChunk];
  weigh_chunk(call.norm, xhat, count, column, values);
  round_in_place(call.norm.weight ? call.product_type : call.norm.xhat_type, values, count);
  G products[kChunk];
  for (std::int64_t i = 0; i < count; ++i) {
    products[i] = static_cast<G>(values[i]) * static_cast<G>(act[i]);
  }
  store(call.norm.y_type, products, count, call.norm.y, row * call.norm.d + column);
}

// A part from xhat(i) and act[i], in chunks that fit the first cache.
template <class T, class Xhat>
void finish_gated_slowly(const GatedCall& call, std::int64_t column, std::int64_t count,
                         std::int64_t row, const T* act, const Xhat& xhat) {
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t size = count - begin < kChunk ? count - begin : kChunk;
    T chunk[kChunk];
    for (std::int64_t i = 0; i < size; ++i) chunk[i] = xhat(begin + i);
    const auto finish = call.norm.multiply == DType::f64  ? &finish_gated_chunk<double, double, T>
                        : call.act_multiply == DType::f64 ? &finish_gated_chunk<T, double, T>
                                                          : &finish_gated_chunk<T, T, T>;
    finish(call, chunk, act + begin, size, column + begin, row);
  }
}

// A part that is out of range: see redo.
template <class T, class Reader>
[[gnu::noinline]] bool redo_gated(const GatedCall& call, const Reader& reader, std::int64_t column,
                                  std::int64_t count, std::int64_t row, const T* act, T& rstd) {
  const RescaledRow rescaled = rescale<T>(call.norm, reader, call.norm.width);
  if (!rescaled.valid) return false;
  rstd = static_cast<T>(__builtin_ldexp(rescaled.rstd, rescaled.exponent));
  finish_gated_slowly<T>(call, column, count, row, act, [&](std::int64_t i) {
    const double x = static_cast<double>(reader.at(i));
    return static_cast<T>(__builtin_ldexp(x, rescaled.exponent) * rescaled.rstd);
  });
  return true;
}

// The gate comes last. No loop here stores past the cache: the exponential takes longer than
// memory.
template <class Vec, class X, bool Strided>
[[gnu::noinline]] void normalise_then_gate(const GatedCall& call, std::int64_t begin,
                                           std::int64_t end, typename Vec::Scalar* act) {
  using T = typename Vec::Scalar;
  constexpr bool kSplit = !Strided && std::is_same_v<X, bf16>;
  const ForwardCall& norm = call.norm;
  const std::int64_t part = norm.d / norm.groups;
  ScaleGatedRow<T> scale = nullptr;
  if constexpr (!Strided) scale = pick_gated_scale<Vec, X>(call);
  const std::int64_t weight_size = norm.weight ? element_size(norm.weight_type) : 0;
  const std::int64_t y_size = element_size(norm.y_type);
  const std::int64_t stride = call.x.rows.stride;
  RowCursor x(call.x.rows.outer, begin);
  RowCursor gate(call.gate.rows.outer, begin);
  for (std::int64_t row = begin; row < end; ++row, x.next(), gate.next()) {
    for (std::int64_t group = 0; group < norm.groups; ++group) {
      const std::int64_t column = group * part;
      const X* data = static_cast<const X*>(call.x.data) + x.offset() + column * stride;
      const RowReader<Vec, X, Strided> reader{data, stride};
      const T sum = sum_of_squares<Vec, kSplit>(reader, norm.width);
      T rstd = inverse_rms<T>(norm, sum);
      activate_part<Vec>(call, gate.offset(), column, part, act);
      if (__builtin_expect(out_of_range<T>(norm, sum), 0) &&
          redo_gated<T>(call, reader, column, part, row, act, rstd)) {
      } else if (scale) {
        scale(data, rstd, static_cast<const char*>(norm.weight) + column * weight_size, act,
              static_cast<char*>(norm.y) + (row * norm.d + column) * y_size, part);
      } else {
        finish_gated_slowly<T>(call, column, part, row, act,
                               [&](std::int64_t i) { return reader.at(i) * rstd; });
      }
      if (norm.rstd) static_cast<T*>(norm.rstd)[row * norm.groups + group] = rstd;
    }
  }
}

template <class Isa, class X>
void gated_forward_of(const GatedCall& call, std::int64_t begin, std::int64_t end, void* scratch) {
  using F32 = typename Isa::F32;
  float* floats = static_cast<float*>(scratch);
  if constexpr (std::is_same_v<X, double>) {
    using F64 = typename Isa::F64;
    double* doubles = static_cast<double*>(scratch);
    if (call.norm.compute == DType::f32) {
      normalise_then_gate<F32, X, true>(call, begin, end, floats);
    } else if (call.x.rows.stride != 1) {
      normalise_then_gate<F64, X, true>(call, begin, end, doubles);
    } else {
      normalise_then_gate<F64, X, false>(call, begin, end, doubles);
    }
  } else if (call.x.rows.stride != 1) {
    normalise_then_gate<F32, X, true>(call, begin, end, floats);
  } else {
    normalise_then_gate<F32, X, false>(call, begin, end, floats);
  }
}

template <class Isa>
void gated_forward(const GatedCall& call, std::int64_t begin, std::int64_t end, void* scratch) {
  const KeepSubnormals keep;
  if (call.gate_before) {
    if (call.norm.compute == DType::f64) {
      return gate_then_normalise<typename Isa::F64>(call, begin, end,
                                                    static_cast<double*>(scratch));
    }
    return gate_then_normalise<typename Isa::F32>(call, begin, end, static_cast<float*>(scratch));
  }
  switch (call.x.type) {
    case DType::f32:
      return gated_forward_of<Isa, float>(call, begin, end, scratch);
    case DType::f64:
      return gated_forward_of<Isa, double>(call, begin, end, scratch);
    case DType::bf16:
      return gated_forward_of<Isa, bf16>(call, begin, end, scratch);
    case DType::f16:
      return gated_forward_of<Isa, f16>(call, begin, end, scratch);
    case DType::none:
      return;
  }
}

}  // namespace
}  // namespace rmsnorm
