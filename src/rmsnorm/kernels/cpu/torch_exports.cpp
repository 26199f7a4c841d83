// What the library offers besides its operations, as C symbols.

#include "torch_common.h"

namespace rmsnorm {
namespace {

const void* parse(const char* text, std::size_t length) noexcept {
  try {
    const Spec& spec = parse_spec({text, length});
    return spec.gate == Gate::none ? &spec : nullptr;
  } catch (...) {
    return nullptr;
  }
}

std::int64_t elements(void* tensor) noexcept {
  std::int64_t count = 0;
  return aoti_torch_get_numel(static_cast<AtenTensorHandle>(tensor), &count) ? 0 : count;
}

void discard(void* tensor) noexcept {
  aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(tensor));
}

constexpr DirectTable kTable{parse, direct_forward, direct_backward, elements, discard};

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

// For python_entry.cpp.
extern "C" RMSNORM_EXPORT const void* rmsnorm_direct() noexcept { return &rmsnorm::kTable; }
