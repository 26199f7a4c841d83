// The table of one instruction set, from its primitives.
#pragma once

#include "add_rms_norm.h"
#include "backward.h"
#include "gated_rms_norm.h"
#include "rms_norm.h"

namespace rmsnorm {
namespace {

template <class Isa>
constexpr Kernels make_kernels() {
  return {.name = Isa::kName,
          .forward = &forward<Isa>,
          .add_forward = &add_forward<Isa>,
          .gated_forward = &gated_forward<Isa>,
          .prepare_weight = &prepare_weight<Isa>,
          .backward = &backward<Isa>,
          .order_weight = &order_weight<Isa>,
          .add_blocks = &add_blocks<Isa>,
          .store_sums = &store_sums<Isa>};
}

}  // namespace
}  // namespace rmsnorm
