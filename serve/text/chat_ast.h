// The syntax tree of a chat template. Built by chat_parser.cc, walked by chat_renderer.cc.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/base/status.h"
#include "serve/text/chat_template.h"
#include "serve/text/chat_value.h"

namespace stockpot::chat {

// Where something stands in the template, both from 1.
struct Position {
  int line = 1;
  int column = 1;
};

// InvalidArgument "chat template line L column C: message".
Status ErrorAt(Position position, std::string_view message);

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

struct Expr {
  enum class Kind {
    kConstant,   // constant
    kName,       // text
    kList,       // children
    kTuple,      // children
    kDict,       // children: key, value, key, value, ...
    kAttribute,  // children[0] . text
    kItem,       // children[0] [ children[1] ]
    kSlice,      // children[0] [ children[1] : children[2] : children[3] ], each may be null
    kCall,       // children[0] ( children[1...], keywords )
    kFilter,     // children[0] | text ( children[1...], keywords )
    kTest,       // children[0] is text ( children[1...] ); negated: is not
    kUnary,      // text: "-", "+", "not"
    kBinary,     // text: the operator, "and" and "or" included
    kCompare,    // children[0] operators[0] children[1] operators[1] ...
    kCondition,  // children[0] if children[1] else children[2] (may be null)
  };
  Kind kind = Kind::kConstant;
  Position position;
  int depth = 1;  // of the tree below, itself included
  std::string text;
  Value constant;
  std::vector<ExprPtr> children;
  std::vector<std::pair<std::string, ExprPtr>> keywords;
  std::vector<std::string> operators;
  bool negated = false;
};

struct Stmt;
using StmtPtr = std::unique_ptr<Stmt>;
using Block = std::vector<StmtPtr>;

// A name, an attribute of a namespace, or several names to unpack into.
struct Target {
  std::vector<std::string> names;
  std::string attribute;  // names[0].attribute
  bool unpack = false;
};

struct Stmt {
  enum class Kind {
    kText,      // text
    kPrint,     // value
    kIf,        // branches: (condition, body); the last condition may be null (else)
    kFor,       // target, value, condition (may be null), body, otherwise
    kSet,       // target, value
    kSetBlock,  // target, body
    kMacro,     // text, parameters, body
    kScope,     // body: {% generation %}
    kBreak,
    kContinue,
  };
  Kind kind = Kind::kText;
  Position position;
  std::string text;
  Target target;
  ExprPtr value, condition;
  std::vector<std::pair<ExprPtr, Block>> branches;
  std::vector<std::pair<std::string, ExprPtr>> parameters;  // the default may be null
  Block body, otherwise;
};

}  // namespace stockpot::chat

namespace stockpot {
struct ChatTemplate::Parsed {
  chat::Block body;
};
}  // namespace stockpot
