// Chat template text -> tokens. Does Jinja2's whitespace control (trim_blocks, lstrip_blocks, '-'
// and '+'), so that the parser never sees it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"
#include "serve/text/chat_ast.h"

namespace stockpot::chat {

struct Token {
  enum class Kind {
    kText,        // text between tags
    kPrintBegin,  // {{
    kPrintEnd,    // }}
    kBlockBegin,  // {%
    kBlockEnd,    // %}
    kName,
    kString,  // text: the string's value
    kInteger,
    kFloat,
    kOperator,
    kEnd,
  };
  Kind kind = Kind::kEnd;
  std::string text;
  Position position;
};

// InvalidArgument with the position of what can not be read.
Result<std::vector<Token>> Lex(std::string_view source);

}  // namespace stockpot::chat
