#include "serve/text/chat_expression_parser.h"

#include <algorithm>
#include <charconv>

#include "serve/text/chat_functions.h"

namespace stockpot::chat {

using Kind = Token::Kind;

// Counts the rules that are open, so that brackets can not exhaust the stack.
class ExpressionParser::Nesting {
 public:
  explicit Nesting(int* count) : count_(count) { ++*count_; }
  ~Nesting() { --*count_; }
  bool too_deep() const { return *count_ > ChatTemplateLimits::kMaxNesting; }

 private:
  int* count_;
};

Token ExpressionParser::Take() {
  const Token& token = Now();
  if (token.kind != Kind::kEnd) ++next_;
  return token;
}

bool ExpressionParser::TakeIf(Kind kind, std::string_view text) {
  if (Now().kind != kind || Now().text != text) return false;
  ++next_;
  return true;
}

Status ExpressionParser::Expect(Kind kind, std::string_view text) {
  if (Now().kind == kind && (text.empty() || Now().text == text)) {
    if (kind != Kind::kEnd) ++next_;
    return OkStatus();
  }
  const std::string wanted = kind == Kind::kBlockEnd   ? "%}"
                             : kind == Kind::kPrintEnd ? "}}"
                                                       : std::string(text);
  return Error("expected '" + wanted + "'" +
               (Now().text.empty() ? "" : ", found '" + Now().text + "'"));
}

Result<ExprPtr> ExpressionParser::Finish(ExprPtr node) const {
  for (const ExprPtr& child : node->children) {
    if (child) node->depth = std::max(node->depth, child->depth + 1);
  }
  for (const auto& keyword : node->keywords) {
    node->depth = std::max(node->depth, keyword.second->depth + 1);
  }
  if (node->depth > 2 * ChatTemplateLimits::kMaxNesting) {
    return ErrorAt(node->position, "the expression is nested too deeply");
  }
  return node;
}

Result<ExprPtr> ExpressionParser::Node(Expr::Kind kind, Position position, std::string text,
                                       std::vector<ExprPtr> children) const {
  auto node = std::make_unique<Expr>();
  node->kind = kind;
  node->position = position;
  node->text = std::move(text);
  node->children = std::move(children);
  return Finish(std::move(node));
}

namespace {

// std::vector has no initializer list of move-only values.
template <typename... Pointers>
std::vector<ExprPtr> ListOf(Pointers... pointers) {
  std::vector<ExprPtr> out;
  (out.push_back(std::move(pointers)), ...);
  return out;
}

}  // namespace

Result<ExprPtr> ExpressionParser::Expression() {
  const Nesting nesting(&nesting_);
  if (nesting.too_deep()) return Error("the expression is nested too deeply");
  STOCKPOT_ASSIGN_OR_RETURN(ExprPtr node, Or());
  while (AtName("if")) {
    const Position position = Take().position;
    STOCKPOT_ASSIGN_OR_RETURN(ExprPtr condition, Or());
    ExprPtr otherwise;
    if (TakeIf(Kind::kName, "else")) {
      STOCKPOT_ASSIGN_OR_RETURN(otherwise, Expression());
    }
    STOCKPOT_ASSIGN_OR_RETURN(
        node, Node(Expr::Kind::kCondition, position, "",
                   ListOf(std::move(node), std::move(condition), std::move(otherwise))));
  }
  return node;
}

bool ExpressionParser::AtEndOfTuple() const {
  return Now().kind == Kind::kPrintEnd || Now().kind == Kind::kBlockEnd || AtOperator(")") ||
         AtName("in");
}

Result<ExprPtr> ExpressionParser::Tuple(bool with_condition) {
  const Position position = Now().position;
  std::vector<ExprPtr> items;
  bool comma = false;
  while (!AtEndOfTuple()) {
    const Nesting nesting(&nesting_);
    if (nesting.too_deep()) return Error("the expression is nested too deeply");
    STOCKPOT_ASSIGN_OR_RETURN(ExprPtr item, with_condition ? Expression() : Or());
    items.push_back(std::move(item));
    if (!TakeIf(Kind::kOperator, ",")) break;
    comma = true;
  }
  if (!comma && items.size() == 1) return std::move(items[0]);
  if (items.empty() && !AtOperator(")")) return Error("expected an expression");
  return Node(Expr::Kind::kTuple, position, "", std::move(items));
}

Result<Target> ExpressionParser::AssignmentTarget(bool with_attribute) {
  Target target;
  const bool parentheses = TakeIf(Kind::kOperator, "(");
  do {
    if (Now().kind != Kind::kName || AtName("in")) return Error("expected a name to assign to");
    for (const std::string_view constant : {"true", "false", "none", "True", "False", "None"}) {
      if (Now().text == constant) return Error("can not assign to '" + Now().text + "'");
    }
    target.names.push_back(Take().text);
    if (with_attribute && target.names.size() == 1 && TakeIf(Kind::kOperator, ".")) {
      if (Now().kind != Kind::kName) return Error("expected the name of an attribute");
      target.attribute = Take().text;
      break;
    }
    if (!AtOperator(",")) break;
    target.unpack = true;
  } while (TakeIf(Kind::kOperator, ","));
  if (parentheses) STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kOperator, ")"));
  if (target.names.empty()) return Error("expected a name to assign to");
  return target;
}

Result<ExprPtr> ExpressionParser::LeftAssociative(Rule operand,
                                                  const std::vector<std::string_view>& operators,
                                                  Kind kind) {
  STOCKPOT_ASSIGN_OR_RETURN(ExprPtr left, (this->*operand)());
  while (Now().kind == kind &&
         std::find(operators.begin(), operators.end(), Now().text) != operators.end()) {
    const Token op = Take();
    STOCKPOT_ASSIGN_OR_RETURN(ExprPtr right, (this->*operand)());
    STOCKPOT_ASSIGN_OR_RETURN(left, Node(Expr::Kind::kBinary, op.position, op.text,
                                         ListOf(std::move(left), std::move(right))));
  }
  return left;
}

Result<ExprPtr> ExpressionParser::Or() {
  return LeftAssociative(&ExpressionParser::And, {"or"}, Kind::kName);
}
Result<ExprPtr> ExpressionParser::And() {
  return LeftAssociative(&ExpressionParser::Not, {"and"}, Kind::kName);
}
Result<ExprPtr> ExpressionParser::Sum() {
  return LeftAssociative(&ExpressionParser::Concatenation, {"+", "-"}, Kind::kOperator);
}
Result<ExprPtr> ExpressionParser::Concatenation() {
  return LeftAssociative(&ExpressionParser::Product, {"~"}, Kind::kOperator);
}
Result<ExprPtr> ExpressionParser::Product() {
  return LeftAssociative(&ExpressionParser::Power, {"*", "/", "//", "%"}, Kind::kOperator);
}
Result<ExprPtr> ExpressionParser::Power() {
  return LeftAssociative(&ExpressionParser::Unary, {"**"}, Kind::kOperator);
}

Result<ExprPtr> ExpressionParser::Not() {
  if (!AtName("not")) return Comparison();
  const Nesting nesting(&nesting_);
  if (nesting.too_deep()) return Error("the expression is nested too deeply");
  const Position position = Take().position;
  STOCKPOT_ASSIGN_OR_RETURN(ExprPtr operand, Not());
  return Node(Expr::Kind::kUnary, position, "not", ListOf(std::move(operand)));
}

Result<ExprPtr> ExpressionParser::Comparison() {
  const Position position = Now().position;
  STOCKPOT_ASSIGN_OR_RETURN(ExprPtr first, Sum());
  std::vector<std::string> operators;
  std::vector<ExprPtr> operands;
  while (true) {
    std::string op;
    for (const std::string_view known : {"==", "!=", "<=", ">=", "<", ">"}) {
      if (AtOperator(known)) op = known;
    }
    if (AtName("in")) op = "in";
    const bool not_in = AtName("not") && Next().kind == Kind::kName && Next().text == "in";
    if (not_in) op = "not in";
    if (op.empty()) break;
    Take();
    if (not_in) Take();
    STOCKPOT_ASSIGN_OR_RETURN(ExprPtr operand, Sum());
    operators.push_back(std::move(op));
    operands.push_back(std::move(operand));
  }
  if (operators.empty()) return first;
  operands.insert(operands.begin(), std::move(first));
  STOCKPOT_ASSIGN_OR_RETURN(ExprPtr node,
                            Node(Expr::Kind::kCompare, position, "", std::move(operands)));
  node->operators = std::move(operators);
  return node;
}

Result<ExprPtr> ExpressionParser::UnaryWith(bool with_filter) {
  ExprPtr node;
  if (AtOperator("-") || AtOperator("+")) {
    const Nesting nesting(&nesting_);
    if (nesting.too_deep()) return Error("the expression is nested too deeply");
    const Token sign = Take();
    STOCKPOT_ASSIGN_OR_RETURN(ExprPtr operand, UnaryWith(/*with_filter=*/false));
    STOCKPOT_ASSIGN_OR_RETURN(
        node, Node(Expr::Kind::kUnary, sign.position, sign.text, ListOf(std::move(operand))));
  } else {
    STOCKPOT_ASSIGN_OR_RETURN(node, Primary());
  }
  STOCKPOT_ASSIGN_OR_RETURN(node, Postfix(std::move(node)));
  return with_filter ? FiltersAndTests(std::move(node)) : std::move(node);
}

Result<ExprPtr> ExpressionParser::Primary() {
  if (AtOperator("(")) {
    Take();
    STOCKPOT_ASSIGN_OR_RETURN(ExprPtr node, Tuple(/*with_condition=*/true));
    STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kOperator, ")"));
    return node;
  }
  if (AtOperator("[")) return ListLiteral();
  if (AtOperator("{")) return DictLiteral();
  return NameOrConstant();
}

Result<ExprPtr> ExpressionParser::NameOrConstant() {
  const Token token = Take();
  Value value;
  switch (token.kind) {
    case Kind::kName:
      if (token.text == "true" || token.text == "True") {
        value = Value::Bool(true);
      } else if (token.text == "false" || token.text == "False") {
        value = Value::Bool(false);
      } else if (token.text == "none" || token.text == "None") {
        value = Value::None();
      } else {
        for (const std::string_view name : {"varargs", "kwargs", "caller", "self", "super"}) {
          if (token.text != name || (!in_macro_ && name.ends_with("args"))) continue;
          return ErrorAt(token.position, "'" + token.text + "' is not supported");
        }
        return Node(Expr::Kind::kName, token.position, token.text, {});
      }
      break;
    case Kind::kString: {
      std::string text = token.text;  // strings side by side are one
      while (Now().kind == Kind::kString) text += Take().text;
      value = Value::String(std::move(text));
      break;
    }
    case Kind::kInteger: {
      int64_t number = 0;
      const char* end = token.text.data() + token.text.size();
      if (std::from_chars(token.text.data(), end, number).ec != std::errc()) {
        return ErrorAt(token.position, "integer out of range");
      }
      value = Value::Int(number);
      break;
    }
    case Kind::kFloat: {
      double number = 0;
      const char* end = token.text.data() + token.text.size();
      if (std::from_chars(token.text.data(), end, number).ec != std::errc()) {
        return ErrorAt(token.position, "number out of range");
      }
      value = Value::Float(number);
      break;
    }
    default:
      return ErrorAt(token.position, token.text.empty()
                                         ? std::string("expected an expression")
                                         : "expected an expression, found '" + token.text + "'");
  }
  STOCKPOT_ASSIGN_OR_RETURN(ExprPtr node, Node(Expr::Kind::kConstant, token.position, "", {}));
  node->constant = std::move(value);
  return node;
}

Result<ExprPtr> ExpressionParser::ListLiteral() {
  const Position position = Take().position;
  std::vector<ExprPtr> items;
  while (!TakeIf(Kind::kOperator, "]")) {
    if (!items.empty()) {
      STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kOperator, ","));
      if (TakeIf(Kind::kOperator, "]")) break;
    }
    STOCKPOT_ASSIGN_OR_RETURN(ExprPtr item, Expression());
    items.push_back(std::move(item));
  }
  return Node(Expr::Kind::kList, position, "", std::move(items));
}

Result<ExprPtr> ExpressionParser::DictLiteral() {
  const Position position = Take().position;
  std::vector<ExprPtr> items;
  while (!TakeIf(Kind::kOperator, "}")) {
    if (!items.empty()) {
      STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kOperator, ","));
      if (TakeIf(Kind::kOperator, "}")) break;
    }
    STOCKPOT_ASSIGN_OR_RETURN(ExprPtr key, Expression());
    STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kOperator, ":"));
    STOCKPOT_ASSIGN_OR_RETURN(ExprPtr value, Expression());
    items.push_back(std::move(key));
    items.push_back(std::move(value));
  }
  return Node(Expr::Kind::kDict, position, "", std::move(items));
}

Result<ExprPtr> ExpressionParser::Postfix(ExprPtr node) {
  while (true) {
    const Position position = Now().position;
    if (TakeIf(Kind::kOperator, ".")) {
      if (Now().kind != Kind::kName && Now().kind != Kind::kInteger) {
        return Error("expected the name of an attribute");
      }
      const Token name = Take();
      if (name.kind == Kind::kInteger) return ErrorAt(name.position, "'.' before a number");
      STOCKPOT_ASSIGN_OR_RETURN(
          node, Node(Expr::Kind::kAttribute, name.position, name.text, ListOf(std::move(node))));
    } else if (TakeIf(Kind::kOperator, "[")) {
      STOCKPOT_ASSIGN_OR_RETURN(node, Subscript(std::move(node)));
    } else if (TakeIf(Kind::kOperator, "(")) {
      STOCKPOT_ASSIGN_OR_RETURN(node,
                                Node(Expr::Kind::kCall, position, "", ListOf(std::move(node))));
      STOCKPOT_RETURN_IF_ERROR(Arguments(node.get()));
      STOCKPOT_ASSIGN_OR_RETURN(node, Finish(std::move(node)));
    } else {
      return node;
    }
  }
}

Result<ExprPtr> ExpressionParser::FiltersAndTests(ExprPtr node) {
  while (true) {
    if (AtOperator("|")) {
      STOCKPOT_ASSIGN_OR_RETURN(node, Filter(std::move(node)));
    } else if (AtName("is")) {
      STOCKPOT_ASSIGN_OR_RETURN(node, Test(std::move(node)));
    } else if (AtOperator("(")) {
      return Error("a call of a filter's or a test's result is not supported");
    } else {
      return node;
    }
  }
}

Result<ExprPtr> ExpressionParser::Subscript(ExprPtr node) {
  const Position position = Now().position;
  std::vector<ExprPtr> parts;  // of a slice; null where left out
  bool colon = false;
  for (int colons = 0;; ++colons) {
    ExprPtr part;
    if (!AtOperator(":") && !AtOperator("]")) {
      STOCKPOT_ASSIGN_OR_RETURN(part, Expression());
    }
    parts.push_back(std::move(part));
    if (colons == 2 || !TakeIf(Kind::kOperator, ":")) break;
    colon = true;
  }
  if (AtOperator(",")) return Error("several subscripts are not supported");
  if (!colon && !parts[0]) return Error("expected a subscript");
  STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kOperator, "]"));
  if (!colon) {
    return Node(Expr::Kind::kItem, position, "", ListOf(std::move(node), std::move(parts[0])));
  }
  parts.resize(3);
  return Node(
      Expr::Kind::kSlice, position, "",
      ListOf(std::move(node), std::move(parts[0]), std::move(parts[1]), std::move(parts[2])));
}

Result<ExprPtr> ExpressionParser::Filter(ExprPtr node) {
  Take();
  if (Now().kind != Kind::kName) return Error("expected the name of a filter");
  const Token name = Take();
  if (!IsFilter(name.text)) {
    return ErrorAt(name.position, "filter '" + name.text + "' is not supported");
  }
  STOCKPOT_ASSIGN_OR_RETURN(
      node, Node(Expr::Kind::kFilter, name.position, name.text, ListOf(std::move(node))));
  if (TakeIf(Kind::kOperator, "(")) STOCKPOT_RETURN_IF_ERROR(Arguments(node.get()));
  return Finish(std::move(node));
}

Result<ExprPtr> ExpressionParser::Test(ExprPtr node) {
  Take();
  const bool negated = TakeIf(Kind::kName, "not");
  if (Now().kind != Kind::kName) return Error("expected the name of a test");
  const Token name = Take();
  if (!IsTest(name.text)) {
    return ErrorAt(name.position, "test '" + name.text + "' is not supported");
  }
  STOCKPOT_ASSIGN_OR_RETURN(
      node, Node(Expr::Kind::kTest, name.position, name.text, ListOf(std::move(node))));
  node->negated = negated;
  const bool ends = AtName("else") || AtName("or") || AtName("and") || AtName("if") ||
                    AtName("is") || AtName("in") || AtName("not");
  if (TakeIf(Kind::kOperator, "(")) {
    STOCKPOT_RETURN_IF_ERROR(Arguments(node.get()));
  } else if (!ends && (Now().kind == Kind::kName || Now().kind == Kind::kString ||
                       Now().kind == Kind::kInteger || Now().kind == Kind::kFloat ||
                       AtOperator("[") || AtOperator("{"))) {
    STOCKPOT_ASSIGN_OR_RETURN(ExprPtr argument, Primary());
    STOCKPOT_ASSIGN_OR_RETURN(argument, Postfix(std::move(argument)));
    node->children.push_back(std::move(argument));
  }
  return Finish(std::move(node));
}

Status ExpressionParser::Arguments(Expr* call) {
  bool first = true;
  while (!TakeIf(Kind::kOperator, ")")) {
    if (!first) {
      STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kOperator, ","));
      if (TakeIf(Kind::kOperator, ")")) break;
    }
    first = false;
    if (AtOperator("*") || AtOperator("**")) return Error("'*' arguments are not supported");
    const bool keyword =
        Now().kind == Kind::kName && Next().kind == Kind::kOperator && Next().text == "=";
    std::string name;
    if (keyword) {
      name = Take().text;
      Take();
    } else if (!call->keywords.empty()) {
      return Error("a positional argument behind a named one");
    }
    STOCKPOT_ASSIGN_OR_RETURN(ExprPtr value, Expression());
    if (keyword) {
      call->keywords.emplace_back(std::move(name), std::move(value));
    } else {
      call->children.push_back(std::move(value));
    }
  }
  return OkStatus();
}

}  // namespace stockpot::chat
