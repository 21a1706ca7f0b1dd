#include "serve/text/chat_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "serve/text/utf8.h"

namespace stockpot::chat {

Status Budget::Step(int64_t count) {
  steps_ -= count;
  if (steps_ >= 0) return OkStatus();
  return ResourceExhausted("chat template ran for more than " +
                           std::to_string(ChatTemplateLimits::kMaxSteps) + " steps");
}

Status Budget::Bytes(size_t count) {
  if (count > bytes_) {
    return ResourceExhausted("chat template built more than " +
                             std::to_string(ChatTemplateLimits::kMaxWorkBytes) + " bytes");
  }
  bytes_ -= count;
  return OkStatus();
}

const Value* Dict::Find(std::string_view key) const {
  for (const auto& [name, value] : entries) {
    if (name == key) return &value;
  }
  return nullptr;
}

void Dict::Set(std::string key, Value value) {
  for (auto& [name, old] : entries) {
    if (name == key) {
      old = std::move(value);
      return;
    }
  }
  entries.emplace_back(std::move(key), std::move(value));
}

Value Value::Undefined(std::string what) {
  Value value = String(std::move(what));
  value.kind_ = Kind::kUndefined;
  return value;
}
Value Value::None() {
  Value value;
  value.kind_ = Kind::kNone;
  return value;
}
Value Value::Bool(bool b) {
  Value value = Int(b ? 1 : 0);
  value.kind_ = Kind::kBool;
  return value;
}
Value Value::Int(int64_t i) {
  Value value;
  value.kind_ = Kind::kInt;
  value.integer_ = i;
  return value;
}
Value Value::Float(double d) {
  Value value;
  value.kind_ = Kind::kFloat;
  value.float_ = d;
  return value;
}
Value Value::String(std::string text) {
  Value value;
  value.kind_ = Kind::kString;
  value.string_ = std::make_shared<const std::string>(std::move(text));
  return value;
}

Result<Value> Value::MakeList(std::vector<Value> items, Budget* budget, bool tuple) {
  Value value;
  value.kind_ = Kind::kList;
  for (const Value& item : items) value.depth_ = std::max(value.depth_, item.depth_ + 1);
  if (value.depth_ > ChatTemplateLimits::kMaxNesting) {
    return InvalidArgument("lists are nested too deeply");
  }
  STOCKPOT_RETURN_IF_ERROR(budget->Bytes((items.size() + 1) * sizeof(Value)));
  value.list_ = std::make_shared<const List>(List{std::move(items), tuple});
  return value;
}

Result<Value> Value::MakeDict(Dict dict, Budget* budget) {
  Value value;
  value.kind_ = Kind::kDict;
  for (const auto& [key, item] : dict.entries) {
    value.depth_ = std::max(value.depth_, item.depth_ + 1);
  }
  if (value.depth_ > ChatTemplateLimits::kMaxNesting) {
    return InvalidArgument("mappings are nested too deeply");
  }
  STOCKPOT_RETURN_IF_ERROR(budget->Bytes((dict.entries.size() + 1) * sizeof(Value)));
  value.dict_ = std::make_shared<const Dict>(std::move(dict));
  return value;
}

Value Value::Namespace(Dict* owned_by_renderer) {
  Value value;
  value.kind_ = Kind::kNamespace;
  value.namespace_ = owned_by_renderer;
  return value;
}
Value Value::OfLoop(std::shared_ptr<Loop> loop) {
  Value value;
  value.kind_ = Kind::kLoop;
  value.loop_ = std::move(loop);
  return value;
}
Value Value::Function(std::string name) {
  Value value = String(std::move(name));
  value.kind_ = Kind::kFunction;
  return value;
}
Value Value::Method(std::string name) {
  Value value = String(std::move(name));
  value.kind_ = Kind::kMethod;
  return value;
}
Value Value::Macro(const Stmt* macro) {
  Value value;
  value.kind_ = Kind::kMacro;
  value.macro_ = macro;
  return value;
}

Result<Value> Value::FromJson(const nlohmann::ordered_json& json, Budget* budget, int depth) {
  if (depth > ChatTemplateLimits::kMaxNesting) {
    return InvalidArgument("the messages are nested too deeply");
  }
  STOCKPOT_RETURN_IF_ERROR(budget->Step());
  switch (json.type()) {
    case nlohmann::json::value_t::boolean:
      return Bool(json.get<bool>());
    case nlohmann::json::value_t::number_integer:
      return Int(json.get<int64_t>());
    case nlohmann::json::value_t::number_unsigned:
      if (json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
        return InvalidArgument("integer out of range: " + std::to_string(json.get<uint64_t>()));
      }
      return Int(json.get<int64_t>());
    case nlohmann::json::value_t::number_float:
      return Float(json.get<double>());
    case nlohmann::json::value_t::string: {
      const auto& text = json.get_ref<const std::string&>();
      STOCKPOT_RETURN_IF_ERROR(budget->Bytes(text.size()));
      return String(IsValidUtf8(text) ? text : ToValidUtf8(text));
    }
    case nlohmann::json::value_t::array: {
      std::vector<Value> items;
      for (const auto& element : json) {
        STOCKPOT_ASSIGN_OR_RETURN(Value item, FromJson(element, budget, depth + 1));
        items.push_back(std::move(item));
      }
      return MakeList(std::move(items), budget);
    }
    case nlohmann::json::value_t::object: {
      Dict dict;
      for (const auto& [key, element] : json.items()) {
        STOCKPOT_ASSIGN_OR_RETURN(Value item, FromJson(element, budget, depth + 1));
        dict.entries.emplace_back(key, std::move(item));
      }
      return MakeDict(std::move(dict), budget);
    }
    default:
      return None();
  }
}

const std::string& Value::string() const {
  static const std::string empty;
  return string_ ? *string_ : empty;
}

const std::vector<Value>& Value::items() const { return list_->items; }
bool Value::is_tuple() const { return list_->tuple; }

bool Value::Truthy() const {
  switch (kind_) {
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
    case Kind::kInt:
      return integer_ != 0;
    case Kind::kFloat:
      return float_ != 0;
    case Kind::kString:
      return !string_->empty();
    case Kind::kList:
      return !list_->items.empty();
    case Kind::kDict:
      return !dict_->entries.empty();
    default:
      return true;
  }
}

std::string_view Value::TypeName() const {
  switch (kind_) {
    case Kind::kUndefined:
      return "undefined";
    case Kind::kNone:
      return "none";
    case Kind::kBool:
      return "a boolean";
    case Kind::kInt:
      return "an integer";
    case Kind::kFloat:
      return "a float";
    case Kind::kString:
      return "a string";
    case Kind::kList:
      return list_->tuple ? "a tuple" : "a list";
    case Kind::kDict:
      return "a mapping";
    case Kind::kNamespace:
      return "a namespace";
    case Kind::kLoop:
      return "the loop";
    case Kind::kFunction:
      return "a function";
    case Kind::kMethod:
      return "a method";
    case Kind::kMacro:
      return "a macro";
  }
  return "";
}

Result<bool> Equal(const Value& a, const Value& b, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(budget->Step());
  using Kind = Value::Kind;
  if (a.is_number() && b.is_number()) {
    if (a.is_integer() && b.is_integer()) return a.integer() == b.integer();
    return a.number() == b.number();
  }
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      STOCKPOT_RETURN_IF_ERROR(budget->Step(static_cast<int64_t>(a.string().size() / 64)));
      return a.string() == b.string();
    case Kind::kList:
      if (a.items().size() != b.items().size() || a.is_tuple() != b.is_tuple()) return false;
      for (size_t i = 0; i < a.items().size(); ++i) {
        STOCKPOT_ASSIGN_OR_RETURN(const bool same, Equal(a.items()[i], b.items()[i], budget));
        if (!same) return false;
      }
      return true;
    case Kind::kDict:
      if (a.dict().entries.size() != b.dict().entries.size()) return false;
      for (const auto& [key, value] : a.dict().entries) {
        const Value* other = b.dict().Find(key);
        if (other == nullptr) return false;
        STOCKPOT_ASSIGN_OR_RETURN(const bool same, Equal(value, *other, budget));
        if (!same) return false;
      }
      return true;
    case Kind::kNamespace:
      return a.mutable_namespace() == b.mutable_namespace();
    case Kind::kLoop:
      return a.loop() == b.loop();
    case Kind::kMacro:
      return a.macro() == b.macro();
    default:
      return a.string() == b.string();
  }
}

Result<int> Compare(const Value& a, const Value& b, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(budget->Step());
  const auto order = [](const auto& x, const auto& y) { return x < y ? -1 : (y < x ? 1 : 0); };
  if (a.is_integer() && b.is_integer()) return order(a.integer(), b.integer());
  if (a.is_number() && b.is_number()) return order(a.number(), b.number());
  if (a.is(Value::Kind::kString) && b.is(Value::Kind::kString)) {
    return order(a.string(), b.string());  // UTF-8 sorts as code points do
  }
  if (a.is(Value::Kind::kList) && b.is(Value::Kind::kList)) {
    for (size_t i = 0; i < std::min(a.items().size(), b.items().size()); ++i) {
      STOCKPOT_ASSIGN_OR_RETURN(const bool same, Equal(a.items()[i], b.items()[i], budget));
      if (!same) return Compare(a.items()[i], b.items()[i], budget);
    }
    return order(a.items().size(), b.items().size());
  }
  return InvalidArgument("no order between " + std::string(a.TypeName()) + " and " +
                         std::string(b.TypeName()));
}

Result<std::vector<Value>> Iterate(const Value& value, Budget* budget) {
  std::vector<Value> out;
  switch (value.kind()) {
    case Value::Kind::kUndefined:
      break;
    case Value::Kind::kList:
      STOCKPOT_RETURN_IF_ERROR(budget->Bytes(value.items().size() * sizeof(Value)));
      out = value.items();
      break;
    case Value::Kind::kDict:
      STOCKPOT_RETURN_IF_ERROR(budget->Bytes(value.dict().entries.size() * sizeof(Value)));
      for (const auto& entry : value.dict().entries) out.push_back(Value::String(entry.first));
      break;
    case Value::Kind::kString:
      STOCKPOT_RETURN_IF_ERROR(budget->Bytes(value.string().size() * sizeof(Value)));
      for (size_t i = 0; i < value.string().size();) {
        const int length = NextCodePoint(value.string(), i).bytes;
        out.push_back(Value::String(value.string().substr(i, length)));
        i += length;
      }
      break;
    default:
      return InvalidArgument("can not iterate over " + std::string(value.TypeName()));
  }
  return out;
}

Result<int64_t> Length(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kUndefined:
      return 0;
    case Value::Kind::kList:
      return static_cast<int64_t>(value.items().size());
    case Value::Kind::kDict:
      return static_cast<int64_t>(value.dict().entries.size());
    case Value::Kind::kString:
      return std::count_if(value.string().begin(), value.string().end(),
                           [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; });
    default:
      return InvalidArgument("no length of " + std::string(value.TypeName()));
  }
}

}  // namespace stockpot::chat
