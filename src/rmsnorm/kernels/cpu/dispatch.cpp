#include "dispatch.h"

#include <cstdlib>
#include <string>
#include <string_view>

namespace rmsnorm {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512_bf16() { return false; }
#endif

struct Choice {
  const Kernels* kernels = nullptr;
  std::string error;
};

const Kernels* usable(std::string_view name) {
  if (name == "avx512") {
    if (has_avx512_bf16() && avx512_bf16_kernels()) return avx512_bf16_kernels();
    return has_avx512() ? avx512_kernels() : nullptr;
  }
  if (name == "avx2") return has_avx2() ? avx2_kernels() : nullptr;
  if (name == "neon") return neon_kernels();
  if (name == "scalar") return scalar_kernels();
  return nullptr;
}

Choice choose() {
  Choice choice;
  std::string available;
  for (const char* isa : {"avx512", "avx2", "neon", "scalar"}) {
    const Kernels* found = usable(isa);
    if (!found) continue;
    if (!choice.kernels) choice.kernels = found;
    available += available.empty() ? isa : std::string(", ") + isa;
  }
  const char* wanted = std::getenv("RMSNORM_ISA");
  if (wanted && *wanted) {
    choice.kernels = usable(wanted);
    if (!choice.kernels) {
      choice.error = "RMSNORM_ISA is '" + std::string(wanted) +
                     "', which this machine or this build does not have; it has " + available;
    }
  }
  return choice;
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

const Kernels* kernels() { return chosen().kernels; }

const char* isa_error() { return chosen().error.c_str(); }

}  // namespace rmsnorm
