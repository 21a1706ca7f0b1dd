// Which strings may be names. Names from outside end up in keys, URLs, file paths and logs.
// Thread promise: pure functions.
#pragma once

#include <cstddef>
#include <string_view>

namespace stockpot {

// Well-formed UTF-8: no overlong forms, no surrogates, nothing over U+10FFFF.
bool IsUtf8(std::string_view text);

// 1..max_bytes of valid UTF-8 without control characters.
bool IsPrintableName(std::string_view name, size_t max_bytes);

// A run or a base: [A-Za-z0-9][A-Za-z0-9._-]{0,127}. No '@', so that RUN@STEP has one reading.
bool IsValidRunName(std::string_view name);

// A group of tensors that are no weights: a run's name without '.', at most 64; not "merge" or
// "full", since RUN@STEP.GROUP names its state.
bool IsValidGroupName(std::string_view name);

// An alias or a route: 1..256 bytes, printable.
bool IsValidRouteName(std::string_view name);

// A file that travels with an artifact: a plain file name like a run name's, never a path, so that
// it can be written into any folder.
bool IsValidFileName(std::string_view name);

}  // namespace stockpot
