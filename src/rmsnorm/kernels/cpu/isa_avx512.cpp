#include "dispatch.h"

#if defined(__AVX512F__)
#include "vec/avx512.h"
// After the primitives that it is written over.
#include "kernels.h"
#endif

namespace rmsnorm {

const Kernels* avx512_kernels() {
#if defined(__AVX512F__)
  static constexpr Kernels table = make_kernels<Avx512>();
  return &table;
#else
  return nullptr;
#endif
}

const Kernels* avx512_bf16_kernels() {
#if defined(__AVX512BF16__)
  static constexpr Kernels table = make_kernels<Avx512Bf16>();
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace rmsnorm
