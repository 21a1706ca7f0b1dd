// The post_processor of a tokenizer.json: the ids around a text when special tokens are asked for.
// Thread promise: immutable.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/status.h"
#include "serve/text/json_node.h"

namespace stockpot {

struct PostProcessor {
  std::vector<int32_t> before, after;

  // Template ids must be below `vocab_size`.
  static Result<PostProcessor> FromJson(const JsonNode& node, int32_t vocab_size);

 private:
  Status Add(const JsonNode& node, int32_t vocab_size, int depth);
  Status AddTemplate(const JsonNode& node, int32_t vocab_size);
};

}  // namespace stockpot
