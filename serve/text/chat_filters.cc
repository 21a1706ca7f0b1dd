// Filters. kFilters at the end is the whole list.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "serve/text/chat_filter_list.h"
#include "serve/text/chat_functions.h"
#include "serve/text/utf8.h"

namespace stockpot::chat {
namespace {

using Kind = Value::Kind;

Status WrongKind(std::string_view filter, const Value& value) {
  return InvalidArgument(std::string(filter) + " of " + std::string(value.TypeName()));
}

bool IsTrue(const Value* value) { return value != nullptr && value->Truthy(); }

Result<Value> Text(const Value& value, Budget* budget) {
  STOCKPOT_ASSIGN_OR_RETURN(std::string text, ToText(value, budget));
  return Value::String(std::move(text));
}

Result<Value> Trim(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(1, {"chars"}));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text, ToText(value, budget));
  return Value::String(StripText(text, arguments.Find(0, "chars"), true, true));
}

Result<Value> Default(const Value& value, const Arguments& arguments, Budget*) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(2, {"default_value", "boolean"}));
  const bool use =
      value.is(Kind::kUndefined) || (IsTrue(arguments.Find(1, "boolean")) && !value.Truthy());
  if (!use) return value;
  const Value* instead = arguments.Find(0, "default_value");
  return instead != nullptr ? *instead : Value::String("");
}

Result<Value> LengthOf(const Value& value, const Arguments& arguments, Budget*) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t length, Length(value));
  return Value::Int(length);
}

Result<Value> Upper(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text, ToText(value, budget));
  return Value::String(UpperCase(text));
}

Result<Value> Lower(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text, ToText(value, budget));
  return Value::String(LowerCase(text));
}

Result<Value> Capitalize(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  STOCKPOT_ASSIGN_OR_RETURN(Value text, Text(value, budget));
  return CallMethod(text, "capitalize", {}, budget);
}

Result<Value> Replace(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_ASSIGN_OR_RETURN(Value text, Text(value, budget));
  return CallMethod(text, "replace", arguments, budget);
}

Result<Value> TextOf(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  return Text(value, budget);
}

Result<Value> ToJsonFilter(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(
      arguments.Check(4, {"ensure_ascii", "indent", "separators", "sort_keys"}));
  JsonStyle style;
  style.ensure_ascii = IsTrue(arguments.Find(0, "ensure_ascii"));
  style.sort_keys = IsTrue(arguments.Find(3, "sort_keys"));
  const Value* indent = arguments.Find(1, "indent");
  if (indent != nullptr && !indent->is(Kind::kNone)) {
    constexpr int64_t kMaxIndent = 64;
    if (!indent->is_integer() || indent->integer() < 0 || indent->integer() > kMaxIndent) {
      return InvalidArgument("tojson: indent must be an integer from 0 to 64");
    }
    style.indent = static_cast<int>(indent->integer());
    style.item_separator = ",";
  }
  const Value* separators = arguments.Find(2, "separators");
  if (separators != nullptr && !separators->is(Kind::kNone)) {
    if (!separators->is(Kind::kList) || separators->items().size() != 2 ||
        !separators->items()[0].is(Kind::kString) || !separators->items()[1].is(Kind::kString)) {
      return InvalidArgument("tojson: separators must be two strings");
    }
    style.item_separator = separators->items()[0].string();
    style.key_separator = separators->items()[1].string();
  }
  STOCKPOT_ASSIGN_OR_RETURN(std::string json, ToJson(value, style, budget));
  return Value::String(std::move(json));
}

Result<Value> ToInt(const Value& value, const Arguments& arguments, Budget*) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(1, {"default"}));
  const Value* otherwise = arguments.Find(0, "default");
  constexpr double kLimit = 9e18;
  if (value.is_integer()) return Value::Int(value.integer());
  if (value.is(Kind::kFloat) && std::fabs(value.number()) < kLimit) {
    return Value::Int(static_cast<int64_t>(value.number()));
  }
  if (value.is(Kind::kString)) {
    std::string text = StripText(value.string(), nullptr, true, true);
    if (text.starts_with("+")) text.erase(0, 1);
    double number = 0;
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
    if (!text.empty() && parsed.ec == std::errc() && parsed.ptr == text.data() + text.size() &&
        std::fabs(number) < kLimit) {
      int64_t integer = 0;
      const auto whole = std::from_chars(text.data(), text.data() + text.size(), integer);
      const bool is_whole = whole.ptr == text.data() + text.size() && whole.ec == std::errc();
      return Value::Int(is_whole ? integer : static_cast<int64_t>(number));
    }
  }
  return otherwise != nullptr ? *otherwise : Value::Int(0);
}

Result<Value> ToFloat(const Value& value, const Arguments& arguments, Budget*) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(1, {"default"}));
  const Value* otherwise = arguments.Find(0, "default");
  if (value.is_number()) return Value::Float(value.number());
  if (value.is(Kind::kString)) {
    const std::string text = StripText(value.string(), nullptr, true, true);
    double number = 0;
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
    if (!text.empty() && parsed.ec == std::errc() && parsed.ptr == text.data() + text.size()) {
      return Value::Float(number);
    }
  }
  return otherwise != nullptr ? *otherwise : Value::Float(0);
}

Result<Value> Absolute(const Value& value, const Arguments& arguments, Budget*) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  if (value.is(Kind::kFloat)) return Value::Float(std::fabs(value.number()));
  if (!value.is_integer() || value.integer() == INT64_MIN) return WrongKind("abs", value);
  return Value::Int(std::abs(value.integer()));
}

Result<Value> Items(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  if (value.is(Kind::kUndefined)) return Value::MakeList({}, budget);
  if (!value.is(Kind::kDict)) return WrongKind("items", value);
  return CallMethod(value, "items", {}, budget);
}

// Jinja2's indent: lines behind the first move in by `width` spaces, or by a given text.
Result<Value> Indent(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(3, {"width", "first", "blank"}));
  constexpr int64_t kMaxWidth = 1000;
  std::string prefix(4, ' ');
  if (const Value* width = arguments.Find(0, "width")) {
    if (width->is(Kind::kString)) {
      prefix = width->string();
    } else if (width->is_integer() && width->integer() >= 0 && width->integer() <= kMaxWidth) {
      prefix.assign(static_cast<size_t>(width->integer()), ' ');
    } else {
      return WrongKind("indent", *width);
    }
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text, ToText(value, budget));
  STOCKPOT_ASSIGN_OR_RETURN(const Value lines,
                            CallMethod(Value::String(text + "\n"), "splitlines", {}, budget));
  const bool blank = IsTrue(arguments.Find(2, "blank"));
  std::string out = IsTrue(arguments.Find(1, "first")) ? prefix : "";
  for (size_t i = 0; i < lines.items().size(); ++i) {
    const std::string& line = lines.items()[i].string();
    STOCKPOT_RETURN_IF_ERROR(budget->Bytes(line.size() + prefix.size() + 1));
    if (i > 0) out += '\n';
    if (i > 0 && (blank || !line.empty())) out += prefix;
    out += line;
  }
  return Value::String(std::move(out));
}

using FilterFunction = Result<Value> (*)(const Value&, const Arguments&, Budget*);
struct NamedFilter {
  std::string_view name;
  FilterFunction function;
};
constexpr std::array kFilters = {
    NamedFilter{"abs", Absolute},
    NamedFilter{"capitalize", Capitalize},
    NamedFilter{"count", LengthOf},
    NamedFilter{"d", Default},
    NamedFilter{"default", Default},
    NamedFilter{"dictsort", DictSort},
    NamedFilter{"first", First},
    NamedFilter{"float", ToFloat},
    NamedFilter{"indent", Indent},
    NamedFilter{"int", ToInt},
    NamedFilter{"items", Items},
    NamedFilter{"join", Join},
    NamedFilter{"last", Last},
    NamedFilter{"length", LengthOf},
    NamedFilter{"list", ToList},
    NamedFilter{"lower", Lower},
    NamedFilter{"map", Map},
    NamedFilter{"max", Maximum},
    NamedFilter{"min", Minimum},
    NamedFilter{"reject", Reject},
    NamedFilter{"rejectattr", RejectAttribute},
    NamedFilter{"replace", Replace},
    NamedFilter{"reverse", Reverse},
    NamedFilter{"safe", TextOf},
    NamedFilter{"select", Select},
    NamedFilter{"selectattr", SelectAttribute},
    NamedFilter{"sort", Sort},
    NamedFilter{"string", TextOf},
    NamedFilter{"tojson", ToJsonFilter},
    NamedFilter{"trim", Trim},
    NamedFilter{"unique", Unique},
    NamedFilter{"upper", Upper},
};

const NamedFilter* FindFilter(std::string_view name) {
  const auto found = std::find_if(kFilters.begin(), kFilters.end(),
                                  [&](const NamedFilter& f) { return f.name == name; });
  return found == kFilters.end() ? nullptr : &*found;
}

}  // namespace

bool IsFilter(std::string_view name) { return FindFilter(name) != nullptr; }

Result<Value> ApplyFilter(std::string_view name, const Value& value, const Arguments& arguments,
                          Budget* budget) {
  // map() can name map(): depth is bounded by the arguments, each level takes one.
  return FindFilter(name)->function(value, arguments, budget);
}

const Value* Arguments::Find(size_t index, std::string_view name) const {
  if (index < positional.size()) return &positional[index];
  for (const auto& [key, value] : named) {
    if (key == name) return &value;
  }
  return nullptr;
}

Status Arguments::Check(size_t most, const std::vector<std::string_view>& names) const {
  if (positional.size() > most) return InvalidArgument("too many arguments");
  for (const auto& [key, value] : named) {
    if (std::find(names.begin(), names.end(), key) == names.end()) {
      return InvalidArgument("unexpected argument '" + key + "'");
    }
  }
  return OkStatus();
}

}  // namespace stockpot::chat
