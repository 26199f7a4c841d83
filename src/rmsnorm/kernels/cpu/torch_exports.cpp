// What the library offers besides its operations, as C symbols.

#include <mutex>
#include <string>
#include <unordered_map>

#include "torch_common.h"

namespace rmsnorm {
namespace {

// The specs of direct calls, by their strings. Never freed, for a thread may outlive whatever is
// destroyed at the end; nobody has many.
const void* parse(const char* text, std::size_t length) noexcept {
  constexpr std::size_t kMostSpecs = 4096;
  static auto& kept = *new std::unordered_map<std::string, DirectSpec>;
  static auto& mutex = *new std::mutex;
  try {
    const std::string key(text, length);
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = kept.find(key);
    if (found != kept.end()) return &found->second;
    const Spec spec = parse_spec(key);
    if (spec.gate != Gate::none || kept.size() >= kMostSpecs) return nullptr;
    return &kept.emplace(key, DirectSpec{spec, key}).first->second;
  } catch (...) {
    return nullptr;
  }
}

const char* text(const void* spec) noexcept {
  return static_cast<const DirectSpec*>(spec)->text.c_str();
}

void* share(void* tensor) noexcept {
  AtenTensorHandle shared = nullptr;
  aoti_torch_new_tensor_handle(static_cast<AtenTensorHandle>(tensor), &shared);
  return shared;
}

std::int64_t elements(void* tensor) noexcept {
  std::int64_t count = 0;
  return aoti_torch_get_numel(static_cast<AtenTensorHandle>(tensor), &count) ? 0 : count;
}

// The dtype of a tensor that may be missing, or not be of ours.
DType dtype_of(void* tensor) {
  std::int32_t code = 0;
  if (!tensor || aoti_torch_get_dtype(static_cast<AtenTensorHandle>(tensor), &code)) {
    return DType::none;
  }
  return known_dtype(code).value_or(DType::none);
}

bool fits(void* x, void* weight, std::int64_t width, std::uint64_t dtypes) noexcept {
  const DType x_type = dtype_of(x);
  const DType weight_type = dtype_of(weight);
  if (x_type == DType::none || (weight && weight_type == DType::none)) return false;
  const unsigned bit = 5 * static_cast<unsigned>(x_type) + static_cast<unsigned>(weight_type);
  if (!(dtypes >> bit & 1)) return false;
  std::int64_t dims = 0;
  std::int64_t* sizes = nullptr;
  if (aoti_torch_get_dim(static_cast<AtenTensorHandle>(x), &dims) ||
      aoti_torch_get_sizes(static_cast<AtenTensorHandle>(x), &sizes)) {
    return false;
  }
  return dims > 0 && (width == 0 || sizes[dims - 1] == width);
}

void discard(void* tensor) noexcept {
  aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(tensor));
}

constexpr DirectTable kTable{sizeof(DirectTable),
                             parse,
                             text,
                             direct_forward,
                             direct_backward,
                             elements,
                             fits,
                             share,
                             discard};

}  // namespace
}  // namespace rmsnorm

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

// The DirectTable, for python_entry.cpp and autograd_node.cpp.
extern "C" RMSNORM_EXPORT const void* rmsnorm_direct() noexcept { return &rmsnorm::kTable; }
