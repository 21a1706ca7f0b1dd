#include "serve/http/json_fields.h"

#include <cmath>
#include <cstdio>

namespace stockpot {
namespace {

using Json = nlohmann::ordered_json;

std::string Range(double low, double high) {
  char text[96];
  std::snprintf(text, sizeof text, "between %.9g and %.9g", low, high);
  return text;
}

}  // namespace

std::optional<int64_t> AsInteger(const Json& value) {
  if (value.is_number_unsigned()) {
    const uint64_t number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (number == std::floor(number) && std::abs(number) < 0x1p53) {
      return static_cast<int64_t>(number);
    }
  }
  return std::nullopt;
}

void JsonFields::Fail(const std::string& field, const std::string& what) {
  if (!error_) error_ = ApiError(InvalidArgument(field + " " + what), field);
}

const Json* JsonFields::Find(const char* field) const {
  const auto it = object_.find(field);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

void JsonFields::Read(const char* field, bool* value) {
  const Json* json = Find(field);
  if (!json) return;
  if (!json->is_boolean()) return Fail(field, "must be true or false");
  *value = json->get<bool>();
}

void JsonFields::Read(const char* field, std::string* value) {
  const Json* json = Find(field);
  if (!json) return;
  if (!json->is_string()) return Fail(field, "must be a string");
  *value = json->get_ref<const std::string&>();
}

void JsonFields::Read(const char* field, std::optional<int64_t>* value, int64_t low, int64_t high) {
  const Json* json = Find(field);
  if (!json) return;
  const std::optional<int64_t> number = AsInteger(*json);
  if (!number) return Fail(field, "must be an integer");
  if (*number < low || *number > high) {
    return Fail(field, "must be " + Range(static_cast<double>(low), static_cast<double>(high)));
  }
  *value = *number;
}

void JsonFields::Read(const char* field, int64_t* value, int64_t low, int64_t high) {
  std::optional<int64_t> number;
  Read(field, &number, low, high);
  if (number) *value = *number;
}

void JsonFields::Read(const char* field, std::optional<double>* value, double low, double high) {
  const Json* json = Find(field);
  if (!json) return;
  if (!json->is_number()) return Fail(field, "must be a number");
  const double number = json->get<double>();
  if (!(number >= low && number <= high)) return Fail(field, "must be " + Range(low, high));
  *value = number;
}

void JsonFields::Read(const char* field, double* value, double low, double high) {
  std::optional<double> number;
  Read(field, &number, low, high);
  if (number) *value = *number;
}

void JsonFields::Read(const char* field, std::vector<int32_t>* value, size_t most) {
  const Json* json = Find(field);
  if (!json) return;
  if (!json->is_array()) return Fail(field, "must be an array of token ids");
  if (json->size() > most) {
    return Fail(field, "has more than " + std::to_string(most) + " entries");
  }
  value->clear();
  value->reserve(json->size());
  for (const Json& entry : *json) {
    const std::optional<int64_t> id = AsInteger(entry);
    if (!id || *id < 0 || *id > std::numeric_limits<int32_t>::max()) {
      return Fail(field, "must be an array of token ids");
    }
    value->push_back(static_cast<int32_t>(*id));
  }
}

}  // namespace stockpot
