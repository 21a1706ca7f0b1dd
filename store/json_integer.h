// Integers of JSON texts. nlohmann's own conversion also takes a float, cuts it, and is undefined
// where it does not fit (1e300).
#pragma once

#include <concepts>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

namespace stockpot {

// Throws std::exception unless it is an integer that T holds: for code that turns exceptions of
// nlohmann-json into a Status.
template <std::integral T>
T IntegerOrThrow(const nlohmann::json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<nlohmann::json::number_unsigned_t>();
    if (std::in_range<T>(number)) return static_cast<T>(number);
  } else if (value.is_number_integer()) {
    const auto number = value.get<nlohmann::json::number_integer_t>();
    if (std::in_range<T>(number)) return static_cast<T>(number);
  }
  throw std::range_error(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) +
                         " is no integer, or out of range");
}

}  // namespace stockpot
