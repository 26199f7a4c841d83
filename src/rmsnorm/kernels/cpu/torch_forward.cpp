// The forward kernels as torch operations. The schemas are defined in Python (rmsnorm/ops).

#include <cmath>
#include <optional>

#include "torch_common.h"
#include "vec/scalar.h"

namespace rmsnorm {
namespace {

// With more rows than this a float16 weight is widened once, not for each row, since its conversion
// costs as much as the multiplication. A bfloat16 weight is only a shift away from float.
constexpr std::int64_t kFewRows = 4;
// The share of a thread where there is a gate, whose exponential costs several times the norm.
constexpr std::int64_t kGatedGrain = kGrainElements / 4;

// The types of a call's intermediate results and of its result, from the spec. The rows that are
// normalised may have another type than x, whose type is the one that the spec speaks of.
void choose_types(const Spec& spec, DType row_type, DType x_type, const DType* weight_type,
                  ForwardCall& call) {
  call.x_type = row_type;
  const bool keeps_double = row_type == DType::f64 && spec.accumulate_input;
  call.compute = keeps_double ? DType::f64 : DType::f32;
  call.y_type = x_type;
  if (weight_type && spec.output == Output::promote) {
    call.y_type = promote(x_type, *weight_type);
  } else if (weight_type && spec.output == Output::weight) {
    call.y_type = *weight_type;
  }
  if (spec.rounding == Rounding::before_weight &&
      element_size(x_type) < element_size(call.compute)) {
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

// What every forward operation is given; the tensors are the caller's.
struct Arguments {
  AtenTensorHandle x = nullptr;
  AtenTensorHandle weight = nullptr;
  std::optional<double> eps;
  std::int64_t ndim = 1;
  const Spec* spec = nullptr;
};

// One call under way: its tensors, and the memory that it allocates.
class Forward {
 public:
  explicit Forward(const Arguments& arguments) : arguments_(arguments), x_(arguments.x, "x") {
    STD_TORCH_CHECK(isa_ != nullptr, "rmsnorm: ", isa_error());
    if (arguments.weight) weight_.emplace(arguments.weight, "weight", x_, arguments.ndim);
  }

  const Kernels& isa() const { return *isa_; }
  const View& x() const { return x_; }
  std::int64_t rows() const { return rows_; }
  bool empty(const ForwardCall& call) const { return rows_ == 0 || call.d == 0; }
  std::optional<Parameter>& weight() { return weight_; }

  // The shape, the eps and the types of the norm of rows of `row_type`.
  ForwardCall describe(DType row_type) {
    const Spec& spec = *arguments_.spec;
    const DType weight_type = weight_ ? weight_->type() : DType::none;
    ForwardCall call;
    choose_types(spec, row_type, x_.type, weight_ ? &weight_type : nullptr, call);
    rows_ = describe_norm(spec, arguments_.eps, x_, arguments_.ndim, call);
    return call;
  }

  // Another tensor of x's shape.
  View like_x(AtenTensorHandle tensor, const char* name) const {
    const View view(tensor, name);
    check_like_x(view, name, x_);
    return view;
  }

  // A new tensor of x's shape, where the call's result goes.
  Owned new_y(ForwardCall& call) const {
    Owned result = empty_contiguous(x_, call.y_type);
    if (empty(call)) return result;
    const std::int64_t bytes = bytes_of(call);
    call.y = fresh_rows(result, bytes);
    call.stream = streams(call, bytes);
    return result;
  }
  // Whether the result is better stored past the cache.
  bool streams(const ForwardCall& call) const { return streams(call, bytes_of(call)); }

  // A new tensor for the call's factors (..., groups).
  Owned new_rstd(ForwardCall& call) const {
    std::int64_t size[kMaxRank];
    const std::int64_t rank = x_.rank - arguments_.ndim + 1;
    for (std::int64_t dim = 0; dim < rank - 1; ++dim) size[dim] = x_.size[dim];
    size[rank - 1] = call.groups;
    Owned result = empty_of(call.compute, rank, size);
    if (call.d == 0) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(result.get()));
    call.rstd = data_of(result);
    return result;
  }

  // Gives the call its weight: as it is where a kernel reads that, else widened.
  void set_weight(ForwardCall& call) {
    if (!weight_) return;
    const bool as_half =
        weight_->type() == call.x_type && call.multiply == DType::f32 &&
        (weight_->type() == DType::bf16 || (weight_->type() == DType::f16 && rows_ <= kFewRows));
    if (as_half || weight_->type() == call.multiply) {
      call.weight_type = weight_->type();
      call.weight = weight_->as_is();
      call.offset = arguments_.spec->offset;
    } else {
      set_wide_weight(call);
    }
  }
  void set_wide_weight(ForwardCall& call) {
    if (!weight_) return;
    const double offset = arguments_.spec->offset;
    call.weight_type = call.multiply;
    call.weight = weight_->widened(*isa_, call.d, offset, call.compute, call.multiply);
  }

  // Runs `body` on ranges of rows, on several threads where each gets `share` elements or more.
  template <class Body>
  void run(const ForwardCall& call, std::int64_t share, const Body& body) const {
    const std::int64_t grain = (share + call.d - 1) / call.d;
    if (rows_ <= grain) return body(0, rows_);
    torch::stable::parallel_for(0, rows_, grain, body);
  }

 private:
  std::int64_t bytes_of(const ForwardCall& call) const {
    return rows_ * call.d * element_size(call.y_type);
  }
  static bool streams(const ForwardCall& call, std::int64_t bytes) {
    return worth_streaming(call.y, bytes, call.d / call.groups * element_size(call.y_type));
  }

  const Arguments& arguments_;
  const Kernels* isa_ = kernels();
  View x_;
  std::optional<Parameter> weight_;
  std::int64_t rows_ = 0;
};

void check_out(const View& out, const View& x, DType y_type) {
  STD_TORCH_CHECK(out.type == y_type, "rmsnorm: out is ", dtype_name(out.type),
                  "; the result of this call is ", dtype_name(y_type));
  check_like_x(out, "out", x);
  check_writable(out, "out");
}

// Whether rows can be written to `out` one by one, as soon as each is read.
bool takes_rows(const View& out, const View& x, const View* weight, const View* bias) {
  return out.contiguous() && !overlaps(out, x, true) &&
         !(weight && overlaps(out, *weight, false)) && !(bias && overlaps(out, *bias, false));
}

// The operation rms_norm, into `out` if that is not null, and else into a new tensor, which is
// returned; beside it rstd, if that is wanted.
Owned rms_norm(const Arguments& arguments, AtenTensorHandle bias_handle,
               AtenTensorHandle out_handle, Owned* rstd) {
  Forward forward(arguments);
  const View& x = forward.x();
  std::optional<Parameter> bias;
  if (bias_handle) bias.emplace(bias_handle, "bias", x, arguments.ndim);
  ForwardCall call = forward.describe(x.type);
  const bool empty = forward.empty(call);
  std::optional<View> out;
  if (out_handle) {
    out.emplace(out_handle, "out");
    check_out(*out, x, call.y_type);
    if (empty) return nullptr;
  }
  if (rstd) *rstd = forward.new_rstd(call);
  std::optional<Parameter>& weight = forward.weight();
  // Any other `out` gets a copy of the result.
  const bool direct = out && takes_rows(*out, x, weight ? &weight->view() : nullptr,
                                        bias ? &bias->view() : nullptr);
  Owned result;
  if (direct) {
    call.y = out->data;
    call.stream = forward.streams(call);
  } else {
    result = forward.new_y(call);
  }
  if (empty) return result;
  Owned x_copy;
  call.x = rows_of(x, arguments.ndim, call.x_rows, x_copy);
  forward.set_weight(call);
  if (bias) call.bias = bias->widened(forward.isa(), call.d, 0.0, call.compute, call.multiply);
  forward.run(call, kGrainElements, [&](std::int64_t begin, std::int64_t end) {
    forward.isa().forward(call, begin, end);
  });
  if (!out) return result;
  if (!direct) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(out_handle, result.get(), 0));
  return nullptr;
}

// alpha as PyTorch's addition has it: rounded to the type that is added up, where that is the type
// of both terms and of the sum; else to that of the arithmetic.
double rounded_alpha(double alpha, DType type) {
  if (std::isnan(alpha)) return std::nan("");  // no bits of its own in the sum
  const auto single = static_cast<float>(alpha);
  switch (type) {
    case DType::f64:
      return alpha;
    case DType::bf16:
      return widen(narrow<bf16>(single));
    case DType::f16:
      return widen(narrow<f16>(single));
    default:
      return single;
  }
}

// Whether a sum of at most size - 1 strides of each dimension, forwards or backwards, is
// `distance`. `dims` have falling strides, each beyond the reach of those behind it.
bool reachable(const OuterDims& dims, int dim, std::int64_t distance) {
  if (dim == dims.rank) return distance == 0;
  const std::int64_t stride = dims.stride[dim];
  std::int64_t steps = distance / stride;
  if (distance % stride < 0) --steps;
  for (const std::int64_t n : {steps, steps + 1}) {
    if (n > -dims.size[dim] && n < dims.size[dim] &&
        reachable(dims, dim + 1, distance - n * stride)) {
      return true;
    }
  }
  return false;
}

// Whether x and the residual, of one shape, have elements in common; true where that is not plain
// to see. Views with the same strides may lie between each other's elements, as the halves of a
// wider tensor do.
bool share_elements(const View& x, const View& residual) {
  const auto [x_begin, x_end] = x.extent();
  const auto [begin, end] = residual.extent();
  if (x_end <= begin || end <= x_begin) return false;
  OuterDims dims;
  for (std::int64_t dim = 0; dim < x.rank; ++dim) {
    if (x.size[dim] == 1) continue;
    if (x.stride[dim] != residual.stride[dim] || x.stride[dim] <= 0) return true;
    int at = dims.rank++;
    for (; at > 0 && dims.stride[at - 1] < x.stride[dim]; --at) {
      dims.size[at] = dims.size[at - 1];
      dims.stride[at] = dims.stride[at - 1];
    }
    dims.size[at] = x.size[dim];
    dims.stride[at] = x.stride[dim];
  }
  std::int64_t reach = 0;
  for (int dim = dims.rank - 1; dim >= 0; --dim) {
    if (dims.stride[dim] <= reach) return true;
    reach += (dims.size[dim] - 1) * dims.stride[dim];
  }
  const std::int64_t bytes = residual.data - x.data;
  const std::int64_t size = element_size(x.type);
  if (x.type != residual.type || bytes % size != 0) return true;
  return reachable(dims, 0, bytes / size);
}

struct AddResult {
  Owned y;
  Owned sum;
  Owned rstd;
};

// The call of an addition before its results have a place.
AddCall describe_add(Forward& forward, const View& residual, DType sum_type, double alpha) {
  const DType x_type = forward.x().type;
  AddCall call;
  call.norm = forward.describe(sum_type);
  call.x.type = x_type;
  call.residual.type = residual.type;
  call.add_type = x_type == DType::f64 || residual.type == DType::f64 ? DType::f64 : DType::f32;
  const bool one_type = x_type == sum_type && residual.type == sum_type;
  call.alpha = rounded_alpha(alpha, one_type ? sum_type : call.add_type);
  return call;
}

void run_add(Forward& forward, const View& residual, std::int64_t ndim, AddCall& call) {
  Owned x_copy;
  Owned residual_copy;
  call.x.data = rows_of(forward.x(), ndim, call.x.rows, x_copy);
  call.residual.data = rows_of(residual, ndim, call.residual.rows, residual_copy);
  call.norm.x = call.sum;
  forward.set_weight(call.norm);
  forward.run(call.norm, kGrainElements, [&](std::int64_t begin, std::int64_t end) {
    forward.isa().add_forward(call, begin, end);
  });
}

AddResult add_rms_norm(const Arguments& arguments, AtenTensorHandle residual_handle, double alpha,
                       std::optional<DType> sum_type, bool with_rstd) {
  Forward forward(arguments);
  const View& x = forward.x();
  const View residual = forward.like_x(residual_handle, "residual");
  AddCall call =
      describe_add(forward, residual, sum_type.value_or(promote(x.type, residual.type)), alpha);
  AddResult result;
  result.y = forward.new_y(call.norm);
  result.sum = empty_contiguous(x, call.norm.x_type);
  if (with_rstd) result.rstd = forward.new_rstd(call.norm);
  if (forward.empty(call.norm)) return result;
  call.sum = fresh_rows(result.sum, forward.rows() * call.norm.d * element_size(call.norm.x_type));
  run_add(forward, residual, arguments.ndim, call);
  return result;
}

// The same, y into x and the sum into the residual. Where one of them has no contiguous rows, or
// shares memory with the weight, its result is written elsewhere and copied; or, unless
// `may_copy`, nothing is done and false returned.
bool add_rms_norm_in_place(const Arguments& arguments, AtenTensorHandle residual_handle,
                           double alpha, bool may_copy) {
  Forward forward(arguments);
  const View& x = forward.x();
  const View residual = forward.like_x(residual_handle, "residual");
  AddCall call = describe_add(forward, residual, residual.type, alpha);
  STD_TORCH_CHECK(call.norm.y_type == x.type, "rmsnorm: x is ", dtype_name(x.type),
                  ", but the result of this call is ", dtype_name(call.norm.y_type));
  check_writable(x, "x");
  check_writable(residual, "residual");
  const auto count_versions = [&] {
    count_version(arguments.x);
    count_version(residual_handle);
  };
  if (forward.empty(call.norm)) {
    count_versions();
    return true;
  }
  STD_TORCH_CHECK(!share_elements(x, residual),
                  "rmsnorm: x and residual overlap in memory, but each is overwritten");
  const std::optional<Parameter>& weight = forward.weight();
  const auto direct = [&weight](const View& view) {
    return view.contiguous() && !(weight && overlaps(view, weight->view(), false));
  };
  if (!may_copy && !(direct(x) && direct(residual))) return false;
  count_versions();
  Owned y;
  Owned sum;
  if (direct(x)) {
    call.norm.y = x.data;
  } else {
    y = forward.new_y(call.norm);
  }
  if (direct(residual)) {
    call.sum = residual.data;
  } else {
    sum = empty_contiguous(x, residual.type);
    call.sum = fresh_rows(sum, forward.rows() * call.norm.d * element_size(residual.type));
  }
  run_add(forward, residual, arguments.ndim, call);
  if (y) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(arguments.x, y.get(), 0));
  if (sum) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(residual_handle, sum.get(), 0));
  return true;
}

// The types beside those of the norm where the gate comes after it. What it multiplies is rounded
// where the spec rounds before the weight, and then has the type of that product.
void choose_gated_types(const Spec& spec, DType x_type, const DType* weight_type, GatedCall& call) {
  const bool before_weight = spec.rounding == Rounding::before_weight;
  const bool wide_product = before_weight && weight_type && *weight_type == DType::f64;
  call.act_multiply = wide_product ? DType::f64 : call.norm.multiply;
  if (!weight_type) return;
  const DType product = before_weight ? promote(x_type, *weight_type) : *weight_type;
  if (element_size(product) == 2 && call.norm.xhat_type != DType::none) {
    call.product_type = product;
  }
}

Owned gated_rms_norm(const Arguments& arguments, AtenTensorHandle gate_handle, Owned* rstd) {
  const Spec& spec = *arguments.spec;
  Forward forward(arguments);
  const View& x = forward.x();
  const View gate = forward.like_x(gate_handle, "gate");
  GatedCall call;
  call.norm = forward.describe(x.type);
  call.activation = spec.gate;
  call.gate_before = spec.gate_before;
  call.x.type = x.type;
  call.gate.type = gate.type;
  const std::optional<Parameter>& weight = forward.weight();
  const DType weight_type = weight ? weight->type() : DType::none;
  choose_gated_types(spec, x.type, weight ? &weight_type : nullptr, call);
  Owned y = forward.new_y(call.norm);
  if (rstd) *rstd = forward.new_rstd(call.norm);
  if (forward.empty(call.norm)) return y;
  Owned x_copy;
  Owned gate_copy;
  call.x.data = rows_of(x, 1, call.x.rows, x_copy);
  call.gate.data = rows_of(gate, 1, call.gate.rows, gate_copy);
  forward.set_wide_weight(call.norm);
  forward.run(call.norm, kGatedGrain, [&](std::int64_t begin, std::int64_t end) {
    Buffer scratch(scratch_elements(call) * element_size(call.norm.compute));
    forward.isa().gated_forward(call, begin, end, scratch.data());
  });
  return y;
}

// Below, every argument is owned before anything can throw.
struct NormArguments {
  Owned x;
  Owned weight;
  Owned bias;
  Arguments common;

  explicit NormArguments(StableIValue* stack)
      : x(to<AtenTensorHandle>(stack[0])),
        weight(take_optional(stack[1])),
        bias(take_optional(stack[2])) {
    common.x = x.get();
    common.weight = weight.get();
    common.eps = to<std::optional<double>>(stack[3]);
    common.ndim = to<std::int64_t>(stack[5]);
    common.spec = &take_spec(stack[4], /*takes_gate=*/false);
    refuse_forward_mode("rms_norm");
  }
};

void rms_norm_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const NormArguments arguments(stack);
  Owned y = rms_norm(arguments.common, arguments.bias.get(), nullptr, nullptr);
  give(stack[0], y);
}

void rms_norm_fwd_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const NormArguments arguments(stack);
  Owned rstd;
  Owned y = rms_norm(arguments.common, arguments.bias.get(), nullptr, &rstd);
  give(stack[0], y);
  give(stack[1], rstd);
}

void rms_norm_out_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Owned out(to<AtenTensorHandle>(stack[6]));
  const NormArguments arguments(stack);
  rms_norm(arguments.common, arguments.bias.get(), out.get(), nullptr);
  give(stack[0], out);
}

struct AddArguments {
  Owned x;
  Owned residual;
  Owned weight;
  Arguments common;
  double alpha;

  explicit AddArguments(StableIValue* stack)
      : x(to<AtenTensorHandle>(stack[0])),
        residual(to<AtenTensorHandle>(stack[1])),
        weight(take_optional(stack[2])) {
    common.x = x.get();
    common.weight = weight.get();
    common.eps = to<std::optional<double>>(stack[3]);
    common.ndim = to<std::int64_t>(stack[5]);
    alpha = to<double>(stack[6]);
    common.spec = &take_spec(stack[4], /*takes_gate=*/false);
    refuse_forward_mode("add_rms_norm");
  }
};

void add_rms_norm_into(StableIValue* stack, bool with_rstd) {
  const auto dtype = to<std::optional<std::int32_t>>(stack[7]);
  const AddArguments arguments(stack);
  std::optional<DType> sum_type;
  if (dtype) {
    sum_type = known_dtype(*dtype);
    STD_TORCH_CHECK(sum_type,
                    "add_rms_norm: residual_dtype is not float32, float64, bfloat16 or "
                    "float16");
  }
  AddResult result = add_rms_norm(arguments.common, arguments.residual.get(), arguments.alpha,
                                  sum_type, with_rstd);
  give(stack[0], result.y);
  give(stack[1], result.sum);
  if (with_rstd) give(stack[2], result.rstd);
}

void add_rms_norm_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  add_rms_norm_into(stack, false);
}

void add_rms_norm_fwd_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  add_rms_norm_into(stack, true);
}

void add_rms_norm_in_place_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const AddArguments arguments(stack);
  add_rms_norm_in_place(arguments.common, arguments.residual.get(), arguments.alpha,
                        /*may_copy=*/true);
}

struct GatedArguments {
  Owned x;
  Owned gate;
  Owned weight;
  Arguments common;

  explicit GatedArguments(StableIValue* stack)
      : x(to<AtenTensorHandle>(stack[0])),
        gate(to<AtenTensorHandle>(stack[1])),
        weight(take_optional(stack[2])) {
    common.x = x.get();
    common.weight = weight.get();
    common.eps = to<std::optional<double>>(stack[3]);
    common.spec = &take_spec(stack[4], /*takes_gate=*/true);
    refuse_forward_mode("gated_rms_norm");
  }
};

void gated_rms_norm_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const GatedArguments arguments(stack);
  Owned y = gated_rms_norm(arguments.common, arguments.gate.get(), nullptr);
  give(stack[0], y);
}

void gated_rms_norm_fwd_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const GatedArguments arguments(stack);
  Owned rstd;
  Owned y = gated_rms_norm(arguments.common, arguments.gate.get(), &rstd);
  give(stack[0], y);
  give(stack[1], rstd);
}

}  // namespace

bool direct_forward(const DirectCall& call, DirectResult& result) noexcept {
  try {
    Arguments arguments;
    take_direct(call, arguments);
    if (call.out) {
      // The copy that another `out` gets belongs below autograd, where torch.ops makes it.
      const View x(arguments.x, "x");
      const View out(static_cast<AtenTensorHandle>(call.out), "out");
      std::optional<View> weight;
      if (arguments.weight) weight.emplace(arguments.weight, "weight");
      if (!takes_rows(out, x, weight ? &*weight : nullptr, nullptr)) return false;
    }
    if (call.in_place) {
      const auto residual = static_cast<AtenTensorHandle>(call.residual);
      // Whoever gives no dtype for the sum has not said that it may be rounded.
      const DType kept = View(residual, "residual").type;
      if (promote(View(arguments.x, "x").type, kept) != kept) return false;
      return add_rms_norm_in_place(arguments, residual, 1.0, /*may_copy=*/false);
    }
    AddResult results;
    Owned* rstd = call.want_rstd ? &results.rstd : nullptr;
    if (call.residual) {
      results = add_rms_norm(arguments, static_cast<AtenTensorHandle>(call.residual), 1.0,
                             std::nullopt, call.want_rstd);
    } else {
      results.y = rms_norm(arguments, nullptr, static_cast<AtenTensorHandle>(call.out), rstd);
    }
    result = {results.y.release(), results.sum.release(), results.rstd.release()};
    return true;
  } catch (...) {  // torch.ops says what is wrong
    return false;
  }
}

}  // namespace rmsnorm

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, library) {
  library.impl("rms_norm", &rmsnorm::rms_norm_boxed);
  library.impl("rms_norm.out", &rmsnorm::rms_norm_out_boxed);
  library.impl("rms_norm_fwd", &rmsnorm::rms_norm_fwd_boxed);
  library.impl("add_rms_norm", &rmsnorm::add_rms_norm_boxed);
  library.impl("add_rms_norm_fwd", &rmsnorm::add_rms_norm_fwd_boxed);
  library.impl("add_rms_norm_", &rmsnorm::add_rms_norm_in_place_boxed);
  library.impl("gated_rms_norm", &rmsnorm::gated_rms_norm_boxed);
  library.impl("gated_rms_norm_fwd", &rmsnorm::gated_rms_norm_fwd_boxed);
}
