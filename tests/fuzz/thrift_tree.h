// Calls in Thrift's strict binary protocol as a tree, without the IDL: to be changed as values and
// written again, so that a mutated call still is one, whatever fields the interface has by then.
// Thread promise: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace stockpot::fuzz {

// Thrift's own numbers.
enum class WireType : uint8_t {
  kStop = 0,
  kBool = 2,
  kByte = 3,
  kDouble = 4,
  kI16 = 6,
  kI32 = 8,
  kI64 = 10,
  kString = 11,
  kStruct = 12,
  kMap = 13,
  kSet = 14,
  kList = 15,
};

struct WireValue {
  WireType type = WireType::kStruct;
  int64_t number = 0;                    // bool, byte, i16, i32, i64; the bits of a double
  std::string text;                      // string
  WireType key_type = WireType::kStop;   // map
  WireType item_type = WireType::kStop;  // list, set, map
  std::vector<WireValue> items;  // list, set; map: key, value, key, value; struct: its fields
  std::vector<int16_t> ids;      // struct: of items, one each

  const WireValue* Field(int16_t id) const;  // null: none
};

struct WireMessage {
  int32_t kind = 1;  // call 1, reply 2, exception 3
  std::string name;  // "checkpoint:hello"
  int32_t sequence = 0;
  WireValue body;
};

// As many whole messages as there are; `rest` (may be null) takes the bytes behind them.
std::vector<WireMessage> ReadMessages(std::string_view bytes, std::string* rest);
std::string WriteMessages(const std::vector<WireMessage>& messages);

}  // namespace stockpot::fuzz
