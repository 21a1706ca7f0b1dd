// Parts of values (items, membership) and the string operations that filters and methods share.
#include <unicode/locid.h>
#include <unicode/unistr.h>

#include "serve/text/chat_functions.h"
#include "serve/text/unicode.h"
#include "serve/text/utf8.h"

namespace stockpot::chat {

using Kind = Value::Kind;

bool IsPythonSpace(char32_t c) { return IsWhitespace(c) || (c >= 0x1C && c <= 0x1F); }

std::string UpperCase(std::string_view text) {
  std::string out;
  icu::UnicodeString::fromUTF8({text.data(), static_cast<int32_t>(text.size())})
      .toUpper(icu::Locale::getRoot())
      .toUTF8String(out);
  return out;
}

std::string LowerCase(std::string_view text) {
  std::string out;
  icu::UnicodeString::fromUTF8({text.data(), static_cast<int32_t>(text.size())})
      .toLower(icu::Locale::getRoot())
      .toUTF8String(out);
  return out;
}

std::string StripText(std::string_view text, const Value* characters, bool left, bool right) {
  const bool listed = characters != nullptr && characters->is(Kind::kString);
  const auto strips = [&](std::string_view character) {
    return listed ? characters->string().find(character) != std::string::npos
                  : IsPythonSpace(NextCodePoint(character, 0).code_point);
  };
  while (left && !text.empty()) {
    const int length = NextCodePoint(text, 0).bytes;
    if (!strips(text.substr(0, length))) break;
    text.remove_prefix(length);
  }
  while (right && !text.empty()) {
    const size_t last = PreviousCodePoint(text, text.size());
    if (!strips(text.substr(last))) break;
    text.remove_suffix(text.size() - last);
  }
  return std::string(text);
}

Result<Value> GetItem(const Value& value, const Value& key, Budget* budget) {
  const std::string name = key.is(Kind::kString) ? "'" + key.string() + "'" : "item";
  const Value missing = Value::Undefined(name + " of " + std::string(value.TypeName()));
  if (value.is(Kind::kUndefined)) {
    return InvalidArgument(name + " of something undefined" +
                           (value.string().empty() ? "" : " (" + value.string() + ")"));
  }
  if ((value.is(Kind::kDict) || value.is(Kind::kNamespace)) && key.is(Kind::kString)) {
    STOCKPOT_RETURN_IF_ERROR(budget->Step(static_cast<int64_t>(value.dict().entries.size() / 16)));
    const Value* found = value.dict().Find(key.string());
    return found != nullptr ? *found : missing;
  }
  if (!key.is_integer()) return missing;
  if (value.is(Kind::kList)) {
    const auto size = static_cast<int64_t>(value.items().size());
    const int64_t index = key.integer() < 0 ? key.integer() + size : key.integer();
    return index < 0 || index >= size ? missing : value.items()[static_cast<size_t>(index)];
  }
  if (value.is(Kind::kString)) {
    STOCKPOT_RETURN_IF_ERROR(budget->Step(static_cast<int64_t>(value.string().size() / 64)));
    STOCKPOT_ASSIGN_OR_RETURN(const int64_t size, Length(value));
    int64_t index = key.integer() < 0 ? key.integer() + size : key.integer();
    if (index < 0 || index >= size) return missing;
    size_t i = 0;
    for (; index > 0; --index) i += NextCodePoint(value.string(), i).bytes;
    return Value::String(value.string().substr(i, NextCodePoint(value.string(), i).bytes));
  }
  return missing;
}

Result<bool> Contains(const Value& container, const Value& item, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(budget->Step());
  switch (container.kind()) {
    case Kind::kUndefined:
      return false;
    case Kind::kString:
      if (!item.is(Kind::kString)) {
        return InvalidArgument("'in' of a string needs a string, not " +
                               std::string(item.TypeName()));
      }
      STOCKPOT_RETURN_IF_ERROR(budget->Step(static_cast<int64_t>(container.string().size() / 64)));
      return container.string().find(item.string()) != std::string::npos;
    case Kind::kDict:
      STOCKPOT_RETURN_IF_ERROR(
          budget->Step(static_cast<int64_t>(container.dict().entries.size() / 16)));
      return item.is(Kind::kString) && container.dict().Find(item.string()) != nullptr;
    case Kind::kList:
      for (const Value& element : container.items()) {
        STOCKPOT_ASSIGN_OR_RETURN(const bool same, Equal(element, item, budget));
        if (same) return true;
      }
      return false;
    default:
      return InvalidArgument("'in' of " + std::string(container.TypeName()) + " is not supported");
  }
}

}  // namespace stockpot::chat
