// Compares the kernels of an instruction set, bit for bit, with a plain implementation of the same
// definition: `bit_grid native|scalar|avx2|avx512|neon [quick]`. Exit 0: every bit is equal. Quick,
// for emulated processors, leaves out six of seven conversions and the rows above a million.
//
// The reference below holds every number as a double and rounds it to the type that the definition
// names after each operation. For float operands that gives the bits of float arithmetic: their
// product is exact in double, and the sum, quotient and square root of floats do not suffer from
// being rounded twice, since double has more than twice float's digits.

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
#include <vector>

#include "dispatch.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

using rmsnorm::DType;
using rmsnorm::EpsIn;
using rmsnorm::ForwardCall;
using rmsnorm::Kernels;

#if defined(__x86_64__)
using Quad = __float128;
#else
using Quad = long double;
#endif

constexpr DType kTypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
constexpr DType kXhatTypes[] = {DType::none, DType::bf16, DType::f16};
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
  std::vector<double> x;  // (d,) as stored
  std::vector<double> y;  // (d,) of y's type
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

// x * rstd of one group, in place; `x` holds values of the compute type.
void normalise(const ForwardCall& call, double* x, std::int64_t count) {
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
    finite = finite && std::isfinite(x[i]);
    largest = std::max(largest, std::fabs(x[i]));
  }
  if (!redo || !finite || (largest == 0.0 && call.eps == 0.0)) {
    const double rstd = inverse_rms(call, sum, rounded(compute, call.eps), compute);
    for (std::int64_t i = 0; i < count; ++i) x[i] = rounded(compute, x[i] * rstd);
    return;
  }
  // In double; a row of doubles is scaled so that its largest element, or eps, is near 1.
  int exponent = 0;
  if (compute == DType::f64) {
    const double floor = call.eps_in == EpsIn::mean_square ? std::sqrt(call.eps) : call.eps;
    exponent = -std::ilogb(std::max(largest, floor));
  }
  Quad exact = 0;
  for (std::int64_t i = 0; i < call.width; ++i) {
    const double scaled = std::ldexp(x[i], exponent);
    exact += static_cast<Quad>(scaled * scaled);
  }
  const double eps =
      std::ldexp(call.eps, call.eps_in == EpsIn::mean_square ? 2 * exponent : exponent);
  const double rstd = inverse_rms(call, static_cast<double>(exact), eps, DType::f64);
  for (std::int64_t i = 0; i < count; ++i) {
    x[i] = rounded(compute, std::ldexp(x[i], exponent) * rstd);
  }
}

// Turns row.x into row.y.
void reference(const ForwardCall& call, const Array& weight, const Array& bias, Row& row) {
  row.y = row.x;
  for (double& value : row.y) value = rounded(call.compute, value);
  const std::int64_t part = call.d / call.groups;
  for (std::int64_t g = 0; g < call.groups; ++g) normalise(call, &row.y[g * part], part);
  const auto keep = [&call](double v) { return rounded(call.multiply, v); };
  for (std::int64_t i = 0; i < call.d; ++i) {
    double value = row.y[i];
    if (call.weight) {
      double factor = weight.get(i);
      if (call.offset != 0.0) {
        const double narrowed = rounded(call.compute, factor);
        factor = rounded(call.compute, narrowed + call.offset);
      }
      if (call.xhat_type != DType::none) value = rounded(call.xhat_type, value);
      value = keep(value * factor);
    }
    if (call.bias) {
      if (call.bias_after_round) value = rounded(call.y_type, value);
      value = keep(value + bias.get(i));
    }
    row.y[i] = rounded(call.y_type, value);
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
      static_cast<long long>(c.width), static_cast<long long>(c.x_stride),
      c.bias_after_round ? " bias_after_round" : "", c.stream ? " stream" : "");
  return text;
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

struct Arrays {
  Array x, weight, bias;
};

// Calls the kernel for rows [begin, end) and compares every element of y, and what is around it.
void compare(const Kernels& kernels, ForwardCall call, Arrays& arrays, std::int64_t rows,
             std::int64_t begin, std::int64_t end, std::int64_t y_offset, bool flush = false) {
  Array y(call.y_type, rows * call.d + 2 * kGuard, y_offset);
  for (std::int64_t i = 0; i < kGuard; ++i) {
    y.set_bits(i, 0xa5a5a5a5a5a5a5a5u);
    y.set_bits(y.size() - 1 - i, 0xa5a5a5a5a5a5a5a5u);
  }
  const std::uint64_t guard = y.bits(0);
  const std::uint64_t poison = y.bits(kGuard);
  call.x = arrays.x.data();
  call.weight = arrays.weight.data();
  call.bias = arrays.bias.data();
  call.y = static_cast<char*>(y.data()) + kGuard * size_of(call.y_type);
  {
    const FlushMode mode(flush);
    kernels.forward(call, begin, end);
  }
  ++tally.calls;
  tally.values += (end - begin) * call.d;

  for (std::int64_t i = 0; i < kGuard; ++i) {
    if (y.bits(i) != guard || y.bits(y.size() - 1 - i) != guard) {
      if (++tally.wrong <= kReported) {
        std::printf("  written outside the result: %s\n", describe(call).c_str());
      }
      break;
    }
  }
  Row row;
  row.x.resize(static_cast<std::size_t>(call.d));
  for (std::int64_t r = 0; r < rows; ++r) {
    if (r < begin || r >= end) {
      for (std::int64_t i = 0; i < call.d; ++i) {
        const std::uint64_t got = y.bits(kGuard + r * call.d + i);
        if (got != poison) fail("row not asked for", r, i, call.y_type, got, kNan);
      }
      continue;
    }
    const std::int64_t first = offset_of(call.outer, r);
    for (std::int64_t i = 0; i < call.d; ++i) {
      row.x[static_cast<std::size_t>(i)] = arrays.x.get(first + i * call.x_stride);
    }
    reference(call, arrays.weight, arrays.bias, row);
    for (std::int64_t i = 0; i < call.d; ++i) {
      const std::uint64_t got = y.bits(kGuard + r * call.d + i);
      const double wanted = row.y[static_cast<std::size_t>(i)];
      if (!same(call.y_type, got, wanted)) {
        fail(describe(call), r, i, call.y_type, got, wanted);
      }
    }
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

void run(const Kernels& kernels, Case test, Random& random) {
  ForwardCall& call = test.call;
  const std::int64_t d = call.d;
  const std::int64_t span = (d - 1) * call.x_stride + 1;
  rmsnorm::OuterDims& outer = call.outer;
  outer.rank = 0;
  if (test.layout == Layout::transposed && test.rows % 2 == 0) {
    outer.rank = 2;
    outer.size[0] = test.rows / 2;
    outer.stride[0] = span;
    outer.size[1] = 2;
    outer.stride[1] = span * (test.rows / 2) + 1;
  } else if (test.rows > 1) {
    outer.rank = 1;
    outer.size[0] = test.rows;
    outer.stride[0] = test.layout == Layout::expanded ? 0
                      : test.layout == Layout::gaps   ? span + 5
                                                      : span;
  }
  if (call.compute == DType::f32) call.eps = static_cast<float>(call.eps);
  Arrays arrays;
  arrays.x = Array(call.x_type, offset_of(outer, test.rows - 1) + span, test.x_offset);
  for (std::int64_t r = 0; r < test.rows; ++r) {
    const auto data = test.only_ordinary || random.below(3) == 0
                          ? Data::ordinary
                          : static_cast<Data>(random.below(8));
    const std::int64_t first = offset_of(outer, r);
    for (std::int64_t i = 0; i < d; ++i) {
      arrays.x.set(first + i * call.x_stride, value_of(data, call.x_type, random));
    }
    const std::int64_t special = first + random.below(d) * call.x_stride;
    if (data == Data::infinite) arrays.x.set(special, random.coin() ? kInf : -kInf);
    if (data == Data::nan) arrays.x.set(special, kNan);
  }
  if (test.weighted) {
    arrays.weight = Array(call.weight_type, d, test.parameter_offset);
    for (std::int64_t i = 0; i < d; ++i) arrays.weight.set(i, parameter_of(random));
  }
  if (test.biased) {
    arrays.bias = Array(call.multiply, d, test.parameter_offset);
    for (std::int64_t i = 0; i < d; ++i) arrays.bias.set(i, 0.1 * parameter_of(random));
  }
  const std::int64_t begin = random.below(4) ? 0 : random.below(test.rows);
  const std::int64_t end =
      random.below(4) ? test.rows : begin + random.below(test.rows - begin + 1);
  compare(kernels, call, arrays, test.rows, begin, end, test.y_offset, test.flush);
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
    const bool y = call.y_type == call.x_type || call.y_type == call.compute;
    const bool xhat =
        call.xhat_type == DType::none || (call.xhat_type == call.x_type && test.weighted);
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
      test.call.x_stride = random.below(3) ? 1 : random.below(4);
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
      test.call.x_stride = i == 7 ? 2 : 1;
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
      test.call.x_stride = random.below(4) ? 1 : 3;
      test.rows = 1 + random.below(5);
      run(kernels, test, random);
    }
    for (std::int64_t d = 1; d <= 300; d += 1 + random.below(20)) {
      vary(test, random);
      test.call.groups = 1;
      test.call.d = d;
      test.call.width = 1 + random.below(d);
      test.call.x_stride = random.below(4) ? 1 : 2;
      test.rows = 1 + random.below(5);
      run(kernels, test, random);
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

      // And in the loop for any mix of types: a float row, rounded to the half.
      call = unit_call(DType::f32, half, count);
      Arrays plain;
      plain.x = Array(DType::f32, count, 0);
      plain.x.set(0, 1.0);
      for (std::int64_t i = 1; i < count; ++i) plain.x.set_bits(i, arrays.weight.bits(i));
      compare(kernels, call, plain, 1, 0, 1, 0);
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
