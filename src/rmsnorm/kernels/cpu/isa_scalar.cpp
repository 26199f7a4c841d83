#include "dispatch.h"
#include "kernels.h"

namespace rmsnorm {

const Kernels* scalar_kernels() {
  static constexpr Kernels table = make_kernels<Scalar>();
  return &table;
}

}  // namespace rmsnorm
