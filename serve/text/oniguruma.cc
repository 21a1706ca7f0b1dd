// Oniguruma's regex syntax (its Ruby flavour, as `tokenizers` compiles patterns) to PCRE2's.
//
// Every construct is either known to mean the same in both, or rewritten, or refused by name: a
// pattern that is silently read another way would give wrong ids.
#include <algorithm>
#include <array>
#include <cctype>

#include "serve/text/regex.h"
#include "serve/text/utf8.h"

namespace stockpot {
namespace {

// \w: letters, marks, digits, connectors and the two joiners. Begins and ends with a property, so
// that a '-' beside it in a class stays a literal.
constexpr std::string_view kWordItems = "\\p{Alphabetic}\\x{200c}\\x{200d}\\p{M}\\p{Nd}\\p{Pc}";

struct PropertyName {
  std::string_view oniguruma;  // lower case, without separators
  std::string_view pcre2;
};
// Names of more than two letters that are no scripts.
constexpr std::array kProperties = {
    PropertyName{"letter", "L"},
    PropertyName{"mark", "M"},
    PropertyName{"number", "N"},
    PropertyName{"punctuation", "P"},
    PropertyName{"symbol", "S"},
    PropertyName{"separator", "Z"},
    PropertyName{"any", "Any"},
    PropertyName{"alpha", "Alphabetic"},
    PropertyName{"alphabetic", "Alphabetic"},
    PropertyName{"space", "White_Space"},
    PropertyName{"whitespace", "White_Space"},
    PropertyName{"ideographic", "Ideographic"},
    PropertyName{"emoji", "Emoji"},
    PropertyName{"extendedpictographic", "Extended_Pictographic"},
};

class Translator {
 public:
  explicit Translator(std::string_view pattern) : in_(pattern) {}

  Result<std::string> Run() {
    while (i_ < in_.size()) STOCKPOT_RETURN_IF_ERROR(Item());
    return std::move(out_);
  }

 private:
  bool At(std::string_view text) const { return in_.substr(i_).starts_with(text); }
  char Peek(size_t ahead = 0) const { return i_ + ahead < in_.size() ? in_[i_ + ahead] : '\0'; }

  Status Refuse(std::string_view construct) const {
    return InvalidArgument("regex construct not supported: " + std::string(construct) +
                           " at offset " + std::to_string(i_) + " of '" + std::string(in_) + "'");
  }

  void Emit(std::string_view text) { out_ += text; }
  void Copy(size_t count) {
    out_ += in_.substr(i_, count);
    i_ += count;
  }

  Status Item() {
    switch (in_[i_]) {
      case '\\':
        return Escape(/*in_class=*/false);
      case '[':
        return Class();
      case '(':
        return Group();
      case '{':
        return Interval();
      case ']':
      case '}':
        Emit("\\");
        Copy(1);
        return OkStatus();
      case '\0':
        return Refuse("NUL");
      default:
        Copy(1);
        return OkStatus();
    }
  }

  Status Group() {
    constexpr std::array<std::string_view, 8> kSame = {"(?:",  "(?=",  "(?!",  "(?>",
                                                       "(?<=", "(?<!", "(?i:", "(?-i:"};
    for (const std::string_view opening : kSame) {
      if (At(opening)) {
        Copy(opening.size());
        return OkStatus();
      }
    }
    // Elsewhere than at the start, Oniguruma's (?i) also embraces the alternatives that follow.
    if (At("(?i)") && i_ == 0) {
      Copy(4);
      return OkStatus();
    }
    if (At("(?") || At("(*")) return Refuse("group '" + std::string(in_.substr(i_, 4)) + "'");
    Emit("(?:");
    ++i_;
    return OkStatus();
  }

  // {n} {n,} {n,m} {,m}; anything else is a literal brace.
  Status Interval() {
    size_t j = i_ + 1;
    const auto digits = [&] {
      const size_t begin = j;
      while (j < in_.size() && std::isdigit(static_cast<unsigned char>(in_[j]))) ++j;
      return in_.substr(begin, j - begin);
    };
    const std::string_view low = digits();
    const bool comma = j < in_.size() && in_[j] == ',';
    if (comma) ++j;
    const std::string_view high = comma ? digits() : low;
    if (j >= in_.size() || in_[j] != '}' || (low.empty() && high.empty())) {
      Emit("\\");
      Copy(1);
      return OkStatus();
    }
    ++j;
    if (j < in_.size() && in_[j] == '+') return Refuse("'+' after an interval");
    if (j < in_.size() && in_[j] == '?' && !comma) return Refuse("'?' after {n}");
    Emit("{" + std::string(low.empty() ? "0" : low));
    if (comma) Emit("," + std::string(high));
    Emit("}");
    i_ = j;
    return OkStatus();
  }

  Status Class() {
    Copy(1);
    if (Peek() == '^') Copy(1);
    if (Peek() == ']') return Refuse("']' first in a character class");
    while (i_ < in_.size() && in_[i_] != ']') {
      if (in_[i_] == '\\') {
        STOCKPOT_RETURN_IF_ERROR(Escape(/*in_class=*/true));
      } else if (in_[i_] == '[') {
        return Refuse("nested or POSIX character class");
      } else if (At("&&")) {
        return Refuse("'&&' in a character class");
      } else if (in_[i_] == '\0') {
        return Refuse("NUL");
      } else {
        Copy(1);
      }
    }
    if (i_ == in_.size()) return Refuse("character class without an end");
    Copy(1);
    return OkStatus();
  }

  Status Escape(bool in_class) {
    const char c = Peek(1);
    if (static_cast<unsigned char>(c) >= 0x80) {  // a needless backslash
      ++i_;
      Copy(1);
      return OkStatus();
    }
    if (!std::isalnum(static_cast<unsigned char>(c))) {
      if (c == '\0') return Refuse("backslash before NUL or the end");
      Copy(2);
      return OkStatus();
    }
    if (c == 'p' || c == 'P') return Property();
    if (c == 'x' || c == 'u') return Hexadecimal();
    const auto replace = [&](std::string_view text) {
      Emit(text);
      i_ += 2;
      return OkStatus();
    };
    switch (c) {
      case 's':
        return replace("\\p{White_Space}");
      case 'S':
        return replace("\\P{White_Space}");
      case 'h':
        return replace("\\p{AHex}");
      case 'H':
        return replace("\\P{AHex}");
      case 'v':
        return replace("\\x0b");
      case 'd':
      case 'D':
      case 'r':
      case 'n':
      case 't':
      case 'f':
      case 'a':
      case 'e':
        Copy(2);
        return OkStatus();
      default:
        break;
    }
    const std::string word(kWordItems);
    if (c == 'w') return replace(in_class ? word : "[" + word + "]");
    if (!in_class) {
      const std::string is = "[" + word + "]";
      if (c == 'W') return replace("[^" + word + "]");
      if (c == 'b')
        return replace("(?:(?<=" + is + ")(?!" + is + ")|(?<!" + is + ")(?=" + is + "))");
      if (c == 'A' || c == 'z' || c == 'Z') {
        Copy(2);
        return OkStatus();
      }
    }
    return Refuse(std::string("escape '\\") + c + "'" + (in_class ? " in a character class" : ""));
  }

  // \p{Name}, \p{^Name}, \P{Name}
  Status Property() {
    const size_t close = in_.find('}', i_);
    if (Peek(2) != '{' || close == std::string_view::npos) return Refuse("\\p without {name}");
    std::string_view name = in_.substr(i_ + 3, close - i_ - 3);
    const bool caret = name.starts_with("^");
    if (caret) name.remove_prefix(1);
    std::string key;
    for (const char c : name) {
      if (std::isalnum(static_cast<unsigned char>(c))) {
        key += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      } else if (c != '_' && c != ' ' && c != '-') {
        return Refuse("property '" + std::string(name) + "'");
      }
    }
    if (key.empty()) return Refuse("property without a name");
    const auto known = std::find_if(kProperties.begin(), kProperties.end(),
                                    [&](const PropertyName& p) { return p.oniguruma == key; });
    Emit(in_.substr(i_, 2));
    Emit(caret ? "{^" : "{");
    if (known != kProperties.end()) {
      Emit(known->pcre2);
    } else if (key.size() <= 2) {
      Emit(name);  // a general category
    } else {
      Emit("sc:");  // Oniguruma means Script; PCRE2's default is Script_Extensions
      Emit(name);
    }
    Emit("}");
    i_ = close + 1;
    return OkStatus();
  }

  // \xHH (below 0x80: above, it is a raw byte to Oniguruma), \x{H...}, \uHHHH
  Status Hexadecimal() {
    size_t begin = i_ + 2, end = 0, next = 0;
    if (Peek(1) == 'x' && Peek(2) == '{') {
      ++begin;
      end = in_.find('}', begin);
      next = end + 1;
    } else {
      end = next = begin + (Peek(1) == 'x' ? 2 : 4);
    }
    if (end == std::string_view::npos || end > in_.size() || end == begin || end - begin > 6) {
      return Refuse("malformed \\x or \\u");
    }
    const std::string digits(in_.substr(begin, end - begin));
    const auto is_hex = [](unsigned char c) { return std::isxdigit(c) != 0; };
    if (!std::all_of(digits.begin(), digits.end(), is_hex)) return Refuse("malformed \\x or \\u");
    if (Peek(1) == 'x' && Peek(2) != '{' && digits[0] >= '8') return Refuse("\\x80 and above");
    if (std::stoul(digits, nullptr, 16) == 0) return Refuse("NUL");
    Emit("\\x{" + digits + "}");
    i_ = next;
    return OkStatus();
  }

  std::string_view in_;
  size_t i_ = 0;
  std::string out_;
};

}  // namespace

Result<std::string> TranslateOniguruma(std::string_view oniguruma_pattern) {
  if (!IsValidUtf8(oniguruma_pattern)) return InvalidArgument("regex is not valid UTF-8");
  return Translator(oniguruma_pattern).Run();
}

}  // namespace stockpot
