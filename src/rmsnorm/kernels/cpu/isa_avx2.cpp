#include "dispatch.h"

#if defined(__AVX2__)
#include "vec/avx2.h"
// After the primitives that it is written over.
#include "kernels.h"
#endif

namespace rmsnorm {

const Kernels* avx2_kernels() {
#if defined(__AVX2__)
  static constexpr Kernels table = make_kernels<Avx2>();
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace rmsnorm
