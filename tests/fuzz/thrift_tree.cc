#include "tests/fuzz/thrift_tree.h"

namespace stockpot::fuzz {
namespace {

constexpr uint32_t kVersion1 = 0x80010000;
constexpr int kMaxDepth = 24;  // the server's own limit is 16

// Every Read returns false at the first byte that does not fit.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}

  std::string_view left() const { return left_; }

  bool Message(WireMessage& message) {
    int64_t version = 0, sequence = 0;
    if (!Integer(4, version) || (static_cast<uint32_t>(version) & 0xFFFF0000) != kVersion1) {
      return false;
    }
    message.kind = static_cast<int32_t>(version & 0xFF);
    if (!String(message.name) || !Integer(4, sequence)) return false;
    message.sequence = static_cast<int32_t>(sequence);
    message.body.type = WireType::kStruct;
    return Value(message.body, 0);
  }

 private:
  bool Integer(size_t bytes, int64_t& value) {
    if (left_.size() < bytes) return false;
    uint64_t bits = 0;
    for (size_t i = 0; i < bytes; ++i) bits = bits << 8 | static_cast<uint8_t>(left_[i]);
    left_.remove_prefix(bytes);
    const int unused = static_cast<int>(8 * (8 - bytes));
    value = static_cast<int64_t>(bits << unused) >> unused;
    return true;
  }

  bool String(std::string& text) {
    int64_t size = 0;
    if (!Integer(4, size) || size < 0 || static_cast<size_t>(size) > left_.size()) return false;
    text = left_.substr(0, static_cast<size_t>(size));
    left_.remove_prefix(static_cast<size_t>(size));
    return true;
  }

  bool Type(WireType& type) {
    int64_t byte = 0;
    if (!Integer(1, byte)) return false;
    type = static_cast<WireType>(byte);
    return true;
  }

  bool Value(WireValue& value, int depth) {
    if (depth > kMaxDepth) return false;
    switch (value.type) {
      case WireType::kBool:
      case WireType::kByte:
        return Integer(1, value.number);
      case WireType::kI16:
        return Integer(2, value.number);
      case WireType::kI32:
        return Integer(4, value.number);
      case WireType::kI64:
      case WireType::kDouble:
        return Integer(8, value.number);
      case WireType::kString:
        return String(value.text);
      case WireType::kStruct:
        return Struct(value, depth);
      case WireType::kMap:
        return Type(value.key_type) && Type(value.item_type) && Items(value, 2, depth);
      case WireType::kSet:
      case WireType::kList:
        return Type(value.item_type) && Items(value, 1, depth);
      case WireType::kStop:
        break;
    }
    return false;
  }

  bool Struct(WireValue& value, int depth) {
    while (true) {
      WireValue field;
      if (!Type(field.type)) return false;
      if (field.type == WireType::kStop) return true;
      int64_t id = 0;
      if (!Integer(2, id) || !Value(field, depth + 1)) return false;
      value.ids.push_back(static_cast<int16_t>(id));
      value.items.push_back(std::move(field));
    }
  }

  bool Items(WireValue& value, int64_t each, int depth) {
    int64_t size = 0;
    if (!Integer(4, size) || size < 0 || static_cast<size_t>(size) > left_.size()) return false;
    for (int64_t i = 0; i < size * each; ++i) {
      WireValue item;
      item.type = each == 2 && i % 2 == 0 ? value.key_type : value.item_type;
      if (!Value(item, depth + 1)) return false;
      value.items.push_back(std::move(item));
    }
    return true;
  }

  std::string_view left_;
};

void PutInteger(std::string& out, size_t bytes, int64_t value) {
  for (size_t i = bytes; i-- > 0;) out += static_cast<char>(value >> (8 * i));
}

void PutString(std::string& out, std::string_view text) {
  PutInteger(out, 4, static_cast<int64_t>(text.size()));
  out += text;
}

void PutType(std::string& out, WireType type) { PutInteger(out, 1, static_cast<int64_t>(type)); }

void PutValue(std::string& out, const WireValue& value) {
  switch (value.type) {
    case WireType::kBool:
    case WireType::kByte:
      return PutInteger(out, 1, value.number);
    case WireType::kI16:
      return PutInteger(out, 2, value.number);
    case WireType::kI32:
      return PutInteger(out, 4, value.number);
    case WireType::kI64:
    case WireType::kDouble:
      return PutInteger(out, 8, value.number);
    case WireType::kString:
      return PutString(out, value.text);
    case WireType::kStruct:
      for (size_t i = 0; i < value.items.size(); ++i) {
        PutType(out, value.items[i].type);
        PutInteger(out, 2, value.ids[i]);
        PutValue(out, value.items[i]);
      }
      return PutType(out, WireType::kStop);
    case WireType::kMap:
      PutType(out, value.key_type);
      PutType(out, value.item_type);
      PutInteger(out, 4, static_cast<int64_t>(value.items.size() / 2));
      break;
    case WireType::kSet:
    case WireType::kList:
      PutType(out, value.item_type);
      PutInteger(out, 4, static_cast<int64_t>(value.items.size()));
      break;
    case WireType::kStop:
      return;
  }
  for (const WireValue& item : value.items) PutValue(out, item);
}

}  // namespace

const WireValue* WireValue::Field(int16_t id) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == id) return &items[i];
  }
  return nullptr;
}

std::vector<WireMessage> ReadMessages(std::string_view bytes, std::string* rest) {
  std::vector<WireMessage> messages;
  while (!bytes.empty()) {
    Reader reader(bytes);
    WireMessage message;
    if (!reader.Message(message)) break;
    bytes = reader.left();
    messages.push_back(std::move(message));
  }
  if (rest != nullptr) *rest = bytes;
  return messages;
}

std::string WriteMessages(const std::vector<WireMessage>& messages) {
  std::string out;
  for (const WireMessage& message : messages) {
    PutInteger(out, 4, static_cast<int32_t>(kVersion1 | static_cast<uint8_t>(message.kind)));
    PutString(out, message.name);
    PutInteger(out, 4, message.sequence);
    PutValue(out, message.body);
  }
  return out;
}

}  // namespace stockpot::fuzz
