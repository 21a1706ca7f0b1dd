// Methods of strings, mappings and lists.
#include <unicode/uchar.h>

#include <algorithm>
#include <array>

#include "serve/text/chat_functions.h"
#include "serve/text/unicode.h"
#include "serve/text/utf8.h"

namespace stockpot::chat {
namespace {

using Kind = Value::Kind;

constexpr std::array<std::string_view, 24> kStringMethods = {
    "capitalize", "count",        "endswith",     "find",    "isalnum", "isalpha",
    "isdigit",    "islower",      "isspace",      "isupper", "join",    "lower",
    "lstrip",     "removeprefix", "removesuffix", "replace", "rfind",   "rstrip",
    "split",      "splitlines",   "startswith",   "strip",   "title",   "upper"};
constexpr std::array<std::string_view, 4> kDictMethods = {"get", "items", "keys", "values"};
constexpr std::array<std::string_view, 2> kListMethods = {"count", "index"};

Result<std::string> TextArgument(const Arguments& arguments, size_t index, std::string_view name) {
  const Value* value = arguments.Find(index, name);
  if (value == nullptr || !value->is(Kind::kString)) {
    return InvalidArgument("argument " + std::to_string(index + 1) + " must be a string");
  }
  return value->string();
}

Result<int64_t> IntegerArgument(const Arguments& arguments, size_t index, std::string_view name,
                                int64_t otherwise) {
  const Value* value = arguments.Find(index, name);
  if (value == nullptr) return otherwise;
  if (!value->is_integer()) {
    return InvalidArgument("argument " + std::to_string(index + 1) + " must be an integer");
  }
  return value->integer();
}

Result<Value> ListOfTexts(std::vector<std::string> parts, Budget* budget) {
  std::vector<Value> out;
  for (std::string& part : parts) {
    STOCKPOT_RETURN_IF_ERROR(budget->Bytes(part.size()));
    out.push_back(Value::String(std::move(part)));
  }
  return Value::MakeList(std::move(out), budget);
}

std::vector<std::string> SplitAtSpace(std::string_view text, int64_t most) {
  std::vector<std::string> parts;
  size_t i = 0;
  while (true) {
    while (i < text.size() && IsPythonSpace(NextCodePoint(text, i).code_point)) {
      i += NextCodePoint(text, i).bytes;
    }
    if (i >= text.size()) return parts;
    const size_t begin = i;
    if (most >= 0 && static_cast<int64_t>(parts.size()) == most) {
      parts.push_back(StripText(text.substr(begin), nullptr, false, true));
      return parts;
    }
    while (i < text.size() && !IsPythonSpace(NextCodePoint(text, i).code_point)) {
      i += NextCodePoint(text, i).bytes;
    }
    parts.emplace_back(text.substr(begin, i - begin));
  }
}

Result<Value> Split(const std::string& text, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(2, {"sep", "maxsplit"}));
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t most, IntegerArgument(arguments, 1, "maxsplit", -1));
  const Value* separator = arguments.Find(0, "sep");
  if (separator == nullptr || separator->is(Kind::kNone)) {
    return ListOfTexts(SplitAtSpace(text, most), budget);
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::string by, TextArgument(arguments, 0, "sep"));
  if (by.empty()) return InvalidArgument("split: empty separator");
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t at = text.find(by); at != text.npos; at = text.find(by, begin)) {
    if (most >= 0 && static_cast<int64_t>(parts.size()) == most) break;
    parts.push_back(text.substr(begin, at - begin));
    begin = at + by.size();
  }
  parts.push_back(text.substr(begin));
  return ListOfTexts(std::move(parts), budget);
}

Result<Value> SplitLines(const std::string& text, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  std::vector<std::string> lines;
  size_t begin = 0;
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = NextCodePoint(text, i);
    const char32_t c = step.code_point;
    const bool ends = (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 ||
                      c == 0x2028 || c == 0x2029;
    size_t next = i + step.bytes;
    if (c == '\r' && next < text.size() && text[next] == '\n') ++next;
    if (ends) {
      lines.push_back(text.substr(begin, i - begin));
      begin = next;
    }
    i = next;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return ListOfTexts(std::move(lines), budget);
}

Result<Value> ReplaceIn(const std::string& text, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(3, {"count"}));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string from, TextArgument(arguments, 0, "old"));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string to, TextArgument(arguments, 1, "new"));
  int64_t left = -1;
  if (const Value* count = arguments.Find(2, "count"); count && !count->is(Kind::kNone)) {
    STOCKPOT_ASSIGN_OR_RETURN(left, IntegerArgument(arguments, 2, "count", -1));
  }
  std::string out;
  size_t i = 0;
  const auto put = [&]() -> Status {
    STOCKPOT_RETURN_IF_ERROR(budget->Bytes(to.size()));
    out += to;
    if (left > 0) --left;
    return OkStatus();
  };
  STOCKPOT_RETURN_IF_ERROR(budget->Bytes(text.size()));
  while (left != 0) {
    if (from.empty()) {  // between all characters, and at both ends
      STOCKPOT_RETURN_IF_ERROR(put());
      if (i >= text.size()) break;
      const int length = NextCodePoint(text, i).bytes;
      out += text.substr(i, length);
      i += length;
      continue;
    }
    const size_t at = text.find(from, i);
    if (at == text.npos) break;
    out += text.substr(i, at - i);
    i = at + from.size();
    STOCKPOT_RETURN_IF_ERROR(put());
  }
  if (i < text.size()) out += text.substr(i);
  return Value::String(std::move(out));
}

Result<Value> StartsOrEndsWith(const std::string& text, bool start, const Arguments& arguments) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(1));
  const Value* value = arguments.Find(0, "prefix");
  std::vector<Value> choices;
  if (value != nullptr && value->is(Kind::kList) && value->is_tuple()) {
    choices = value->items();
  } else if (value != nullptr) {
    choices = {*value};
  }
  if (value == nullptr) return InvalidArgument("startswith and endswith need a string");
  for (const Value& choice : choices) {
    if (!choice.is(Kind::kString)) return InvalidArgument("startswith and endswith need a string");
    if (start ? text.starts_with(choice.string()) : text.ends_with(choice.string())) {
      return Value::Bool(true);
    }
  }
  return Value::Bool(false);
}

int64_t CharactersBefore(std::string_view text, size_t offset) {
  return std::count_if(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(offset),
                       [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; });
}

Result<Value> FindIn(const std::string& text, bool last, const Arguments& arguments) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(1));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string what, TextArgument(arguments, 0, "sub"));
  const size_t at = last ? text.rfind(what) : text.find(what);
  return Value::Int(at == text.npos ? -1 : CharactersBefore(text, at));
}

// isalpha and the like: true for a text that is not empty and whose characters all pass.
bool AllCharacters(std::string_view text, std::string_view method) {
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = NextCodePoint(text, i);
    const auto c = static_cast<UChar32>(step.code_point);
    const uint32_t category = U_GET_GC_MASK(c);
    const bool alpha = (category & U_GC_L_MASK) != 0;
    const int32_t numeric = u_getIntPropertyValue(c, UCHAR_NUMERIC_TYPE);
    const bool digit = numeric == U_NT_DECIMAL || numeric == U_NT_DIGIT;
    const bool passes = method == "isalpha"   ? alpha
                        : method == "isdigit" ? digit
                        : method == "isspace" ? IsPythonSpace(step.code_point)
                                              : alpha || numeric != U_NT_NONE;
    if (!passes) return false;
    i += step.bytes;
  }
  return !text.empty();
}

// isupper, islower: some cased character, and none of the other case.
bool HasCase(std::string_view text, bool upper) {
  bool some = false;
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = NextCodePoint(text, i);
    const auto c = static_cast<UChar32>(step.code_point);
    const bool is_upper = u_isUUppercase(c), is_lower = u_isULowercase(c);
    if (u_charType(c) == U_TITLECASE_LETTER || (upper ? is_lower : is_upper)) return false;
    some = some || is_upper || is_lower;
    i += step.bytes;
  }
  return some;
}

// Python's title() (each word) and capitalize() (the first character only).
std::string Title(std::string_view text, bool each_word) {
  std::string out;
  bool in_word = false;
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = NextCodePoint(text, i);
    const auto c = static_cast<UChar32>(step.code_point);
    const bool first = each_word ? !in_word : i == 0;
    AppendUtf8(static_cast<char32_t>(first ? u_totitle(c) : u_tolower(c)), &out);
    in_word = u_hasBinaryProperty(c, UCHAR_CASED);
    i += step.bytes;
  }
  return out;
}

Result<Value> CallCaseMethod(const std::string& text, std::string_view name) {
  if (name == "upper") return Value::String(UpperCase(text));
  if (name == "lower") return Value::String(LowerCase(text));
  if (name == "title") return Value::String(Title(text, true));
  if (name == "capitalize") return Value::String(Title(text, false));
  if (name == "isupper" || name == "islower") return Value::Bool(HasCase(text, name == "isupper"));
  return Value::Bool(AllCharacters(text, name));
}

Result<Value> CallStringMethod(const std::string& text, std::string_view name,
                               const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(budget->Bytes(text.size()));
  if (name == "split") return Split(text, arguments, budget);
  if (name == "splitlines") return SplitLines(text, arguments, budget);
  if (name == "replace") return ReplaceIn(text, arguments, budget);
  if (name == "startswith" || name == "endswith") {
    return StartsOrEndsWith(text, name == "startswith", arguments);
  }
  if (name == "find" || name == "rfind") return FindIn(text, name == "rfind", arguments);
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    STOCKPOT_RETURN_IF_ERROR(arguments.Check(1));
    const Value* characters = arguments.Find(0, "");
    if (characters != nullptr && !characters->is(Kind::kString) && !characters->is(Kind::kNone)) {
      return InvalidArgument("strip needs a string");
    }
    return Value::String(StripText(text, characters, name != "rstrip", name != "lstrip"));
  }
  if (name == "join") {
    STOCKPOT_RETURN_IF_ERROR(arguments.Check(1));
    if (arguments.positional.empty()) return InvalidArgument("join needs a list");
    Arguments separator;
    separator.positional.push_back(Value::String(text));
    return ApplyFilter("join", arguments.positional[0], separator, budget);
  }
  if (name == "count" || name == "removeprefix" || name == "removesuffix") {
    STOCKPOT_RETURN_IF_ERROR(arguments.Check(1));
    STOCKPOT_ASSIGN_OR_RETURN(const std::string what, TextArgument(arguments, 0, ""));
    if (name == "removeprefix") {
      return Value::String(text.starts_with(what) ? text.substr(what.size()) : text);
    }
    if (name == "removesuffix") {
      return Value::String(text.ends_with(what) ? text.substr(0, text.size() - what.size()) : text);
    }
    if (what.empty()) return Value::Int(CharactersBefore(text, text.size()) + 1);
    int64_t count = 0;
    for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + what.size())) {
      ++count;
    }
    return Value::Int(count);
  }
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  return CallCaseMethod(text, name);
}

Result<Value> CallDictMethod(const Value& value, std::string_view name, const Arguments& arguments,
                             Budget* budget) {
  if (name == "get") {
    STOCKPOT_RETURN_IF_ERROR(arguments.Check(2));
    if (arguments.positional.empty()) return InvalidArgument("get needs a key");
    STOCKPOT_ASSIGN_OR_RETURN(Value found, GetItem(value, arguments.positional[0], budget));
    if (!found.is(Kind::kUndefined)) return found;
    const Value* otherwise = arguments.Find(1, "");
    return otherwise != nullptr ? *otherwise : Value::None();
  }
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  std::vector<Value> out;
  for (const auto& [key, item] : value.dict().entries) {
    STOCKPOT_RETURN_IF_ERROR(budget->Step());
    if (name == "items") {
      STOCKPOT_ASSIGN_OR_RETURN(
          Value pair, Value::MakeList({Value::String(key), item}, budget, /*tuple=*/true));
      out.push_back(std::move(pair));
    } else {
      out.push_back(name == "keys" ? Value::String(key) : item);
    }
  }
  return Value::MakeList(std::move(out), budget);
}

Result<Value> CallListMethod(const Value& value, std::string_view name, const Arguments& arguments,
                             Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(1));
  if (arguments.positional.empty()) return InvalidArgument("an argument is missing");
  int64_t count = 0;
  for (size_t i = 0; i < value.items().size(); ++i) {
    STOCKPOT_ASSIGN_OR_RETURN(const bool same,
                              Equal(value.items()[i], arguments.positional[0], budget));
    if (same && name == "index") return Value::Int(static_cast<int64_t>(i));
    if (same) ++count;
  }
  if (name == "index") return InvalidArgument("index: not in the list");
  return Value::Int(count);
}

template <size_t N>
bool Has(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

bool HasMethod(const Value& value, std::string_view name) {
  if (value.is(Kind::kString)) return Has(kStringMethods, name);
  if (value.is(Kind::kDict)) return Has(kDictMethods, name);
  return value.is(Kind::kList) && Has(kListMethods, name);
}

Result<Value> CallMethod(const Value& value, std::string_view name, const Arguments& arguments,
                         Budget* budget) {
  if (value.is(Kind::kString)) return CallStringMethod(value.string(), name, arguments, budget);
  if (value.is(Kind::kDict)) return CallDictMethod(value, name, arguments, budget);
  return CallListMethod(value, name, arguments, budget);
}

}  // namespace stockpot::chat
