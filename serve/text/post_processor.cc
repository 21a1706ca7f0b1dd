#include "serve/text/post_processor.h"

namespace stockpot {
namespace {

constexpr int kMaxDepth = 8;
constexpr size_t kMaxIds = 1000;  // before, and after

Status AppendIds(const JsonNode& node, const std::string& name, int32_t vocab_size,
                 std::vector<int32_t>* out) {
  STOCKPOT_ASSIGN_OR_RETURN(const JsonNode table, node.Get("special_tokens"));
  STOCKPOT_ASSIGN_OR_RETURN(const JsonNode entry, table.Get(name));
  STOCKPOT_ASSIGN_OR_RETURN(const auto ids, entry.Array("ids"));
  for (const JsonNode& id : ids) {
    if (!id.value().is_number_unsigned() ||
        id.value().get<uint64_t>() >= static_cast<uint64_t>(vocab_size)) {
      return id.Error("no id of the vocabulary");
    }
    if (out->size() >= kMaxIds) return entry.Error("too many special tokens");
    out->push_back(id.value().get<int32_t>());
  }
  return OkStatus();
}

}  // namespace

Result<PostProcessor> PostProcessor::FromJson(const JsonNode& node, int32_t vocab_size) {
  PostProcessor processor;
  STOCKPOT_RETURN_IF_ERROR(processor.Add(node, vocab_size, 0));
  return processor;
}

Status PostProcessor::Add(const JsonNode& node, int32_t vocab_size, int depth) {
  if (depth > kMaxDepth) return node.Error("too deeply nested post-processors");
  STOCKPOT_ASSIGN_OR_RETURN(const std::string type, node.String("type"));
  if (type == "ByteLevel") return OkStatus();  // moves offsets only
  if (type == "TemplateProcessing") return AddTemplate(node, vocab_size);
  if (type != "Sequence") return node.Error("post-processor '" + type + "' is not supported");
  STOCKPOT_ASSIGN_OR_RETURN(const auto children, node.Array("processors"));
  for (const JsonNode& child : children) {
    STOCKPOT_RETURN_IF_ERROR(Add(child, vocab_size, depth + 1));
  }
  return OkStatus();
}

Status PostProcessor::AddTemplate(const JsonNode& node, int32_t vocab_size) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto pieces, node.Array("single"));
  std::vector<int32_t> outer_before, outer_after;
  bool seen_text = false;
  for (const JsonNode& piece : pieces) {
    if (const auto sequence = piece.Find("Sequence")) {
      STOCKPOT_ASSIGN_OR_RETURN(const std::string id, sequence->String("id"));
      if (id != "A" || seen_text) return piece.Error("expected sequence A exactly once");
      seen_text = true;
    } else {
      STOCKPOT_ASSIGN_OR_RETURN(const JsonNode special, piece.Get("SpecialToken"));
      STOCKPOT_ASSIGN_OR_RETURN(const std::string id, special.String("id"));
      STOCKPOT_RETURN_IF_ERROR(
          AppendIds(node, id, vocab_size, seen_text ? &outer_after : &outer_before));
    }
  }
  if (!seen_text) return node.Error("the template 'single' lacks sequence A");
  if (before.size() + after.size() > kMaxIds) return node.Error("too many special tokens");
  before.insert(before.begin(), outer_before.begin(), outer_before.end());
  after.insert(after.end(), outer_after.begin(), outer_after.end());
  return OkStatus();
}

}  // namespace stockpot
