// Tokens -> syntax tree. Names of filters and tests are checked here, so that a template with an
// unknown one is refused when it is loaded, not when it is used.
#pragma once

#include <string_view>

#include "kernels/base/status.h"
#include "serve/text/chat_ast.h"

namespace stockpot::chat {

// InvalidArgument with the position and the construct that is wrong or not supported.
Result<Block> Parse(std::string_view source);

}  // namespace stockpot::chat
