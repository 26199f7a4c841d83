// The storage types and the description of one call: plain data, shared by every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rmsnorm {

// Half types as storage: arithmetic is always done after widening.
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

enum class DType : std::uint8_t { f32, f64, bf16, f16, none };

// Bytes. Of internal linkage, because files with different instruction flags include it.
static constexpr std::int64_t element_size(DType type) {
  return type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2;
}

enum class EpsIn : std::uint8_t { mean_square, root, clamp };

constexpr int kMaxRank = 64;

// The dimensions in front of a row, collapsed where the strides allow it. Strides in elements.
struct OuterDims {
  int rank = 0;
  std::int64_t size[kMaxRank];
  std::int64_t stride[kMaxRank];
};

// One forward call. The weight and the bias are prepared by the caller: contiguous, and of a type
// that the call's path reads (see `weight_type`).
struct ForwardCall {
  const void* x = nullptr;
  void* y = nullptr;             // contiguous, (rows, d)
  const void* weight = nullptr;  // (d,) or null
  const void* bias = nullptr;    // (d,) or null; float, or double where `multiply` is f64
  OuterDims outer;
  std::int64_t x_stride = 1;  // between the elements of a row
  std::int64_t d = 0;
  std::int64_t groups = 1;
  std::int64_t width = 0;  // elements under one mean square
  DType x_type = DType::f32;
  DType y_type = DType::f32;
  DType weight_type = DType::f32;  // f32, f64 where `multiply` is f64, or x's own half type
  double offset = 0.0;             // still to be added to the weight, in `compute`
  DType compute = DType::f32;      // f32 or f64: squares, sum, x * rstd
  DType multiply = DType::f32;     // f32 or f64: times weight, plus bias
  DType xhat_type = DType::none;   // xhat is rounded to this half type before the weight
  EpsIn eps_in = EpsIn::mean_square;
  bool divide = true;             // mean of the squares, not their sum
  bool bias_after_round = false;  // the product is rounded to y's type before the bias is added
  bool stream = false;            // non-temporal stores: y is larger than the cache
  double eps = 0.0;               // a value of `compute`
};

// What one instruction set provides.
struct Kernels {
  const char* name;
  // Normalises rows [begin, end) of the call.
  void (*forward)(const ForwardCall& call, std::int64_t begin, std::int64_t end);
  // Widens `count` contiguous elements to `to` (f32 or f64); an offset is added in `compute`.
  void (*prepare_weight)(DType type, const void* weight, std::int64_t count, double offset,
                         DType compute, DType to, void* result);
};

}  // namespace rmsnorm
