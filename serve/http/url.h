// The parts of a request target that handlers need (RFC 3986).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace stockpot {

// Nothing if a '%' is not followed by two hex digits. `plus_is_space`: in queries.
std::optional<std::string> PercentDecode(std::string_view text, bool plus_is_space);

// The decoded value of the first `name=` in a query, or nothing.
std::optional<std::string> QueryField(std::string_view query, std::string_view name);

}  // namespace stockpot
