// Calls and arithmetic of chat templates: the second half of chat_renderer.h.
#include <cmath>

#include "serve/text/chat_renderer.h"

namespace stockpot::chat {
namespace {

using Kind = Value::Kind;

constexpr int64_t kMaxRange = 100'000;       // elements of one range(), as Jinja2's sandbox allows
constexpr size_t kMaxTimeFormatBytes = 200;  // strftime_now's format

Status WrongOperands(const std::string& op, const Value& a, const Value& b) {
  std::string message =
      "'" + op + "' of " + std::string(a.TypeName()) + " and " + std::string(b.TypeName());
  for (const Value* value : {&a, &b}) {
    if (value->is(Kind::kUndefined)) message += ": " + value->string() + " is undefined";
  }
  return InvalidArgument(std::move(message));
}

// Python's // and %: towards minus infinity.
int64_t FloorDivide(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

Result<Value> IntegerArithmetic(const std::string& op, int64_t a, int64_t b) {
  int64_t out = 0;
  bool overflow = false;
  if (op == "+") {
    overflow = __builtin_add_overflow(a, b, &out);
  } else if (op == "-") {
    overflow = __builtin_sub_overflow(a, b, &out);
  } else if (op == "*") {
    overflow = __builtin_mul_overflow(a, b, &out);
  } else if (op == "**") {
    if (b < 0) return Value::Float(std::pow(static_cast<double>(a), static_cast<double>(b)));
    out = 1;
    for (int64_t i = 0; i < b && !overflow && out != 0 && !(a == 1 || (a == -1 && i > 1)); ++i) {
      overflow = __builtin_mul_overflow(out, a, &out);
    }
    if (a == -1) out = b % 2 == 0 ? 1 : -1;
  } else {
    if (b == 0) return InvalidArgument("division by zero");
    if (op == "/") return Value::Float(static_cast<double>(a) / static_cast<double>(b));
    if (b == -1) {
      overflow = op == "//" && __builtin_sub_overflow(int64_t{0}, a, &out);
    } else {
      out = op == "//" ? FloorDivide(a, b) : a - FloorDivide(a, b) * b;
    }
  }
  if (overflow) return InvalidArgument("integer out of range");
  return Value::Int(out);
}

Result<Value> FloatArithmetic(const std::string& op, double a, double b) {
  if (op == "+") return Value::Float(a + b);
  if (op == "-") return Value::Float(a - b);
  if (op == "*") return Value::Float(a * b);
  if (op == "**") return Value::Float(std::pow(a, b));
  if (b == 0) return InvalidArgument("division by zero");
  if (op == "/") return Value::Float(a / b);
  if (op == "//") return Value::Float(std::floor(a / b));
  return Value::Float(a - std::floor(a / b) * b);
}

Result<Value> Repeat(const Value& value, int64_t times, Budget* budget) {
  times = std::max<int64_t>(times, 0);
  const size_t size =
      value.is(Kind::kString) ? value.string().size() : value.items().size() * sizeof(Value);
  if (size > 0 && static_cast<uint64_t>(times) > ChatTemplateLimits::kMaxWorkBytes / size) {
    return ResourceExhausted("'*' makes too much");
  }
  if (size == 0) times = 0;
  STOCKPOT_RETURN_IF_ERROR(budget->Bytes(size * static_cast<size_t>(times)));
  std::string text;
  std::vector<Value> items;
  for (int64_t i = 0; i < times; ++i) {
    if (value.is(Kind::kString)) {
      text += value.string();
    } else {
      items.insert(items.end(), value.items().begin(), value.items().end());
    }
  }
  if (value.is(Kind::kString)) return Value::String(std::move(text));
  return Value::MakeList(std::move(items), budget, value.is_tuple());
}

Result<Value> Range(const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(3));
  int64_t bounds[3] = {0, 0, 1};
  for (size_t i = 0; i < arguments.positional.size(); ++i) {
    if (!arguments.positional[i].is_integer()) return InvalidArgument("range needs integers");
    bounds[i] = arguments.positional[i].integer();
  }
  if (arguments.positional.empty()) return InvalidArgument("range needs integers");
  if (arguments.positional.size() == 1) std::swap(bounds[0], bounds[1]);
  const auto [start, stop, step] = bounds;
  if (step == 0) return InvalidArgument("the step of range must not be 0");
  std::vector<Value> out;
  int64_t value = start;
  while (step > 0 ? value < stop : value > stop) {
    if (static_cast<int64_t>(out.size()) >= kMaxRange) {
      return ResourceExhausted("range has more than " + std::to_string(kMaxRange) + " elements");
    }
    out.push_back(Value::Int(value));
    if (__builtin_add_overflow(value, step, &value)) break;
  }
  return Value::MakeList(std::move(out), budget);
}

Result<Value> FormatTime(const Arguments& arguments, const ChatTemplate::Clock& clock) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(1));
  const Value* format = arguments.Find(0, "format");
  if (format == nullptr || !format->is(Kind::kString) ||
      format->string().size() > kMaxTimeFormatBytes) {
    return InvalidArgument("strftime_now needs a format");
  }
  const std::string& text = format->string();
  // Only what the C standard defines: an unknown conversion is undefined behaviour there.
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') continue;
    constexpr std::string_view kKnown = "aAbBcdHIjmMpSUwWxXyYZz%FTDeRuVGgnthC";
    if (++i >= text.size() || kKnown.find(text[i]) == kKnown.npos) {
      return InvalidArgument("strftime_now: conversion not supported in '" + text + "'");
    }
  }
  const std::time_t now = clock ? clock() : std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char buffer[32 * kMaxTimeFormatBytes];
  const size_t length = std::strftime(buffer, sizeof(buffer), text.c_str(), &local);
  return Value::String(std::string(buffer, length));
}

}  // namespace

Result<Value> Arithmetic(const std::string& op, const Value& a, const Value& b, Budget* budget) {
  if (op == "~") {
    STOCKPOT_ASSIGN_OR_RETURN(std::string left, ToText(a, budget));
    STOCKPOT_ASSIGN_OR_RETURN(const std::string right, ToText(b, budget));
    return Value::String(std::move(left) + right);
  }
  if (a.is_integer() && b.is_integer()) return IntegerArithmetic(op, a.integer(), b.integer());
  if (a.is_number() && b.is_number()) return FloatArithmetic(op, a.number(), b.number());
  if (op == "*" && b.is_integer() && (a.is(Kind::kString) || a.is(Kind::kList))) {
    return Repeat(a, b.integer(), budget);
  }
  if (op == "*" && a.is_integer() && (b.is(Kind::kString) || b.is(Kind::kList))) {
    return Repeat(b, a.integer(), budget);
  }
  if (op == "+" && a.is(Kind::kString) && b.is(Kind::kString)) {
    STOCKPOT_RETURN_IF_ERROR(budget->Bytes(a.string().size() + b.string().size()));
    return Value::String(a.string() + b.string());
  }
  if (op == "+" && a.is(Kind::kList) && b.is(Kind::kList) && a.is_tuple() == b.is_tuple()) {
    STOCKPOT_RETURN_IF_ERROR(budget->Bytes(a.items().size() * sizeof(Value)));
    std::vector<Value> items = a.items();
    items.insert(items.end(), b.items().begin(), b.items().end());
    return Value::MakeList(std::move(items), budget, a.is_tuple());
  }
  return WrongOperands(op, a, b);
}

Result<Arguments> Renderer::EvaluateArguments(const Expr& expression, const Scope& scope) {
  Arguments arguments;
  for (size_t i = 1; i < expression.children.size(); ++i) {
    STOCKPOT_ASSIGN_OR_RETURN(Value value, Evaluate(*expression.children[i], scope));
    arguments.positional.push_back(std::move(value));
  }
  for (const auto& [name, child] : expression.keywords) {
    STOCKPOT_ASSIGN_OR_RETURN(Value value, Evaluate(*child, scope));
    arguments.named.emplace_back(name, std::move(value));
  }
  return arguments;
}

Result<Value> Renderer::Call(const Expr& expression, const Scope& scope) {
  const Expr& callee = *expression.children[0];
  if (callee.kind == Expr::Kind::kAttribute) {  // a method: the object is needed, not the member
    STOCKPOT_ASSIGN_OR_RETURN(const Value object, Evaluate(*callee.children[0], scope));
    if (HasMethod(object, callee.text) || object.is(Kind::kLoop)) {
      STOCKPOT_ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(expression, scope));
      Result<Value> result = object.is(Kind::kLoop)
                                 ? CallLoop(*object.loop(), callee.text, arguments)
                                 : CallMethod(object, callee.text, arguments, budget_);
      if (!result.ok()) return result.status().WithContext("method '" + callee.text + "'");
      return result;
    }
  }
  STOCKPOT_ASSIGN_OR_RETURN(const Value function, Evaluate(callee, scope));
  STOCKPOT_ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(expression, scope));
  if (function.is(Kind::kFunction)) return CallFunction(function.string(), arguments);
  if (function.is(Kind::kMacro)) return CallMacro(*function.macro(), arguments);
  if (function.is(Kind::kUndefined)) {
    return InvalidArgument(function.string() + " is undefined and can not be called");
  }
  return InvalidArgument("can not call " + std::string(function.TypeName()));
}

Result<Value> Renderer::CallLoop(const Loop& loop, const std::string& name,
                                 const Arguments& arguments) {
  if (name != "cycle") return InvalidArgument("loop." + name + "() is not supported");
  if (arguments.positional.empty()) return InvalidArgument("cycle needs values");
  const auto count = static_cast<int64_t>(arguments.positional.size());
  return arguments.positional[static_cast<size_t>(loop.index0 % count)];
}

Result<Value> Renderer::CallFunction(const std::string& name, const Arguments& arguments) {
  if (name == "range") return Range(arguments, budget_);
  if (name == "strftime_now") return FormatTime(arguments, clock_);
  if (name == "raise_exception") {
    const Value* message = arguments.Find(0, "message");
    if (message == nullptr) return InvalidArgument("raise_exception needs a message");
    STOCKPOT_ASSIGN_OR_RETURN(const std::string text, ToText(*message, budget_));
    return InvalidArgument(text);
  }
  // namespace(a=1) and dict(a=1), both also of a mapping
  Dict dict;
  if (arguments.positional.size() > 1) return InvalidArgument(name + " takes one mapping at most");
  if (!arguments.positional.empty()) {
    if (!arguments.positional[0].is(Kind::kDict)) {
      return InvalidArgument(name + " of " + std::string(arguments.positional[0].TypeName()));
    }
    dict = arguments.positional[0].dict();
  }
  for (const auto& [key, value] : arguments.named) dict.Set(key, value);
  if (name == "dict") return Value::MakeDict(std::move(dict), budget_);
  STOCKPOT_RETURN_IF_ERROR(budget_->Bytes(sizeof(Dict) + dict.entries.size() * sizeof(Value)));
  namespaces_.push_back(std::make_unique<Dict>(std::move(dict)));
  return Value::Namespace(namespaces_.back().get());
}

Result<Value> Renderer::CallMacro(const Stmt& macro, const Arguments& arguments) {
  Scope scope{&top_, {}};
  if (arguments.positional.size() > macro.parameters.size()) {
    return InvalidArgument("macro '" + macro.text + "' takes " +
                           std::to_string(macro.parameters.size()) + " arguments");
  }
  for (const auto& [name, value] : arguments.named) {
    bool known = false;
    for (size_t i = arguments.positional.size(); i < macro.parameters.size(); ++i) {
      known = known || macro.parameters[i].first == name;
    }
    if (!known) {
      return InvalidArgument("macro '" + macro.text + "' takes no argument '" + name + "' here");
    }
  }
  for (size_t i = 0; i < macro.parameters.size(); ++i) {
    const auto& [name, otherwise] = macro.parameters[i];
    Value value = Value::Undefined("parameter '" + name + "'");
    if (const Value* given = arguments.Find(i, name)) {
      value = *given;
    } else if (otherwise) {
      STOCKPOT_ASSIGN_OR_RETURN(value, Evaluate(*otherwise, scope));
    }
    scope.names.Set(name, std::move(value));
  }
  std::string text;
  STOCKPOT_ASSIGN_OR_RETURN([[maybe_unused]] const Flow flow, Execute(macro.body, &scope, &text));
  STOCKPOT_RETURN_IF_ERROR(budget_->Bytes(text.size()));
  return Value::String(std::move(text));
}

}  // namespace stockpot::chat
