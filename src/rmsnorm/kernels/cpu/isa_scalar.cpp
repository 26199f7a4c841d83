#include "dispatch.h"
#include "rms_norm.h"

namespace rmsnorm {

const Kernels* scalar_kernels() {
  static constexpr Kernels table = make_kernels<Scalar>();
  return &table;
}

}  // namespace rmsnorm
