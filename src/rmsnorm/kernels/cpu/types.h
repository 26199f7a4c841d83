// The storage types and the descriptions of the calls: plain data, shared by every instruction set.
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

// The activation of a gate.
enum class Gate : std::uint8_t { none, silu, sigmoid };

constexpr int kMaxRank = 64;

// The dimensions in front of a row, collapsed where the strides allow it. Strides in elements.
struct OuterDims {
  int rank = 0;
  std::int64_t size[kMaxRank];
  std::int64_t stride[kMaxRank];
};

// Where the rows of a tensor lie: the offset of each, and the distance between its elements.
struct Rows {
  OuterDims outer;
  std::int64_t stride = 1;
};

// One forward call. The weight and the bias are prepared by the caller: contiguous, and of a type
// that the call's path reads (see `weight_type`).
struct ForwardCall {
  const void* x = nullptr;
  void* y = nullptr;             // contiguous, (rows, d)
  void* rstd = nullptr;          // contiguous, (rows, groups) of `compute`, or null
  const void* weight = nullptr;  // (d,) or null
  const void* bias = nullptr;    // (d,) or null; float, or double where `multiply` is f64
  Rows x_rows;
  std::int64_t d = 0;
  std::int64_t groups = 1;
  std::int64_t width = 0;  // elements under one mean square
  DType x_type = DType::f32;
  DType y_type = DType::f32;
  DType weight_type = DType::f32;  // f32, f64 where `multiply` is f64, or x's own half type
  double offset = 0.0;             // still to be added to the weight, in `compute`
  DType compute = DType::f32;      // f32 or f64: squares, sum, x * rstd
  DType multiply = DType::f32;     // f32 or f64: times weight, plus bias
  DType xhat_type = DType::none;   // xhat is rounded to this type before the weight
  EpsIn eps_in = EpsIn::mean_square;
  bool divide = true;             // mean of the squares, not their sum
  bool bias_after_round = false;  // the product is rounded to y's type before the bias is added
  bool stream = false;            // non-temporal stores: y is larger than the cache
  double eps = 0.0;               // a value of `compute`
};

// A tensor that is read row by row; no data: there is none.
struct Operand {
  const void* data = nullptr;
  Rows rows;
  DType type = DType::f32;
};

// The norm of residual + alpha * x, which is written to the memory that `norm` reads: contiguous
// rows. That may be the residual's own memory, and the result's that of x.
struct AddCall {
  ForwardCall norm;
  void* sum = nullptr;  // norm.x
  Operand x;
  Operand residual;
  DType add_type = DType::f32;  // f32 or f64: the fused multiply-add
  double alpha = 1.0;           // a value of `add_type`
};

// The norm of x * act(gate), or that of x times act(gate). In the first case `norm` says how the
// row in between is normalised, and its x and x_type are not looked at.
struct GatedCall {
  ForwardCall norm;
  Operand x;
  Operand gate;
  Gate activation = Gate::silu;
  bool gate_before = true;
  DType product_type = DType::none;  // after: xhat * weight is rounded to this half type
  DType act_multiply = DType::f32;   // after: f32 or f64, of the product with the activation
};

// One backward call. Its rows are cut into blocks of `block_rows`; each block writes its own sums
// over rows, which are then added in a fixed order.
struct BackwardCall {
  Operand x;          // the row that was normalised, before any gate
  Operand dy;         // the gradient of the result
  Operand dresidual;  // a gradient that reaches x besides, or none
  Operand gate;       // or none
  Gate activation = Gate::none;
  bool gate_before = false;      // the gate multiplies x, not the normalised row
  const void* rstd = nullptr;    // (rows, groups), of `compute`
  const void* weight = nullptr;  // (d,) of `compute`, the offset added; in split order if `split`
  void* dx = nullptr;            // contiguous (rows, d), of x's type, or null
  void* dgate = nullptr;         // contiguous (rows, d), of the gate's type, or null
  void* dweight = nullptr;       // (blocks, d) of `compute`, in the order of the weight, or null
  void* dbias = nullptr;         // the same
  std::int64_t rows = 0;
  std::int64_t d = 0;
  std::int64_t groups = 1;
  std::int64_t width = 0;  // elements under one mean square
  std::int64_t block_rows = 1;
  EpsIn eps_in = EpsIn::mean_square;
  bool divide = true;
  double eps = 0.0;            // a value of `compute`
  DType compute = DType::f32;  // f32 or f64
  bool direct = false;         // rows are read and written in place by the vector loops
  bool split = false;          // direct, and the rows are bfloat16 in split pairs of registers
  bool stream = false;         // non-temporal stores of dx
};

// Rows whose products are added up before they join the sums of their block, which has a multiple
// of them. The bits of the sums depend on it.
constexpr std::int64_t kChunkRows = 16;

// Working memory of one thread, in elements of `compute`: rows of d elements (see Scratch).
constexpr std::int64_t kSumRows = 2;
constexpr std::int64_t kPartRows = 10;
static constexpr std::int64_t scratch_elements(const BackwardCall& call) {
  const std::int64_t sums = call.block_rows > kChunkRows ? kSumRows : 0;
  return (sums + (call.direct ? 0 : kPartRows)) * call.d;
}

// Working memory of one thread, in elements of norm.compute.
static constexpr std::int64_t scratch_elements(const GatedCall& call) { return call.norm.d; }

// What one instruction set provides.
struct Kernels {
  const char* name;
  // Normalises rows [begin, end) of the call.
  void (*forward)(const ForwardCall& call, std::int64_t begin, std::int64_t end);
  void (*add_forward)(const AddCall& call, std::int64_t begin, std::int64_t end);
  // `scratch` holds scratch_elements(call) of norm.compute.
  void (*gated_forward)(const GatedCall& call, std::int64_t begin, std::int64_t end, void* scratch);
  // Widens `count` contiguous elements to `to` (f32 or f64); an offset is added in `compute`.
  void (*prepare_weight)(DType type, const void* weight, std::int64_t count, double offset,
                         DType compute, DType to, void* result);

  // Computes blocks [begin, end) of the call; `scratch` holds scratch_elements(call) of `compute`.
  void (*backward)(const BackwardCall& call, std::int64_t begin, std::int64_t end, void* scratch);
  // Brings a prepared weight (d,) into the order in which the call's loops read it.
  void (*order_weight)(const BackwardCall& call, void* weight);
  // Adds columns [begin, end) of the sums of all blocks, into the first block's.
  void (*add_blocks)(const BackwardCall& call, void* sums, std::int64_t begin, std::int64_t end);
  // Stores the first block's sums (d,), back in order, as `type`.
  void (*store_sums)(const BackwardCall& call, const void* sums, DType type, void* result);
};

}  // namespace rmsnorm
