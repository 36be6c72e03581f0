#include "dtensor/runtime/decisions_impl.h"

#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <bit>

namespace dtensor {
namespace {

std::uint64_t bits(double value) { return std::bit_cast<std::uint64_t>(value); }

std::uint64_t number_type(const c10::IValue& value) {
  if (value.isInt()) return 11;
  if (value.isDouble()) return 12;
  if (value.isBool()) return 13;
  return value.isNone() ? 1 : 14;
}

std::vector<std::uint64_t>& memory() {
  thread_local std::vector<std::uint64_t> words;
  return words;
}

}  // namespace

CallKey::CallKey(const OpInfo& info, std::int64_t rank) : words_(memory()), scales_(info.scales) {
  words_.clear();
  add(reinterpret_cast<std::uintptr_t>(&info));
  // The default type is what integers become in a division, or with a number that is none.
  add(static_cast<std::uint64_t>(rank) << 8 | static_cast<std::uint64_t>(c10::get_default_dtype_as_scalartype()));
}

void CallKey::add_number(std::size_t arg, std::size_t item, const at::Tensor& plain) {
  const bool wrapped = plain.unsafeGetTensorImpl()->is_wrapped_number();
  add(arg * 65536 + item);
  add(static_cast<std::uint64_t>(plain.scalar_type()) * 2 + (wrapped ? 1 : 0));
  if (scales_) add_magnitude(number_of(plain));
}

void CallKey::add_magnitude(const StaticArg& number) {
  const auto [large, small] = number.magnitude();
  add(number.is_none() ? 64 : static_cast<std::uint64_t>(large) * 4 + small);
}

void CallKey::add_value(const c10::IValue& value) {
  if (value.isNone()) {
    add(1);
  } else if (value.isInt()) {
    add(2);
    add(static_cast<std::uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    add(value.toBool() ? 3 : 4);
  } else if (value.isDouble()) {
    add(5);
    add(bits(value.toDouble()));
  } else if (value.isIntList()) {
    const auto list = value.toIntList();
    add(6 + 16 * list.size());
    for (std::size_t i = 0; i < list.size(); ++i) add(static_cast<std::uint64_t>(list.get(i)));
  } else {
    const StaticArg arg = static_arg({}, value);
    const Dims ints = arg.as_ints();
    add(7 + 16 * ints.size());
    for (const std::int64_t i : ints) add(static_cast<std::uint64_t>(i));
    add(bits(arg.as_double()));
    add(arg.as_text().size());
    for (const char c : arg.as_text()) add(static_cast<unsigned char>(c));
  }
}

void CallKey::add_static(KeyUse use, const c10::IValue& value) {
  switch (use) {
    case KeyUse::kNothing:
      return;
    case KeyUse::kPresence:
      add(value.isNone() ? 1 : 15);
      return;
    case KeyUse::kPlain:
      // An int may be a size or a dim; only what cannot be one is a mere number.
      if (value.isDouble() || value.isComplexDouble()) {
        add(number_type(value));
        return;
      }
      break;
    case KeyUse::kType:
      add(number_type(value));
      return;
    case KeyUse::kSign:
      add(number_type(value));
      add(static_cast<std::uint64_t>(static_arg({}, value).sign() + 1));
      return;
    case KeyUse::kScale: {
      const StaticArg number = static_arg({}, value);
      add(number_type(value));
      if (!partial_) return;
      add(static_cast<std::uint64_t>(number.sign() + 1));
      return add_magnitude(number);
    }
    case KeyUse::kValue:
      break;
  }
  add_value(value);
}

void CallKey::add_static(KeyUse use, at::IntArrayRef ints) {
  if (use != KeyUse::kPlain && use != KeyUse::kValue) return add_static(use, c10::IValue(ints));
  add(6 + 16 * ints.size());
  for (const std::int64_t i : ints) add(static_cast<std::uint64_t>(i));
}

Decisions& Decisions::of_this_thread() {
  thread_local Decisions instance;
  return instance;
}

void Decisions::insert(std::shared_ptr<const Prepared> prepared) {
  Bucket& places = bucket(prepared->hash);
  std::rotate(places.begin(), places.end() - 1, places.end());
  if (!places[0]) ++stats_.entries;
  places[0] = std::move(prepared);
}

void Decisions::clear() {
  buckets_.clear();
  stats_.entries = 0;
}

}  // namespace dtensor
