// Chat messages -> prompt text, by the checkpoint's own Jinja2 chat template.
//
// An interpreter for the part of Jinja2 that chat templates use, with the settings of transformers'
// apply_chat_template (trim_blocks, lstrip_blocks, loop controls, no autoescape, `tojson` that
// keeps key order and does not escape):
//
//   statements   for (with filter, else, recursive is refused) / if / set (also block, namespace
//                attributes, several targets) / macro / break / continue / generation / raw /
//                comments
//   expressions  literals, arithmetic, ~, comparison chains, and / or / not, in, is, a if b else c,
//                attribute, item, slice, calls, list, tuple and dict literals
//   filters      kFilters in chat_filters.cc;  tests: kTests in chat_tests.cc
//   functions    range, namespace, dict, raise_exception, strftime_now, macros
//
// Anything else is refused: Parse gives InvalidArgument with the construct and its line and column.
// Both template and messages are untrusted: nesting, steps and output size are bounded, and nothing
// outside the given values can be reached.
//
// Thread promise: immutable after Parse; any number of threads may Render at once. Copies are cheap
// and share the parsed template.
#pragma once

#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "kernels/base/status.h"

namespace stockpot {

struct ChatTemplateLimits {
  static constexpr size_t kMaxSourceBytes = size_t{1} << 20;
  static constexpr int kMaxNesting = 100;                      // blocks and brackets, calls
  static constexpr int64_t kMaxSteps = 2'000'000;              // evaluated nodes, one Render
  static constexpr size_t kMaxOutputBytes = size_t{32} << 20;  // the rendered prompt
  static constexpr size_t kMaxWorkBytes = size_t{256} << 20;   // all strings built, one Render
};

class ChatTemplate {
 public:
  // Where strftime_now takes the time from; the default is the system's clock and time zone.
  using Clock = std::function<std::time_t()>;

  // `bos` and `eos` are what the template sees as bos_token and eos_token.
  static Result<ChatTemplate> Parse(std::string_view source, std::string bos, std::string eos,
                                    Clock clock = {});

  // Renders with `messages` (an array of objects), `add_generation_prompt`, bos_token, eos_token
  // and every member of the object `extra` (tools, documents, chat_template_kwargs; null is an
  // empty object; it wins over the others). ordered_json, because `tojson` must write keys in the
  // client's order; a plain nlohmann::json converts, with sorted keys. InvalidArgument:
  // raise_exception() was called (its message is in the status), or the template misuses a value.
  // ResourceExhausted: a limit above.
  Result<std::string> Render(const nlohmann::ordered_json& messages, bool add_generation_prompt,
                             const nlohmann::ordered_json& extra = nullptr) const;

  struct Parsed;  // the syntax tree, chat_ast.h

 private:
  ChatTemplate() = default;
  std::shared_ptr<const Parsed> parsed_;
  std::string bos_, eos_;
  Clock clock_;
};

}  // namespace stockpot
