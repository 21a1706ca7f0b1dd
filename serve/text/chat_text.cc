// Values as text: Python's str(), repr() and json.dumps().
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "serve/text/chat_value.h"
#include "serve/text/utf8.h"

namespace stockpot::chat {
namespace {

std::string Hex(const char* format, uint32_t value) {
  char buffer[16];
  std::snprintf(buffer, sizeof(buffer), format, value);
  return buffer;
}

std::string QuoteLikePython(const std::string& text) {
  const bool has_single = text.find('\'') != text.npos;
  const char quote = has_single && text.find('"') == text.npos ? '"' : '\'';
  std::string out(1, quote);
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = NextCodePoint(text, i);
    const char32_t c = step.code_point;
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c < 0x20 || (c >= 0x7F && c <= 0xA0) || c == 0xAD) {
      out += Hex("\\x%02x", c);
    } else {
      out += text.substr(i, step.bytes);
    }
    i += step.bytes;
  }
  return out + quote;
}

std::string QuoteLikeJson(const std::string& text, bool ensure_ascii) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = NextCodePoint(text, i);
    const char32_t c = step.code_point;
    constexpr std::string_view kShort = "\"\\\n\r\t\f\b", kLetters = "\"\\nrtfb";
    const size_t known = c < 0x80 ? kShort.find(static_cast<char>(c)) : kShort.npos;
    if (known != kShort.npos) {
      out += '\\';
      out += kLetters[known];
    } else if (c < 0x20 || (ensure_ascii && c >= 0x7F && c < 0x10000 && c != 0x7F)) {
      out += Hex("\\u%04x", c);
    } else if (ensure_ascii && c >= 0x10000) {
      out += Hex("\\u%04x", 0xD800 + ((c - 0x10000) >> 10));
      out += Hex("\\u%04x", 0xDC00 + ((c - 0x10000) & 0x3FF));
    } else {
      out += text.substr(i, step.bytes);
    }
    i += step.bytes;
  }
  return out + "\"";
}

// Writes repr() of a value; recursion is bounded by Value::depth().
class Repr {
 public:
  explicit Repr(Budget* budget) : budget_(budget) {}

  Status Write(const Value& value) {
    STOCKPOT_RETURN_IF_ERROR(budget_->Step());
    switch (value.kind()) {
      case Value::Kind::kUndefined:
        return Append("Undefined");
      case Value::Kind::kNone:
        return Append("None");
      case Value::Kind::kBool:
        return Append(value.integer() != 0 ? "True" : "False");
      case Value::Kind::kInt:
        return Append(std::to_string(value.integer()));
      case Value::Kind::kFloat:
        return Append(FloatText(value.number()));
      case Value::Kind::kString:
        return Append(QuoteLikePython(value.string()));
      case Value::Kind::kList:
        return WriteList(value);
      case Value::Kind::kDict:
        return WriteDict(value.dict());
      default:
        return InvalidArgument("can not write " + std::string(value.TypeName()) + " as text");
    }
  }

  std::string out;

 private:
  Status Append(std::string_view text) {
    STOCKPOT_RETURN_IF_ERROR(budget_->Bytes(text.size()));
    out += text;
    return OkStatus();
  }

  Status WriteList(const Value& value) {
    out += value.is_tuple() ? '(' : '[';
    for (size_t i = 0; i < value.items().size(); ++i) {
      if (i > 0) out += ", ";
      STOCKPOT_RETURN_IF_ERROR(Write(value.items()[i]));
    }
    if (value.is_tuple() && value.items().size() == 1) out += ',';
    return Append(value.is_tuple() ? ")" : "]");
  }

  Status WriteDict(const Dict& dict) {
    out += '{';
    bool first = true;
    for (const auto& [key, item] : dict.entries) {
      if (!first) out += ", ";
      first = false;
      STOCKPOT_RETURN_IF_ERROR(Append(QuoteLikePython(key) + ": "));
      STOCKPOT_RETURN_IF_ERROR(Write(item));
    }
    return Append("}");
  }

  Budget* budget_;
};

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, Budget* budget) : style_(style), budget_(budget) {}

  Status Write(const Value& value, int level) {
    STOCKPOT_RETURN_IF_ERROR(budget_->Step());
    switch (value.kind()) {
      case Value::Kind::kNone:
        return Append("null");
      case Value::Kind::kBool:
        return Append(value.integer() != 0 ? "true" : "false");
      case Value::Kind::kInt:
        return Append(std::to_string(value.integer()));
      case Value::Kind::kFloat:
        return Append(Float(value.number()));
      case Value::Kind::kString:
        return Append(QuoteLikeJson(value.string(), style_.ensure_ascii));
      case Value::Kind::kList:
        return WriteList(value.items(), level);
      case Value::Kind::kDict:
        return WriteDict(value.dict(), level);
      default:
        return InvalidArgument("tojson: no JSON for " + std::string(value.TypeName()));
    }
  }

  std::string out;

 private:
  static std::string Float(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
    return FloatText(value);
  }

  Status Append(std::string_view text) {
    STOCKPOT_RETURN_IF_ERROR(budget_->Bytes(text.size()));
    out += text;
    return OkStatus();
  }

  Status NewLine(int level) {
    if (style_.indent < 0) return OkStatus();
    return Append("\n" + std::string(static_cast<size_t>(style_.indent) * level, ' '));
  }

  Status WriteList(const std::vector<Value>& items, int level) {
    if (items.empty()) return Append("[]");
    STOCKPOT_RETURN_IF_ERROR(Append("["));
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) STOCKPOT_RETURN_IF_ERROR(Append(style_.item_separator));
      STOCKPOT_RETURN_IF_ERROR(NewLine(level + 1));
      STOCKPOT_RETURN_IF_ERROR(Write(items[i], level + 1));
    }
    STOCKPOT_RETURN_IF_ERROR(NewLine(level));
    return Append("]");
  }

  Status WriteDict(const Dict& dict, int level) {
    if (dict.entries.empty()) return Append("{}");
    std::vector<const std::pair<std::string, Value>*> order;
    for (const auto& entry : dict.entries) order.push_back(&entry);
    if (style_.sort_keys) {
      std::stable_sort(order.begin(), order.end(),
                       [](const auto* a, const auto* b) { return a->first < b->first; });
    }
    STOCKPOT_RETURN_IF_ERROR(Append("{"));
    for (size_t i = 0; i < order.size(); ++i) {
      if (i > 0) STOCKPOT_RETURN_IF_ERROR(Append(style_.item_separator));
      STOCKPOT_RETURN_IF_ERROR(NewLine(level + 1));
      STOCKPOT_RETURN_IF_ERROR(Append(QuoteLikeJson(order[i]->first, style_.ensure_ascii)));
      STOCKPOT_RETURN_IF_ERROR(Append(style_.key_separator));
      STOCKPOT_RETURN_IF_ERROR(Write(order[i]->second, level + 1));
    }
    STOCKPOT_RETURN_IF_ERROR(NewLine(level));
    return Append("}");
  }

  const JsonStyle& style_;
  Budget* budget_;
};

}  // namespace

std::string FloatText(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[40];
  const double magnitude = std::fabs(value);
  const bool scientific = magnitude != 0 && (magnitude < 1e-4 || magnitude >= 1e16);
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), value,
                    scientific ? std::chars_format::scientific : std::chars_format::fixed);
  std::string text(buffer, end.ptr);
  if (!scientific && text.find('.') == text.npos) text += ".0";
  return text;
}

Result<std::string> ToText(const Value& value, Budget* budget) {
  if (value.is(Value::Kind::kUndefined)) return std::string();
  if (value.is(Value::Kind::kString)) {
    STOCKPOT_RETURN_IF_ERROR(budget->Bytes(value.string().size()));
    return value.string();
  }
  Repr repr(budget);
  STOCKPOT_RETURN_IF_ERROR(repr.Write(value));
  return std::move(repr.out);
}

Result<std::string> ToJson(const Value& value, const JsonStyle& style, Budget* budget) {
  JsonWriter writer(style, budget);
  STOCKPOT_RETURN_IF_ERROR(writer.Write(value, 0));
  return std::move(writer.out);
}

}  // namespace stockpot::chat
