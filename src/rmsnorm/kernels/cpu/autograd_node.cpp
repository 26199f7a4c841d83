// The gradient of a direct call as a node of PyTorch's graph, in C++: recording and running one
// written in Python takes several times as long as the norm of a short row does.
//
// PyTorch has no stable interface for nodes. This library is built for one version, and the package
// goes without it, on an autograd.Function, with any other (rmsnorm/ops/extension.py).
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "direct.h"

namespace rmsnorm {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

const DirectTable* table = nullptr;  // of the kernels
c10::DispatchKeySet plain_keys;      // of a tensor of which nothing is to be known but its values

// What a norm is told besides its tensors.
struct Settings {
  const void* spec = nullptr;
  std::optional<double> eps;
  std::int64_t ndim = 0;
};

struct Needs {
  bool dx = false;
  bool dweight = false;
};

// Whether there is nothing to do in this thread but to run the kernel on these tensors, any of
// which may be undefined. Key sets of 0 are an ordinary thread's.
bool is_plain(std::initializer_list<const Tensor*> tensors) {
  const auto& thread = c10::impl::raw_local_dispatch_key_set;
  if (thread.included_ != 0 || thread.excluded_ != 0) return false;
  if (at::hasCallbacks() || torch::autograd::ForwardADLevel::try_get_by_idx(0)) return false;
  return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor* tensor) {
    return !tensor->defined() || tensor->key_set() == plain_keys;
  });
}

// Moves a result of the kernels out of its handle.
Tensor take(void* handle) {
  if (!handle) return {};
  Tensor tensor = std::move(*static_cast<Tensor*>(handle));
  table->discard(handle);
  return tensor;
}

void* handle_of(const Tensor& tensor) {
  return tensor.defined() ? const_cast<Tensor*>(&tensor) : nullptr;
}

std::optional<Tensor> optional(const Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// dx and dweight, each undefined where it is not needed. From the kernel, or, where more is asked
// than its numbers, from the operation whose rules stand in Python (rmsnorm/ops/rms_norm.py).
std::pair<Tensor, Tensor> gradients(const Settings& settings, Needs needs, const Tensor& dy,
                                    const Tensor& x, const Tensor& weight, const Tensor& rstd,
                                    const Tensor& dresidual) {
  if (!at::GradMode::is_enabled() && is_plain({&dy, &x, &weight, &rstd, &dresidual})) {
    DirectBackward call;
    call.norm.x = handle_of(x);
    call.norm.weight = handle_of(weight);
    call.norm.spec = settings.spec;
    call.norm.ndim = settings.ndim;
    call.norm.has_eps = settings.eps.has_value();
    call.norm.eps = settings.eps.value_or(0.0);
    call.dy = handle_of(dy);
    call.rstd = handle_of(rstd);
    call.dresidual = handle_of(dresidual);
    call.need_dx = needs.dx;
    call.need_dweight = needs.dweight;
    DirectGradients found;
    if (table->backward(call, found)) return {take(found.dx), take(found.dweight)};
  }
  static const auto operation =
      c10::Dispatcher::singleton().findSchemaOrThrow("rmsnorm::rms_norm_gradients", "");
  torch::jit::Stack stack;
  torch::jit::push(stack, dy, x, optional(weight), rstd, optional(dresidual), settings.eps,
                   std::string(table->text(settings.spec)), settings.ndim, needs.dx, needs.dweight);
  operation.callBoxed(stack);
  return {needs.dx ? stack[0].toTensor() : Tensor(),
          needs.dweight ? stack[1].toTensor() : Tensor()};
}

// The gradients of x, of the residual where there is one, and of the weight, from those of y and of
// the sum. Any of them may be undefined.
variable_list input_gradients(const Settings& settings, const std::vector<bool>& needed,
                              const variable_list& grads, const Tensor& x, const Tensor& weight,
                              const Tensor& rstd) {
  const bool adds = grads.size() == 2;
  const Tensor dresidual = adds ? grads[1] : Tensor();
  const Needs needs{needed[0] || (adds && needed[1]), weight.defined() && needed.back()};
  Tensor dx = dresidual;
  Tensor dweight;
  if (grads[0].defined() && (needs.dx || needs.dweight)) {
    std::tie(dx, dweight) = gradients(settings, needs, grads[0], x, weight, rstd, dresidual);
  }
  if (!adds) return {std::move(dx), std::move(dweight)};
  return {needed[0] ? dx : Tensor(), needed[1] ? dx : Tensor(), std::move(dweight)};
}

class RMSNormBackward final : public torch::autograd::Node {
 public:
  RMSNormBackward(torch::autograd::edge_list&& edges, const Settings& settings)
      : Node(std::move(edges)), settings_(settings) {}

  void save(const Tensor& x, bool is_output, const Tensor& weight, const Tensor& rstd) {
    x_is_output_ = is_output;
    x_ = SavedVariable(x, is_output);
    weight_ = SavedVariable(weight, false);
    rstd_ = SavedVariable(rstd, false);
  }

  std::string name() const override { return "RMSNormBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    x_.reset_data();
    weight_.reset_data();
    rstd_.reset_data();
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    args.collect(std::string("rmsnorm::RMSNormBackward"));
    args.collect(std::string(table->text(settings_.spec)));
    args.collect(settings_.eps);
    args.collect(settings_.ndim);
    args.collect(x_, x_is_output_);
    args.collect(weight_, false);
    args.collect(rstd_, false);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::autograd::SwapSavedVariables& saved) override;

 protected:
  variable_list apply(variable_list&& grads) override {
    // A gradient of the sum alone is passed on: what was saved may have changed, or be gone.
    if (!grads[0].defined()) return input_gradients(settings_, needed(), grads, {}, {}, {});
    const auto [x, weight, rstd] = unpack_locked();
    return input_gradients(settings_, needed(), grads, x, weight, rstd);
  }

 private:
  std::tuple<Tensor, Tensor, Tensor> unpack() {
    return {x_.unpack(x_is_output_ ? getptr() : nullptr), weight_.unpack(), rstd_.unpack()};
  }

  // The lock is held for this alone: what computes the gradients may run this node again, from a
  // mode in Python or in another thread.
  std::tuple<Tensor, Tensor, Tensor> unpack_locked() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return unpack();
  }

  std::vector<bool> needed() const {
    std::vector<bool> needed(num_outputs());
    for (std::size_t i = 0; i < needed.size(); ++i) needed[i] = task_should_compute_output(i);
    return needed;
  }

  Settings settings_;
  bool x_is_output_ = false;
  SavedVariable x_;
  SavedVariable weight_;
  SavedVariable rstd_;
};

// What compiled autograd calls when the graph runs that it recorded.
variable_list replay(const variable_list& grads, const std::vector<c10::IValue>& arguments) {
  const auto optional_tensor = [](const c10::IValue& value) {
    return value.isTensor() ? value.toTensor() : Tensor();
  };
  const std::string text = arguments[3].toStringRef();
  const Settings settings{table->parse(text.data(), text.size()), arguments[4].toOptional<double>(),
                          arguments[5].toInt()};
  return input_gradients(settings, arguments[6].toBoolList().vec(), grads, arguments[0].toTensor(),
                         optional_tensor(arguments[1]), arguments[2].toTensor());
}

variable_list RMSNormBackward::apply_with_saved(const variable_list& grads,
                                                torch::autograd::SwapSavedVariables& saved) {
  namespace compiled = torch::dynamo::autograd;
  SavedVariable* const places[] = {&x_, &weight_, &rstd_};
  for (SavedVariable* place : places) saved.before(*place);
  const auto [x, weight, rstd] = unpack();
  const std::vector<c10::IValue> arguments = {x,
                                              optional(weight),
                                              rstd,
                                              std::string(table->text(settings_.spec)),
                                              settings_.eps,
                                              settings_.ndim,
                                              c10::IValue(needed())};
  std::vector<at::TypePtr> types;
  for (const c10::IValue& argument : arguments) {
    types.push_back(argument.isTensor() ? at::TypePtr(at::TensorType::get()) : argument.type());
  }
  using Metadata = std::vector<std::optional<torch::autograd::InputMetadata>>;
  const auto metadata =
      compiled::IValuePacker<Metadata>::pack(compiled::get_input_metadata(next_edges()));
  const auto& python = compiled::getPyCompilerInterface();
  const std::string function =
      python->bind_function(saved.get_py_compiler(), "rmsnorm_backward", replay, types,
                            /*is_custom_function=*/true, /*is_traceable=*/false);
  variable_list results = python->call_function(saved.get_py_compiler(), "apply_functional",
                                                function, grads, arguments, metadata);
  for (SavedVariable* place : places) saved.after(*place);
  return results;
}

Tensor tensor_of(void* handle) { return handle ? *static_cast<const Tensor*>(handle) : Tensor(); }

bool can_record(const DirectCall& call) noexcept {
  try {
    // Hooks on saved tensors are Python's: what they raise would not get through.
    if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return false;
    const Tensor x = tensor_of(call.x);
    const Tensor weight = tensor_of(call.weight);
    const Tensor residual = tensor_of(call.residual);
    // They cannot be saved, which an autograd.Function says.
    if (x.is_inference() || (weight.defined() && weight.is_inference())) return false;
    // A gradient has its tensor's dtype, and there is one for both.
    return !residual.defined() || residual.dtype() == x.dtype();
  } catch (...) {
    return false;
  }
}

bool record(const DirectCall& call, const DirectResult& result) noexcept {
  try {
    const Tensor x = tensor_of(call.x);
    const Tensor weight = tensor_of(call.weight);
    const Tensor residual = tensor_of(call.residual);
    const Tensor& rstd = *static_cast<const Tensor*>(result.rstd);
    Tensor& y = *static_cast<Tensor*>(result.y);
    const std::int64_t weight_dims = weight.defined() ? weight.dim() : 1;
    const Settings settings{call.spec, call.has_eps ? std::optional(call.eps) : std::nullopt,
                            call.ndim ? call.ndim : weight_dims};
    namespace graph = torch::autograd;
    const bool adds = residual.defined();
    const auto node =
        c10::make_intrusive<RMSNormBackward>(adds ? graph::collect_next_edges(x, residual, weight)
                                                  : graph::collect_next_edges(x, weight),
                                             settings);
    graph::create_gradient_edge(y, node);
    if (adds) {
      Tensor& sum = *static_cast<Tensor*>(result.sum);
      graph::create_gradient_edge(sum, node);
      node->save(sum, true, weight, rstd);
    } else {
      node->save(x, false, weight, rstd);
    }
    return true;
  } catch (...) {
    return false;
  }
}

constexpr AutogradTable kTable{can_record, record};

}  // namespace
}  // namespace rmsnorm

// The AutogradTable for calls of these kernels; null where PyTorch is not the version that
// this library was built with, or the kernels are from another build.
//
// Call it where no mode is on (rmsnorm/ops/direct.py): it looks at a new tensor.
extern "C" __attribute__((visibility("default"))) const void* rmsnorm_autograd(
    const void* kernels, const char* version) noexcept {
  const auto* found = static_cast<const rmsnorm::DirectTable*>(kernels);
  if (std::string(version) != TORCH_VERSION || found->size != sizeof *found) return nullptr;
  try {
    rmsnorm::plain_keys = at::empty({0}, at::kCPU).key_set();
  } catch (...) {
    return nullptr;
  }
  rmsnorm::table = found;
  return &rmsnorm::kTable;
}
