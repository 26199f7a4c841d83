// The backward kernels as torch operations. The schemas are defined in Python (rmsnorm/ops).

#include <algorithm>
#include <optional>

#include "torch_common.h"

namespace rmsnorm {
namespace {

// The smallest share of a thread, in elements: each costs about twice what it does in the forward.
constexpr std::int64_t kBackwardGrain = 16384;
// The same where the sums of the blocks are added up, which is one addition for each.
constexpr std::int64_t kSumGrain = std::int64_t{1} << 18;
// More blocks would serve more threads, and cost more memory: each has a row of sums.
constexpr std::int64_t kMostBlocks = 48;

// What every backward operation is given; the tensors are the caller's.
struct Arguments {
  AtenTensorHandle dy = nullptr;
  AtenTensorHandle x = nullptr;
  AtenTensorHandle gate = nullptr;
  AtenTensorHandle weight = nullptr;
  AtenTensorHandle rstd = nullptr;
  AtenTensorHandle dresidual = nullptr;
  std::optional<double> eps;
  std::int64_t ndim = 1;
  const Spec* spec = nullptr;
  bool need_dx = false;
  bool need_dgate = false;
  bool need_dweight = false;
  bool need_dbias = false;
};

// Null: not asked for.
struct Gradients {
  Owned dx;
  Owned dgate;
  Owned dweight;
  Owned dbias;
};

// A tensor of x's shape, as the kernels read it; holds the copy that a strange layout needs.
class RowsOf {
 public:
  RowsOf(const View& view, std::int64_t ndim) {
    operand_.data = rows_of(view, ndim, operand_.rows, copy_);
    operand_.type = view.type;
  }
  const Operand& operand() const { return operand_; }

 private:
  Operand operand_;
  Owned copy_;
};

bool reads_in_place(const BackwardCall& call) {
  const auto dense = [](const Operand& operand) { return operand.rows.stride == 1; };
  if (call.gate.data || call.width != call.d / call.groups) return false;
  if (!dense(call.x) || !dense(call.dy)) return false;
  if (call.dresidual.data && !(dense(call.dresidual) && call.dresidual.type == call.x.type)) {
    return false;
  }
  if (call.compute == DType::f64) return call.dy.type == DType::f64;
  if (call.x.type == DType::f64) return false;
  return call.dy.type == call.x.type || call.dy.type == DType::f32;
}

// One call under way: its tensors, and the memory that it allocates.
class Backward {
 public:
  explicit Backward(const Arguments& arguments)
      : arguments_(arguments), x_(arguments.x, "x"), dy_(arguments.dy, "dy") {
    STD_TORCH_CHECK(isa_ != nullptr, "rmsnorm: ", isa_error());
    const Spec& spec = *arguments.spec;
    const bool keeps_double = x_.type == DType::f64 && spec.accumulate_input;
    call_.compute = keeps_double ? DType::f64 : DType::f32;
    call_.rows = describe_norm(spec, arguments.eps, x_, arguments.ndim, call_);
    check_like_x(dy_, "dy", x_);
    if (arguments.weight) weight_.emplace(arguments.weight, "weight", x_, arguments.ndim);
    if (arguments.gate) {
      STD_TORCH_CHECK(spec.gate != Gate::none, "rmsnorm: the spec has no gate");
      gate_.emplace(arguments.gate, "gate");
      check_like_x(*gate_, "gate", x_);
    }
    if (arguments.dresidual) {
      dresidual_.emplace(arguments.dresidual, "dresidual");
      check_like_x(*dresidual_, "dresidual", x_);
    }
    has_dweight_ = arguments.need_dweight && weight_;
  }

  // What an operation returns in the place of a gradient: (0,) where it was not asked for.
  Owned& or_nothing(Owned& gradient) const {
    std::int64_t none = 0;
    if (!gradient) gradient = empty_of(x_.type, 1, &none);
    return gradient;
  }

  Gradients run() {
    const View rstd(arguments_.rstd, "rstd");
    check_rstd(rstd);
    Gradients result = new_gradients();
    if (call_.rows == 0 || call_.d == 0) {
      if (has_dweight_) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(result.dweight.get()));
      if (arguments_.need_dbias) {
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(result.dbias.get()));
      }
      return result;
    }
    read_operands();
    Owned rstd_copy;
    if (!rstd.contiguous()) rstd_copy = contiguous_copy(rstd);
    call_.rstd = rstd_copy ? data_of(rstd_copy) : rstd.data;
    Buffer weight(call_.d * item());
    prepare_weight(weight);

    const std::int64_t chunks = (call_.rows + kChunkRows - 1) / kChunkRows;
    call_.block_rows = kChunkRows * ((chunks + kMostBlocks - 1) / kMostBlocks);
    const std::int64_t blocks = (call_.rows + call_.block_rows - 1) / call_.block_rows;
    std::optional<Buffer> dweight_sums;
    std::optional<Buffer> dbias_sums;
    if (has_dweight_) call_.dweight = dweight_sums.emplace(blocks * call_.d * item()).data();
    if (arguments_.need_dbias) call_.dbias = dbias_sums.emplace(blocks * call_.d * item()).data();
    place_rows(result);
    if (call_.dx || call_.dgate || call_.dweight || call_.dbias) run_blocks(blocks);
    if (has_dweight_) add_up(call_.dweight, blocks, weight_->type(), result.dweight);
    if (arguments_.need_dbias) add_up(call_.dbias, blocks, call_.compute, result.dbias);
    return result;
  }

 private:
  std::int64_t item() const { return element_size(call_.compute); }

  void check_rstd(const View& rstd) const {
    STD_TORCH_CHECK(rstd.type == call_.compute, "rmsnorm: rstd is ", dtype_name(rstd.type),
                    "; expected ", dtype_name(call_.compute));
    std::int64_t count = 1;
    for (std::int64_t dim = 0; dim < rstd.rank; ++dim) count *= rstd.size[dim];
    STD_TORCH_CHECK(count == call_.rows * call_.groups, "rmsnorm: rstd has shape ", rstd.shape(),
                    "; expected one number for each row and group of x, whose shape is ",
                    x_.shape());
  }

  Gradients new_gradients() const {
    std::int64_t* row_size = x_.size + (x_.rank - arguments_.ndim);
    Gradients result;
    if (arguments_.need_dx) result.dx = empty_contiguous(x_, x_.type);
    if (arguments_.need_dgate) result.dgate = empty_contiguous(x_, gate_->type);
    if (has_dweight_) result.dweight = empty_of(weight_->type(), arguments_.ndim, row_size);
    if (arguments_.need_dbias) result.dbias = empty_of(call_.compute, arguments_.ndim, row_size);
    return result;
  }

  void read_operands() {
    const std::int64_t ndim = arguments_.ndim;
    call_.x = x_rows_.emplace(x_, ndim).operand();
    call_.dy = dy_rows_.emplace(dy_, ndim).operand();
    if (gate_) {
      call_.gate = gate_rows_.emplace(*gate_, ndim).operand();
      call_.activation = arguments_.spec->gate;
      call_.gate_before = arguments_.spec->gate_before;
    }
    if (dresidual_) call_.dresidual = dresidual_rows_.emplace(*dresidual_, ndim).operand();
    call_.direct = reads_in_place(call_);
    call_.split = call_.direct && call_.x.type == DType::bf16 && call_.dy.type == DType::bf16;
  }

  // The weight in the form that the loops read; 1 where there is none.
  void prepare_weight(Buffer& prepared) {
    if (weight_) {
      isa_->prepare_weight(weight_->type(), weight_->as_is(), call_.d, arguments_.spec->offset,
                           call_.compute, call_.compute, prepared.data());
    } else if (call_.compute == DType::f64) {
      std::fill_n(static_cast<double*>(prepared.data()), call_.d, 1.0);
    } else {
      std::fill_n(static_cast<float*>(prepared.data()), call_.d, 1.0f);
    }
    isa_->order_weight(call_, prepared.data());
    call_.weight = prepared.data();
  }

  // Where dx and dgate go.
  void place_rows(const Gradients& result) {
    if (arguments_.need_dx) {
      const std::int64_t row_bytes = call_.d * element_size(x_.type);
      call_.dx = fresh_rows(result.dx, call_.rows * row_bytes);
      call_.stream = worth_streaming(call_.dx, call_.rows * row_bytes, row_bytes / call_.groups);
    }
    if (arguments_.need_dgate) {
      call_.dgate = fresh_rows(result.dgate, call_.rows * call_.d * element_size(gate_->type));
    }
  }

  void run_blocks(std::int64_t blocks) const {
    const auto body = [this](std::int64_t begin, std::int64_t end) {
      Buffer scratch(scratch_elements(call_) * item());
      isa_->backward(call_, begin, end, scratch.data());
    };
    const std::int64_t block_elements = call_.block_rows * call_.d;
    const std::int64_t grain = (kBackwardGrain + block_elements - 1) / block_elements;
    if (blocks <= grain) return body(0, blocks);
    torch::stable::parallel_for(0, blocks, grain, body);
  }

  // The sums of all blocks to one row of `type`.
  void add_up(void* sums, std::int64_t blocks, DType type, const Owned& target) const {
    const auto body = [&](std::int64_t begin, std::int64_t end) {
      isa_->add_blocks(call_, sums, begin, end);
    };
    const std::int64_t grain = (kSumGrain + blocks - 1) / blocks;
    if (call_.d <= grain) {
      body(0, call_.d);
    } else {
      torch::stable::parallel_for(0, call_.d, grain, body);
    }
    isa_->store_sums(call_, sums, type, data_of(target));
  }

  const Arguments& arguments_;
  const Kernels* isa_ = kernels();
  View x_;
  View dy_;
  std::optional<Parameter> weight_;
  std::optional<View> gate_;
  std::optional<View> dresidual_;
  bool has_dweight_ = false;
  std::optional<RowsOf> x_rows_, dy_rows_, gate_rows_, dresidual_rows_;
  BackwardCall call_;
};

// Below, every argument is owned before anything can throw.
struct NormArguments {
  Owned dy;
  Owned x;
  Owned weight;
  Owned rstd;
  Owned dresidual;
  Arguments common;

  explicit NormArguments(StableIValue* stack)
      : dy(to<AtenTensorHandle>(stack[0])),
        x(to<AtenTensorHandle>(stack[1])),
        weight(take_optional(stack[2])),
        rstd(to<AtenTensorHandle>(stack[3])),
        dresidual(take_optional(stack[4])) {
    common.dy = dy.get();
    common.x = x.get();
    common.weight = weight.get();
    common.rstd = rstd.get();
    common.dresidual = dresidual.get();
    common.eps = to<std::optional<double>>(stack[5]);
    common.ndim = to<std::int64_t>(stack[7]);
    common.need_dx = to<bool>(stack[8]);
    common.need_dweight = to<bool>(stack[9]);
    common.need_dbias = to<bool>(stack[10]);
    common.spec = &take_spec(stack[6], /*takes_gate=*/false);
    refuse_forward_mode("rms_norm");
  }
};

void rms_norm_bwd_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const NormArguments arguments(stack);
  Backward backward(arguments.common);
  Gradients gradients = backward.run();
  give(stack[0], backward.or_nothing(gradients.dx));
  give(stack[1], backward.or_nothing(gradients.dweight));
  give(stack[2], backward.or_nothing(gradients.dbias));
}

struct GatedArguments {
  Owned dy;
  Owned x;
  Owned gate;
  Owned weight;
  Owned rstd;
  Arguments common;

  explicit GatedArguments(StableIValue* stack)
      : dy(to<AtenTensorHandle>(stack[0])),
        x(to<AtenTensorHandle>(stack[1])),
        gate(to<AtenTensorHandle>(stack[2])),
        weight(take_optional(stack[3])),
        rstd(to<AtenTensorHandle>(stack[4])) {
    common.dy = dy.get();
    common.x = x.get();
    common.gate = gate.get();
    common.weight = weight.get();
    common.rstd = rstd.get();
    common.eps = to<std::optional<double>>(stack[5]);
    common.need_dx = to<bool>(stack[7]);
    common.need_dgate = to<bool>(stack[8]);
    common.need_dweight = to<bool>(stack[9]);
    common.spec = &take_spec(stack[6], /*takes_gate=*/true);
    refuse_forward_mode("gated_rms_norm");
  }
};

void gated_rms_norm_bwd_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const GatedArguments arguments(stack);
  Backward backward(arguments.common);
  Gradients gradients = backward.run();
  give(stack[0], backward.or_nothing(gradients.dx));
  give(stack[1], backward.or_nothing(gradients.dgate));
  give(stack[2], backward.or_nothing(gradients.dweight));
}

}  // namespace

bool direct_backward(const DirectBackward& call, DirectGradients& gradients) noexcept {
  try {
    Arguments arguments;
    take_direct(call.norm, arguments);
    arguments.dy = static_cast<AtenTensorHandle>(call.dy);
    arguments.rstd = static_cast<AtenTensorHandle>(call.rstd);
    arguments.dresidual = static_cast<AtenTensorHandle>(call.dresidual);
    arguments.need_dx = call.need_dx;
    arguments.need_dweight = call.need_dweight;
    Gradients found = Backward(arguments).run();
    gradients = {found.dx.release(), found.dweight.release()};
    return true;
  } catch (...) {  // torch.ops says what is wrong
    return false;
  }
}

}  // namespace rmsnorm

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, library) {
  library.impl("rms_norm_bwd", &rmsnorm::rms_norm_bwd_boxed);
  library.impl("gated_rms_norm_bwd", &rmsnorm::gated_rms_norm_bwd_boxed);
}
