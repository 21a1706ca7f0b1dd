#include "serve/text/chat_renderer.h"

#include <algorithm>
#include <array>
#include <optional>

namespace stockpot::chat {
namespace {

using Kind = Value::Kind;

// Evaluations within evaluations. Each takes some hundred bytes of stack, a few thousand with a
// sanitizer; deep enough for macros that call themselves on nested JSON schemas.
constexpr int kMaxDepth = 500;

class Depth {
 public:
  explicit Depth(int* depth) : depth_(depth) { ++*depth_; }
  ~Depth() { --*depth_; }
  bool too_deep() const { return *depth_ > kMaxDepth; }

 private:
  int* depth_;
};

// Puts the position into an error that has none yet.
Status Locate(const Status& status, Position position) {
  if (status.message().starts_with("chat template ")) return status;
  return Status(status.code(), ErrorAt(position, status.message()).message());
}

}  // namespace

Renderer::Renderer(const Block& body, Dict globals, ChatTemplate::Clock clock, Budget* budget)
    : body_(body), clock_(std::move(clock)), budget_(budget) {
  for (const char* name : {"range", "namespace", "dict", "raise_exception", "strftime_now"}) {
    globals_.names.Set(name, Value::Function(name));
  }
  for (auto& [name, value] : globals.entries) globals_.names.Set(name, std::move(value));
  top_.outer = &globals_;
}

Result<std::string> Renderer::Run() {
  std::string out;
  STOCKPOT_ASSIGN_OR_RETURN([[maybe_unused]] const Flow flow, Execute(body_, &top_, &out));
  return out;
}

Status Renderer::Write(std::string_view text, std::string* out) {
  written_ += text.size();
  if (written_ > ChatTemplateLimits::kMaxOutputBytes) {
    return ResourceExhausted("chat template wrote more than " +
                             std::to_string(ChatTemplateLimits::kMaxOutputBytes) + " bytes");
  }
  *out += text;
  return OkStatus();
}

Result<Renderer::Flow> Renderer::Execute(const Block& block, Scope* scope, std::string* out) {
  for (const StmtPtr& statement : block) {
    Result<Flow> flow = ExecuteOne(*statement, scope, out);
    if (!flow.ok()) return Locate(flow.status(), statement->position);
    if (*flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Result<Renderer::Flow> Renderer::ExecuteOne(const Stmt& statement, Scope* scope, std::string* out) {
  STOCKPOT_RETURN_IF_ERROR(budget_->Step());
  const Depth depth(&depth_);
  if (depth.too_deep()) return InvalidArgument("calls are nested too deeply");
  switch (statement.kind) {
    case Stmt::Kind::kText:
      STOCKPOT_RETURN_IF_ERROR(Write(statement.text, out));
      break;
    case Stmt::Kind::kPrint: {
      STOCKPOT_ASSIGN_OR_RETURN(const Value value, Evaluate(*statement.value, *scope));
      STOCKPOT_ASSIGN_OR_RETURN(const std::string text, ToText(value, budget_));
      STOCKPOT_RETURN_IF_ERROR(Write(text, out));
      break;
    }
    case Stmt::Kind::kIf:
      return If(statement, scope, out);
    case Stmt::Kind::kFor:
      return For(statement, scope, out);
    case Stmt::Kind::kSet: {
      STOCKPOT_ASSIGN_OR_RETURN(Value value, Evaluate(*statement.value, *scope));
      STOCKPOT_RETURN_IF_ERROR(Assign(statement, statement.target, std::move(value), scope));
      break;
    }
    case Stmt::Kind::kSetBlock: {
      std::string text;
      Scope inner{scope, {}};
      STOCKPOT_ASSIGN_OR_RETURN(const Flow flow, Execute(statement.body, &inner, &text));
      if (flow != Flow::kNext) return InvalidArgument("a loop is left from within a set block");
      STOCKPOT_RETURN_IF_ERROR(
          Assign(statement, statement.target, Value::String(std::move(text)), scope));
      break;
    }
    case Stmt::Kind::kMacro:
      scope->names.Set(statement.text, Value::Macro(&statement));
      break;
    case Stmt::Kind::kScope: {
      Scope inner{scope, {}};
      return Execute(statement.body, &inner, out);
    }
    case Stmt::Kind::kBreak:
      return Flow::kBreak;
    case Stmt::Kind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNext;
}

Result<Renderer::Flow> Renderer::If(const Stmt& statement, Scope* scope, std::string* out) {
  for (const auto& [condition, body] : statement.branches) {
    if (condition) {
      STOCKPOT_ASSIGN_OR_RETURN(const Value value, Evaluate(*condition, *scope));
      if (!value.Truthy()) continue;
    }
    return Execute(body, scope, out);
  }
  return Flow::kNext;
}

Result<Renderer::Flow> Renderer::For(const Stmt& statement, Scope* scope, std::string* out) {
  STOCKPOT_ASSIGN_OR_RETURN(const Value value, Evaluate(*statement.value, *scope));
  STOCKPOT_ASSIGN_OR_RETURN(std::vector<Value> items, Iterate(value, budget_));
  auto loop = std::make_shared<Loop>();
  if (statement.condition) {
    for (Value& item : items) {
      Scope inner{scope, {}};
      STOCKPOT_RETURN_IF_ERROR(Assign(statement, statement.target, item, &inner));
      STOCKPOT_ASSIGN_OR_RETURN(const Value keep, Evaluate(*statement.condition, inner));
      if (keep.Truthy()) loop->items.push_back(std::move(item));
    }
  } else {
    loop->items = std::move(items);
  }
  for (size_t i = 0; i < loop->items.size(); ++i) {
    loop->index0 = static_cast<int64_t>(i);
    Scope inner{scope, {}};
    STOCKPOT_RETURN_IF_ERROR(budget_->Step());
    inner.names.Set("loop", Value::OfLoop(loop));
    STOCKPOT_RETURN_IF_ERROR(Assign(statement, statement.target, loop->items[i], &inner));
    STOCKPOT_ASSIGN_OR_RETURN(const Flow flow, Execute(statement.body, &inner, out));
    if (flow == Flow::kBreak) break;
  }
  if (!loop->items.empty()) return Flow::kNext;
  Scope inner{scope, {}};
  return Execute(statement.otherwise, &inner, out);  // break here belongs to the loop around
}

Status Renderer::Assign(const Stmt& statement, const Target& target, Value value, Scope* scope) {
  if (!target.attribute.empty()) {
    const Scope* at = scope;
    const Value* found = nullptr;
    for (; at != nullptr && found == nullptr; at = at->outer) {
      found = at->names.Find(target.names[0]);
    }
    if (found == nullptr || !found->is(Kind::kNamespace)) {
      return ErrorAt(statement.position, "'" + target.names[0] + "' is no namespace");
    }
    STOCKPOT_RETURN_IF_ERROR(budget_->Bytes(sizeof(Value)));
    found->mutable_namespace()->Set(target.attribute, std::move(value));
    return OkStatus();
  }
  if (!target.unpack) {
    scope->names.Set(target.names[0], std::move(value));
    return OkStatus();
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<Value> parts, Iterate(value, budget_));
  if (parts.size() != target.names.size()) {
    return ErrorAt(statement.position, "can not unpack " + std::to_string(parts.size()) +
                                           " values into " + std::to_string(target.names.size()));
  }
  for (size_t i = 0; i < parts.size(); ++i) scope->names.Set(target.names[i], parts[i]);
  return OkStatus();
}

Result<Value> Renderer::Evaluate(const Expr& expression, const Scope& scope) {
  STOCKPOT_RETURN_IF_ERROR(budget_->Step());
  const Depth depth(&depth_);
  if (depth.too_deep()) return ErrorAt(expression.position, "calls are nested too deeply");
  Result<Value> value = EvaluateNode(expression, scope);
  if (!value.ok()) return Locate(value.status(), expression.position);
  return value;
}

Result<Value> Renderer::EvaluateNode(const Expr& expression, const Scope& scope) {
  switch (expression.kind) {
    case Expr::Kind::kConstant:
      return expression.constant;
    case Expr::Kind::kName:
      return Name(expression, scope);
    case Expr::Kind::kList:
    case Expr::Kind::kTuple:
    case Expr::Kind::kDict:
      return Collection(expression, scope);
    case Expr::Kind::kAttribute:
      return Attribute(expression, scope);
    case Expr::Kind::kItem: {
      STOCKPOT_ASSIGN_OR_RETURN(const Value value, Evaluate(*expression.children[0], scope));
      STOCKPOT_ASSIGN_OR_RETURN(const Value key, Evaluate(*expression.children[1], scope));
      STOCKPOT_ASSIGN_OR_RETURN(Value item, GetItem(value, key, budget_));
      if (item.is(Kind::kUndefined) && key.is(Kind::kString))
        return AttributeOf(value, key.string());
      return item;
    }
    case Expr::Kind::kSlice:
      return Slice(expression, scope);
    case Expr::Kind::kCall:
      return Call(expression, scope);
    case Expr::Kind::kFilter: {
      STOCKPOT_ASSIGN_OR_RETURN(const Value value, Evaluate(*expression.children[0], scope));
      STOCKPOT_ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(expression, scope));
      Result<Value> result = ApplyFilter(expression.text, value, arguments, budget_);
      if (!result.ok()) return result.status().WithContext("filter '" + expression.text + "'");
      return result;
    }
    case Expr::Kind::kTest: {
      STOCKPOT_ASSIGN_OR_RETURN(const Value value, Evaluate(*expression.children[0], scope));
      STOCKPOT_ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(expression, scope));
      STOCKPOT_ASSIGN_OR_RETURN(const bool holds,
                                ApplyTest(expression.text, value, arguments, budget_));
      return Value::Bool(holds != expression.negated);
    }
    case Expr::Kind::kUnary:
      return Unary(expression, scope);
    case Expr::Kind::kBinary:
      return Binary(expression, scope);
    case Expr::Kind::kCompare:
      return Comparison(expression, scope);
    case Expr::Kind::kCondition: {
      STOCKPOT_ASSIGN_OR_RETURN(const Value condition, Evaluate(*expression.children[1], scope));
      if (condition.Truthy()) return Evaluate(*expression.children[0], scope);
      if (expression.children[2]) return Evaluate(*expression.children[2], scope);
      return Value::Undefined("an if expression without else");
    }
  }
  return Internal("unknown expression");
}

Result<Value> Renderer::Name(const Expr& expression, const Scope& scope) {
  for (const Scope* at = &scope; at != nullptr; at = at->outer) {
    STOCKPOT_RETURN_IF_ERROR(budget_->Step(static_cast<int64_t>(at->names.entries.size() / 16)));
    if (const Value* value = at->names.Find(expression.text)) return *value;
  }
  return Value::Undefined("'" + expression.text + "'");
}

Result<Value> Renderer::Collection(const Expr& expression, const Scope& scope) {
  std::vector<Value> values;
  for (const ExprPtr& child : expression.children) {
    STOCKPOT_ASSIGN_OR_RETURN(Value value, Evaluate(*child, scope));
    values.push_back(std::move(value));
  }
  if (expression.kind != Expr::Kind::kDict) {
    return Value::MakeList(std::move(values), budget_, expression.kind == Expr::Kind::kTuple);
  }
  Dict dict;
  for (size_t i = 0; i < values.size(); i += 2) {
    if (!values[i].is(Kind::kString)) {
      return ErrorAt(expression.children[i]->position, "the key of a mapping must be a string");
    }
    dict.Set(values[i].string(), std::move(values[i + 1]));
  }
  return Value::MakeDict(std::move(dict), budget_);
}

Result<Value> Renderer::Attribute(const Expr& expression, const Scope& scope) {
  STOCKPOT_ASSIGN_OR_RETURN(const Value value, Evaluate(*expression.children[0], scope));
  // A method hides an item of the same name, as in Python.
  if (HasMethod(value, expression.text)) return Value::Method(expression.text);
  if (value.is(Kind::kLoop)) return AttributeOf(value, expression.text);
  return GetItem(value, Value::String(expression.text), budget_);
}

// What value[name] falls back to: methods, and the attributes of `loop`.
Result<Value> Renderer::AttributeOf(const Value& value, const std::string& name) {
  if (HasMethod(value, name)) return Value::Method(name);
  const Value missing = Value::Undefined("'" + name + "' of " + std::string(value.TypeName()));
  if (!value.is(Kind::kLoop)) return missing;
  const Loop& loop = *value.loop();
  const auto size = static_cast<int64_t>(loop.items.size());
  const auto item = [&](int64_t index) {
    return index < 0 || index >= size ? missing : loop.items[static_cast<size_t>(index)];
  };
  if (name == "index") return Value::Int(loop.index0 + 1);
  if (name == "index0") return Value::Int(loop.index0);
  if (name == "revindex") return Value::Int(size - loop.index0);
  if (name == "revindex0") return Value::Int(size - loop.index0 - 1);
  if (name == "first") return Value::Bool(loop.index0 == 0);
  if (name == "last") return Value::Bool(loop.index0 == size - 1);
  if (name == "length") return Value::Int(size);
  if (name == "depth") return Value::Int(1);
  if (name == "depth0") return Value::Int(0);
  if (name == "previtem") return item(loop.index0 - 1);
  if (name == "nextitem") return item(loop.index0 + 1);
  return missing;
}

Result<Value> Renderer::Slice(const Expr& expression, const Scope& scope) {
  STOCKPOT_ASSIGN_OR_RETURN(const Value value, Evaluate(*expression.children[0], scope));
  if (!value.is(Kind::kList) && !value.is(Kind::kString)) {
    if (value.is(Kind::kUndefined)) return InvalidArgument("slice of something undefined");
    return Value::Undefined("a slice of " + std::string(value.TypeName()));
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<Value> items, Iterate(value, budget_));
  std::array<std::optional<int64_t>, 3> bounds;  // start, stop, step
  for (size_t i = 0; i < bounds.size(); ++i) {
    if (!expression.children[i + 1]) continue;
    STOCKPOT_ASSIGN_OR_RETURN(const Value bound, Evaluate(*expression.children[i + 1], scope));
    if (bound.is(Kind::kNone)) continue;
    if (!bound.is_integer()) return InvalidArgument("the bounds of a slice must be integers");
    bounds[i] = bound.integer();
  }
  const auto size = static_cast<int64_t>(items.size());
  const int64_t step = bounds[2].value_or(1);
  if (step == 0) return InvalidArgument("the step of a slice must not be 0");
  const auto clamp = [&](std::optional<int64_t> bound, int64_t otherwise) {
    if (!bound) return otherwise;
    const int64_t index = *bound < 0 ? *bound + size : *bound;
    return std::clamp<int64_t>(index, step > 0 ? 0 : -1, step > 0 ? size : size - 1);
  };
  const int64_t start = clamp(bounds[0], step > 0 ? 0 : size - 1);
  const int64_t stop = clamp(bounds[1], step > 0 ? size : -1);
  std::vector<Value> out;
  // One index past the end is enough: a huge step must not overflow.
  const int64_t stride = std::clamp<int64_t>(step, -size - 1, size + 1);
  for (int64_t i = start; step > 0 ? i < stop : i > stop; i += stride) {
    out.push_back(items[static_cast<size_t>(i)]);
  }
  if (value.is(Kind::kList)) return Value::MakeList(std::move(out), budget_, value.is_tuple());
  std::string text;
  for (const Value& character : out) text += character.string();
  return Value::String(std::move(text));
}

Result<Value> Renderer::Unary(const Expr& expression, const Scope& scope) {
  STOCKPOT_ASSIGN_OR_RETURN(const Value value, Evaluate(*expression.children[0], scope));
  if (expression.text == "not") return Value::Bool(!value.Truthy());
  if (!value.is_number()) {
    return InvalidArgument("'" + expression.text + "' of " + std::string(value.TypeName()));
  }
  if (expression.text == "+") return value.is_integer() ? Value::Int(value.integer()) : value;
  if (value.is(Kind::kFloat)) return Value::Float(-value.number());
  return Arithmetic("-", Value::Int(0), value, budget_);
}

Result<Value> Renderer::Binary(const Expr& expression, const Scope& scope) {
  STOCKPOT_ASSIGN_OR_RETURN(Value left, Evaluate(*expression.children[0], scope));
  if (expression.text == "and" && !left.Truthy()) return left;
  if (expression.text == "or" && left.Truthy()) return left;
  STOCKPOT_ASSIGN_OR_RETURN(Value right, Evaluate(*expression.children[1], scope));
  if (expression.text == "and" || expression.text == "or") return right;
  return Arithmetic(expression.text, left, right, budget_);
}

Result<Value> Renderer::Comparison(const Expr& expression, const Scope& scope) {
  STOCKPOT_ASSIGN_OR_RETURN(Value left, Evaluate(*expression.children[0], scope));
  for (size_t i = 0; i < expression.operators.size(); ++i) {
    STOCKPOT_ASSIGN_OR_RETURN(Value right, Evaluate(*expression.children[i + 1], scope));
    const std::string& op = expression.operators[i];
    bool holds = false;
    if (op == "in" || op == "not in") {
      STOCKPOT_ASSIGN_OR_RETURN(const bool contains, Contains(right, left, budget_));
      holds = contains == (op == "in");
    } else if (op == "==" || op == "!=") {
      STOCKPOT_ASSIGN_OR_RETURN(const bool same, Equal(left, right, budget_));
      holds = same == (op == "==");
    } else {
      STOCKPOT_ASSIGN_OR_RETURN(const int order, Compare(left, right, budget_));
      holds = op == "<" ? order < 0 : op == "<=" ? order <= 0 : op == ">" ? order > 0 : order >= 0;
    }
    if (!holds) return Value::Bool(false);
    left = std::move(right);
  }
  return Value::Bool(true);
}

}  // namespace stockpot::chat
