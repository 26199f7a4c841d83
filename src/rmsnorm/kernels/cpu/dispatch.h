// Chooses the instruction set, once.
#pragma once

#include "types.h"

namespace rmsnorm {

// The kernels of the best instruction set of this machine, or of the one that the environment
// variable RMSNORM_ISA names. Null if RMSNORM_ISA names one that this machine lacks; `isa_error`
// then says which.
const Kernels* kernels();
const char* isa_error();

// One per instruction set, null where it was not compiled.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* neon_kernels();

}  // namespace rmsnorm
