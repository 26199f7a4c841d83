// What python_entry.cpp, the direct call, and autograd_node.cpp, its gradient, ask of the kernels,
// and the first of the second: C functions over handles of tensors (at::Tensor*), which stay the
// caller's unless they are results. Where one returns false, the caller takes the way through
// torch.ops, where what is wrong is said; all but `record` have then done nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rmsnorm {

struct DirectCall {
  void* x = nullptr;
  void* residual = nullptr;  // or null: no addition
  void* weight = nullptr;    // or null
  const void* spec = nullptr;
  std::int64_t ndim = 0;  // 0: as many as the weight has, or 1
  bool has_eps = false;
  double eps = 0.0;
  bool want_rstd = false;
  void* out = nullptr;    // or null: where y goes, instead of a new tensor
  bool in_place = false;  // whether y goes into x, and the sum into the residual
};

struct DirectResult {
  void* y = nullptr;
  void* sum = nullptr;   // where there was a residual
  void* rstd = nullptr;  // where it was wanted
};

struct DirectBackward {
  DirectCall norm;  // its x is what was normalised
  void* dy = nullptr;
  void* rstd = nullptr;
  void* dresidual = nullptr;  // or null
  bool need_dx = false;
  bool need_dweight = false;
};

struct DirectGradients {
  void* dx = nullptr;  // null where it was not needed
  void* dweight = nullptr;
};

bool direct_forward(const DirectCall& call, DirectResult& result) noexcept;
bool direct_backward(const DirectBackward& call, DirectGradients& gradients) noexcept;

struct DirectTable {
  std::size_t size;  // of this: what was built apart may have another
  // The spec that `text` encodes, which is never freed; null if there is none, or if it has a gate.
  const void* (*parse)(const char* text, std::size_t length) noexcept;
  const char* (*text)(const void* spec) noexcept;  // the other way round
  bool (*forward)(const DirectCall& call, DirectResult& result) noexcept;
  bool (*backward)(const DirectBackward& call, DirectGradients& gradients) noexcept;
  std::int64_t (*elements)(void* tensor) noexcept;  // how many it has
  // Whether rows of x have `width` elements, or any number if that is 0, and `dtypes` holds the bit
  // 5 * x's dtype + the weight's, as types.h numbers them.
  bool (*fits)(void* x, void* weight, std::int64_t width, std::uint64_t dtypes) noexcept;
  void* (*share)(void* tensor) noexcept;   // one more owner of it, or null
  void (*discard)(void* tensor) noexcept;  // gives up a result, or what `share` returned
};

// What the direct call asks of autograd (autograd_node.cpp).
struct AutogradTable {
  // Whether `record` can take the results of a call; an autograd.Function can in any case.
  bool (*can_record)(const DirectCall& call) noexcept;
  // Makes the results of a forward with rstd the outputs of a node of autograd's graph. One that
  // returns false leaves results that are of no use.
  bool (*record)(const DirectCall& call, const DirectResult& result) noexcept;
};

}  // namespace rmsnorm
