// UTF-8, where tokenizers care: length of characters, whole characters, broken input.
// Thread promise: free functions without state.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace stockpot {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

// What stands at text[offset].
struct Utf8Step {
  char32_t code_point = 0;  // U+FFFD where broken
  int bytes = 1;            // of the character, or of the maximal broken part (Unicode 3.9, D93b)
  bool valid = false;
  bool truncated = false;  // not valid, but a whole character could follow: the text ends within it
};

// REQUIRES: offset < text.size().
Utf8Step NextCodePoint(std::string_view text, size_t offset);

bool IsValidUtf8(std::string_view text);

// `text` with each maximal broken part replaced by U+FFFD, as Python's and Rust's lossy decoders
// do.
std::string ToValidUtf8(std::string_view text);

// The start of the last character: the largest offset < end that is no continuation byte.
// REQUIRES: 0 < end <= text.size(), valid UTF-8.
size_t PreviousCodePoint(std::string_view text, size_t end);

void AppendUtf8(char32_t code_point, std::string* out);

// Moves what is certain of *pending to *out: whole characters and U+FFFD for broken parts. A
// character whose end may still come stays in *pending (at most 3 bytes) unless `last`.
void DrainUtf8(std::string* pending, bool last, std::string* out);

}  // namespace stockpot
