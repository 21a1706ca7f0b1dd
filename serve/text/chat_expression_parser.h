// The expressions of a chat template, with Jinja2's precedences, and the reading of tokens.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "serve/text/chat_ast.h"
#include "serve/text/chat_lexer.h"

namespace stockpot::chat {

class ExpressionParser {
 public:
  // REQUIRES: *tokens outlives the parser, does not change and ends with kEnd.
  explicit ExpressionParser(const std::vector<Token>* tokens) : tokens_(tokens) {}

  const Token& Now() const { return (*tokens_)[next_]; }
  const Token& Next() const { return (*tokens_)[std::min(next_ + 1, tokens_->size() - 1)]; }
  Token Take();
  bool TakeIf(Token::Kind kind, std::string_view text);
  Status Expect(Token::Kind kind, std::string_view text);

  Result<ExprPtr> Expression();
  // An expression, or several with commas between: a tuple. Without `with_condition` an `if` ends
  // it.
  Result<ExprPtr> Tuple(bool with_condition);
  // What stands before `in` or `=`.
  Result<Target> AssignmentTarget(bool with_attribute);

  // Macros have implicit names (varargs, kwargs, caller) that are refused.
  void set_in_macro(bool in_macro) { in_macro_ = in_macro; }

 private:
  class Nesting;

  Status Error(std::string_view message) const { return ErrorAt(Now().position, message); }
  bool AtOperator(std::string_view text) const {
    return Now().kind == Token::Kind::kOperator && Now().text == text;
  }
  bool AtName(std::string_view text) const {
    return Now().kind == Token::Kind::kName && Now().text == text;
  }
  bool AtEndOfTuple() const;

  // A node over these children. Refuses a tree that is too deep to walk.
  Result<ExprPtr> Node(Expr::Kind kind, Position position, std::string text,
                       std::vector<ExprPtr> children) const;
  Result<ExprPtr> Finish(ExprPtr node) const;

  using Rule = Result<ExprPtr> (ExpressionParser::*)();
  Result<ExprPtr> LeftAssociative(Rule operand, const std::vector<std::string_view>& operators,
                                  Token::Kind kind);
  Result<ExprPtr> Or();
  Result<ExprPtr> And();
  Result<ExprPtr> Not();
  Result<ExprPtr> Comparison();
  Result<ExprPtr> Sum();
  Result<ExprPtr> Concatenation();
  Result<ExprPtr> Product();
  Result<ExprPtr> Power();
  Result<ExprPtr> Unary() { return UnaryWith(/*with_filter=*/true); }
  Result<ExprPtr> UnaryWith(bool with_filter);
  Result<ExprPtr> Primary();
  Result<ExprPtr> NameOrConstant();
  Result<ExprPtr> ListLiteral();
  Result<ExprPtr> DictLiteral();
  Result<ExprPtr> Postfix(ExprPtr node);
  Result<ExprPtr> FiltersAndTests(ExprPtr node);
  Result<ExprPtr> Subscript(ExprPtr node);
  Result<ExprPtr> Filter(ExprPtr node);
  Result<ExprPtr> Test(ExprPtr node);
  Status Arguments(Expr* call);  // after "("

  const std::vector<Token>* tokens_;
  size_t next_ = 0;
  int nesting_ = 0;
  bool in_macro_ = false;
};

}  // namespace stockpot::chat
