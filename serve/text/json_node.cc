#include "serve/text/json_node.h"

#include "serve/text/utf8.h"

namespace stockpot {
namespace {

constexpr size_t kMaxQuotedBytes = 60;  // of a value shown in a message

std::string Describe(const nlohmann::json& value) {
  if (value.is_structured()) return std::string("an ") + value.type_name();
  std::string text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (text.size() > kMaxQuotedBytes) text = ToValidUtf8(text.substr(0, kMaxQuotedBytes)) + "...";
  return text;
}

}  // namespace

Status JsonNode::Error(std::string_view message) const {
  return InvalidArgument(place_ + ": " + std::string(message));
}

std::optional<JsonNode> JsonNode::Find(std::string_view key) const {
  if (!value_->is_object()) return std::nullopt;
  const auto found = value_->find(key);
  if (found == value_->end() || found->is_null()) return std::nullopt;
  return JsonNode(*found, place_.empty() ? std::string(key) : place_ + "." + std::string(key));
}

Result<JsonNode> JsonNode::Get(std::string_view key) const {
  if (!value_->is_object()) return Error("expected an object, found " + Describe(*value_));
  auto found = Find(key);
  if (!found) return Error("member '" + std::string(key) + "' is missing");
  return *std::move(found);
}

Result<std::vector<JsonNode>> JsonNode::Array(std::string_view key) const {
  STOCKPOT_ASSIGN_OR_RETURN(const JsonNode array, Get(key));
  if (!array.value().is_array()) {
    return array.Error("expected an array, found " + Describe(array.value()));
  }
  std::vector<JsonNode> out;
  out.reserve(array.value().size());
  for (size_t i = 0; i < array.value().size(); ++i) {
    out.emplace_back(array.value()[i], array.place() + "[" + std::to_string(i) + "]");
  }
  return out;
}

Result<std::string> JsonNode::String(std::string_view key) const {
  STOCKPOT_ASSIGN_OR_RETURN(const JsonNode node, Get(key));
  if (!node.value().is_string()) {
    return node.Error("expected a string, found " + Describe(node.value()));
  }
  return node.value().get_ref<const std::string&>();
}

Result<std::optional<std::string>> JsonNode::OptionalString(std::string_view key) const {
  if (!Find(key)) return std::optional<std::string>();
  STOCKPOT_ASSIGN_OR_RETURN(std::string text, String(key));
  return std::optional<std::string>(std::move(text));
}

Result<bool> JsonNode::Bool(std::string_view key, std::optional<bool> if_absent) const {
  if (if_absent && !Find(key)) return *if_absent;
  STOCKPOT_ASSIGN_OR_RETURN(const JsonNode node, Get(key));
  if (!node.value().is_boolean()) {
    return node.Error("expected a boolean, found " + Describe(node.value()));
  }
  return node.value().get<bool>();
}

Result<int64_t> JsonNode::Integer(std::string_view key, int64_t low, int64_t high) const {
  STOCKPOT_ASSIGN_OR_RETURN(const JsonNode node, Get(key));
  const bool fits = node.value().is_number_unsigned()
                        ? node.value().get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX)
                        : node.value().is_number_integer();
  const int64_t number = fits ? node.value().get<int64_t>() : 0;
  if (!fits || number < low || number > high) {
    return node.Error("expected an integer from " + std::to_string(low) + " to " +
                      std::to_string(high) + ", found " + Describe(node.value()));
  }
  return number;
}

Result<char32_t> JsonNode::Character(std::string_view key) const {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text, String(key));
  if (!text.empty()) {
    const Utf8Step step = NextCodePoint(text, 0);
    if (step.valid && static_cast<size_t>(step.bytes) == text.size()) return step.code_point;
  }
  return Find(key)->Error("expected one character, found " + Describe(Find(key)->value()));
}

}  // namespace stockpot
