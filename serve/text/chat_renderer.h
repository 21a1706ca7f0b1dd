// Walks the syntax tree of a chat template and writes its text.
#pragma once

#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "serve/text/chat_ast.h"
#include "serve/text/chat_functions.h"

namespace stockpot::chat {

// One Render. Thread promise: one thread uses an object, once.
class Renderer {
 public:
  // `budget` has paid for `globals`. REQUIRES: body and budget outlive the renderer.
  Renderer(const Block& body, Dict globals, ChatTemplate::Clock clock, Budget* budget);

  Result<std::string> Run();

 private:
  // What a statement did to the loop around it.
  enum class Flow { kNext, kBreak, kContinue };

  // Names of a block; looked up from the inside out.
  struct Scope {
    const Scope* outer = nullptr;
    Dict names;
  };

  Result<Flow> Execute(const Block& block, Scope* scope, std::string* out);
  Result<Flow> ExecuteOne(const Stmt& statement, Scope* scope, std::string* out);
  Result<Flow> If(const Stmt& statement, Scope* scope, std::string* out);
  Result<Flow> For(const Stmt& statement, Scope* scope, std::string* out);
  Status Assign(const Stmt& statement, const Target& target, Value value, Scope* scope);
  Status Write(std::string_view text, std::string* out);

  Result<Value> Evaluate(const Expr& expression, const Scope& scope);
  Result<Value> EvaluateNode(const Expr& expression, const Scope& scope);
  Result<Value> Name(const Expr& expression, const Scope& scope);
  Result<Value> Collection(const Expr& expression, const Scope& scope);
  Result<Value> Attribute(const Expr& expression, const Scope& scope);
  Result<Value> AttributeOf(const Value& value, const std::string& name);
  Result<Value> Slice(const Expr& expression, const Scope& scope);
  Result<Value> Unary(const Expr& expression, const Scope& scope);
  Result<Value> Binary(const Expr& expression, const Scope& scope);
  Result<Value> Comparison(const Expr& expression, const Scope& scope);
  Result<Value> Call(const Expr& expression, const Scope& scope);
  Result<Value> CallFunction(const std::string& name, const Arguments& arguments);
  Result<Value> CallMacro(const Stmt& macro, const Arguments& arguments);
  Result<Value> CallLoop(const Loop& loop, const std::string& name, const Arguments& arguments);
  Result<Arguments> EvaluateArguments(const Expr& expression, const Scope& scope);

  const Block& body_;
  const ChatTemplate::Clock clock_;
  Budget* budget_;
  Scope globals_, top_;
  std::vector<std::unique_ptr<Dict>> namespaces_;
  int depth_ = 0;       // of evaluations and calls, bounded: the stack is finite
  size_t written_ = 0;  // bytes of output so far
};

// Python's arithmetic of two values. InvalidArgument where Python raises.
Result<Value> Arithmetic(const std::string& op, const Value& a, const Value& b, Budget* budget);

}  // namespace stockpot::chat
