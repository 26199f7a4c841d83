#include "dispatch.h"

#if defined(__aarch64__)
#include "vec/neon.h"
// After the primitives that it is written over.
#include "kernels.h"
#endif

namespace rmsnorm {

const Kernels* neon_kernels() {
#if defined(__aarch64__)
  static constexpr Kernels table = make_kernels<Neon>();
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace rmsnorm
