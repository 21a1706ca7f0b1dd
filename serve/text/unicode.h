// Unicode data, from ICU: normal forms and the two character classes of added tokens.
// Thread promise: free functions without state of ours.
#pragma once

#include <string>
#include <string_view>

#include "kernels/base/status.h"

namespace stockpot {

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

// As `tokenizers` normalizes: characters younger than Unicode 9 stay as they are.
// REQUIRES: `text` is valid UTF-8.
Result<std::string> Normalize(NormalForm form, std::string_view text);

// The property White_Space.
bool IsWhitespace(char32_t code_point);

// What \w of the Unicode regex rules (UTS 18) accepts.
bool IsWordCharacter(char32_t code_point);

}  // namespace stockpot
