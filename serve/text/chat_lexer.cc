#include "serve/text/chat_lexer.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "serve/text/unicode.h"
#include "serve/text/utf8.h"

namespace stockpot::chat {
namespace {

// As Jinja2 reads a source: one kind of line end, and no line end at the very end.
std::string NormalizeNewlines(std::string_view source) {
  std::string out;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out += source[i];
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

bool IsNameStart(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_'; }
bool IsDigit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

class Lexer {
 public:
  explicit Lexer(std::string source) : in_(std::move(source)) {}

  Result<std::vector<Token>> Run() {
    while (i_ < in_.size()) STOCKPOT_RETURN_IF_ERROR(TextThenTag());
    Add(Token::Kind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  bool At(std::string_view text) const {
    return std::string_view(in_).substr(i_).starts_with(text);
  }
  char Peek(size_t ahead = 0) const { return i_ + ahead < in_.size() ? in_[i_ + ahead] : '\0'; }

  // Moves on and keeps count of lines.
  void Advance(size_t count) {
    for (size_t k = 0; k < count; ++k, ++i_) {
      if (in_[i_] == '\n') {
        ++position_.line;
        position_.column = 1;
      } else if ((static_cast<uint8_t>(in_[i_]) & 0xC0) != 0x80) {
        ++position_.column;
      }
    }
  }

  void Add(Token::Kind kind, std::string text) {
    tokens_.push_back({kind, std::move(text), position_});
  }

  void SkipWhitespace() {
    while (i_ < in_.size()) {
      const Utf8Step step = NextCodePoint(in_, i_);
      if (!IsWhitespace(step.code_point)) break;
      Advance(step.bytes);
    }
  }

  // Adds the text before a tag at `end`, without what the tag's sign or lstrip_blocks takes away.
  void AddText(size_t end, char sign, bool is_block) {
    const Position start = position_;
    std::string text = in_.substr(i_, end - i_);
    Advance(end - i_);
    if (sign == '-') {
      while (!text.empty()) {
        const size_t last = PreviousCodePoint(text, text.size());
        if (!IsWhitespace(NextCodePoint(text, last).code_point)) break;
        text.resize(last);
      }
    } else if (sign != '+' && is_block) {
      const size_t newline = text.rfind('\n');
      const size_t line = newline == text.npos ? 0 : newline + 1;
      const bool blank = std::all_of(text.begin() + static_cast<std::ptrdiff_t>(line), text.end(),
                                     [](char c) { return c == ' ' || c == '\t'; });
      if (blank && (line > 0 || line_starting_)) text.resize(line);
    }
    if (!text.empty()) tokens_.push_back({Token::Kind::kText, std::move(text), start});
  }

  // Behind the end of a tag: '-' takes all white space, trim_blocks one line end.
  void AfterTag(char sign, bool trims) {
    const size_t begin = i_;
    if (sign == '-') {
      SkipWhitespace();
    } else if (trims && sign != '+' && Peek() == '\n') {
      Advance(1);
    }
    line_starting_ = i_ > begin && in_[i_ - 1] == '\n';
  }

  Status TextThenTag() {
    size_t tag = i_;
    for (;; ++tag) {
      tag = in_.find('{', tag);
      if (tag == in_.npos || tag + 1 >= in_.size()) {
        AddText(in_.size(), '+', false);
        return OkStatus();
      }
      if (in_[tag + 1] == '{' || in_[tag + 1] == '%' || in_[tag + 1] == '#') break;
    }
    const char kind = in_[tag + 1];
    char sign = tag + 2 < in_.size() ? in_[tag + 2] : '\0';
    if (sign != '-' && (sign != '+' || kind == '{')) sign = '\0';
    AddText(tag, sign, kind != '{');
    if (kind == '#') return Comment();
    if (kind == '%' && IsRaw(sign)) return Raw(sign);
    Add(kind == '{' ? Token::Kind::kPrintBegin : Token::Kind::kBlockBegin, "");
    Advance(sign == '\0' ? 2 : 3);
    return Tag(kind == '{' ? "}}" : "%}");
  }

  Status Comment() {
    const Position start = position_;
    const size_t end = in_.find("#}", i_ + 2);
    if (end == in_.npos) return ErrorAt(start, "comment without an end");
    const char sign =
        end > i_ + 2 && (in_[end - 1] == '-' || in_[end - 1] == '+') ? in_[end - 1] : '\0';
    Advance(end + 2 - i_);
    AfterTag(sign, /*trims=*/true);
    return OkStatus();
  }

  // Reads "{% NAME %}" at `from`; returns its end, or npos.
  size_t SimpleTag(size_t from, std::string_view name, char* open_sign, char* close_sign) const {
    size_t j = from + 2;
    const auto sign = [&](char* out) {
      *out = j < in_.size() && (in_[j] == '-' || in_[j] == '+') ? in_[j++] : '\0';
    };
    const auto space = [&] {
      while (j < in_.size() && std::isspace(static_cast<unsigned char>(in_[j]))) ++j;
    };
    sign(open_sign);
    space();
    if (in_.compare(j, name.size(), name) != 0) return in_.npos;
    j += name.size();
    space();
    sign(close_sign);
    return in_.compare(j, 2, "%}") == 0 ? j + 2 : in_.npos;
  }

  bool IsRaw(char) const {
    char open = 0, close = 0;
    return SimpleTag(i_, "raw", &open, &close) != in_.npos;
  }

  Status Raw(char) {
    const Position start = position_;
    char open = 0, close = 0;
    Advance(SimpleTag(i_, "raw", &open, &close) - i_);
    AfterTag(close, /*trims=*/true);
    for (size_t tag = in_.find("{%", i_); tag != in_.npos; tag = in_.find("{%", tag + 2)) {
      const size_t end = SimpleTag(tag, "endraw", &open, &close);
      if (end == in_.npos) continue;
      AddText(tag, open, /*is_block=*/true);
      Advance(end - i_);
      AfterTag(close, /*trims=*/true);
      return OkStatus();
    }
    return ErrorAt(start, "raw block without an end");
  }

  Status Tag(std::string_view close) {
    const Position start = position_;
    int brackets = 0;  // within brackets, "}}" closes dicts
    while (true) {
      SkipWhitespace();
      if (i_ >= in_.size()) return ErrorAt(start, "tag without an end");
      const char sign = Peek() == '-' || (Peek() == '+' && close == "%}") ? Peek() : '\0';
      if (brackets == 0 && (At(close) || (sign != '\0' && in_.compare(i_ + 1, 2, close) == 0))) {
        const bool block = close == "%}";
        Add(block ? Token::Kind::kBlockEnd : Token::Kind::kPrintEnd, "");
        const bool signed_end = !At(close);
        Advance(signed_end ? 3 : 2);
        AfterTag(signed_end ? sign : '\0', block);
        return OkStatus();
      }
      const char c = Peek();
      if (c == '(' || c == '[' || c == '{') ++brackets;
      if (c == ')' || c == ']' || c == '}') --brackets;
      if (brackets < 0) return ErrorAt(position_, std::string("unexpected '") + c + "'");
      STOCKPOT_RETURN_IF_ERROR(ExpressionToken());
    }
  }

  Status ExpressionToken() {
    const char c = Peek();
    if (c == '\'' || c == '"') return StringToken();
    if (IsDigit(c)) return NumberToken();
    if (IsNameStart(c)) {
      size_t length = 1;
      while (IsNameStart(Peek(length)) || IsDigit(Peek(length))) ++length;
      Add(Token::Kind::kName, in_.substr(i_, length));
      Advance(length);
      return OkStatus();
    }
    constexpr std::array<std::string_view, 25> kOperators = {
        "**", "//", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<",
        ">",  "=",  ".",  ",",  ":",  "|",  "(", ")", "[", "]", "{", "}"};
    for (const std::string_view op : kOperators) {
      if (At(op)) {
        Add(Token::Kind::kOperator, std::string(op));
        Advance(op.size());
        return OkStatus();
      }
    }
    return ErrorAt(position_,
                   "unexpected character '" + in_.substr(i_, NextCodePoint(in_, i_).bytes) + "'");
  }

  Status NumberToken() {
    size_t length = 0;
    std::string digits;
    const auto run = [&] {
      for (; IsDigit(Peek(length)) || (Peek(length) == '_' && IsDigit(Peek(length + 1)));
           ++length) {
        if (Peek(length) != '_') digits += Peek(length);
      }
    };
    run();
    bool is_float = false;
    if (Peek(length) == '.' && IsDigit(Peek(length + 1))) {
      is_float = true;
      digits += '.';
      ++length;
      run();
    }
    const size_t sign = Peek(length + 1) == '-' || Peek(length + 1) == '+' ? 1 : 0;
    if ((Peek(length) == 'e' || Peek(length) == 'E') && IsDigit(Peek(length + 1 + sign))) {
      is_float = true;
      digits += 'e';
      if (sign == 1) digits += Peek(length + 1);
      length += 1 + sign;
      run();
    }
    if (IsNameStart(Peek(length))) return ErrorAt(position_, "number form not supported");
    Add(is_float ? Token::Kind::kFloat : Token::Kind::kInteger, digits);
    Advance(length);
    return OkStatus();
  }

  Status StringToken() {
    const char quote = Peek();
    const Position start = position_;
    std::string value;
    size_t j = i_ + 1;
    while (j < in_.size() && in_[j] != quote) {
      if (in_[j] != '\\') {
        value += in_[j++];
        continue;
      }
      if (j + 1 >= in_.size()) break;
      STOCKPOT_RETURN_IF_ERROR(StringEscape(&j, &value));
    }
    if (j >= in_.size()) return ErrorAt(start, "string without an end");
    Add(Token::Kind::kString, std::move(value));
    Advance(j + 1 - i_);
    return OkStatus();
  }

  // Python's escapes. *j stands on the backslash, afterwards behind the escape.
  Status StringEscape(size_t* j, std::string* value) {
    const char c = in_[*j + 1];
    constexpr std::string_view kLetters = "\\'\"abfnrtv", kValues = "\\'\"\a\b\f\n\r\t\v";
    if (const size_t known = kLetters.find(c); known != kLetters.npos) {
      *value += kValues[known];
      *j += 2;
    } else if (c == '\n') {
      *j += 2;
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const size_t digits = c == 'x' ? 2 : (c == 'u' ? 4 : 8);
      const std::string hex = in_.substr(*j + 2, digits);
      const auto is_hex = [](unsigned char h) { return std::isxdigit(h) != 0; };
      if (hex.size() != digits || !std::all_of(hex.begin(), hex.end(), is_hex)) {
        return ErrorAt(position_, "malformed escape in a string");
      }
      const auto code_point = static_cast<char32_t>(std::stoul(hex, nullptr, 16));
      if (code_point > 0x10FFFF || (code_point >= 0xD800 && code_point < 0xE000)) {
        return ErrorAt(position_, "escape of no character in a string");
      }
      AppendUtf8(code_point, value);
      *j += 2 + digits;
    } else if (IsDigit(c) || c == 'N') {
      return ErrorAt(position_, std::string("string escape '\\") + c + "' is not supported");
    } else {
      *value += '\\';  // Python keeps what it does not know
      *j += 1;
    }
    return OkStatus();
  }

  const std::string in_;
  size_t i_ = 0;
  Position position_;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

Status ErrorAt(Position position, std::string_view message) {
  return InvalidArgument("chat template line " + std::to_string(position.line) + " column " +
                         std::to_string(position.column) + ": " + std::string(message));
}

Result<std::vector<Token>> Lex(std::string_view source) {
  if (!IsValidUtf8(source)) return InvalidArgument("chat template is not valid UTF-8");
  return Lexer(NormalizeNewlines(source)).Run();
}

}  // namespace stockpot::chat
