// What the torch operations share: tensors through PyTorch's stable ABI, and their checks.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "direct.h"
#include "dispatch.h"
#include "spec.h"

namespace rmsnorm {

// The smallest share of a thread, in elements: about 10 us of work, a few times what waking costs.
inline constexpr std::int64_t kGrainElements = 32768;
// From this size on a result is stored past the cache. Stores past the cache gain where the result
// has left it before it is read and lose where it has not; this is a size at which they gained on
// machines with 32 MB of last-level cache, whose two threads read x beside it.
inline constexpr std::int64_t kStreamBytes = std::int64_t{24} << 20;
// Below this a result is as likely as not to lie in memory that was touched before.
inline constexpr std::int64_t kHugePagesFrom = std::int64_t{8} << 20;

// Owns a tensor. The handle itself instead of torch::stable::Tensor, which allocates for each.
struct DeleteTensor {
  void operator()(AtenTensorOpaque* handle) const { aoti_torch_delete_tensor_object(handle); }
};
using Owned = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

inline std::int32_t torch_dtype(DType type) {
  switch (type) {
    case DType::f32:
      return aoti_torch_dtype_float32();
    case DType::f64:
      return aoti_torch_dtype_float64();
    case DType::bf16:
      return aoti_torch_dtype_bfloat16();
    case DType::f16:
      return aoti_torch_dtype_float16();
    case DType::none:
      break;
  }
  return -1;
}

// The inverse; none for a type that the kernels do not compute.
inline std::optional<DType> known_dtype(std::int32_t dtype) {
  for (const DType candidate : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    if (dtype == torch_dtype(candidate)) return candidate;
  }
  return std::nullopt;
}

inline const char* dtype_name(DType type) {
  switch (type) {
    case DType::f32:
      return "float32";
    case DType::f64:
      return "float64";
    case DType::bf16:
      return "bfloat16";
    case DType::f16:
      return "float16";
    case DType::none:
      break;
  }
  return "none";
}

inline DType promote(DType a, DType b) {
  if (a == b) return a;
  return a == DType::f64 || b == DType::f64 ? DType::f64 : DType::f32;
}

// What the kernels need to know of a tensor, read once: every question to torch is a call.
struct View {
  AtenTensorHandle handle = nullptr;
  std::int64_t rank = 0;
  std::int64_t* size = nullptr;
  std::int64_t* stride = nullptr;
  char* data = nullptr;
  DType type = DType::f32;

  View(AtenTensorHandle tensor, const char* name) : handle(tensor) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &rank));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &size));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &stride));
    std::int32_t device = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device));
    STD_TORCH_CHECK(device == aoti_torch_device_type_cpu(), "rmsnorm: ", name,
                    " is not on the CPU, but x is");
    STD_TORCH_CHECK(rank <= kMaxRank, "rmsnorm: ", name, " has ", rank, " dimensions; at most ",
                    kMaxRank, " are supported");
    std::int32_t dtype = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    const std::optional<DType> known = known_dtype(dtype);
    STD_TORCH_CHECK(known, "rmsnorm: ", name,
                    " has a dtype that is not float32, float64, bfloat16 or float16");
    type = *known;
    void* pointer = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &pointer));
    data = static_cast<char*>(pointer);
  }

  std::string shape() const {
    std::string text = "(";
    for (std::int64_t dim = 0; dim < rank; ++dim) {
      text += (dim ? ", " : "") + std::to_string(size[dim]);
    }
    return text + ")";
  }
  bool contiguous() const {
    std::int64_t expected = 1;
    for (std::int64_t dim = rank - 1; dim >= 0; --dim) {
      if (size[dim] != 1 && stride[dim] != expected) return false;
      expected *= size[dim];
    }
    return true;
  }
  // The addresses between which its elements lie.
  std::pair<const char*, const char*> extent() const {
    std::int64_t low = 0;
    std::int64_t high = 1;
    for (std::int64_t dim = 0; dim < rank; ++dim) {
      const std::int64_t reach = (size[dim] - 1) * stride[dim];
      (reach < 0 ? low : high) += reach;
    }
    return {data + low * element_size(type), data + high * element_size(type)};
  }
};

// A new contiguous tensor, with nothing in it.
inline Owned empty_of(DType type, std::int64_t rank, std::int64_t* size) {
  std::int64_t strides[kMaxRank];
  std::int64_t stride = 1;
  for (std::int64_t dim = rank - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= size[dim] > 1 ? size[dim] : 1;
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(rank, size, strides, torch_dtype(type),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Owned(handle);
}

inline Owned empty_contiguous(const View& like, DType type) {
  return empty_of(type, like.rank, like.size);
}

inline void* data_of(const Owned& tensor) {
  void* data = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
  return data;
}

// Asks for huge pages under a fresh large result: first touch of small pages costs several times
// what the norm does. Only memory that this operation has just allocated is ever advised.
inline void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::int64_t bytes) {
#if defined(__linux__)
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  static const bool enabled = [] {
    const char* setting = std::getenv("RMSNORM_HUGE_PAGES");
    return !setting || std::string_view(setting) != "0";
  }();
  if (!enabled || bytes < kHugePagesFrom) return;
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes)) &
                   ~(kHugePage - 1);
  // A refusal (no huge pages on this system) only leaves things as they were.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// The memory of a new result of `bytes` bytes, which the kernels write.
inline void* fresh_rows(const Owned& tensor, std::int64_t bytes) {
  void* data = data_of(tensor);
  advise_huge_pages(data, bytes);
  return data;
}

inline Owned contiguous_copy(const View& view) {
  Owned copy = empty_contiguous(view, view.type);
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), view.handle, 0));
  return copy;
}

// Memory for the kernels, aligned for every instruction set, with nothing in it.
class Buffer {
 public:
  explicit Buffer(std::int64_t bytes)
      : blocks_(
            std::make_unique_for_overwrite<Block[]>(static_cast<std::size_t>((bytes + 63) / 64))) {}
  void* data() { return blocks_.get(); }

 private:
  struct alignas(64) Block {
    char bytes[64];
  };
  std::unique_ptr<Block[]> blocks_;
};

inline void check_like_x(const View& tensor, const char* name, const View& x) {
  bool same = tensor.rank == x.rank;
  for (std::int64_t dim = 0; same && dim < x.rank; ++dim) same = tensor.size[dim] == x.size[dim];
  STD_TORCH_CHECK(same, "rmsnorm: ", name, " has shape ", tensor.shape(), "; expected that of x, ",
                  x.shape());
}

inline void check_writable(const View& view, const char* name) {
  for (std::int64_t dim = 0; dim < view.rank; ++dim) {
    STD_TORCH_CHECK(view.size[dim] <= 1 || view.stride[dim] != 0, "rmsnorm: ", name,
                    " is expanded: several of its elements share one place in memory");
  }
}

// The nearest float, also where this thread takes subnormal floats for zero.
inline double to_float(double value) {
  if (std::fabs(value) >= 0x1p-126) return static_cast<float>(value);
  return std::nearbyint(value * 0x1p149) * 0x1p-149;
}

// The row and the constants of a call whose `compute` is known; returns the number of rows.
template <class Call>
std::int64_t describe_norm(const Spec& spec, std::optional<double> eps, const View& x,
                           std::int64_t ndim, Call& call) {
  STD_TORCH_CHECK(ndim >= 1 && ndim <= x.rank, "rmsnorm: x has shape ", x.shape(),
                  "; expected at least ", ndim < 1 ? 1 : ndim, " dimension(s) to normalise over");
  std::int64_t rows = 1;
  call.d = 1;
  for (std::int64_t dim = 0; dim < x.rank; ++dim) {
    (dim < x.rank - ndim ? rows : call.d) *= x.size[dim];
  }
  STD_TORCH_CHECK(call.d % spec.groups == 0, "rmsnorm: a row of ", call.d,
                  " elements cannot be cut into ", spec.groups, " equal groups");
  call.groups = spec.groups;
  call.width = statistics_width(spec, call.d);
  call.eps_in = spec.eps_in;
  call.divide = spec.mean;
  const double machine_eps = call.compute == DType::f64 ? 0x1p-52 : 0x1p-23;
  call.eps = eps ? *eps : spec.has_eps ? spec.eps : machine_eps;
  if (call.compute == DType::f32) call.eps = to_float(call.eps);
  STD_TORCH_CHECK(call.eps >= 0.0 && std::isfinite(call.eps), "rmsnorm: eps is ", call.eps,
                  "; expected a finite number of at least 0");
  return rows;
}

// Whether a result of `bytes` bytes, in parts of `part_bytes`, is better stored past the cache.
inline bool worth_streaming(const void* data, std::int64_t bytes, std::int64_t part_bytes) {
  return bytes >= kStreamBytes && part_bytes % 64 == 0 &&
         reinterpret_cast<std::uintptr_t>(data) % 64 == 0;
}

// A weight or a bias: checked, contiguous, and in the form that the kernels read. Holds what it had
// to allocate.
class Parameter {
 public:
  Parameter(AtenTensorHandle handle, const char* name, const View& x, std::int64_t ndim)
      : view_(handle, name) {
    bool matches = view_.rank == ndim && ndim <= x.rank;
    for (std::int64_t dim = 0; matches && dim < ndim; ++dim) {
      matches = view_.size[dim] == x.size[x.rank - ndim + dim];
    }
    STD_TORCH_CHECK(matches, "rmsnorm: ", name, " has shape ", view_.shape(),
                    "; expected the last ", ndim, " dimension(s) of x, whose shape is ", x.shape());
  }
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  const View& view() const { return view_; }
  DType type() const { return view_.type; }

  const void* as_is() {
    if (view_.contiguous()) return view_.data;
    copy_ = contiguous_copy(view_);
    return View(copy_.get(), "copy").data;
  }
  const void* widened(const Kernels& isa, std::int64_t count, double offset, DType compute,
                      DType to) {
    widened_.emplace(count * element_size(to));
    isa.prepare_weight(view_.type, as_is(), count, offset, compute, to, widened_->data());
    return widened_->data();
  }

 private:
  View view_;
  Owned copy_;
  std::optional<Buffer> widened_;
};

// x as rows: collapses the outer dimensions; false if a row has no single stride.
inline bool describe_rows(const View& x, std::int64_t ndim, Rows& rows) {
  std::int64_t row_stride = 0;
  std::int64_t covered = 1;  // elements of the row described so far, from the innermost dimension
  for (std::int64_t dim = x.rank - 1; dim >= x.rank - ndim; --dim) {
    if (x.size[dim] == 1) continue;
    if (covered == 1) {
      row_stride = x.stride[dim];
    } else if (x.stride[dim] != row_stride * covered) {
      return false;
    }
    covered *= x.size[dim];
  }
  rows.stride = covered == 1 ? 1 : row_stride;

  OuterDims& outer = rows.outer;
  for (std::int64_t dim = 0; dim < x.rank - ndim; ++dim) {
    if (x.size[dim] == 1) continue;
    if (outer.rank && outer.stride[outer.rank - 1] == x.stride[dim] * x.size[dim]) {
      outer.size[outer.rank - 1] *= x.size[dim];
      outer.stride[outer.rank - 1] = x.stride[dim];
      continue;
    }
    outer.size[outer.rank] = x.size[dim];
    outer.stride[outer.rank] = x.stride[dim];
    ++outer.rank;
  }
  return true;
}

// The rows of `x`, and where they begin; of a copy of it where a row has no single stride.
inline const char* rows_of(const View& x, std::int64_t ndim, Rows& rows, Owned& copy) {
  if (describe_rows(x, ndim, rows)) return x.data;
  copy = contiguous_copy(x);
  const View dense(copy.get(), "copy");
  rows = Rows();
  describe_rows(dense, ndim, rows);
  return dense.data;
}

// Whether writing `out` row by row could overwrite what is still to be read of `other`.
inline bool overlaps(const View& out, const View& other, bool same_rows_allowed) {
  const auto [out_begin, out_end] = out.extent();
  const auto [begin, end] = other.extent();
  if (out_end <= begin || end <= out_begin) return false;
  return !(same_rows_allowed && out_begin == begin && out.type == other.type && other.contiguous());
}

using torch::stable::detail::to;

// Puts a result in its place on the stack.
inline void give(StableIValue& place, Owned& tensor) {
  place = torch::stable::detail::from(tensor.release());
}

// The spec behind a string argument, without copying the string, for an operation that takes a gate
// or one that does not.
inline const Spec& take_spec(StableIValue value, bool takes_gate) {
  struct DeleteString {
    void operator()(StringOpaque* string) const { torch_delete_string(string); }
  };
  const std::unique_ptr<StringOpaque, DeleteString> owner(
      torch::stable::detail::to<StringHandle>(value));
  std::size_t length = 0;
  const char* text = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(owner.get(), &length));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(owner.get(), &text));
  const Spec& spec = parse_spec({text, length});
  STD_TORCH_CHECK((spec.gate != Gate::none) == takes_gate, "rmsnorm: the spec has ",
                  takes_gate ? "no gate" : "a gate, which this operation does not take");
  return spec;
}

inline Owned take_optional(StableIValue value) {
  return Owned(torch::stable::detail::to<std::optional<AtenTensorHandle>>(value).value_or(nullptr));
}

// The spec of a direct call, and its text, which a node of autograd hands to operations.
struct DirectSpec {
  Spec spec;
  std::string text;
};

// The arguments of a direct call, which are the same as those of an operation.
template <class Arguments>
void take_direct(const DirectCall& call, Arguments& arguments) {
  arguments.x = static_cast<AtenTensorHandle>(call.x);
  arguments.weight = static_cast<AtenTensorHandle>(call.weight);
  if (call.has_eps) arguments.eps = call.eps;
  arguments.spec = &static_cast<const DirectSpec*>(call.spec)->spec;
  arguments.ndim = call.ndim ? call.ndim : 1;
  if (!call.ndim && call.weight) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(arguments.weight, &arguments.ndim));
  }
}

#if defined(__ELF__)
// torch::autograd::ForwardADLevel::try_get_by_idx, which is null where no level is open. The stable
// ABI has no way to ask; a torch without this function leaves the address null.
[[gnu::weak]] std::shared_ptr<void> forward_level(std::uint64_t index) asm(
    "_ZN5torch8autograd14ForwardADLevel14try_get_by_idxEm");

// torch::autograd::impl::bump_version of the at::Tensor that a handle points to: lets autograd
// notice that it was written to. Null where there is no such function.
[[gnu::weak]] void bump_version(const void* tensor) asm(
    "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE");
#endif

// Lets autograd notice that what it may have saved is written to; refuses an inference tensor
// outside of inference mode, as PyTorch's operations do.
inline void count_version([[maybe_unused]] AtenTensorHandle tensor) {
#if defined(__ELF__)
  if (bump_version) bump_version(tensor);
#endif
}

// Refuses forward mode in an operation, whose result would silently have no tangent. Which argument
// has one cannot be told: torch.func.jvp takes the tangents off before a kernel sees its arguments.
// `name`: the public function, which has a forward mode.
inline void refuse_forward_mode([[maybe_unused]] const char* name) {
#if defined(__ELF__)
  STD_TORCH_CHECK(!forward_level || !forward_level(0), "torch.ops.rmsnorm.", name,
                  " has no forward mode; rmsnorm.", name, " does: call that");
#endif
}

}  // namespace rmsnorm
