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

struct Arguments {
  Owned dy;
  Owned x;
  Owned gate;
  Owned weight;
  Owned rstd;
  Owned dresidual;
  std::optional<double> eps;
  std::int64_t ndim = 1;
  const Spec* spec = nullptr;
  bool need_dx = false;
  bool need_dgate = false;
  bool need_dweight = false;
  bool need_dbias = false;
};

struct Gradients {
  Owned dx;
  Owned dgate;
  Owned dweight;
  Owned dbias;
};

// What was not asked for.
Owned nothing(DType type) {
  std::int64_t none = 0;
  return empty_of(type, 1, &none);
}

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
      : arguments_(arguments), x_(arguments.x.get(), "x"), dy_(arguments.dy.get(), "dy") {
    STD_TORCH_CHECK(isa_ != nullptr, "rmsnorm: ", isa_error());
    const Spec& spec = *arguments.spec;
    const bool keeps_double = x_.type == DType::f64 && spec.accumulate_input;
    call_.compute = keeps_double ? DType::f64 : DType::f32;
    call_.rows = describe_norm(spec, arguments.eps, x_, arguments.ndim, call_);
    check_like_x(dy_, "dy", x_);
    if (arguments.weight) weight_.emplace(arguments.weight.get(), "weight", x_, arguments.ndim);
    if (arguments.gate) {
      STD_TORCH_CHECK(spec.gate != Gate::none, "rmsnorm: the spec has no gate");
      gate_.emplace(arguments.gate.get(), "gate");
      check_like_x(*gate_, "gate", x_);
    }
    if (arguments.dresidual) {
      dresidual_.emplace(arguments.dresidual.get(), "dresidual");
      check_like_x(*dresidual_, "dresidual", x_);
    }
    has_dweight_ = arguments.need_dweight && weight_;
  }

  Gradients run() {
    const View rstd(arguments_.rstd.get(), "rstd");
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
    const auto like_row = [&](bool wanted, DType type) {
      return wanted ? empty_of(type, arguments_.ndim, row_size) : nothing(x_.type);
    };
    Gradients result;
    result.dx = arguments_.need_dx ? empty_contiguous(x_, x_.type) : nothing(x_.type);
    if (gate_) {
      result.dgate = arguments_.need_dgate ? empty_contiguous(x_, gate_->type) : nothing(x_.type);
    }
    result.dweight = like_row(has_dweight_, weight_ ? weight_->type() : x_.type);
    result.dbias = like_row(arguments_.need_dbias, call_.compute);
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
struct NormArguments : Arguments {
  explicit NormArguments(StableIValue* stack) {
    dy.reset(to<AtenTensorHandle>(stack[0]));
    x.reset(to<AtenTensorHandle>(stack[1]));
    weight = take_optional(stack[2]);
    rstd.reset(to<AtenTensorHandle>(stack[3]));
    dresidual = take_optional(stack[4]);
    eps = to<std::optional<double>>(stack[5]);
    ndim = to<std::int64_t>(stack[7]);
    need_dx = to<bool>(stack[8]);
    need_dweight = to<bool>(stack[9]);
    need_dbias = to<bool>(stack[10]);
    spec = &take_spec(stack[6]);
    refuse_forward_mode("rms_norm");
  }
};

void rms_norm_bwd_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const NormArguments arguments(stack);
  Gradients gradients = Backward(arguments).run();
  give(stack[0], gradients.dx);
  give(stack[1], gradients.dweight);
  give(stack[2], gradients.dbias);
}

struct GatedArguments : Arguments {
  explicit GatedArguments(StableIValue* stack) {
    dy.reset(to<AtenTensorHandle>(stack[0]));
    x.reset(to<AtenTensorHandle>(stack[1]));
    gate.reset(to<AtenTensorHandle>(stack[2]));
    weight = take_optional(stack[3]);
    rstd.reset(to<AtenTensorHandle>(stack[4]));
    eps = to<std::optional<double>>(stack[5]);
    need_dx = to<bool>(stack[7]);
    need_dgate = to<bool>(stack[8]);
    need_dweight = to<bool>(stack[9]);
    spec = &take_spec(stack[6]);
    refuse_forward_mode("gated_rms_norm");
  }
};

void gated_rms_norm_bwd_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const GatedArguments arguments(stack);
  Gradients gradients = Backward(arguments).run();
  give(stack[0], gradients.dx);
  give(stack[1], gradients.dgate);
  give(stack[2], gradients.dweight);
}

}  // namespace
}  // namespace rmsnorm

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, library) {
  library.impl("rms_norm_bwd", &rmsnorm::rms_norm_bwd_boxed);
  library.impl("gated_rms_norm_bwd", &rmsnorm::gated_rms_norm_bwd_boxed);
}
