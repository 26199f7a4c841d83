// The CPU kernels as torch operations, through PyTorch's stable ABI. The schemas are defined in
// Python (rmsnorm/ops); this file is the only one that includes torch.

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

#include "dispatch.h"
#include "spec.h"

namespace rmsnorm {
namespace {

// The smallest share of a thread, in elements: about 10 us of work, a few times what waking costs.
constexpr std::int64_t kGrainElements = 32768;
// From this size on a result is stored past the cache. Stores past the cache gain where the result
// has left it before it is read and lose where it has not; this is a size at which they gained on
// machines with 32 MB of last-level cache, whose two threads read x beside it.
constexpr std::int64_t kStreamBytes = std::int64_t{24} << 20;
// With more rows than this a float16 weight is widened once, not for each row, since its conversion
// costs as much as the multiplication. A bfloat16 weight is only a shift away from float.
constexpr std::int64_t kFewRows = 4;
// Below this a result is as likely as not to lie in memory that was touched before.
constexpr std::int64_t kHugePagesFrom = std::int64_t{8} << 20;

// Owns a tensor. The handle itself instead of torch::stable::Tensor, which allocates for each.
struct DeleteTensor {
  void operator()(AtenTensorOpaque* handle) const { aoti_torch_delete_tensor_object(handle); }
};
using Owned = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

std::int32_t torch_dtype(DType type) {
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

const char* dtype_name(DType type) {
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

DType promote(DType a, DType b) {
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
    STD_TORCH_CHECK(device == aoti_torch_device_type_cpu(), "rms_norm: ", name,
                    " is not on the CPU, but x is");
    STD_TORCH_CHECK(rank <= kMaxRank, "rms_norm: ", name, " has ", rank, " dimensions; at most ",
                    kMaxRank, " are supported");
    std::int32_t dtype = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    bool known = false;
    for (const DType candidate : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
      if (dtype != torch_dtype(candidate)) continue;
      type = candidate;
      known = true;
      break;
    }
    STD_TORCH_CHECK(known, "rms_norm: ", name,
                    " has a dtype that is not float32, float64, bfloat16 or float16");
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

Owned empty_contiguous(const View& like, DType type) {
  std::int64_t strides[kMaxRank];
  std::int64_t stride = 1;
  for (std::int64_t dim = like.rank - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= like.size[dim] > 1 ? like.size[dim] : 1;
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      like.rank, like.size, strides, torch_dtype(type), aoti_torch_device_type_cpu(), 0, &handle));
  return Owned(handle);
}

// Asks for huge pages under a fresh large result: first touch of small pages costs several times
// what the norm does. Only memory that this operation has just allocated is ever advised.
void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::int64_t bytes) {
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

Owned contiguous_copy(const View& view) {
  Owned copy = empty_contiguous(view, view.type);
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), view.handle, 0));
  return copy;
}

// A weight or a bias: checked, contiguous, and in the form that the kernels read. Holds what it had
// to allocate.
class Parameter {
 public:
  Parameter(AtenTensorHandle handle, const char* name, const View& x, std::int64_t ndim)
      : view_(handle, name) {
    bool matches = view_.rank == ndim;
    for (std::int64_t dim = 0; matches && dim < ndim; ++dim) {
      matches = view_.size[dim] == x.size[x.rank - ndim + dim];
    }
    STD_TORCH_CHECK(matches, "rms_norm: ", name, " has shape ", view_.shape(),
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
    // 64-byte blocks: aligned for every instruction set.
    const auto blocks = static_cast<std::size_t>((count * element_size(to) + 63) / 64);
    widened_ = std::make_unique_for_overwrite<Block[]>(blocks);
    void* target = widened_.get();
    isa.prepare_weight(view_.type, as_is(), count, offset, compute, to, target);
    return target;
  }

 private:
  struct alignas(64) Block {
    char bytes[64];
  };

  View view_;
  Owned copy_;
  std::unique_ptr<Block[]> widened_;
};

// x as rows: collapses the outer dimensions; false if a row has no single stride.
bool describe_rows(const View& x, std::int64_t ndim, ForwardCall& call) {
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
  call.x_stride = covered == 1 ? 1 : row_stride;

  OuterDims& outer = call.outer;
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

// Whether writing `out` row by row could overwrite what is still to be read of `other`.
bool overlaps(const View& out, const View& other, bool same_rows_allowed) {
  const auto [out_begin, out_end] = out.extent();
  const auto [begin, end] = other.extent();
  if (out_end <= begin || end <= out_begin) return false;
  return !(same_rows_allowed && out_begin == begin && out.type == other.type && other.contiguous());
}

// The types of a call's intermediate results and of its result, from the spec.
void choose_types(const Spec& spec, DType x_type, const DType* weight_type, ForwardCall& call) {
  call.x_type = x_type;
  const bool keeps_double = x_type == DType::f64 && spec.accumulate_input;
  call.compute = keeps_double ? DType::f64 : DType::f32;
  call.y_type = x_type;
  if (weight_type && spec.output == Output::promote) {
    call.y_type = promote(x_type, *weight_type);
  } else if (weight_type && spec.output == Output::weight) {
    call.y_type = *weight_type;
  }
  if (spec.rounding == Rounding::before_weight && element_size(x_type) == 2) {
    call.xhat_type = x_type;
  } else if (spec.rounding == Rounding::weight_dtype && weight_type &&
             element_size(*weight_type) == 2) {
    call.xhat_type = *weight_type;
  }
  const bool wide_weight = weight_type && *weight_type == DType::f64 && spec.offset == 0.0;
  const bool wide_xhat = spec.rounding == Rounding::before_weight && x_type == DType::f64;
  call.multiply = keeps_double || wide_weight || wide_xhat ? DType::f64 : DType::f32;
  call.bias_after_round = spec.rounding != Rounding::after_weight;
}

struct Arguments {
  Owned x;
  Owned weight;
  Owned bias;
  std::optional<double> eps;
  std::int64_t ndim;
  const Spec* spec;
};

// The shape, the eps and the types of a call.
ForwardCall describe_call(const Arguments& arguments, const View& x, const DType* weight_type) {
  const Spec& spec = *arguments.spec;
  ForwardCall call;
  choose_types(spec, x.type, weight_type, call);
  call.d = 1;
  for (std::int64_t dim = x.rank - arguments.ndim; dim < x.rank; ++dim) call.d *= x.size[dim];
  STD_TORCH_CHECK(call.d % spec.groups == 0, "rms_norm: a row of ", call.d,
                  " elements cannot be cut into ", spec.groups, " equal groups");
  call.groups = spec.groups;
  call.width = statistics_width(spec, call.d);
  call.eps_in = spec.eps_in;
  call.divide = spec.mean;
  const double machine_eps = call.compute == DType::f64 ? 0x1p-52 : 0x1p-23;
  call.eps = arguments.eps ? *arguments.eps : spec.has_eps ? spec.eps : machine_eps;
  STD_TORCH_CHECK(call.eps >= 0.0 && std::isfinite(call.eps), "rms_norm: eps is ", call.eps,
                  "; expected a finite number of at least 0");
  if (call.compute == DType::f32) call.eps = static_cast<float>(call.eps);
  return call;
}

void check_out(const View& out, const View& x, DType y_type) {
  STD_TORCH_CHECK(out.type == y_type, "rms_norm: out is ", dtype_name(out.type),
                  "; the result of this call is ", dtype_name(y_type));
  bool same = out.rank == x.rank;
  for (std::int64_t dim = 0; same && dim < x.rank; ++dim) same = out.size[dim] == x.size[dim];
  STD_TORCH_CHECK(same, "rms_norm: out has shape ", out.shape(), "; expected ", x.shape());
  for (std::int64_t dim = 0; dim < out.rank; ++dim) {
    STD_TORCH_CHECK(out.size[dim] <= 1 || out.stride[dim] != 0,
                    "rms_norm: out is expanded: several of its elements share one place in memory");
  }
}

// Gives the call its weight: as it is where a kernel reads that, else widened.
void set_weight(const Kernels& isa, Parameter& weight, double offset, std::int64_t rows,
                ForwardCall& call) {
  const bool as_half =
      weight.type() == call.x_type && call.multiply == DType::f32 &&
      (weight.type() == DType::bf16 || (weight.type() == DType::f16 && rows <= kFewRows));
  if (as_half || weight.type() == call.multiply) {
    call.weight_type = weight.type();
    call.weight = weight.as_is();
    call.offset = offset;
  } else {
    call.weight_type = call.multiply;
    call.weight = weight.widened(isa, call.d, offset, call.compute, call.multiply);
  }
}

// Runs the call, on several threads where there is enough to do.
void run(const Kernels& isa, const ForwardCall& call, std::int64_t rows) {
  const std::int64_t grain = (kGrainElements + call.d - 1) / call.d;
  if (rows <= grain) return isa.forward(call, 0, rows);
  torch::stable::parallel_for(
      0, rows, grain, [&](std::int64_t begin, std::int64_t end) { isa.forward(call, begin, end); });
}

// Computes the call, into `out` if that is not null, and else into a new tensor, which is returned.
Owned rms_norm(const Arguments& arguments, AtenTensorHandle out_handle) {
  const Kernels* isa = kernels();
  STD_TORCH_CHECK(isa != nullptr, "rmsnorm: ", isa_error());
  const std::int64_t ndim = arguments.ndim;
  const View x(arguments.x.get(), "x");
  STD_TORCH_CHECK(ndim >= 1 && ndim <= x.rank, "rms_norm: x has shape ", x.shape(),
                  "; expected at least ", ndim < 1 ? 1 : ndim, " dimension(s) to normalise over");
  std::optional<Parameter> weight;
  if (arguments.weight) weight.emplace(arguments.weight.get(), "weight", x, ndim);
  std::optional<Parameter> bias;
  if (arguments.bias) bias.emplace(arguments.bias.get(), "bias", x, ndim);
  const DType weight_type = weight ? weight->type() : DType::none;
  ForwardCall call = describe_call(arguments, x, weight ? &weight_type : nullptr);
  std::int64_t rows = 1;
  for (std::int64_t dim = 0; dim < x.rank - ndim; ++dim) rows *= x.size[dim];
  const bool empty = rows == 0 || call.d == 0;

  std::optional<View> out;
  if (out_handle) {
    out.emplace(out_handle, "out");
    check_out(*out, x, call.y_type);
    if (empty) return nullptr;
  }
  // An `out` that rows cannot be written to one by one gets a copy of the result.
  const bool direct = out && out->contiguous() && !overlaps(*out, x, true) &&
                      !(weight && overlaps(*out, weight->view(), false)) &&
                      !(bias && overlaps(*out, bias->view(), false));
  Owned result;
  if (!direct) result = empty_contiguous(x, call.y_type);
  if (empty) return result;
  const std::int64_t bytes = rows * call.d * element_size(call.y_type);
  if (direct) {
    call.y = out->data;
  } else {
    void* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(result.get(), &data));
    advise_huge_pages(data, bytes);
    call.y = data;
  }
  call.stream = bytes >= kStreamBytes &&
                call.d / call.groups * element_size(call.y_type) % 64 == 0 &&
                reinterpret_cast<std::uintptr_t>(call.y) % 64 == 0;

  Owned x_copy;
  call.x = x.data;
  if (!describe_rows(x, ndim, call)) {
    x_copy = contiguous_copy(x);
    const View copy(x_copy.get(), "x");
    call.x = copy.data;
    describe_rows(copy, ndim, call);
  }
  if (weight) set_weight(*isa, *weight, arguments.spec->offset, rows, call);
  if (bias) call.bias = bias->widened(*isa, call.d, 0.0, call.compute, call.multiply);
  run(*isa, call, rows);

  if (!out) return result;
  if (!direct) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(out_handle, result.get(), 0));
  return nullptr;
}

// The spec behind a string argument, without copying the string.
const Spec& take_spec(StableIValue value) {
  struct DeleteString {
    void operator()(StringOpaque* string) const { torch_delete_string(string); }
  };
  const std::unique_ptr<StringOpaque, DeleteString> owner(
      torch::stable::detail::to<StringHandle>(value));
  std::size_t length = 0;
  const char* text = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(owner.get(), &length));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(owner.get(), &text));
  return parse_spec({text, length});
}

Owned take_optional(StableIValue value) {
  return Owned(torch::stable::detail::to<std::optional<AtenTensorHandle>>(value).value_or(nullptr));
}

// Every argument is owned before anything can throw.
Arguments take_arguments(StableIValue* stack) {
  using torch::stable::detail::to;
  Arguments arguments{
      Owned(to<AtenTensorHandle>(stack[0])), take_optional(stack[1]),    take_optional(stack[2]),
      to<std::optional<double>>(stack[3]),   to<std::int64_t>(stack[5]), nullptr};
  arguments.spec = &take_spec(stack[4]);
  return arguments;
}

void rms_norm_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const Arguments arguments = take_arguments(stack);
  stack[0] = torch::stable::detail::from(rms_norm(arguments, nullptr).release());
}

void rms_norm_out_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Owned out(torch::stable::detail::to<AtenTensorHandle>(stack[6]));
  const Arguments arguments = take_arguments(stack);
  rms_norm(arguments, out.get());
  stack[0] = torch::stable::detail::from(out.release());
}

}  // namespace
}  // namespace rmsnorm

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, library) {
  library.impl("rms_norm", &rmsnorm::rms_norm_boxed);
  library.impl("rms_norm.out", &rmsnorm::rms_norm_out_boxed);
}

#if defined(_WIN32)
#define RMSNORM_EXPORT __declspec(dllexport)
#else
#define RMSNORM_EXPORT __attribute__((visibility("default")))
#endif

// The instruction set in use, or null where RMSNORM_ISA names one that is not here.
extern "C" RMSNORM_EXPORT const char* rmsnorm_cpu_isa() noexcept {
  const rmsnorm::Kernels* isa = rmsnorm::kernels();
  return isa ? isa->name : nullptr;
}

extern "C" RMSNORM_EXPORT const char* rmsnorm_isa_error() noexcept { return rmsnorm::isa_error(); }
