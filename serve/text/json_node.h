// A JSON value together with its place in the file, so that every complaint can name the place.
//
//   JsonNode model = ...;                                   // "model"
//   STOCKPOT_ASSIGN_OR_RETURN(bool fuse, model.Bool("fuse_unk", false));
//   // -> InvalidArgument: model.fuse_unk: expected a boolean, found "yes"
//
// null counts as absent everywhere, as in tokenizer.json. A node borrows from the parsed document.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"

namespace stockpot {

class JsonNode {
 public:
  JsonNode(const nlohmann::json& value, std::string place)
      : value_(&value), place_(std::move(place)) {}

  const nlohmann::json& value() const { return *value_; }
  const std::string& place() const { return place_; }

  // InvalidArgument "<place>: <message>".
  Status Error(std::string_view message) const;

  // The member, or nothing when it is absent or null, or when this is no object.
  std::optional<JsonNode> Find(std::string_view key) const;
  Result<JsonNode> Get(std::string_view key) const;
  // The elements of the array `key`. InvalidArgument when it is absent or no array.
  Result<std::vector<JsonNode>> Array(std::string_view key) const;

  Result<std::string> String(std::string_view key) const;
  Result<std::optional<std::string>> OptionalString(std::string_view key) const;
  Result<bool> Bool(std::string_view key, std::optional<bool> if_absent = {}) const;
  Result<int64_t> Integer(std::string_view key, int64_t low, int64_t high) const;
  // One Unicode character.
  Result<char32_t> Character(std::string_view key) const;

 private:
  const nlohmann::json* value_;
  std::string place_;
};

}  // namespace stockpot
