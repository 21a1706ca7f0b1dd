// Characters that are younger than our regex engine.
//
// PCRE2 10.42 knows Unicode 14; the Oniguruma in `tokenizers` 0.22 knows Unicode 16. A letter that
// came between would be no letter to \p{L} here and give other ids. So before matching, such a
// character is replaced by an old one with the same general category (and script, for Han) and the
// same number of bytes: the ranges that match stay the same, and only ranges are used.
#pragma once

#include <string>
#include <string_view>

namespace stockpot {

// The text to match instead of `text`: `text` itself, or *storage. REQUIRES: valid UTF-8.
std::string_view WithStandIns(std::string_view text, std::string* storage);

}  // namespace stockpot
