// NormSpec as the kernels see it: parsed from the canonical string of rmsnorm/spec.py.
#pragma once

#include <string>
#include <string_view>

#include "types.h"

namespace rmsnorm {

enum class Rounding : std::uint8_t { before_weight, after_weight, weight_dtype };
enum class Output : std::uint8_t { input, promote, weight };

struct Spec {
  bool has_eps = false;
  double eps = 0.0;
  EpsIn eps_in = EpsIn::mean_square;
  bool mean = true;
  double offset = 0.0;
  bool accumulate_input = true;
  Rounding rounding = Rounding::after_weight;
  Output output = Output::input;
  std::int64_t groups = 1;
  double partial = 1.0;
  Gate gate = Gate::none;
  bool gate_before = true;
};

// The spec that `text` encodes, from a cache after the first time. Throws std::invalid_argument.
const Spec& parse_spec(std::string_view text);

// The number of elements under one mean square in a row of d (NormSpec.width).
std::int64_t statistics_width(const Spec& spec, std::int64_t d);

}  // namespace rmsnorm
