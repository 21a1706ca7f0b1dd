// Typed access to the fields of a JSON object that a client sent. The first thing that is wrong is
// remembered, so that a parser reads all fields in a row and looks once:
//
//   JsonFields fields(object);
//   fields.Read("n", &n, 1, 128);
//   fields.Read("stream", &stream);
//   if (fields.error()) return *fields.error();
//
// A missing field and null leave the destination as it is.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "serve/http/api_error.h"

namespace stockpot {

class JsonFields {
 public:
  // Borrows the object. REQUIRES: object.is_object().
  explicit JsonFields(const nlohmann::ordered_json& object) : object_(object) {}

  const ApiStatus& error() const { return error_; }
  void Fail(const std::string& field, const std::string& what);

  // Null: missing or JSON null.
  const nlohmann::ordered_json* Find(const char* field) const;

  void Read(const char* field, bool* value);
  void Read(const char* field, std::string* value);
  // Integers may be written as 16.0; a bool is no number.
  void Read(const char* field, int64_t* value, int64_t low, int64_t high);
  void Read(const char* field, std::optional<int64_t>* value, int64_t low, int64_t high);
  void Read(const char* field, double* value, double low, double high);
  void Read(const char* field, std::optional<double>* value, double low, double high);
  // An array of token ids, each in int32's non-negative range.
  void Read(const char* field, std::vector<int32_t>* value, size_t most);

 private:
  const nlohmann::ordered_json& object_;
  ApiStatus error_;
};

// The integer that `value` is, or nothing.
std::optional<int64_t> AsInteger(const nlohmann::ordered_json& value);

}  // namespace stockpot
