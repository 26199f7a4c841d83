// Compares the kernels of an instruction set, bit for bit, with a plain implementation of the same
// definition: `bit_grid native|scalar|avx2|avx512|neon [quick]`. Exit 0: every bit is equal. Quick,
// for emulated processors, leaves out six of seven conversions and the rows above a million, and
// takes fewer of the random calls.
//
// The gradients are compared with those of the plain C++ kernels, not with a definition: they have
// the same bits on every instruction set, and that those are right is what the Python tests check,
// against an oracle in float64.
//
// The reference below holds every number as a double and rounds it to the type that the definition
// names after each operation. For float operands that gives the bits of float arithmetic: their
// product is exact in double, and the sum, quotient and square root of floats do not suffer from
// being rounded twice, since double has more than twice float's digits. A fused multiply-add comes
// from <cmath>; the activations of floats from long double, with far more digits than decide.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dispatch.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

using rmsnorm::AddCall;
using rmsnorm::BackwardCall;
using rmsnorm::DType;
using rmsnorm::EpsIn;
using rmsnorm::ForwardCall;
using rmsnorm::Gate;
using rmsnorm::GatedCall;
using rmsnorm::Kernels;
using rmsnorm::Operand;
using rmsnorm::Rows;

#if defined(__x86_64__)
using Quad = __float128;
#else
using Quad = long double;
#endif

constexpr DType kTypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
constexpr DType kXhatTypes[] = {DType::none, DType::bf16, DType::f16, DType::f32};
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

const char* name_of(DType type) {
  constexpr const char* kNames[] = {"f32", "f64", "bf16", "f16", "none"};
  return kNames[static_cast<int>(type)];
}

std::int64_t size_of(DType type) { return type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2; }

bool is_half(DType type) { return size_of(type) == 2; }

// A half format, as IEEE 754 defines a binary format.
struct Format {
  int digits;    // of the significand, the hidden one included
  int unit;      // the smallest positive value is 2^unit
  double limit;  // the largest finite value
};

Format format_of(DType half) {
  return half == DType::bf16 ? Format{8, -133, 0x1.fep127} : Format{11, -24, 65504.0};
}

// The value of the format nearest to `value`, ties to even.
double nearest(double value, const Format& format) {
  if (value == 0.0 || !std::isfinite(value)) return value;
  int exponent;
  std::frexp(value, &exponent);  // 2^(exponent - 1) <= |value| < 2^exponent
  const double unit = std::ldexp(1.0, std::max(exponent - format.digits, format.unit));
  const double result = std::nearbyint(value / unit) * unit;
  return std::fabs(result) > format.limit ? std::copysign(kInf, value) : result;
}

// To a half type through float, as the definition says.
double rounded(DType type, double value) {
  if (type == DType::f64) return value;
  const double single = static_cast<float>(value);
  return type == DType::f32 ? single : nearest(single, format_of(type));
}

// The bits of a value that the type can hold.
std::uint64_t encode(DType type, double value) {
  if (type == DType::f64) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, 8);
    return bits;
  }
  if (type == DType::f32) {
    const float single = static_cast<float>(value);
    std::uint32_t bits;
    std::memcpy(&bits, &single, 4);
    return bits;
  }
  const Format format = format_of(type);
  const int fraction_bits = format.digits - 1;
  const std::uint64_t sign = std::signbit(value) ? 0x8000u : 0u;
  const std::uint64_t infinity = 0x7fffu >> fraction_bits << fraction_bits;
  if (std::isnan(value)) return sign | infinity | 1u << (fraction_bits - 1);
  if (std::isinf(value)) return sign | infinity;
  if (value == 0.0) return sign;
  int exponent;
  std::frexp(value, &exponent);
  const int unit = std::max(exponent - format.digits, format.unit);
  const auto count = static_cast<std::uint64_t>(std::ldexp(std::fabs(value), -unit));
  // The hidden digit of a normal value carries into the exponent field.
  return sign | ((static_cast<std::uint64_t>(unit - format.unit) << fraction_bits) + count);
}

double decode(DType type, std::uint64_t bits) {
  if (type == DType::f64) {
    double value;
    std::memcpy(&value, &bits, 8);
    return value;
  }
  if (type == DType::f32) {
    const auto low = static_cast<std::uint32_t>(bits);
    float value;
    std::memcpy(&value, &low, 4);
    return value;
  }
  const Format format = format_of(type);
  const int fraction_bits = format.digits - 1;
  const auto hidden = std::uint64_t{1} << fraction_bits;
  const std::uint64_t fraction = bits & (hidden - 1);
  const int exponent = static_cast<int>((bits & 0x7fffu) >> fraction_bits);
  const double sign = bits & 0x8000u ? -1.0 : 1.0;
  if (exponent == 0x7fff >> fraction_bits) return fraction ? kNan : sign * kInf;
  if (exponent == 0) return sign * std::ldexp(static_cast<double>(fraction), format.unit);
  return sign * std::ldexp(static_cast<double>(fraction + hidden), format.unit + exponent - 1);
}

// `count` elements, `offset` elements after an address that is a multiple of 64, and nothing
// behind them, so that AddressSanitizer sees a read past the end.
class Array {
 public:
  Array() = default;
  Array(DType type, std::int64_t count, std::int64_t offset)
      : type_(type), offset_(offset), count_(count) {
    const std::size_t bytes = static_cast<std::size_t>((offset + count) * size_of(type));
    memory_.reset(new (std::align_val_t{64}) unsigned char[bytes + 1]);
    std::memset(memory_.get(), 0xff, bytes);  // a NaN in every format
  }
  void* data() { return memory_ ? memory_.get() + offset_ * size_of(type_) : nullptr; }
  std::int64_t size() const { return count_; }
  void set_bits(std::int64_t i, std::uint64_t bits) {
    std::memcpy(address(i), &bits, static_cast<std::size_t>(size_of(type_)));
  }
  std::uint64_t bits(std::int64_t i) const {
    std::uint64_t bits = 0;
    std::memcpy(&bits, address(i), static_cast<std::size_t>(size_of(type_)));
    return bits;
  }
  void set(std::int64_t i, double value) { set_bits(i, encode(type_, rounded(type_, value))); }
  double get(std::int64_t i) const { return decode(type_, bits(i)); }
  Array copy() const {
    Array result(type_, count_, offset_);
    for (std::int64_t i = 0; i < count_; ++i) result.set_bits(i, bits(i));
    return result;
  }

 private:
  struct Delete {
    void operator()(unsigned char* p) const { operator delete[](p, std::align_val_t{64}); }
  };
  unsigned char* address(std::int64_t i) const {
    return memory_.get() + (offset_ + i) * size_of(type_);
  }
  DType type_ = DType::f32;
  std::int64_t offset_ = 0;
  std::int64_t count_ = 0;
  std::unique_ptr<unsigned char[], Delete> memory_;
};

struct Row {
  std::vector<double> x;     // (d,) as stored
  std::vector<double> y;     // (d,) of y's type
  std::vector<double> rstd;  // (groups,) of the compute type
};

double sum_of_squares(const double* x, std::int64_t width, DType compute) {
  const auto keep = [compute](double v) { return rounded(compute, v); };
  const std::int64_t full = compute == DType::f32 ? 8 : 4;
  const std::int64_t lanes = width >= full ? full : 1;
  const std::int64_t vectors = width / lanes;
  const std::int64_t steps = vectors / 4;
  int log2 = 0;
  for (std::int64_t n = steps - 1; n > 0; n /= 2) ++log2;
  const int p = std::max(4, log2 / 4);

  double level[4][4][8] = {};  // [level][accumulator][lane]
  for (std::int64_t step = 0; step < steps; ++step) {
    for (std::int64_t a = 0; a < 4; ++a) {
      for (std::int64_t lane = 0; lane < lanes; ++lane) {
        const double value = x[(step * 4 + a) * lanes + lane];
        level[0][a][lane] = keep(level[0][a][lane] + keep(value * value));
      }
    }
    for (int upper = 1; upper < 4; ++upper) {
      if ((step + 1) % (std::int64_t{1} << (p * upper)) != 0) break;
      for (int i = 0; i < 4 * 8; ++i) {
        double& from = level[upper - 1][i / 8][i % 8];
        double& to = level[upper][i / 8][i % 8];
        to = keep(to + from);
        from = 0.0;
      }
    }
  }
  double total[4][8];
  for (int i = 0; i < 4 * 8; ++i) {
    const auto at = [&](int l) { return level[l][i / 8][i % 8]; };
    total[i / 8][i % 8] = keep(keep(keep(at(0) + at(1)) + at(2)) + at(3));
  }
  for (std::int64_t vector = steps * 4; vector < vectors; ++vector) {
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      const double value = x[vector * lanes + lane];
      total[0][lane] = keep(total[0][lane] + keep(value * value));
    }
  }
  for (int a = 1; a < 4; ++a) {
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      total[0][lane] = keep(total[0][lane] + total[a][lane]);
    }
  }
  double sum = 0.0;
  for (std::int64_t i = vectors * lanes; i < width; ++i) sum = keep(sum + keep(x[i] * x[i]));
  for (std::int64_t lane = 0; lane < lanes; ++lane) sum = keep(sum + total[0][lane]);
  return sum;
}

double inverse_rms(const ForwardCall& call, double sum, double eps, DType type) {
  const auto keep = [type](double v) { return rounded(type, v); };
  const double width = keep(static_cast<double>(call.width));
  if (call.eps_in == EpsIn::clamp) {
    const double norm = keep(std::sqrt(sum));
    return keep(keep(std::sqrt(width)) / (norm < eps ? eps : norm));
  }
  const double ms = call.divide ? keep(sum / width) : sum;
  if (call.eps_in == EpsIn::root) return keep(1.0 / keep(keep(std::sqrt(ms)) + eps));
  return keep(1.0 / keep(std::sqrt(keep(ms + eps))));
}

// x * rstd of one group, in place, and rstd; `x` holds values of the compute type. `wide`: the same
// row in double, for a row that is computed again.
double normalise(const ForwardCall& call, double* x, const double* wide, std::int64_t count) {
  const DType compute = call.compute;
  const double sum = sum_of_squares(x, call.width, compute);
  const double small = compute == DType::f32 ? 0x1p-100 : 0x1p-960;
  const double eps_squared = call.eps_in == EpsIn::mean_square ? call.eps : call.eps * call.eps;
  const double width = static_cast<double>(call.width);
  const bool redo =
      sum == kInf || (sum < small && eps_squared * (call.divide ? width : 1.0) < small);
  double largest = 0.0;
  bool finite = true;
  for (std::int64_t i = 0; i < call.width; ++i) {
    finite = finite && std::isfinite(wide[i]);
    largest = std::max(largest, std::fabs(wide[i]));
  }
  if (!redo || !finite || (largest == 0.0 && call.eps == 0.0)) {
    const double rstd = inverse_rms(call, sum, rounded(compute, call.eps), compute);
    for (std::int64_t i = 0; i < count; ++i) x[i] = rounded(compute, x[i] * rstd);
    return rstd;
  }
  // In double; a row of doubles is scaled so that its largest element, or eps, is near 1.
  int exponent = 0;
  if (compute == DType::f64) {
    const double floor = call.eps_in == EpsIn::mean_square ? std::sqrt(call.eps) : call.eps;
    exponent = -std::ilogb(std::max(largest, floor));
  }
  Quad exact = 0;
  for (std::int64_t i = 0; i < call.width; ++i) {
    const double scaled = std::ldexp(wide[i], exponent);
    exact += static_cast<Quad>(scaled * scaled);
  }
  const double eps =
      std::ldexp(call.eps, call.eps_in == EpsIn::mean_square ? 2 * exponent : exponent);
  const double rstd = inverse_rms(call, static_cast<double>(exact), eps, DType::f64);
  for (std::int64_t i = 0; i < count; ++i) {
    x[i] = rounded(compute, std::ldexp(wide[i], exponent) * rstd);
  }
  return rounded(compute, std::ldexp(rstd, exponent));
}

// Row.x, or what became of it, normalised in place as row.y; `wide` as above.
void normalise_groups(const ForwardCall& call, const std::vector<double>& wide, Row& row) {
  const std::int64_t part = call.d / call.groups;
  row.rstd.clear();
  for (std::int64_t g = 0; g < call.groups; ++g) {
    row.rstd.push_back(normalise(call, &row.y[g * part], &wide[g * part], part));
  }
}

// xhat times the weight, in the type of that product.
double weighed(const ForwardCall& call, const Array& weight, double value, std::int64_t i) {
  if (!call.weight) return value;
  double factor = weight.get(i);
  if (call.offset != 0.0) {
    const double narrowed = rounded(call.compute, factor);
    factor = rounded(call.compute, narrowed + call.offset);
  }
  if (call.xhat_type != DType::none) value = rounded(call.xhat_type, value);
  return rounded(call.multiply, value * factor);
}

// Turns row.x into row.y.
void reference(const ForwardCall& call, const Array& weight, const Array& bias, Row& row) {
  row.y = row.x;
  for (double& value : row.y) value = rounded(call.compute, value);
  const std::vector<double> wide = row.y;
  normalise_groups(call, wide, row);
  for (std::int64_t i = 0; i < call.d; ++i) {
    double value = weighed(call, weight, row.y[i], i);
    if (call.bias) {
      if (call.bias_after_round) value = rounded(call.y_type, value);
      value = rounded(call.multiply, value + bias.get(i));
    }
    row.y[i] = rounded(call.y_type, value);
  }
}

template <class T>
T activation(Gate gate, T g) {
  const T divisor = 1 + std::exp(-g);
  return gate == Gate::silu ? g / divisor : 1 / divisor;
}

// Turns row.x and its gates into row.y.
void gated_reference(const GatedCall& call, const Array& weight, const std::vector<double>& gates,
                     Row& row) {
  const ForwardCall& norm = call.norm;
  const auto count = static_cast<std::size_t>(norm.d);
  std::vector<double> act(count);
  row.y = row.x;
  for (double& value : row.y) value = rounded(norm.compute, value);
  std::vector<double> wide = row.y;
  for (std::size_t i = 0; i < count; ++i) {
    const double gate = rounded(norm.compute, gates[i]);
    act[i] = norm.compute == DType::f64
                 ? activation(call.activation, gate)
                 : static_cast<float>(activation<long double>(call.activation, gate));
    if (!call.gate_before) continue;
    wide[i] = row.y[i] * activation(call.activation, gate);
    row.y[i] = rounded(norm.compute, row.y[i] * act[i]);
  }
  normalise_groups(norm, wide, row);
  for (std::size_t i = 0; i < count; ++i) {
    double value = weighed(norm, weight, row.y[i], static_cast<std::int64_t>(i));
    if (!call.gate_before) {
      const DType product = norm.weight ? call.product_type : norm.xhat_type;
      if (product != DType::none) value = rounded(product, value);
      value = rounded(call.act_multiply, value * act[i]);
    }
    row.y[i] = rounded(norm.y_type, value);
  }
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {  // a Weyl sequence through a mixing function
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 31)) * 0xd6e8feb86659fd93u;
    z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93u;
    return z ^ (z >> 32);
  }
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(n));
  }
  bool coin() { return bits() >> 63; }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double bell() { return (uniform() + uniform() + uniform() + uniform() - 2.0) * 3.0; }
  template <class T, std::size_t N>
  const T& pick(const T (&choices)[N]) {
    return choices[below(N)];
  }

 private:
  std::uint64_t state_;
};

// What a row is made of. Each row of a call has its own, so that rows that are redone lie between
// rows that are not.
enum class Data { ordinary, wide, tiny, huge, zeros, ones, infinite, nan };

double value_of(Data data, DType type, Random& random) {
  const double bell = random.bell();
  switch (data) {
    case Data::wide: {  // any finite bits
      const double any = decode(type, random.bits() >> (64 - 8 * size_of(type)));
      return std::isfinite(any) ? any : bell;
    }
    case Data::tiny:
      return bell * (type == DType::f64 ? 0x1p-1060 : type == DType::f16 ? 0x1p-22 : 0x1p-140);
    case Data::huge:
      return bell * (type == DType::f64 ? 0x1p1018 : type == DType::f16 ? 0x1p12 : 0x1p124);
    case Data::zeros:
      return random.coin() ? 0.0 : -0.0;
    case Data::ones:  // rstd is 1 where eps is 0: what follows sees exact values
      return random.coin() ? 1.0 : -1.0;
    default:
      return bell;
  }
}

// A parameter near 1, sometimes on or beside a tie of a half type, sometimes special.
double parameter_of(Random& random) {
  switch (random.below(8)) {
    case 0: {  // a float that is halfway between two halves, or its neighbour
      const std::uint64_t fraction_bits = random.coin() ? 16 : 13;
      const std::uint64_t tie = std::uint64_t{1} << (fraction_bits - 1);
      std::uint64_t bits = random.bits() >> 32 >> fraction_bits << fraction_bits;
      bits += tie + static_cast<std::uint64_t>(random.below(3)) - 1;
      const double value = decode(DType::f32, bits);
      return std::isnan(value) ? 1.0 : value;
    }
    case 1: {
      constexpr double kSpecial[] = {0.0, -0.0, kInf, -kInf, kNan, 0x1p-149, 0x1p-126, -1e30};
      return random.below(4) ? 1.0 : random.pick(kSpecial);
    }
    default:
      return 1.0 + 0.5 * random.bell();
  }
}

struct Tally {
  std::int64_t calls = 0;
  std::int64_t values = 0;
  std::int64_t wrong = 0;
};

Tally tally;
bool quick = false;
constexpr std::int64_t kReported = 20;
constexpr std::int64_t kGuard = 64;  // elements of y before and after its own

std::string describe(const ForwardCall& c) {
  char text[400];
  constexpr const char* kEpsIn[] = {"mean_square", "root", "clamp"};
  std::snprintf(
      text, sizeof text,
      "x %s y %s weight %s + %g bias %s compute %s multiply %s xhat %s eps_in %s %s eps %a "
      "d %lld groups %lld width %lld stride %lld%s%s",
      name_of(c.x_type), name_of(c.y_type), c.weight ? name_of(c.weight_type) : "none", c.offset,
      c.bias ? "yes" : "none", name_of(c.compute), name_of(c.multiply), name_of(c.xhat_type),
      kEpsIn[static_cast<int>(c.eps_in)], c.divide ? "mean" : "sum", c.eps,
      static_cast<long long>(c.d), static_cast<long long>(c.groups),
      static_cast<long long>(c.width), static_cast<long long>(c.x_rows.stride),
      c.bias_after_round ? " bias_after_round" : "", c.stream ? " stream" : "");
  return text;
}

// What a message says of an operand: its type, and how its rows lie.
std::string describe(const char* name, const Operand& operand) {
  if (!operand.data) return {};
  std::string text = std::string(name) + " " + name_of(operand.type) + " stride " +
                     std::to_string(operand.rows.stride) + " (";
  for (int dim = 0; dim < operand.rows.outer.rank; ++dim) {
    text += (dim ? ", " : "") + std::to_string(operand.rows.outer.stride[dim]);
  }
  return text + ") ";
}

std::string describe(const BackwardCall& c) {
  char text[400];
  constexpr const char* kEpsIn[] = {"mean_square", "root", "clamp"};
  std::snprintf(text, sizeof text,
                "compute %s eps_in %s %s eps %a rows %lld in blocks of %lld d %lld groups %lld "
                "width %lld%s%s%s",
                name_of(c.compute), kEpsIn[static_cast<int>(c.eps_in)], c.divide ? "mean" : "sum",
                c.eps, static_cast<long long>(c.rows), static_cast<long long>(c.block_rows),
                static_cast<long long>(c.d), static_cast<long long>(c.groups),
                static_cast<long long>(c.width), c.direct ? " direct" : "", c.split ? " split" : "",
                c.stream ? " stream" : "");
  std::string gate = describe("gate", c.gate);
  if (c.gate.data) {
    gate += c.activation == Gate::silu ? "silu " : "sigmoid ";
    gate += c.gate_before ? "before " : "after ";
  }
  return "backward " + describe("x", c.x) + describe("dy", c.dy) +
         describe("dresidual", c.dresidual) + gate + text;
}

bool same(DType type, std::uint64_t got, double wanted) {
  if (std::isnan(wanted)) return std::isnan(decode(type, got));
  return got == encode(type, wanted);
}

void fail(const std::string& what, std::int64_t row, std::int64_t column, DType type,
          std::uint64_t got, double wanted) {
  if (++tally.wrong > kReported) return;
  std::printf("  differs: %s; row %lld column %lld: %0*llx, expected %0*llx (%a)\n", what.c_str(),
              static_cast<long long>(row), static_cast<long long>(column),
              static_cast<int>(2 * size_of(type)), static_cast<unsigned long long>(got),
              static_cast<int>(2 * size_of(type)),
              static_cast<unsigned long long>(encode(type, wanted)), wanted);
}

std::int64_t offset_of(const rmsnorm::OuterDims& outer, std::int64_t row) {
  std::int64_t offset = 0;
  for (int dim = outer.rank; dim-- > 0; row /= outer.size[dim]) {
    offset += row % outer.size[dim] * outer.stride[dim];
  }
  return offset;
}

// Denormals off, as a caller's thread may have them.
class FlushMode {
 public:
#if defined(__x86_64__)
  explicit FlushMode(bool on) : saved_(_mm_getcsr()) {
    if (on) _mm_setcsr(saved_ | 0x8040u);
  }
  ~FlushMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  explicit FlushMode(bool on) {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    if (on) asm volatile("msr fpcr, %0" : : "r"(saved_ | std::uint64_t{1} << 24));
  }
  ~FlushMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  std::uint64_t saved_ = 0;
#else
  explicit FlushMode(bool) {}
#endif
};

// A result between two guards, all of it a NaN that no kernel writes; guarded rows [begin, end) of
// `columns` elements are what the kernel may write.
class Result {
 public:
  Result(DType type, std::int64_t rows, std::int64_t columns, std::int64_t offset)
      : type_(type), columns_(columns), array_(type, rows * columns + 2 * kGuard, offset) {
    for (std::int64_t i = 0; i < kGuard; ++i) {
      array_.set_bits(i, 0xa5a5a5a5a5a5a5a5u);
      array_.set_bits(array_.size() - 1 - i, 0xa5a5a5a5a5a5a5a5u);
    }
    guard_ = array_.bits(0);
    poison_ = rows * columns > 0 ? array_.bits(kGuard) : guard_;
  }
  void* data() { return static_cast<char*>(array_.data()) + kGuard * size_of(type_); }
  std::int64_t columns() const { return columns_; }
  void set(std::int64_t row, std::int64_t column, double value) {
    array_.set(kGuard + row * columns_ + column, value);
  }

  void check_guards(const std::string& what) const {
    for (std::int64_t i = 0; i < kGuard; ++i) {
      if (array_.bits(i) == guard_ && array_.bits(array_.size() - 1 - i) == guard_) continue;
      if (++tally.wrong <= kReported) {
        std::printf("  written outside the result: %s\n", what.c_str());
      }
      return;
    }
  }
  void check_untouched(std::int64_t row) const {
    for (std::int64_t i = 0; i < columns_; ++i) {
      const std::uint64_t got = array_.bits(kGuard + row * columns_ + i);
      if (got != poison_) fail("row not asked for", row, i, type_, got, kNan);
    }
  }
  // That every element was written, and with the bits of `wanted`, which has the same shape.
  void check_equal(const std::string& what, const Result& wanted) const {
    for (std::int64_t i = kGuard; i < array_.size() - kGuard; ++i) {
      const std::uint64_t got = array_.bits(i);
      const std::uint64_t other = wanted.array_.bits(i);
      if (got != poison_ && other != poison_) {
        if (got == other) continue;
        if (std::isnan(decode(type_, got)) && std::isnan(decode(type_, other))) continue;
      }
      const std::int64_t element = i - kGuard;
      fail(what, element / columns_, element % columns_, type_, got, decode(type_, other));
    }
  }
  void check_row(const std::string& what, std::int64_t row,
                 const std::vector<double>& wanted) const {
    for (std::int64_t i = 0; i < columns_; ++i) {
      const std::uint64_t got = array_.bits(kGuard + row * columns_ + i);
      const double value = wanted[static_cast<std::size_t>(i)];
      if (!same(type_, got, value)) fail(what, row, i, type_, got, value);
    }
  }

 private:
  DType type_;
  std::int64_t columns_;
  Array array_;
  std::uint64_t guard_ = 0;
  std::uint64_t poison_ = 0;
};

struct Arrays {
  Array x, weight, bias;
};

std::vector<double> row_of(const Array& array, const Rows& rows, std::int64_t row, std::int64_t d) {
  std::vector<double> values(static_cast<std::size_t>(d));
  const std::int64_t first = offset_of(rows.outer, row);
  for (std::int64_t i = 0; i < d; ++i) {
    values[static_cast<std::size_t>(i)] = array.get(first + i * rows.stride);
  }
  return values;
}

// Calls the kernel for rows [begin, end) and compares every element of y and of rstd, and what is
// around them.
void compare(const Kernels& kernels, ForwardCall call, Arrays& arrays, std::int64_t rows,
             std::int64_t begin, std::int64_t end, std::int64_t y_offset, bool flush = false) {
  Result y(call.y_type, rows, call.d, y_offset);
  Result rstd(call.compute, rows, call.groups, 0);
  call.x = arrays.x.data();
  call.weight = arrays.weight.data();
  call.bias = arrays.bias.data();
  call.y = y.data();
  if (tally.calls % 2) call.rstd = rstd.data();
  {
    const FlushMode mode(flush);
    kernels.forward(call, begin, end);
  }
  ++tally.calls;
  tally.values += (end - begin) * call.d;

  const std::string what = describe(call);
  y.check_guards(what);
  rstd.check_guards(what + " rstd");
  Row row;
  for (std::int64_t r = 0; r < rows; ++r) {
    if (r < begin || r >= end) {
      y.check_untouched(r);
      rstd.check_untouched(r);
      continue;
    }
    row.x = row_of(arrays.x, call.x_rows, r, call.d);
    reference(call, arrays.weight, arrays.bias, row);
    y.check_row(what, r, row.y);
    if (call.rstd) rstd.check_row(what + " rstd", r, row.rstd);
  }
}

// How the rows of x lie in memory.
enum class Layout { contiguous, gaps, transposed, expanded };

struct Case {
  ForwardCall call;  // types, d, groups, width, x_stride, eps and so on; no pointers, no outer
  bool weighted = false;
  bool biased = false;
  std::int64_t rows = 1;
  Layout layout = Layout::contiguous;
  std::int64_t x_offset = 0, y_offset = 0, parameter_offset = 0;  // elements
  bool only_ordinary = false;
  bool flush = false;
};

// `count` rows of d elements, `stride` apart.
Rows lay_out(Layout layout, std::int64_t count, std::int64_t d, std::int64_t stride) {
  const std::int64_t span = (d - 1) * stride + 1;
  Rows rows;
  rows.stride = stride;
  rmsnorm::OuterDims& outer = rows.outer;
  if (layout == Layout::transposed && count % 2 == 0) {
    outer.rank = 2;
    outer.size[0] = count / 2;
    outer.stride[0] = span;
    outer.size[1] = 2;
    outer.stride[1] = span * (count / 2) + 1;
  } else if (count > 1) {
    outer.rank = 1;
    outer.size[0] = count;
    outer.stride[0] = layout == Layout::expanded ? 0 : layout == Layout::gaps ? span + 5 : span;
  }
  return rows;
}

// One of them, made of `data`.
void fill_row(Array& array, DType type, const Rows& rows, std::int64_t row, std::int64_t d,
              Data data, Random& random) {
  const std::int64_t first = offset_of(rows.outer, row);
  for (std::int64_t i = 0; i < d; ++i) {
    array.set(first + i * rows.stride, value_of(data, type, random));
  }
  const std::int64_t special = first + random.below(d) * rows.stride;
  if (data == Data::infinite) array.set(special, random.coin() ? kInf : -kInf);
  if (data == Data::nan) array.set(special, kNan);
}

// The memory of `count` of them, `offset` elements after an aligned address.
Array unfilled(DType type, const Rows& rows, std::int64_t count, std::int64_t d,
               std::int64_t offset) {
  return Array(type, offset_of(rows.outer, count - 1) + (d - 1) * rows.stride + 1, offset);
}

// A tensor of such rows, `offset` elements after an aligned address.
Array filled(DType type, const Rows& rows, std::int64_t count, std::int64_t d, std::int64_t offset,
             bool only_ordinary, Random& random) {
  Array array = unfilled(type, rows, count, d, offset);
  for (std::int64_t r = 0; r < count; ++r) {
    const auto data =
        only_ordinary || random.below(3) == 0 ? Data::ordinary : static_cast<Data>(random.below(8));
    fill_row(array, type, rows, r, d, data, random);
  }
  return array;
}

Array filled_weight(const Case& test, Random& random) {
  if (!test.weighted) return {};
  Array weight(test.call.weight_type, test.call.d, test.parameter_offset);
  for (std::int64_t i = 0; i < test.call.d; ++i) weight.set(i, parameter_of(random));
  return weight;
}

// A range of rows to compute: mostly all of them.
std::pair<std::int64_t, std::int64_t> range_of(std::int64_t rows, Random& random) {
  const std::int64_t begin = random.below(4) ? 0 : random.below(rows);
  const std::int64_t end = random.below(4) ? rows : begin + random.below(rows - begin + 1);
  return {begin, end};
}

void run(const Kernels& kernels, Case test, Random& random) {
  ForwardCall& call = test.call;
  call.x_rows = lay_out(test.layout, test.rows, call.d, call.x_rows.stride);
  if (call.compute == DType::f32) call.eps = static_cast<float>(call.eps);
  Arrays arrays;
  arrays.x = filled(call.x_type, call.x_rows, test.rows, call.d, test.x_offset, test.only_ordinary,
                    random);
  arrays.weight = filled_weight(test, random);
  if (test.biased) {
    arrays.bias = Array(call.multiply, call.d, test.parameter_offset);
    for (std::int64_t i = 0; i < call.d; ++i) arrays.bias.set(i, 0.1 * parameter_of(random));
  }
  const auto [begin, end] = range_of(test.rows, random);
  compare(kernels, call, arrays, test.rows, begin, end, test.y_offset, test.flush);
}

// A residual addition before the norm that `test` describes.
void run_add(const Kernels& kernels, Case test, DType x_type, DType residual_type, Random& random) {
  AddCall call;
  call.norm = test.call;
  ForwardCall& norm = call.norm;
  const std::int64_t d = norm.d;
  if (norm.compute == DType::f32) norm.eps = static_cast<float>(norm.eps);
  call.x.type = x_type;
  call.residual.type = residual_type;
  call.add_type = x_type == DType::f64 || residual_type == DType::f64 ? DType::f64 : DType::f32;
  constexpr double kAlpha[] = {1.0, 1.0, 0.1, -3.3, 0.0, 1e30};
  call.alpha = rounded(call.add_type, random.pick(kAlpha));
  const auto dense = lay_out(Layout::contiguous, test.rows, d, 1);
  // In place: the result into x, the sum into the residual.
  const bool in_place = norm.y_type == x_type && norm.x_type == residual_type && random.coin();
  const auto any = [&] {
    return in_place ? dense
                    : lay_out(static_cast<Layout>(random.below(4)), test.rows, d,
                              random.below(5) ? 1 : 2);
  };
  call.x.rows = any();
  call.residual.rows = any();
  norm.x_rows = Rows();  // what the sum's rows are is known
  norm.x_rows.stride = 1;
  const Array x =
      filled(x_type, call.x.rows, test.rows, d, test.x_offset, test.only_ordinary, random);
  Array residual = filled(residual_type, call.residual.rows, test.rows, d, test.parameter_offset,
                          test.only_ordinary, random);
  Array x_memory = x.copy();
  Array residual_memory = residual.copy();
  Array weight = filled_weight(test, random);

  const auto [begin, end] =
      in_place ? std::pair<std::int64_t, std::int64_t>(0, test.rows) : range_of(test.rows, random);
  Result y(norm.y_type, test.rows, d, test.y_offset);
  Result sum(norm.x_type, test.rows, d, test.parameter_offset);
  Result rstd(norm.compute, test.rows, norm.groups, 0);
  if (in_place) {
    for (std::int64_t r = 0; r < test.rows; ++r) {
      for (std::int64_t i = 0; i < d; ++i) {
        y.set(r, i, x.get(r * d + i));
        sum.set(r, i, residual.get(r * d + i));
      }
    }
    call.x.data = y.data();
    call.residual.data = sum.data();
  } else {
    call.x.data = x_memory.data();
    call.residual.data = residual_memory.data();
  }
  norm.weight = weight.data();
  norm.y = y.data();
  norm.x = call.sum = sum.data();
  if (random.coin()) norm.rstd = rstd.data();
  kernels.add_forward(call, begin, end);
  ++tally.calls;
  tally.values += 2 * (end - begin) * d;

  const std::string what = std::string("add ") + name_of(x_type) + " and " +
                           name_of(residual_type) + " alpha " + std::to_string(call.alpha) +
                           (in_place ? " in place; " : "; ") + describe(norm);
  y.check_guards(what);
  sum.check_guards(what + " sum");
  rstd.check_guards(what + " rstd");
  Row row;
  for (std::int64_t r = 0; r < test.rows; ++r) {
    if (r < begin || r >= end) {
      y.check_untouched(r);
      sum.check_untouched(r);
      rstd.check_untouched(r);
      continue;
    }
    row.x = row_of(x, call.x.rows, r, d);
    const std::vector<double> before = row_of(residual, call.residual.rows, r, d);
    for (std::int64_t i = 0; i < d; ++i) {
      double& value = row.x[static_cast<std::size_t>(i)];
      const double other = before[static_cast<std::size_t>(i)];
      value = call.add_type == DType::f64
                  ? std::fma(call.alpha, value, other)
                  : std::fma(static_cast<float>(call.alpha), static_cast<float>(value),
                             static_cast<float>(other));
      value = rounded(norm.x_type, value);
    }
    sum.check_row(what + " sum", r, row.x);
    reference(norm, weight, Array(), row);
    y.check_row(what, r, row.y);
    if (norm.rstd) rstd.check_row(what + " rstd", r, row.rstd);
  }
}

// Whether an activation of the gate lies so near the middle of two floats that double, in which the
// kernels compute it, does not decide which of them is nearer.
bool near_tie(double gate) {
  for (const Gate kind : {Gate::silu, Gate::sigmoid}) {
    const auto exact = activation<long double>(kind, static_cast<float>(gate));
    const auto nearest = static_cast<float>(exact);
    const float other = std::nextafter(nearest, exact > nearest ? INFINITY : -INFINITY);
    const long double middle = (static_cast<long double>(nearest) + other) / 2;
    if (std::fabs(exact - middle) < std::fabs(exact) * 0x1p-45L) return true;
  }
  return false;
}

double gate_of(DType type, Random& random) {
  switch (random.below(12)) {
    case 0:
      return random.bell() * 40.0;
    case 1: {
      constexpr double kSpecial[] = {0.0, -0.0, 100.0, -100.0, 700.0, -700.0, -750.0, 1e-30};
      return random.pick(kSpecial);
    }
    case 2:
      return random.below(20) ? 1.0 : random.below(3) ? (random.coin() ? kInf : -kInf) : kNan;
    case 3:
      return value_of(Data::wide, type, random);
    default:
      return random.bell();
  }
}

// A gate before or after the norm that `test` describes.
void run_gated(const Kernels& kernels, Case test, DType x_type, DType gate_type, bool before,
               DType product_type, Random& random) {
  GatedCall call;
  call.norm = test.call;
  ForwardCall& norm = call.norm;
  const std::int64_t d = norm.d;
  if (norm.compute == DType::f32) norm.eps = static_cast<float>(norm.eps);
  call.activation = random.coin() ? Gate::silu : Gate::sigmoid;
  call.gate_before = before;
  call.product_type = product_type;
  call.act_multiply = norm.multiply == DType::f64 || random.below(8) == 0 ? DType::f64 : DType::f32;
  call.x.type = x_type;
  call.gate.type = gate_type;
  const auto any = [&] {
    return lay_out(static_cast<Layout>(random.below(4)), test.rows, d, random.below(5) ? 1 : 2);
  };
  call.x.rows = any();
  call.gate.rows = any();
  Array x = filled(x_type, call.x.rows, test.rows, d, test.x_offset, test.only_ordinary, random);
  Array gate = filled(gate_type, call.gate.rows, test.rows, d, test.parameter_offset, true, random);
  for (std::int64_t i = 0; i < gate.size(); ++i) {
    gate.set(i, gate_of(gate_type, random));
    if (near_tie(gate.get(i))) gate.set(i, 1.0);
  }
  Array weight = filled_weight(test, random);
  const auto [begin, end] = range_of(test.rows, random);
  Result y(norm.y_type, test.rows, d, test.y_offset);
  Result rstd(norm.compute, test.rows, norm.groups, 0);
  Array scratch(norm.compute, scratch_elements(call), 0);
  call.x.data = x.data();
  call.gate.data = gate.data();
  norm.weight = weight.data();
  norm.y = y.data();
  if (random.coin()) norm.rstd = rstd.data();
  kernels.gated_forward(call, begin, end, scratch.data());
  ++tally.calls;
  tally.values += (end - begin) * d;

  const std::string what = std::string("gate ") + name_of(gate_type) +
                           (before ? " before" : " after") +
                           (call.activation == Gate::silu ? " silu" : " sigmoid") + " x " +
                           name_of(x_type) + " product " + name_of(product_type) + " in " +
                           name_of(call.act_multiply) + "; " + describe(norm);
  y.check_guards(what);
  rstd.check_guards(what + " rstd");
  Row row;
  for (std::int64_t r = 0; r < test.rows; ++r) {
    if (r < begin || r >= end) {
      y.check_untouched(r);
      rstd.check_untouched(r);
      continue;
    }
    row.x = row_of(x, call.x.rows, r, d);
    gated_reference(call, weight, row_of(gate, call.gate.rows, r, d), row);
    y.check_row(what, r, row.y);
    if (norm.rstd) rstd.check_row(what + " rstd", r, row.rstd);
  }
}

// What a backward call has beside a forward one.
struct BackwardCase {
  Case norm;  // its call: x_type, compute, d, groups, width, eps and so on
  DType dy_type = DType::f32;
  DType gate_type = DType::none;  // or none
  bool gate_before = false;
  bool dense = false;  // no strides between the elements of a row
};

// The call that a case becomes, with the memory that it reads.
struct BackwardTest {
  BackwardCall call;  // no results
  Array x, dy, dresidual, gate, weight, rstd;
  DType dweight_type = DType::f32;
  bool dx = false, dgate = false, dweight = false, dbias = false;
  std::int64_t dx_offset = 0, result_offset = 0;
  bool flush = false;
};

// The rows of a call are mostly ordinary, since one with a NaN reaches every sum over rows.
enum class Mood { ordinary, finite, any };

Data data_of(Mood mood, Random& random) {
  if (mood == Mood::ordinary || random.below(3)) return Data::ordinary;
  return static_cast<Data>(random.below(mood == Mood::any ? 8 : 6));  // the last two not finite
}

// Makes u = dy * w of a row a multiple of what is normalised, but for a relative error.
void make_parallel(BackwardTest& test, std::int64_t row, double error, Random& random) {
  const BackwardCall& call = test.call;
  const std::vector<double> x = row_of(test.x, call.x.rows, row, call.d);
  std::vector<double> act(x.size(), 1.0);
  if (call.gate.data) {
    act = row_of(test.gate, call.gate.rows, row, call.d);
    for (double& value : act) value = activation(call.activation, value);
  }
  const double factor = std::ldexp(random.bell(), static_cast<int>(random.below(21)) - 10);
  const std::int64_t first = offset_of(call.dy.rows.outer, row);
  for (std::int64_t i = 0; i < call.d; ++i) {
    const auto at = static_cast<std::size_t>(i);
    double value = factor * x[at] / test.weight.get(i) * (1.0 + error * random.bell());
    value = call.gate_before ? value * act[at] : value / act[at];
    test.dy.set(first + i * call.dy.rows.stride, std::isfinite(value) ? value : factor);
  }
}

// As the operation decides it.
bool reads_in_place(const BackwardCall& call) {
  if (call.gate.data || call.width != call.d / call.groups) return false;
  if (call.x.rows.stride != 1 || call.dy.rows.stride != 1) return false;
  if (call.dresidual.data &&
      (call.dresidual.rows.stride != 1 || call.dresidual.type != call.x.type)) {
    return false;
  }
  if (call.compute == DType::f64) return call.dy.type == DType::f64;
  if (call.x.type == DType::f64) return false;
  return call.dy.type == call.x.type || call.dy.type == DType::f32;
}

// rstd as the forward gives it.
Array rstd_of(const BackwardTest& test) {
  const BackwardCall& call = test.call;
  Array rstd(call.compute, call.rows * call.groups, 0);
  Array y(call.compute, call.rows * call.d, 0);
  GatedCall gated;
  ForwardCall& norm = gated.norm;
  norm.x = call.x.data;
  norm.x_rows = call.x.rows;
  norm.x_type = call.x.type;
  norm.y = y.data();
  norm.y_type = norm.compute = norm.multiply = call.compute;
  norm.rstd = rstd.data();
  norm.d = call.d;
  norm.groups = call.groups;
  norm.width = call.width;
  norm.eps_in = call.eps_in;
  norm.divide = call.divide;
  norm.eps = call.eps;
  if (call.gate.data && call.gate_before) {
    gated.x = call.x;
    gated.gate = call.gate;
    gated.activation = call.activation;
    Array scratch(call.compute, scratch_elements(gated), 0);
    rmsnorm::scalar_kernels()->gated_forward(gated, 0, call.rows, scratch.data());
  } else {
    rmsnorm::scalar_kernels()->forward(norm, 0, call.rows);
  }
  return rstd;
}

Array filled_like(Operand& operand, std::int64_t rows, std::int64_t d, std::int64_t offset,
                  Mood mood, Random& random) {
  Array array = unfilled(operand.type, operand.rows, rows, d, offset);
  for (std::int64_t r = 0; r < rows; ++r) {
    fill_row(array, operand.type, operand.rows, r, d, data_of(mood, random), random);
  }
  operand.data = array.data();
  return array;
}

// A NaN of any sign and payload, but for one bit, so that it does not become Result's poison.
std::uint64_t any_nan(DType compute, Random& random) {
  const int fraction_bits = compute == DType::f64 ? 52 : 23;
  const std::uint64_t payload = (random.bits() >> (64 - fraction_bits)) | 1;
  const std::uint64_t infinity = encode(compute, random.coin() ? kInf : -kInf);
  return infinity | (payload & ~(std::uint64_t{1} << (fraction_bits - 2)));
}

BackwardTest backward_test(const BackwardCase& from, Random& random) {
  BackwardTest test;
  BackwardCall& call = test.call;
  const ForwardCall& norm = from.norm.call;
  const std::int64_t d = norm.d;
  const std::int64_t rows = from.norm.rows;
  call.rows = rows;
  call.d = d;
  call.groups = norm.groups;
  call.width = norm.width;
  call.eps_in = norm.eps_in;
  call.divide = norm.divide;
  call.compute = norm.compute;
  call.eps = rounded(call.compute, norm.eps);
  call.block_rows = rmsnorm::kChunkRows * (random.coin() ? 1 : 1 + random.below(3));
  const auto lay = [&](Operand& operand, DType type) {
    operand.type = type;
    const std::int64_t stride = from.dense || random.below(5) ? 1 : random.below(4);
    operand.rows = lay_out(static_cast<Layout>(random.below(4)), rows, d, stride);
  };
  const Mood mood = static_cast<Mood>(random.below(8) ? random.below(2) : 2);
  lay(call.x, norm.x_type);
  test.x = filled_like(call.x, rows, d, from.norm.x_offset, mood, random);
  if (from.gate_type != DType::none) {
    call.activation = random.coin() ? Gate::silu : Gate::sigmoid;
    call.gate_before = from.gate_before;
    lay(call.gate, from.gate_type);
    test.gate = filled_like(call.gate, rows, d, random.below(33), Mood::ordinary, random);
    const std::int64_t kind = random.below(8);
    for (std::int64_t i = 0; i < test.gate.size() && kind < 3; ++i) {
      test.gate.set(i, kind == 0 ? gate_of(from.gate_type, random) : random.bell() * 40.0);
    }
  }
  test.weight = Array(call.compute, d, from.norm.parameter_offset);
  const std::int64_t weights = random.below(8);
  for (std::int64_t i = 0; i < d; ++i) {
    test.weight.set(i, weights == 0   ? parameter_of(random)
                       : weights == 1 ? 1.0
                                      : 1.0 + 0.2 * random.bell());
    if (std::isnan(test.weight.get(i))) test.weight.set_bits(i, any_nan(call.compute, random));
  }
  lay(call.dy, from.dy_type);
  test.dy = filled_like(call.dy, rows, d, random.below(33), mood, random);
  // Only rows that are all tiny have tiny sums.
  const bool tiny = random.below(16) == 0;
  for (std::int64_t r = 0; r < rows && tiny; ++r) {
    fill_row(test.dy, from.dy_type, call.dy.rows, r, d, Data::tiny, random);
  }
  for (std::int64_t r = 0; r < rows && mood != Mood::ordinary && !tiny; ++r) {
    constexpr double kErrors[] = {0.0, 0.0, 0.01, 0.1, 1.0};
    if (random.below(4) == 0) make_parallel(test, r, random.pick(kErrors), random);
  }
  test.dx = random.below(6) != 0;
  test.dweight = random.below(4) != 0;
  test.dweight_type = random.coin() ? call.x.type : random.pick(kTypes);
  if (from.gate_type != DType::none) {
    test.dgate = random.below(4) != 0;
  } else {
    test.dbias = random.below(3) == 0;
    if (random.below(3) == 0) {
      lay(call.dresidual, random.below(4) ? call.x.type : random.pick(kTypes));
      test.dresidual = filled_like(call.dresidual, rows, d, random.below(33), mood, random);
    }
  }
  if (!test.dx && !test.dgate && !test.dbias) test.dweight = true;
  // The loops for any operands serve those that could be read in place as well.
  call.direct = reads_in_place(call) && random.below(8) != 0;
  call.split = call.direct && call.x.type == DType::bf16 && call.dy.type == DType::bf16;
  test.dx_offset = random.below(33);
  test.result_offset = random.below(33);
  const std::int64_t line = 64 / size_of(call.x.type);
  if (call.direct && test.dx && d / call.groups % line == 0 && random.coin()) {
    call.stream = true;
    test.dx_offset = line * random.below(3);
  }
  test.flush = random.below(8) == 0;
  test.rstd = rstd_of(test);
  call.rstd = test.rstd.data();
  return test;
}

// [0, count) in up to `most` pieces, as threads may share it: the ends of each.
std::vector<std::pair<std::int64_t, std::int64_t>> pieces_of(std::int64_t count, std::int64_t most,
                                                             Random& random) {
  std::vector<std::int64_t> cuts = {0, count};
  for (std::int64_t i = 1; i < most; ++i) cuts.push_back(random.below(count + 1));
  std::sort(cuts.begin(), cuts.end());
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;
  for (std::size_t i = 1; i < cuts.size(); ++i) pieces.emplace_back(cuts[i - 1], cuts[i]);
  if (most > 1 && random.coin()) std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

struct Gradients {
  Result dx, dgate, dweight, dbias;
};

// The whole backward, its blocks and the columns of their sums in up to `most` pieces.
Gradients gradients_of(const Kernels& kernels, const BackwardTest& test, const std::string& what,
                       std::int64_t most, Random& random) {
  BackwardCall call = test.call;
  const std::int64_t blocks = (call.rows + call.block_rows - 1) / call.block_rows;
  const DType compute = call.compute;
  const auto shape = [&](DType type, bool wanted, std::int64_t rows, std::int64_t offset) {
    return Result(type, wanted ? rows : 0, call.d, offset);
  };
  Gradients result{shape(call.x.type, test.dx, call.rows, test.dx_offset),
                   shape(call.gate.type, test.dgate, call.rows, test.result_offset),
                   shape(test.dweight_type, test.dweight, 1, test.result_offset),
                   shape(compute, test.dbias, 1, test.result_offset)};
  Result dweight_sums = shape(compute, test.dweight, blocks, test.result_offset);
  Result dbias_sums = shape(compute, test.dbias, blocks, test.result_offset);
  Array weight = test.weight.copy();
  kernels.order_weight(call, weight.data());
  call.weight = weight.data();
  if (test.dx) call.dx = result.dx.data();
  if (test.dgate) call.dgate = result.dgate.data();
  if (test.dweight) call.dweight = dweight_sums.data();
  if (test.dbias) call.dbias = dbias_sums.data();
  for (const auto& [begin, end] : pieces_of(blocks, most, random)) {
    Result scratch(compute, 1, scratch_elements(call), 0);
    kernels.backward(call, begin, end, scratch.data());
    scratch.check_guards(what + " scratch");
  }
  const auto add_up = [&](Result& sums, DType type, Result& to) {
    for (const auto& [begin, end] : pieces_of(call.d, most, random)) {
      kernels.add_blocks(call, sums.data(), begin, end);
    }
    sums.check_guards(what + " sums of blocks");
    kernels.store_sums(call, sums.data(), type, to.data());
  };
  if (test.dweight) add_up(dweight_sums, test.dweight_type, result.dweight);
  if (test.dbias) add_up(dbias_sums, compute, result.dbias);
  result.dx.check_guards(what + " dx");
  result.dgate.check_guards(what + " dgate");
  result.dweight.check_guards(what + " dweight");
  result.dbias.check_guards(what + " dbias");
  return result;
}

// Compares the gradients with those of the plain C++ kernels, which take all blocks at once.
void run_backward(const Kernels& kernels, const BackwardCase& from, Random& random) {
  const BackwardTest test = backward_test(from, random);
  const BackwardCall& call = test.call;
  const std::string what = describe(call) + (test.flush ? " subnormals off" : "") + " call " +
                           std::to_string(tally.calls) + " wants";
  const Gradients wanted = gradients_of(*rmsnorm::scalar_kernels(), test, what, 1, random);
  const Gradients got = [&] {
    const FlushMode mode(test.flush);
    return gradients_of(kernels, test, what, 1 + random.below(4), random);
  }();
  ++tally.calls;
  tally.values +=
      call.rows * call.d * (test.dx + test.dgate) + call.d * (test.dweight + test.dbias);
  got.dx.check_equal(what + " dx", wanted.dx);
  got.dgate.check_equal(what + " dgate", wanted.dgate);
  got.dweight.check_equal(what + " dweight", wanted.dweight);
  got.dbias.check_equal(what + " dbias", wanted.dbias);
}

// The constants that any call may have, whatever its types.
void vary(Case& test, Random& random) {
  constexpr double kEps[] = {0.0, 1e-6, 1e-5, 0x1p-23, 1e-12, 0x1p-52, 1e-30, 1e-42, 1e-310, 1.0};
  ForwardCall& call = test.call;
  call.eps = random.pick(kEps);
  const std::int64_t kind = random.below(8);
  call.eps_in = kind == 0 ? EpsIn::root : kind == 1 ? EpsIn::clamp : EpsIn::mean_square;
  call.divide = call.eps_in == EpsIn::clamp || random.below(5) != 0;
  call.offset = random.below(4) == 0 ? 1.0 : 0.0;
  test.x_offset = random.below(33);
  test.y_offset = random.below(33);
  test.parameter_offset = random.below(33);
  test.layout = static_cast<Layout>(random.below(4));
}

// Every mix of types that a call can have.
std::vector<Case> all_types() {
  std::vector<Case> cases;
  for (const DType x : kTypes) {
    for (const DType compute : {DType::f32, DType::f64}) {
      if (compute == DType::f64 && x != DType::f64) continue;
      for (const DType multiply : {DType::f32, DType::f64}) {
        if (compute == DType::f64 && multiply == DType::f32) continue;
        for (const DType xhat : kXhatTypes) {
          // Of a row that is kept in double beside a float32 x.
          if (xhat == DType::f32 && compute == DType::f32) continue;
          for (const DType y : kTypes) {
            for (int bias = 0; bias < 3; ++bias) {
              Case test;
              test.call.x_type = x;
              test.call.compute = compute;
              test.call.multiply = multiply;
              test.call.xhat_type = xhat;
              test.call.y_type = y;
              test.biased = bias > 0;
              test.call.bias_after_round = bias == 2;
              cases.push_back(test);
              test.weighted = true;
              test.call.weight_type = DType::f32;
              cases.push_back(test);
              test.call.weight_type = DType::f64;
              if (multiply == DType::f64) cases.push_back(test);
              test.call.weight_type = x;
              if (is_half(x)) cases.push_back(test);
            }
          }
        }
      }
    }
  }
  return cases;
}

// Those that the vector loops serve.
std::vector<Case> vector_types() {
  std::vector<Case> cases;
  for (const Case& test : all_types()) {
    const ForwardCall& call = test.call;
    const bool floats = call.x_type == DType::f32;
    const bool y = call.y_type == call.x_type || call.y_type == call.compute ||
                   (floats && is_half(call.y_type));
    const bool half_xhat = floats && is_half(call.xhat_type) &&
                           (!is_half(call.y_type) || call.y_type == call.xhat_type);
    const bool xhat = call.xhat_type == DType::none ||
                      ((call.xhat_type == call.x_type || half_xhat) && test.weighted);
    const bool weight =
        !test.weighted || call.weight_type == call.compute || call.weight_type == call.x_type;
    if (y && xhat && weight && !test.biased && call.multiply == call.compute) {
      cases.push_back(test);
    }
  }
  return cases;
}

void check_types(const Kernels& kernels, Random& random) {
  constexpr std::int64_t kWidths[] = {1, 3, 7, 8, 9, 16, 31, 33, 40, 64, 100, 129, 257, 300, 516};
  for (Case test : all_types()) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      vary(test, random);
      test.call.d = test.call.width = random.pick(kWidths);
      test.call.x_rows.stride = random.below(3) ? 1 : random.below(4);
      test.rows = 1 + random.below(4);
      run(kernels, test, random);
    }
  }
}

void check_widths(const Kernels& kernels, Random& random) {
  const std::vector<Case> fast = vector_types();
  const std::vector<Case> all = all_types();
  for (std::int64_t d = 1; d <= 700; ++d) {
    std::vector<Case> cases = fast;
    for (int i = 0; i < 4; ++i) cases.push_back(all[random.below(all.size())]);
    for (Case& test : cases) {
      vary(test, random);
      test.call.d = test.call.width = d;
      test.rows = d <= 48 ? 1 + random.below(20) : 1 + random.below(3);
      run(kernels, test, random);
    }
  }
  constexpr std::int64_t kLarge[] = {768,  1000,  1023,  1024,  2048,  2049,  4096,  4099,  8191,
                                     8192, 11008, 16384, 16416, 32767, 32768, 65535, 65536, 65537};
  for (const std::int64_t d : kLarge) {
    for (int i = 0; i < 8; ++i) {
      Case test = i < 6 ? fast[random.below(fast.size())] : all[random.below(all.size())];
      vary(test, random);
      test.call.d = test.call.width = d;
      test.call.x_rows.stride = i == 7 ? 2 : 1;
      test.rows = i == 0 ? 2 : 1;
      test.only_ordinary = i < 5;
      run(kernels, test, random);
    }
  }
  for (const DType type : kTypes) {
    Case test;
    test.call.x_type = test.call.y_type = type;
    test.call.compute = test.call.multiply = type == DType::f64 ? DType::f64 : DType::f32;
    test.call.eps = 1e-6;
    test.only_ordinary = true;
    test.x_offset = 1;
    // The last is the narrowest row whose levels have more than 16 steps each.
    for (const std::int64_t d :
         {std::int64_t{1000003}, type == DType::f64 ? 8388625L : 16777249L}) {
      if (d > 1000003 && (quick || type == DType::f32 || type == DType::f16)) continue;
      test.call.d = test.call.width = d;
      run(kernels, test, random);
    }
  }
}

// Every short count at every alignment of x, y and the weight.
void check_alignments(const Kernels& kernels, Random& random) {
  for (Case test : vector_types()) {
    const std::int64_t positions = 64 / size_of(test.call.x_type);
    for (std::int64_t offset = 0; offset < positions; ++offset) {
      for (std::int64_t d = 1; d <= 70; d += 1 + offset % 3) {
        vary(test, random);
        test.call.d = test.call.width = d;
        test.layout = Layout::contiguous;
        test.x_offset = offset;
        test.y_offset = (offset + d) % positions;
        test.rows = 1 + d % 2;
        run(kernels, test, random);
      }
    }
  }
}

void check_groups(const Kernels& kernels, Random& random) {
  std::vector<Case> cases = vector_types();
  const std::vector<Case> all = all_types();
  for (int i = 0; i < 20; ++i) cases.push_back(all[random.below(all.size())]);
  for (Case test : cases) {
    for (std::int64_t part = 1; part <= 140; part += 1 + random.below(6)) {
      vary(test, random);
      test.call.groups = 2 + random.below(7);
      test.call.d = test.call.groups * part;
      test.call.width = part;
      test.call.x_rows.stride = random.below(4) ? 1 : 3;
      test.rows = 1 + random.below(5);
      run(kernels, test, random);
    }
    for (std::int64_t d = 1; d <= 300; d += 1 + random.below(20)) {
      vary(test, random);
      test.call.groups = 1;
      test.call.d = d;
      test.call.width = 1 + random.below(d);
      test.call.x_rows.stride = random.below(4) ? 1 : 2;
      test.rows = 1 + random.below(5);
      run(kernels, test, random);
    }
  }
}

// A width, and whether the row is in groups or only partly counted.
void vary_row(Case& test, std::int64_t part, Random& random) {
  vary(test, random);
  test.call.groups = random.below(4) ? 1 : 1 + random.below(4);
  test.call.d = test.call.groups * part;
  test.call.width = part;
  if (test.call.groups == 1 && random.below(8) == 0) test.call.width = 1 + random.below(part);
  test.rows = part <= 48 ? 1 + random.below(20) : 1 + random.below(4);
  test.biased = false;
}

void check_added(const Kernels& kernels, Random& random) {
  constexpr std::int64_t kWidths[] = {1,  3,  7,   8,   9,   16,  31,  33,
                                      40, 64, 100, 129, 257, 300, 516, 2049};
  const std::vector<Case> all = all_types();
  // The types that a single pass serves, at every width.
  constexpr DType kUsual[][3] = {
      {DType::bf16, DType::bf16, DType::bf16}, {DType::f16, DType::f16, DType::f16},
      {DType::f32, DType::f32, DType::f32},    {DType::f64, DType::f64, DType::f64},
      {DType::bf16, DType::bf16, DType::f32},  {DType::bf16, DType::f32, DType::f32},
      {DType::f16, DType::f16, DType::f32},    {DType::f16, DType::f32, DType::f32}};
  const auto any_norm_of = [&](DType sum) {
    for (;;) {
      const Case& test = all[random.below(static_cast<std::int64_t>(all.size()))];
      if (test.call.x_type == sum && !test.biased) return test;
    }
  };
  for (const auto& [x, residual, sum] : kUsual) {
    for (std::int64_t width = 1; width <= 300; ++width) {
      for (int repeat = 0; repeat < (quick ? 1 : 4); ++repeat) {
        Case test = any_norm_of(sum);
        vary_row(test, width, random);
        run_add(kernels, test, x, residual, random);
      }
    }
  }
  for (const DType x : kTypes) {
    for (const DType residual : kTypes) {
      for (const DType sum : kTypes) {
        for (const std::int64_t width : kWidths) {
          Case test = any_norm_of(sum);
          vary_row(test, width, random);
          run_add(kernels, test, x, residual, random);
        }
      }
    }
  }
}

void check_gated(const Kernels& kernels, Random& random) {
  constexpr std::int64_t kWidths[] = {1, 3, 7, 8, 9, 16, 31, 33, 64, 100, 129, 255, 256, 300, 600};
  for (Case test : all_types()) {
    if (test.biased) continue;
    for (const DType product : kXhatTypes) {
      if (product == DType::f32 || (product != DType::none && !test.weighted)) continue;
      for (int before = 0; before < 2; ++before) {
        const DType x_type = test.call.x_type;
        Case gated = test;
        if (before && product != DType::none) continue;
        if (before) gated.call.x_type = gated.call.compute;
        if (gated.weighted && is_half(gated.call.weight_type)) {
          gated.call.weight_type = DType::f32;
        }
        for (int repeat = 0; repeat < (quick ? 1 : 3); ++repeat) {
          vary_row(gated, random.pick(kWidths), random);
          run_gated(kernels, gated, x_type, random.below(2) ? x_type : random.pick(kTypes), before,
                    product, random);
        }
      }
    }
  }
}

void check_backward(const Kernels& kernels, Random& random) {
  const auto run_width = [&](BackwardCase from, std::int64_t part, std::int64_t rows) {
    vary_row(from.norm, part, random);
    from.norm.rows = rows;
    run_backward(kernels, from, random);
  };
  const auto some_rows = [&](std::int64_t part) {
    if (part <= 12 && random.below(8) == 0) return 200 + random.below(200);
    return part <= 100 ? 1 + random.below(40) : 1 + random.below(9);
  };
  // The types that the vector loops read in place, at every width.
  constexpr DType kInPlace[][2] = {{DType::bf16, DType::bf16}, {DType::bf16, DType::f32},
                                   {DType::f16, DType::f16},   {DType::f16, DType::f32},
                                   {DType::f32, DType::f32},   {DType::f64, DType::f64}};
  for (const auto& [x, dy] : kInPlace) {
    BackwardCase from;
    from.norm.call.x_type = x;
    from.norm.call.compute = x == DType::f64 ? DType::f64 : DType::f32;
    from.dy_type = dy;
    from.dense = true;
    for (std::int64_t part = 1; part <= 300; part += quick && part > 40 ? 5 : 1) {
      run_width(from, part, some_rows(part));
    }
    for (std::int64_t lines = 1; lines <= (quick ? 8 : 24); ++lines) {
      run_width(from, lines * (64 / size_of(x)), some_rows(64));
    }
    constexpr std::int64_t kLarge[] = {768, 1000, 1024, 2049, 4099, 8200, 16416};
    for (const std::int64_t part : kLarge) {
      if (quick && part > 4099) continue;
      run_width(from, part, 1 + random.below(6));
    }
  }
  // Every mix of types, with and without a gate.
  constexpr std::int64_t kWidths[] = {1,  2,  3,   5,   7,   8,   9,   15,  16,  17,  31,
                                      33, 64, 100, 129, 255, 256, 300, 516, 700, 2049};
  for (const DType x : kTypes) {
    for (const DType compute : {DType::f32, DType::f64}) {
      if (compute == DType::f64 && x != DType::f64) continue;
      for (const DType dy : kTypes) {
        for (int gate = 0; gate < 3; ++gate) {
          BackwardCase from;
          from.norm.call.x_type = x;
          from.norm.call.compute = compute;
          from.dy_type = dy;
          from.gate_before = gate == 1;
          for (int repeat = 0; repeat < (quick ? 3 : 12); ++repeat) {
            if (gate) from.gate_type = random.coin() ? x : random.pick(kTypes);
            const std::int64_t part = random.pick(kWidths);
            run_width(from, part, some_rows(part));
          }
        }
      }
    }
  }
}

// Stores past the cache: y and every part of a row begin on a multiple of 64 bytes.
void check_streaming(const Kernels& kernels, Random& random) {
  for (Case test : vector_types()) {
    const std::int64_t unit = 64 / size_of(test.call.y_type);
    for (std::int64_t blocks = 1; blocks <= 24; ++blocks) {
      vary(test, random);
      test.call.groups = 1 + random.below(3);
      test.call.width = blocks * unit;
      test.call.d = test.call.width * test.call.groups;
      test.call.stream = true;
      test.y_offset = unit * random.below(3);
      test.rows = 1 + random.below(10);
      run(kernels, test, random);
    }
  }
}

// Rows that are redone have the same bits where the caller's thread flushes subnormals.
void check_flush_mode(const Kernels& kernels) {
  for (const DType type : {DType::f32, DType::f64, DType::bf16}) {
    for (std::int64_t d = 1; d <= 80; d += 3) {
      ForwardCall call;
      call.x_type = call.y_type = type;
      call.compute = call.multiply = type == DType::f64 ? DType::f64 : DType::f32;
      call.d = call.width = d;
      Arrays arrays;
      arrays.x = Array(type, d, 0);
      for (std::int64_t i = 0; i < d; ++i) {
        arrays.x.set(i, static_cast<double>(i + 1) * (type == DType::f64   ? 0x1p-1070
                                                      : type == DType::f32 ? 0x1p-146
                                                                           : 0x1p-133));
      }
      compare(kernels, call, arrays, 1, 0, 1, 0, true);
    }
  }
}

// Floats of every sign and exponent, every leading part of the significand that a half type keeps,
// and the trailing parts around its ties.
std::vector<std::uint32_t> float_patterns(DType half) {
  const int dropped = 24 - format_of(half).digits;
  const std::uint32_t tie = 1u << (dropped - 1);
  const std::uint32_t trailing[] = {0,   1,       tie / 2,       tie - 1,
                                    tie, tie + 1, tie + tie / 2, 2 * tie - 1};
  std::vector<std::uint32_t> patterns;
  for (std::uint32_t leading = 0; leading < 1u << (32 - dropped); leading += quick ? 7 : 1) {
    for (const std::uint32_t low : trailing) patterns.push_back(leading << dropped | low);
  }
  return patterns;
}

// A row whose rstd is 1, so that y shows what the conversions do to x and to the weight.
ForwardCall unit_call(DType x, DType y, std::int64_t d) {
  ForwardCall call;
  call.x_type = x;
  call.y_type = y;
  call.compute = call.multiply = x == DType::f64 ? DType::f64 : DType::f32;
  call.d = d;
  call.width = 1;  // of element 0, which is 1
  return call;
}

void check_conversions(const Kernels& kernels, Random& random) {
  constexpr std::int64_t kHalves = 65536;
  for (const DType half : {DType::bf16, DType::f16}) {
    // Widening: every half as x, then as the weight.
    for (const DType y : {DType::f32, half, DType::f64}) {
      for (int as_weight = 0; as_weight < 2; ++as_weight) {
        ForwardCall call = unit_call(half, y, kHalves + 1);
        Arrays arrays;
        arrays.x = Array(half, call.d, 3);
        for (std::int64_t i = 0; i < call.d; ++i) arrays.x.set(i, 1.0);
        if (as_weight) {
          call.weight_type = half;
          arrays.weight = Array(half, call.d, 5);
        }
        Array& all = as_weight ? arrays.weight : arrays.x;
        for (std::int64_t i = 0; i < kHalves; ++i) {
          all.set_bits(i + 1, static_cast<std::uint64_t>(i));
        }
        if (as_weight) all.set(0, 1.0);
        compare(kernels, call, arrays, 1, 0, 1, 1);
      }
    }
    // Narrowing, in the vector loops: 1 times a float weight.
    const std::vector<std::uint32_t> patterns = float_patterns(half);
    constexpr std::size_t kPiece = 1 << 16;
    for (std::size_t first = 0; first < patterns.size(); first += kPiece) {
      const auto count = static_cast<std::int64_t>(std::min(kPiece, patterns.size() - first));
      ForwardCall call = unit_call(half, half, count);
      call.weight_type = DType::f32;
      call.stream = first / kPiece % 2;
      Arrays arrays;
      arrays.x = Array(half, count, 0);
      arrays.weight = Array(DType::f32, count, 0);
      for (std::int64_t i = 0; i < count; ++i) {
        arrays.x.set(i, 1.0);
        arrays.weight.set_bits(i, patterns[first + static_cast<std::size_t>(i)]);
      }
      compare(kernels, call, arrays, 1, 0, 1, 0);

      // And a row of floats, rounded to the half: in a vector loop, and, where the floats come as
      // doubles, in the loop for any mix of types.
      for (const DType x : {DType::f32, DType::f64}) {
        call = unit_call(x, half, count);
        call.compute = call.multiply = DType::f32;
        Arrays plain;
        plain.x = Array(x, count, 0);
        plain.x.set(0, 1.0);
        for (std::int64_t i = 1; i < count; ++i) plain.x.set(i, arrays.weight.get(i));
        compare(kernels, call, plain, 1, 0, 1, 0);
      }
    }
    // Rounding before the weight: every half times many an rstd, which eps alone determines.
    for (int repeat = 0; repeat < (quick ? 8 : 40); ++repeat) {
      ForwardCall call = unit_call(half, repeat % 2 ? half : DType::f32, kHalves + 1);
      call.xhat_type = half;
      call.eps = std::ldexp(1.0 + random.uniform(), static_cast<int>(random.below(180)) - 90);
      if (repeat == 0) call.eps = 0x1p-2;  // rstd is 2
      if (repeat == 1) call.eps = 0x1p40;  // rstd is 2^-20
      call.weight_type = repeat % 4 < 2 ? DType::f32 : half;
      Arrays arrays;
      arrays.x = Array(half, call.d, 0);
      arrays.weight = Array(call.weight_type, call.d, 0);
      for (std::int64_t i = 0; i <= kHalves; ++i) {
        arrays.x.set_bits(i, static_cast<std::uint64_t>(i % kHalves));  // element 0 is 0
        arrays.weight.set(i, 1.0);
      }
      compare(kernels, call, arrays, 1, 0, 1, 0);
    }
  }
}

void check_prepared(const Kernels& kernels, Random& random) {
  constexpr DType kForms[][2] = {
      {DType::f32, DType::f32}, {DType::f32, DType::f64}, {DType::f64, DType::f64}};
  const auto check = [&](DType type, DType compute, DType to, double offset, Array& weight,
                         std::int64_t result_offset) {
    Array result(to, weight.size() + 2 * kGuard, result_offset);
    const std::uint64_t poison = result.bits(0);
    kernels.prepare_weight(type, weight.data(), weight.size(), offset, compute, to,
                           static_cast<char*>(result.data()) + kGuard * size_of(to));
    ++tally.calls;
    tally.values += weight.size();
    const std::string what = std::string("prepare_weight ") + name_of(type) + " to " + name_of(to) +
                             " in " + name_of(compute) + " offset " + std::to_string(offset);
    for (std::int64_t i = 0; i < kGuard; ++i) {
      const std::int64_t last = result.size() - 1 - i;
      if (result.bits(i) != poison) fail(what, 0, i, to, result.bits(i), kNan);
      if (result.bits(last) != poison) fail(what, 0, last, to, result.bits(last), kNan);
    }
    for (std::int64_t i = 0; i < weight.size(); ++i) {
      double wanted = weight.get(i);
      if (offset != 0.0) wanted = rounded(compute, rounded(compute, wanted) + offset);
      wanted = rounded(to, wanted);
      const std::uint64_t got = result.bits(kGuard + i);
      if (!same(to, got, wanted)) fail(what, 0, i, to, got, wanted);
    }
  };
  for (const DType type : kTypes) {
    for (const auto& [compute, to] : kForms) {
      for (const double offset : {0.0, 1.0}) {
        for (std::int64_t count = 0; count <= 140; ++count) {
          Array weight(type, count, count % 17);
          for (std::int64_t i = 0; i < count; ++i) weight.set(i, parameter_of(random));
          check(type, compute, to, offset, weight, (count * 5) % 19);
        }
        Array wide(type, 65536, 0);
        for (std::int64_t i = 0; i < wide.size(); ++i) {
          wide.set_bits(i, is_half(type) ? static_cast<std::uint64_t>(i) : random.bits());
        }
        check(type, compute, to, offset, wide, 0);
      }
    }
  }
}

bool check(const Kernels* kernels, const char* name) {
  tally = {};
  std::printf("%s: ", name);
  if (!kernels) {
    std::printf("not in this build\n");
    return false;
  }
  std::fflush(stdout);
  Random random(20260101);
  check_conversions(*kernels, random);
  check_prepared(*kernels, random);
  check_flush_mode(*kernels);
  check_types(*kernels, random);
  check_widths(*kernels, random);
  check_alignments(*kernels, random);
  check_groups(*kernels, random);
  check_streaming(*kernels, random);
  check_added(*kernels, random);
  check_gated(*kernels, random);
  check_backward(*kernels, random);
  std::printf("%lld calls, %lld values, %s\n", static_cast<long long>(tally.calls),
              static_cast<long long>(tally.values),
              tally.wrong ? (std::to_string(tally.wrong) + " DIFFER").c_str() : "all bits equal");
  return tally.wrong == 0;
}

bool check_native() {
  bool good = check(rmsnorm::scalar_kernels(), "scalar");
  const Kernels* best = rmsnorm::kernels();
  std::printf("the best of this machine is %s\n", best ? best->name : rmsnorm::isa_error());
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    good &= check(rmsnorm::avx2_kernels(), "avx2");
  }
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    good &= check(rmsnorm::avx512_kernels(), "avx512");
    if (__builtin_cpu_supports("avx512bf16")) {
      good &= check(rmsnorm::avx512_bf16_kernels(), "avx512 with bf16 instructions");
    }
  }
#elif defined(__aarch64__)
  good &= check(rmsnorm::neon_kernels(), "neon");
#endif
  return good && best;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view isa = argc == 2 || argc == 3 ? argv[1] : "";
  quick = argc == 3 && std::string_view(argv[2]) == "quick";
  bool good = false;
  if (isa == "native") {
    good = check_native();
  } else if (isa == "scalar") {
    good = check(rmsnorm::scalar_kernels(), "scalar");
  } else if (isa == "avx2") {
    good = check(rmsnorm::avx2_kernels(), "avx2");
  } else if (isa == "avx512") {
    good = check(rmsnorm::avx512_kernels(), "avx512");
    good &= check(rmsnorm::avx512_bf16_kernels(), "avx512 with bf16 instructions");
  } else if (isa == "neon") {
    good = check(rmsnorm::neon_kernels(), "neon");
  } else {
    std::fprintf(stderr, "usage: bit_grid native|scalar|avx2|avx512|neon [quick]\n");
    return 2;
  }
  return good ? 0 : 1;
}
