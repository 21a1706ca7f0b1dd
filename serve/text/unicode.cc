#include "serve/text/unicode.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/uniset.h>

#include "kernels/base/check.h"

namespace stockpot {

namespace {

const icu::Normalizer2* Instance(NormalForm form, UErrorCode* error) {
  switch (form) {
    case NormalForm::kNfc:
      return icu::Normalizer2::getNFCInstance(*error);
    case NormalForm::kNfd:
      return icu::Normalizer2::getNFDInstance(*error);
    case NormalForm::kNfkc:
      return icu::Normalizer2::getNFKCInstance(*error);
    case NormalForm::kNfkd:
      return icu::Normalizer2::getNFKDInstance(*error);
  }
  return nullptr;
}

// Characters that `tokenizers` can normalize: its tables are those of Unicode 9.
const icu::UnicodeSet& OldCharacters() {
  static const icu::UnicodeSet set = [] {
    UErrorCode error = U_ZERO_ERROR;
    icu::UnicodeSet old(icu::UnicodeString("[:Age=9.0:]"), error);
    STOCKPOT_CHECK(U_SUCCESS(error), u_errorName(error));
    old.freeze();
    return old;
  }();
  return set;
}

}  // namespace

Result<std::string> Normalize(NormalForm form, std::string_view text) {
  UErrorCode error = U_ZERO_ERROR;
  const icu::Normalizer2* normalizer = Instance(form, &error);
  std::string out;
  if (U_SUCCESS(error)) {
    const icu::FilteredNormalizer2 filtered(*normalizer, OldCharacters());
    icu::StringByteSink<std::string> sink(&out, static_cast<int32_t>(text.size()));
    filtered.normalizeUTF8(0, icu::StringPiece(text.data(), static_cast<int32_t>(text.size())),
                           sink, nullptr, error);
  }
  if (U_FAILURE(error)) return Internal(std::string("ICU normalizer: ") + u_errorName(error));
  return out;
}

bool IsWhitespace(char32_t code_point) {
  return u_hasBinaryProperty(static_cast<UChar32>(code_point), UCHAR_WHITE_SPACE);
}

bool IsWordCharacter(char32_t code_point) {
  const auto c = static_cast<UChar32>(code_point);
  constexpr uint32_t kCategories = U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK;
  return u_hasBinaryProperty(c, UCHAR_ALPHABETIC) || (U_GET_GC_MASK(c) & kCategories) != 0 ||
         u_hasBinaryProperty(c, UCHAR_JOIN_CONTROL);
}

}  // namespace stockpot
