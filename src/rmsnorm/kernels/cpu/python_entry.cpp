// The direct call: from Python straight to the kernels, for plain tensors in plain surroundings.
// The dispatcher, torch.ops and its argument parser cost several times what the norm of a short row
// does. Everything else is declined, which the caller sees as None, and goes through torch.ops.
//
// Python offers no cheap way to ask whether a tensor and its surroundings are plain. PyTorch knows
// from two words: the set of dispatch keys of the tensor, and that of the thread. Where the first
// lies is found at run time, by looking at tensors whose keys are known (rmsnorm/ops/direct.py),
// and both must be what they are for an ordinary tensor in an ordinary thread. That excludes views
// with a pending minus or conjugation, wrappers, fake, sparse and meta tensors, tensors with names,
// and vmap, grad, jvp, autocast, tracing and dispatch modes, without naming any of them.
//
// The names from PyTorch are not part of its stable interface. A PyTorch that lacks one of them
// cannot load this module, and the package goes without it, as it does with any other PyTorch than
// the release that the module was built with.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <cmath>
#include <cstdint>
#include <memory>

#include "direct.h"

// c10::impl::raw_local_dispatch_key_set: included and excluded keys, 0 where they are the default.
extern __thread std::uint64_t thread_keys[2] asm("_ZN3c104impl26raw_local_dispatch_key_setE");
// c10::GradMode::is_enabled
bool grad_mode_is_enabled() asm("_ZN3c108GradMode10is_enabledEv");
// c10::TensorImpl::requires_grad
bool requires_grad(const void* impl) asm("_ZNK3c1010TensorImpl13requires_gradEv");
// at::hasCallbacks: a profiler or another observer waits for operations.
bool has_callbacks() asm("_ZN2at12hasCallbacksEv");
// at::impl::torch_function_mode_enabled
bool function_mode_is_enabled() asm("_ZN2at4impl27torch_function_mode_enabledEv");
// torch::autograd::impl::bump_version: autograd is to notice that the tensor was written to.
void bump_version(const void* tensor) asm("_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE");
// torch::autograd::ForwardADLevel::try_get_by_idx, which is null where no level is open.
std::shared_ptr<void> forward_level(std::uint64_t index) asm(
    "_ZN5torch8autograd14ForwardADLevel14try_get_by_idxEm");
// THPVariable_Wrap(at::TensorBase&&): the Python object of a tensor, which is moved into it.
PyObject* wrap_tensor(void* tensor) asm("_Z16THPVariable_WrapON2at10TensorBaseE");

namespace rmsnorm {
namespace {

// From this many elements on other Python threads may run beside the kernel.
constexpr std::int64_t kReleaseFrom = 32768;
constexpr int kStates = 2;  // plain, and inference mode

struct Setup {
  const DirectTable* table = nullptr;
  const AutogradTable* autograd = nullptr;  // or null
  PyTypeObject* tensor_type = nullptr;
  PyTypeObject* parameter_type = nullptr;
  PyObject* encode = nullptr;    // from a spec, or the name of one, to its canonical string
  Py_ssize_t handle_offset = 0;  // from a Python tensor to its at::Tensor
  Py_ssize_t keys_offset = 0;    // from a TensorImpl to its keys
  std::uint64_t tensor_keys[kStates] = {};
  std::uint64_t thread_keys[kStates][2] = {};
};
Setup setup;

// Attributes of a module, and of the plan and the slot of a swapped one (rmsnorm/rewrite).
struct Names {
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* weight = PyUnicode_InternFromString("weight");
  PyObject* eps = PyUnicode_InternFromString("eps");
  PyObject* spec = PyUnicode_InternFromString("spec");
  PyObject* shape = PyUnicode_InternFromString("normalized_shape");
  PyObject* plan = PyUnicode_InternFromString("_rmsnorm_plan");
  PyObject* slot = PyUnicode_InternFromString("_rmsnorm_slot");
  PyObject* direct = PyUnicode_InternFromString("direct");
  PyObject* least = PyUnicode_InternFromString("least");

  bool complete() const {
    return parameters && weight && eps && spec && shape && plan && slot && direct && least;
  }
};
const Names* names = nullptr;

// The specs of the last calls by the identity of their objects, which are kept alive.
struct KnownSpec {
  PyObject* object = nullptr;
  const void* spec = nullptr;
};
constexpr unsigned kKnownSpecs = 16;
KnownSpec known_specs[kKnownSpecs];
unsigned next_known_spec = 0;

// Forgets an error that only says that a call is not plain. An interrupt is not ours to drop.
void drop_error() {
  if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
}

// The parsed spec, or null.
const void* find_spec(PyObject* object) {
  for (const KnownSpec& known : known_specs) {
    if (known.object == object) return known.spec;
  }
  Py_INCREF(object);  // its owner may give it up meanwhile
  PyObject* text = PyObject_CallFunctionObjArgs(setup.encode, object, nullptr);
  Py_ssize_t length = 0;
  const char* characters = text ? PyUnicode_AsUTF8AndSize(text, &length) : nullptr;
  const void* spec =
      characters ? setup.table->parse(characters, static_cast<std::size_t>(length)) : nullptr;
  Py_XDECREF(text);
  drop_error();  // of what is no spec, for which there will be a complaint
  PyObject* old = object;
  if (spec) {
    KnownSpec& place = known_specs[next_known_spec++ % kKnownSpecs];
    old = place.object;
    place = {object, spec};
  }
  Py_XDECREF(old);
  return spec;
}

// Whether PyTorch would do nothing else with this call than run the kernel.
bool surroundings_are_plain() {
  bool plain = false;
  for (const auto& keys : setup.thread_keys) {
    plain |= thread_keys[0] == keys[0] && thread_keys[1] == keys[1];
  }
  return plain && !has_callbacks() && !function_mode_is_enabled() && !forward_level(0);
}

// The dispatch keys of a tensor; 0 where there is none.
std::uint64_t keys_of(const void* handle) {
  const char* impl = *static_cast<const char* const*>(handle);
  return impl ? *reinterpret_cast<const std::uint64_t*>(impl + setup.keys_offset) : 0;
}

// The at::Tensor of a plain tensor on the CPU; null for anything else.
void* handle_of(PyObject* object) {
  if (Py_TYPE(object) != setup.tensor_type && Py_TYPE(object) != setup.parameter_type) {
    return nullptr;
  }
  char* handle = reinterpret_cast<char*>(object) + setup.handle_offset;
  const std::uint64_t keys = keys_of(handle);
  return keys == setup.tensor_keys[0] || keys == setup.tensor_keys[1] ? handle : nullptr;
}

// The same where there may be no tensor; false if the object is neither.
bool optional_handle_of(PyObject* object, void*& handle) {
  if (object == Py_None) return true;
  handle = handle_of(object);
  return handle != nullptr;
}

bool wants_gradient(void* handle) {
  return handle && requires_grad(*static_cast<const void* const*>(handle));
}

// None or a float; false for what only the slower way understands.
bool read_eps(PyObject* object, DirectCall& call) {
  if (object == Py_None) return true;
  if (!PyFloat_CheckExact(object)) return false;
  call.has_eps = true;
  call.eps = PyFloat_AsDouble(object);
  return call.eps >= 0.0 && std::isfinite(call.eps);
}

bool read_int(PyObject* object, std::int64_t& value) {
  value = PyLong_AsLongLong(object);
  if (value != -1 || !PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

// The arguments weight, eps, spec from `objects` on.
bool read_norm(PyObject* const* objects, DirectCall& call) {
  if (!optional_handle_of(objects[0], call.weight) || !read_eps(objects[1], call)) return false;
  call.spec = find_spec(objects[2]);
  return call.spec != nullptr;
}

// None, unless Python was interrupted.
PyObject* declined() {
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// Gives a new tensor to Python; null, with an error set, if that cannot be.
PyObject* wrap(void* handle) {
  if (!handle) Py_RETURN_NONE;
  PyObject* object = nullptr;
  try {
    object = wrap_tensor(handle);
  } catch (...) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "rmsnorm: no object for a result");
  }
  setup.table->discard(handle);
  return object;
}

// A tuple of new tensors, None for each that is null.
template <class... Handles>
PyObject* wrap_all(Handles... handles) {
  void* const all[] = {handles...};
  PyObject* tuple = PyTuple_New(sizeof...(handles));
  Py_ssize_t place = 0;
  for (void* handle : all) {
    PyObject* object = tuple ? wrap(handle) : nullptr;
    if (object) {
      PyTuple_SetItem(tuple, place++, object);
    } else if (tuple) {
      Py_DECREF(tuple);
      tuple = nullptr;
    } else if (handle) {
      setup.table->discard(handle);
    }
  }
  return tuple;
}

// Owns the tensors of a call as long as it lasts, since another Python thread may meanwhile put
// something else into the objects that they were taken from.
template <std::size_t Count>
class Shared {
 public:
  explicit Shared(void** const (&places)[Count]) {
    for (std::size_t i = 0; i < Count; ++i) {
      void*& handle = *places[i];
      if (!handle) continue;
      handle = owned_[i] = setup.table->share(handle);
      complete_ &= handle != nullptr;
    }
  }
  ~Shared() {
    for (void* handle : owned_) {
      if (handle) setup.table->discard(handle);
    }
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  bool complete() const { return complete_; }

 private:
  void* owned_[Count] = {};
  bool complete_ = true;
};

// Runs `function` on the tensors behind `places`, without Python's lock if it takes a while.
template <std::size_t Count, class Function>
bool run(void** const (&places)[Count], const Function& function) {
  if (setup.table->elements(*places[0]) < kReleaseFrom) return function();
  const Shared<Count> shared(places);
  if (!shared.complete()) return false;
  PyThreadState* state = PyEval_SaveThread();
  const bool done = function();
  PyEval_RestoreThread(state);
  return done;
}

bool run_forward(DirectCall call, DirectResult& result) {
  void** const places[] = {&call.x, &call.residual, &call.weight, &call.out};
  return run(places, [&] { return setup.table->forward(call, result); });
}

// The same, with a node in autograd's graph. False, with no results, where that cannot be.
bool run_recorded(DirectCall call, DirectResult& result) {
  if (!setup.autograd || !setup.autograd->can_record(call)) return false;
  void** const places[] = {&call.x, &call.residual, &call.weight};
  call.want_rstd = true;
  const bool done = run(places, [&] {
    return setup.table->forward(call, result) && setup.autograd->record(call, result);
  });
  void* const handles[] = {result.rstd, done ? nullptr : result.y, done ? nullptr : result.sum};
  for (void* handle : handles) {
    if (handle) setup.table->discard(handle);
  }
  return done;
}

bool run_backward(DirectBackward call, DirectGradients& gradients) {
  void** const places[] = {&call.norm.x, &call.norm.weight, &call.dy, &call.rstd, &call.dresidual};
  return run(places, [&] { return setup.table->backward(call, gradients); });
}

// Whether a result may go into the tensor behind `handle`: outside of inference mode, none of its
// own tensors may change, and there is no gradient of one.
bool may_write(void* handle, bool* is_tracked = nullptr) {
  const bool in_inference_mode =
      thread_keys[0] == setup.thread_keys[1][0] && thread_keys[1] == setup.thread_keys[1][1];
  const bool tracked = keys_of(handle) == setup.tensor_keys[0];
  if (is_tracked) *is_tracked = tracked;
  return (tracked || in_inference_mode) && !(grad_mode_is_enabled() && wants_gradient(handle));
}

// Whether autograd is to know of a call with these tensors.
template <class... Handles>
bool is_differentiated(Handles... handles) {
  return grad_mode_is_enabled() && (wants_gradient(handles) || ...);
}

// The norm as a new tensor; True if only its gradient stands in the way; or None.
PyObject* normalise(const DirectCall& call, bool differentiated) {
  DirectResult result;
  if (!differentiated) return run_forward(call, result) ? wrap(result.y) : declined();
  if (run_recorded(call, result)) return wrap(result.y);
  Py_RETURN_TRUE;
}

// rms_norm(x, weight, eps, spec, ndim[, out]) -> y; True if only a gradient stands in the way; or
// None.
PyObject* rms_norm(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  DirectCall call;
  if ((count != 5 && count != 6) || !setup.table || !surroundings_are_plain()) return declined();
  call.x = handle_of(objects[0]);
  if (!call.x || !read_norm(objects + 1, call) || !read_int(objects[4], call.ndim)) {
    return declined();
  }
  bool is_tracked = false;
  if (count == 6) {
    call.out = handle_of(objects[5]);
    if (!call.out || !may_write(call.out, &is_tracked)) return declined();
  }
  const bool differentiated = is_differentiated(call.x, call.weight);
  if (!call.out) return normalise(call, differentiated);
  if (differentiated) Py_RETURN_TRUE;
  DirectResult result;
  if (!run_forward(call, result)) return declined();
  if (is_tracked) bump_version(call.out);
  Py_INCREF(objects[5]);
  return objects[5];
}

// What stands in a dict under `name`, which is the dict's; null if there is nothing, or no dict.
PyObject* item(PyObject* dict, PyObject* name) {
  if (!dict || !PyDict_Check(dict)) return nullptr;
  PyObject* found = PyDict_GetItemWithError(dict, name);
  if (!found) drop_error();
  return found;
}

// The parameter of a module with these attributes; null if there is none.
PyObject* parameter(PyObject* attributes, PyObject* name) {
  return item(item(attributes, names->parameters), name);
}

// A reference that ends with its scope.
class Reference {
 public:
  explicit Reference(PyObject* object) : object_(object) {
    if (!object) drop_error();
  }
  ~Reference() { Py_XDECREF(object_); }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

// module_norm(module, x) -> y, True or None: rms_norm with the weight, the eps, the spec and the
// number of dimensions of an rmsnorm.RMSNorm, and of no class derived from it, which may have
// properties of these names. They are read here since Python would search the class for each.
PyObject* module_norm(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  DirectCall call;
  if (count != 2 || !setup.table || !surroundings_are_plain()) return declined();
  call.x = handle_of(objects[1]);
  if (!call.x) return declined();
  const Reference attributes(PyObject_GenericGetDict(objects[0], nullptr));
  PyObject* spec = item(attributes.get(), names->spec);
  call.spec = spec ? find_spec(spec) : nullptr;
  if (!call.spec) return declined();
  // From here on nothing else runs in Python, so what is the module's stays.
  PyObject* weight = parameter(attributes.get(), names->weight);
  PyObject* eps = item(attributes.get(), names->eps);
  PyObject* shape = item(attributes.get(), names->shape);
  call.weight = weight ? handle_of(weight) : nullptr;
  if (!call.weight || !eps || !read_eps(eps, call) || !shape || !PyTuple_Check(shape)) {
    return declined();
  }
  call.ndim = PyTuple_Size(shape);
  if (call.ndim == 0) return declined();
  return normalise(call, is_differentiated(call.x, call.weight));
}

// Whether the result for `x` may lie in a slot (rmsnorm/rewrite/stream.py), where Python must look:
// where that cannot be told, too.
bool may_hold(PyObject* slot, void* x) {
  if (!slot || slot == Py_None) return false;
  const Reference least(PyObject_GetAttr(slot, names->least));
  std::int64_t elements = 0;
  return !least.get() || !read_int(least.get(), elements) || setup.table->elements(x) >= elements;
}

// What `Plan.direct` holds, in its order (rmsnorm/rewrite/plan.py).
enum Proven { kWeightName, kEpsName, kEps, kSpec, kWidth, kDtypes, kTrained, kProvenFields };

// proven(module, args, kwargs) -> y, True or None: what a swapped module computes from one
// positional argument, where its plan covers that call.
PyObject* proven(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  if (count != 3 || !setup.table || !PyTuple_Check(objects[1]) || PyTuple_Size(objects[1]) != 1 ||
      !PyDict_Check(objects[2]) || PyDict_Size(objects[2]) != 0 || !surroundings_are_plain()) {
    return declined();
  }
  DirectCall call;
  call.x = handle_of(PyTuple_GetItem(objects[1], 0));
  call.ndim = 1;
  if (!call.x) return declined();
  const Reference attributes(PyObject_GenericGetDict(objects[0], nullptr));
  PyObject* plan = item(attributes.get(), names->plan);
  if (!plan || plan == Py_None || may_hold(item(attributes.get(), names->slot), call.x)) {
    return declined();
  }
  Py_INCREF(plan);
  const Reference direct(PyObject_GetAttr(plan, names->direct));
  Py_DECREF(plan);
  if (!direct.get() || !PyTuple_Check(direct.get()) ||
      PyTuple_Size(direct.get()) != kProvenFields) {
    return declined();
  }
  const auto field = [&](Proven which) { return PyTuple_GetItem(direct.get(), which); };
  call.spec = find_spec(field(kSpec));
  std::int64_t width = 0;
  std::int64_t dtypes = 0;
  std::int64_t trained = 0;
  if (!call.spec || !read_int(field(kWidth), width) || !read_int(field(kDtypes), dtypes) ||
      !read_int(field(kTrained), trained)) {
    return declined();
  }
  // From here on nothing else runs in Python, so what is the module's stays.
  PyObject* eps_name = field(kEpsName);
  PyObject* eps = eps_name == Py_None ? field(kEps) : item(attributes.get(), eps_name);
  // None would mean the spec's here, and something else to the module.
  if (!eps || eps == Py_None || !read_eps(eps, call)) return declined();
  PyObject* weight_name = field(kWeightName);
  if (weight_name != Py_None) {
    PyObject* weight = parameter(attributes.get(), weight_name);
    // None is no weight, for which no dtypes were proven here.
    if (!weight || !optional_handle_of(weight, call.weight)) return declined();
  }
  const bool differentiated = is_differentiated(call.x, call.weight);
  const auto accepted = static_cast<std::uint64_t>(differentiated ? trained : dtypes);
  if (!setup.table->fits(call.x, call.weight, width, accepted)) return declined();
  return normalise(call, differentiated);
}

// The arguments x, residual, weight, eps, spec, ndim; false for what is not plain.
bool read_add(PyObject* const* objects, Py_ssize_t count, DirectCall& call) {
  if (count != 6 || !setup.table || !surroundings_are_plain()) return false;
  call.x = handle_of(objects[0]);
  call.residual = handle_of(objects[1]);
  return call.x && call.residual && read_norm(objects + 2, call) && read_int(objects[5], call.ndim);
}

// add_rms_norm(x, residual, weight, eps, spec, ndim) -> (y, sum), True or None.
PyObject* add_rms_norm(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  DirectCall call;
  if (!read_add(objects, count, call)) return declined();
  DirectResult result;
  if (is_differentiated(call.x, call.residual, call.weight)) {
    if (!run_recorded(call, result)) Py_RETURN_TRUE;
  } else if (!run_forward(call, result)) {
    return declined();
  }
  return wrap_all(result.y, result.sum);
}

// add_rms_norm_(x, residual, weight, eps, spec, ndim) -> True, y being in x and the sum in the
// residual; or None.
PyObject* add_rms_norm_in_place(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  DirectCall call;
  if (!read_add(objects, count, call)) return declined();
  if (!may_write(call.x) || !may_write(call.residual) || is_differentiated(call.weight)) {
    return declined();
  }
  call.in_place = true;
  DirectResult result;
  if (!run_forward(call, result)) return declined();
  Py_RETURN_TRUE;
}

// What an autograd.Function calls, in whose forward no gradient is recorded:
// forward(x, residual, weight, eps, spec, ndim) -> (y, sum, rstd), or None.
PyObject* forward(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  DirectCall call;
  if (count != 6 || !setup.table || grad_mode_is_enabled() || !surroundings_are_plain()) {
    return declined();
  }
  call.x = handle_of(objects[0]);
  if (!call.x || !optional_handle_of(objects[1], call.residual) || !read_norm(objects + 2, call) ||
      !read_int(objects[5], call.ndim)) {
    return declined();
  }
  call.want_rstd = true;
  DirectResult result;
  if (!run_forward(call, result)) return declined();
  return wrap_all(result.y, result.sum, result.rstd);
}

// backward(dy, x, weight, rstd, dresidual, eps, spec, ndim, need_dx, need_dweight)
//   -> (dx, dweight), or None.
PyObject* backward(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  DirectBackward call;
  if (count != 10 || !setup.table || grad_mode_is_enabled() || !surroundings_are_plain()) {
    return declined();
  }
  call.dy = handle_of(objects[0]);
  call.norm.x = handle_of(objects[1]);
  call.rstd = handle_of(objects[3]);
  if (!call.dy || !call.norm.x || !call.rstd) return declined();
  if (!optional_handle_of(objects[4], call.dresidual)) return declined();
  PyObject* const norm[] = {objects[2], objects[5], objects[6]};
  if (!read_norm(norm, call.norm) || !read_int(objects[7], call.norm.ndim)) return declined();
  call.need_dx = objects[8] == Py_True;
  call.need_dweight = objects[9] == Py_True;
  DirectGradients gradients;
  if (!run_backward(call, gradients)) return declined();
  return wrap_all(gradients.dx, gradients.dweight);
}

// keys() -> (included, excluded): this thread's, as they are stored.
PyObject* keys(PyObject*, PyObject*) {
  return Py_BuildValue("(KK)", static_cast<unsigned long long>(thread_keys[0]),
                       static_cast<unsigned long long>(thread_keys[1]));
}

// built_with() -> the release of PyTorch, as "2.13".
PyObject* built_with(PyObject*, PyObject*) { return PyUnicode_FromString(RMSNORM_TORCH_RELEASE); }

// connect(table, AutogradTable or 0, tensor type, parameter type, encode, handle offset,
//         keys offset, (tensor keys, included, excluded) plain, the same in inference mode)
PyObject* connect(PyObject*, PyObject* arguments) {
  Setup found;
  unsigned long long table = 0;
  unsigned long long autograd = 0;
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  unsigned long long states[kStates][3] = {};
  if (!PyArg_ParseTuple(arguments, "KKOOOnn(KKK)(KKK)", &table, &autograd, &tensor_type,
                        &parameter_type, &found.encode, &found.handle_offset, &found.keys_offset,
                        &states[0][0], &states[0][1], &states[0][2], &states[1][0], &states[1][1],
                        &states[1][2])) {
    return nullptr;
  }
  found.table = reinterpret_cast<const DirectTable*>(table);
  if (found.table->size != sizeof(DirectTable)) {
    PyErr_SetString(PyExc_RuntimeError, "rmsnorm: the libraries are from different builds");
    return nullptr;
  }
  found.autograd = reinterpret_cast<const AutogradTable*>(autograd);
  found.tensor_type = reinterpret_cast<PyTypeObject*>(tensor_type);
  found.parameter_type = reinterpret_cast<PyTypeObject*>(parameter_type);
  for (int i = 0; i < kStates; ++i) {
    found.tensor_keys[i] = states[i][0];
    found.thread_keys[i][0] = states[i][1];
    found.thread_keys[i][1] = states[i][2];
  }
  if (!names) {
    auto made = std::make_unique<Names>();
    if (!made->complete()) return nullptr;
    names = made.release();
  }
  Py_INCREF(tensor_type);
  Py_INCREF(parameter_type);
  Py_INCREF(found.encode);
  setup = found;
  return declined();
}

template <class Function>
PyCFunction as_c_function(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"rms_norm", as_c_function(rms_norm), METH_FASTCALL, nullptr},
    {"module_norm", as_c_function(module_norm), METH_FASTCALL, nullptr},
    {"proven", as_c_function(proven), METH_FASTCALL, nullptr},
    {"add_rms_norm", as_c_function(add_rms_norm), METH_FASTCALL, nullptr},
    {"add_rms_norm_", as_c_function(add_rms_norm_in_place), METH_FASTCALL, nullptr},
    {"forward", as_c_function(forward), METH_FASTCALL, nullptr},
    {"backward", as_c_function(backward), METH_FASTCALL, nullptr},
    {"keys", keys, METH_NOARGS, nullptr},
    {"built_with", built_with, METH_NOARGS, nullptr},
    {"connect", connect, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "rmsnorm._direct",
    nullptr,
    -1,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace
}  // namespace rmsnorm

PyMODINIT_FUNC PyInit__direct() { return PyModule_Create(&rmsnorm::module); }
