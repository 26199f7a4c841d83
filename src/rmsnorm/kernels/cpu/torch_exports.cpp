// What the library offers besides its operations, as C symbols.

#include <string>
#include <unordered_map>

#include "torch_common.h"

namespace rmsnorm {
namespace {

// The specs of direct calls, by their strings. Never freed, for a thread may outlive whatever is
// destroyed at the end; nobody has many.
const void* parse(const char* text, std::size_t length) noexcept {
  constexpr std::size_t kMostSpecs = 4096;
  static auto& kept = *new std::unordered_map<std::string, Spec>;
  try {
    const std::string key(text, length);
    const auto found = kept.find(key);
    if (found != kept.end()) return &found->second;
    const Spec spec = parse_spec(key);
    if (spec.gate != Gate::none || kept.size() >= kMostSpecs) return nullptr;
    return &kept.emplace(key, spec).first->second;
  } catch (...) {
    return nullptr;
  }
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

void discard(void* tensor) noexcept {
  aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(tensor));
}

constexpr DirectTable kTable{parse, direct_forward, direct_backward, elements, share, discard};

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
