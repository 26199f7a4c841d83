#include "spec.h"

#include <charconv>
#include <cmath>
#include <memory>
#include <set>
#include <stdexcept>
#include <unordered_map>

namespace rmsnorm {
namespace {

[[noreturn]] void refuse(std::string_view text, std::string_view part) {
  throw std::invalid_argument("rmsnorm: '" + std::string(text) + "' is not an encoded NormSpec: '" +
                              std::string(part) + "'");
}

template <class T>
bool parse_number(std::string_view value, T& result) {
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  return error == std::errc() && end == value.data() + value.size();
}

template <class T>
struct Name {
  std::string_view name;
  T value;
};

template <class T, std::size_t N>
bool choose(std::string_view value, const Name<T> (&names)[N], T& result) {
  for (const Name<T>& candidate : names) {
    if (candidate.name != value) continue;
    result = candidate.value;
    return true;
  }
  return false;
}

constexpr Name<EpsIn> kEpsIn[] = {
    {"mean_square", EpsIn::mean_square}, {"root", EpsIn::root}, {"clamp", EpsIn::clamp}};
constexpr Name<bool> kReduce[] = {{"mean", true}, {"sum", false}};
constexpr Name<bool> kAccumulate[] = {{"input", true}, {"float32", false}};
constexpr Name<Rounding> kRounding[] = {{"before_weight", Rounding::before_weight},
                                        {"after_weight", Rounding::after_weight},
                                        {"weight_dtype", Rounding::weight_dtype}};
constexpr Name<Output> kOutput[] = {
    {"input", Output::input}, {"promote", Output::promote}, {"weight", Output::weight}};

constexpr Name<Gate> kGate[] = {
    {"None", Gate::none}, {"silu", Gate::silu}, {"sigmoid", Gate::sigmoid}};
constexpr Name<bool> kGateOrder[] = {{"before", true}, {"after", false}};

bool set_field(Spec& spec, std::string_view name, std::string_view value) {
  if (name == "eps") {
    spec.has_eps = value != "None";
    return !spec.has_eps ||
           (parse_number(value, spec.eps) && spec.eps >= 0.0 && std::isfinite(spec.eps));
  }
  if (name == "eps_in") return choose(value, kEpsIn, spec.eps_in);
  if (name == "reduce") return choose(value, kReduce, spec.mean);
  if (name == "offset") {
    return parse_number(value, spec.offset) && (spec.offset == 0.0 || spec.offset == 1.0);
  }
  if (name == "accumulate") return choose(value, kAccumulate, spec.accumulate_input);
  if (name == "rounding") return choose(value, kRounding, spec.rounding);
  if (name == "output") return choose(value, kOutput, spec.output);
  if (name == "groups") return parse_number(value, spec.groups) && spec.groups >= 1;
  if (name == "partial") {
    return parse_number(value, spec.partial) && spec.partial > 0.0 && spec.partial <= 1.0;
  }
  if (name == "gate") return choose(value, kGate, spec.gate);
  return name == "gate_order" && choose(value, kGateOrder, spec.gate_before);
}

Spec parse(std::string_view text) {
  Spec spec;
  std::set<std::string_view> seen;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::size_t end = rest.find(';');
    const std::string_view part = rest.substr(0, end);
    rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
    const std::size_t equals = part.find('=');
    if (equals == std::string_view::npos || !seen.insert(part.substr(0, equals)).second ||
        !set_field(spec, part.substr(0, equals), part.substr(equals + 1))) {
      refuse(text, part);
    }
  }
  if ((spec.partial < 1.0 && spec.groups > 1) || (spec.eps_in == EpsIn::clamp && !spec.mean)) {
    refuse(text, "a combination that NormSpec refuses");
  }
  return spec;
}

struct Hash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>()(text);
  }
};

}  // namespace

const Spec& parse_spec(std::string_view text) {
  // Per thread, so that no lock is needed, and entries are dropped only when a later call of the
  // same thread makes a new one: a reference stays valid for the call that asked for it.
  thread_local std::unordered_map<std::string, Spec, Hash, std::equal_to<>> cache;
  const auto found = cache.find(text);
  if (found != cache.end()) return found->second;
  const Spec spec = parse(text);
  constexpr std::size_t kMostSpecs = 4096;
  if (cache.size() >= kMostSpecs) cache.clear();
  return cache.emplace(std::string(text), spec).first->second;
}

std::int64_t statistics_width(const Spec& spec, std::int64_t d) {
  if (spec.partial >= 1.0) return d / spec.groups;
  // Nine decimals: 0.1 * 30 is 3.0000000000000004 in binary.
  const double exact = spec.partial * static_cast<double>(d);
  const auto width = static_cast<std::int64_t>(std::ceil(std::nearbyint(exact * 1e9) / 1e9));
  return width < 1 ? 1 : width > d ? d : width;
}

}  // namespace rmsnorm
