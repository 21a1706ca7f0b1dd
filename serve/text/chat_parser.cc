#include "serve/text/chat_parser.h"

#include <algorithm>

#include "serve/text/chat_expression_parser.h"

namespace stockpot::chat {
namespace {

using Kind = Token::Kind;

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)), expressions_(&tokens_) {}

  Result<Block> Run() {
    STOCKPOT_ASSIGN_OR_RETURN(Block body, Body({}));
    return body;
  }

 private:
  const Token& Now() const { return expressions_.Now(); }
  Token Take() { return expressions_.Take(); }
  bool TakeIf(Kind kind, std::string_view text) { return expressions_.TakeIf(kind, text); }
  Status Expect(Kind kind, std::string_view text) { return expressions_.Expect(kind, text); }
  Status Error(std::string_view message) const { return ErrorAt(Now().position, message); }

  static StmtPtr Make(Stmt::Kind kind, Position position) {
    auto statement = std::make_unique<Stmt>();
    statement->kind = kind;
    statement->position = position;
    return statement;
  }

  // True when a block tag begins here whose name is one of `names`.
  bool AtTag(const std::vector<std::string_view>& names) const {
    return Now().kind == Kind::kBlockBegin && expressions_.Next().kind == Kind::kName &&
           std::find(names.begin(), names.end(), expressions_.Next().text) != names.end();
  }

  // Statements up to a tag named in `ends` (not taken), or the end of the template.
  Result<Block> Body(const std::vector<std::string_view>& ends) {
    if (++nesting_ > ChatTemplateLimits::kMaxNesting) return Error("blocks are nested too deeply");
    Block block;
    while (!AtTag(ends)) {
      if (Now().kind == Kind::kEnd) {
        if (ends.empty()) break;
        return Error("the template ends where '" + std::string(ends.front()) + "' is expected");
      }
      STOCKPOT_ASSIGN_OR_RETURN(StmtPtr statement, Statement());
      block.push_back(std::move(statement));
    }
    --nesting_;
    return block;
  }

  // Body up to {% end %}, the tag included.
  Result<Block> BodyUntil(std::string_view end) {
    STOCKPOT_ASSIGN_OR_RETURN(Block block, Body({end}));
    Take();
    Take();
    STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kBlockEnd, ""));
    return block;
  }

  Result<StmtPtr> Statement() {
    const Token token = Take();
    if (token.kind == Kind::kText) {
      StmtPtr statement = Make(Stmt::Kind::kText, token.position);
      statement->text = token.text;
      return statement;
    }
    if (token.kind == Kind::kPrintBegin) {
      StmtPtr statement = Make(Stmt::Kind::kPrint, token.position);
      STOCKPOT_ASSIGN_OR_RETURN(statement->value, expressions_.Tuple(/*with_condition=*/true));
      STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kPrintEnd, ""));
      return statement;
    }
    const Token name = Take();  // the lexer gives text, {{ and {% here, nothing else
    if (name.kind != Kind::kName) return ErrorAt(name.position, "expected the name of a tag");
    return Tag(name);
  }

  Result<StmtPtr> Tag(const Token& name) {
    if (name.text == "if") return If(name.position);
    if (name.text == "for") return For(name.position);
    if (name.text == "set") return Set(name.position);
    if (name.text == "macro") return Macro(name.position);
    if (name.text == "generation") {
      StmtPtr statement = Make(Stmt::Kind::kScope, name.position);
      STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kBlockEnd, ""));
      STOCKPOT_ASSIGN_OR_RETURN(statement->body, BodyUntil("endgeneration"));
      return statement;
    }
    if (name.text == "break" || name.text == "continue") {
      if (loops_ == 0) return ErrorAt(name.position, "'" + name.text + "' outside of a loop");
      STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kBlockEnd, ""));
      return Make(name.text == "break" ? Stmt::Kind::kBreak : Stmt::Kind::kContinue, name.position);
    }
    return ErrorAt(name.position, "tag '" + name.text + "' is not supported here");
  }

  Result<StmtPtr> If(Position position) {
    StmtPtr statement = Make(Stmt::Kind::kIf, position);
    while (true) {
      STOCKPOT_ASSIGN_OR_RETURN(ExprPtr condition, expressions_.Tuple(/*with_condition=*/false));
      STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kBlockEnd, ""));
      STOCKPOT_ASSIGN_OR_RETURN(Block body, Body({"endif", "else", "elif"}));
      statement->branches.emplace_back(std::move(condition), std::move(body));
      Take();
      const std::string tag = Take().text;
      if (tag == "elif") continue;
      STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kBlockEnd, ""));
      if (tag == "else") {
        STOCKPOT_ASSIGN_OR_RETURN(Block otherwise, BodyUntil("endif"));
        statement->branches.emplace_back(nullptr, std::move(otherwise));
      }
      return statement;
    }
  }

  Result<StmtPtr> For(Position position) {
    StmtPtr statement = Make(Stmt::Kind::kFor, position);
    STOCKPOT_ASSIGN_OR_RETURN(statement->target, expressions_.AssignmentTarget(false));
    STOCKPOT_RETURN_IF_ERROR(CheckNotLoop(statement->target, position));
    STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kName, "in"));
    STOCKPOT_ASSIGN_OR_RETURN(statement->value, expressions_.Tuple(/*with_condition=*/false));
    if (TakeIf(Kind::kName, "if")) {
      STOCKPOT_ASSIGN_OR_RETURN(statement->condition, expressions_.Expression());
    }
    if (Now().text == "recursive") return Error("a recursive loop is not supported");
    STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kBlockEnd, ""));
    ++loops_;
    STOCKPOT_ASSIGN_OR_RETURN(statement->body, Body({"endfor", "else"}));
    --loops_;
    Take();
    const bool has_else = Take().text == "else";
    STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kBlockEnd, ""));
    if (has_else) {
      STOCKPOT_ASSIGN_OR_RETURN(statement->otherwise, BodyUntil("endfor"));
    }
    return statement;
  }

  static Status CheckNotLoop(const Target& target, Position position) {
    for (const std::string& name : target.names) {
      if (name == "loop") return ErrorAt(position, "can not assign to 'loop' in a loop");
    }
    return OkStatus();
  }

  Result<StmtPtr> Set(Position position) {
    StmtPtr statement = Make(Stmt::Kind::kSet, position);
    STOCKPOT_ASSIGN_OR_RETURN(statement->target, expressions_.AssignmentTarget(true));
    if (loops_ > 0) STOCKPOT_RETURN_IF_ERROR(CheckNotLoop(statement->target, position));
    if (TakeIf(Kind::kOperator, "=")) {
      STOCKPOT_ASSIGN_OR_RETURN(statement->value, expressions_.Tuple(/*with_condition=*/true));
      STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kBlockEnd, ""));
      return statement;
    }
    if (Now().kind == Kind::kOperator) return Error("'" + Now().text + "' is not supported in set");
    if (statement->target.unpack) return Error("set of several names needs a value");
    statement->kind = Stmt::Kind::kSetBlock;
    STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kBlockEnd, ""));
    STOCKPOT_ASSIGN_OR_RETURN(statement->body, BodyUntil("endset"));
    return statement;
  }

  Result<StmtPtr> Macro(Position position) {
    // A macro sees the names around it; at the top level these live as long as it does.
    if (loops_ > 0 || in_macro_) return ErrorAt(position, "a macro within a loop or a macro");
    StmtPtr statement = Make(Stmt::Kind::kMacro, position);
    if (Now().kind != Kind::kName) return Error("expected the name of the macro");
    statement->text = Take().text;
    STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kOperator, "("));
    while (!TakeIf(Kind::kOperator, ")")) {
      if (!statement->parameters.empty()) STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kOperator, ","));
      if (Now().kind != Kind::kName) return Error("expected a parameter");
      std::string name = Take().text;
      ExprPtr value;
      if (TakeIf(Kind::kOperator, "=")) {
        STOCKPOT_ASSIGN_OR_RETURN(value, expressions_.Expression());
      }
      statement->parameters.emplace_back(std::move(name), std::move(value));
    }
    STOCKPOT_RETURN_IF_ERROR(Expect(Kind::kBlockEnd, ""));
    in_macro_ = true;
    expressions_.set_in_macro(true);
    STOCKPOT_ASSIGN_OR_RETURN(statement->body, BodyUntil("endmacro"));
    in_macro_ = false;
    expressions_.set_in_macro(false);
    return statement;
  }

  std::vector<Token> tokens_;
  ExpressionParser expressions_;
  int nesting_ = 0;
  int loops_ = 0;
  bool in_macro_ = false;
};

}  // namespace

Result<Block> Parse(std::string_view source) {
  if (source.size() > ChatTemplateLimits::kMaxSourceBytes) {
    return InvalidArgument("chat template has " + std::to_string(source.size()) +
                           " bytes, over the limit of " +
                           std::to_string(ChatTemplateLimits::kMaxSourceBytes));
  }
  STOCKPOT_ASSIGN_OR_RETURN(std::vector<Token> tokens, Lex(source));
  return Parser(std::move(tokens)).Run();
}

}  // namespace stockpot::chat
