// The tests (`is ...`) of chat templates. kTests is the whole list.
#include <algorithm>
#include <array>

#include "serve/text/chat_functions.h"

namespace stockpot::chat {
namespace {

using Kind = Value::Kind;

constexpr std::array<std::string_view, 39> kTests = {
    "!=",       "<",        "<=",          "==",       ">",       ">=",      "boolean",
    "callable", "defined",  "divisibleby", "eq",       "equalto", "even",    "false",
    "float",    "ge",       "greaterthan", "gt",       "in",      "integer", "iterable",
    "le",       "lessthan", "lower",       "lt",       "mapping", "ne",      "none",
    "number",   "odd",      "sameas",      "sequence", "string",  "true",    "undefined",
    "upper",    "filter",   "test",        "escaped"};

// Tests that look at the kind only. 1, 0, or -1 for others.
int KindTest(std::string_view name, const Value& value) {
  const bool text = value.is(Kind::kString), list = value.is(Kind::kList);
  if (name == "defined") return !value.is(Kind::kUndefined);
  if (name == "undefined") return value.is(Kind::kUndefined);
  if (name == "none") return value.is(Kind::kNone);
  if (name == "boolean") return value.is(Kind::kBool);
  if (name == "true") return value.is(Kind::kBool) && value.integer() != 0;
  if (name == "false") return value.is(Kind::kBool) && value.integer() == 0;
  if (name == "integer") return value.is(Kind::kInt);
  if (name == "float") return value.is(Kind::kFloat);
  if (name == "number") return value.is_number();
  if (name == "string") return text;
  if (name == "mapping") return value.is(Kind::kDict);
  if (name == "sequence")
    return text || list || value.is(Kind::kDict) || value.is(Kind::kUndefined);
  if (name == "iterable") {
    return text || list || value.is(Kind::kDict) || value.is(Kind::kUndefined) ||
           value.is(Kind::kLoop);
  }
  if (name == "callable") {
    return value.is(Kind::kFunction) || value.is(Kind::kMethod) || value.is(Kind::kMacro) ||
           value.is(Kind::kLoop);
  }
  if (name == "escaped") return 0;
  return -1;
}

Result<bool> NumberTest(std::string_view name, const Value& value, const Arguments& arguments) {
  if (!value.is_integer()) {
    return InvalidArgument("test '" + std::string(name) + "' of " + std::string(value.TypeName()));
  }
  if (name != "divisibleby") return (value.integer() % 2 != 0) == (name == "odd");
  const Value* divisor = arguments.Find(0, "num");
  if (divisor == nullptr || !divisor->is_integer() || divisor->integer() == 0) {
    return InvalidArgument("divisibleby needs an integer that is not 0");
  }
  return divisor->integer() == -1 || value.integer() % divisor->integer() == 0;
}

}  // namespace

bool IsTest(std::string_view name) {
  return std::find(kTests.begin(), kTests.end(), name) != kTests.end();
}

Result<bool> ApplyTest(std::string_view name, const Value& value, const Arguments& arguments,
                       Budget* budget) {
  const int by_kind = KindTest(name, value);
  if (by_kind >= 0) {
    STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
    return by_kind == 1;
  }
  if (name == "odd" || name == "even" || name == "divisibleby") {
    return NumberTest(name, value, arguments);
  }
  if (name == "upper" || name == "lower") {
    STOCKPOT_ASSIGN_OR_RETURN(const std::string text, ToText(value, budget));
    return CallMethod(Value::String(text), name == "upper" ? "isupper" : "islower", {}, budget)
        ->Truthy();
  }
  if (arguments.positional.size() != (name == "filter" || name == "test" ? 0u : 1u)) {
    return InvalidArgument("test '" + std::string(name) + "' has the wrong number of arguments");
  }
  if (name == "filter") return value.is(Kind::kString) && IsFilter(value.string());
  if (name == "test") return value.is(Kind::kString) && IsTest(value.string());
  const Value& other = arguments.positional[0];
  if (name == "in") return Contains(other, value, budget);
  if (name == "sameas") {
    // Identity, for what has one: constants, and numbers and strings by value.
    if (value.kind() != other.kind()) return false;
    return Equal(value, other, budget);
  }
  const bool negated = name == "ne" || name == "!=";
  if (negated || name == "eq" || name == "==" || name == "equalto") {
    STOCKPOT_ASSIGN_OR_RETURN(const bool same, Equal(value, other, budget));
    return same != negated;
  }
  STOCKPOT_ASSIGN_OR_RETURN(const int order, Compare(value, other, budget));
  if (name == "lt" || name == "<" || name == "lessthan") return order < 0;
  if (name == "le" || name == "<=") return order <= 0;
  if (name == "gt" || name == ">" || name == "greaterthan") return order > 0;
  return order >= 0;  // "ge", ">="
}

}  // namespace stockpot::chat
