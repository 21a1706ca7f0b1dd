// The bytes of whole Thrift connections. Calls are mutated as trees (thrift_tree.h), so that most
// of what arrives is a call; bytes are, too.
#include <algorithm>
#include <cstring>
#include <map>

#include "kernels/base/check.h"
#include "store/digest.h"
#include "tests/fuzz/json_mutator.h"
#include "tests/fuzz/served_store.h"
#include "tests/fuzz/target.h"
#include "tests/fuzz/thrift_tree.h"
#include "thrift/errors.h"

namespace stockpot::fuzz {
namespace {

constexpr size_t kMaxStringGrowth = 64;
constexpr int16_t kResult = 0;  // the field of a reply that holds what was asked for
constexpr int16_t kError = 1;   // likewise rpc::Error: 1 its code, 2 its message
constexpr size_t kDigestBytes = 32;

ServedStore& Served() {
  static ServedStore served;
  return served;
}

// Every reply is one whole message, and no call is answered with "our own fault".
void CheckReplies(std::string_view bytes) {
  std::string rest;
  const std::vector<WireMessage> replies = ReadMessages(bytes, &rest);
  STOCKPOT_CHECK(rest.empty(), rest.size());
  for (const WireMessage& reply : replies) {
    STOCKPOT_CHECK(reply.kind == 2 || reply.kind == 3, reply.kind);
    const WireValue* error = reply.kind == 2 ? reply.body.Field(kError) : nullptr;
    if (error == nullptr) continue;
    STOCKPOT_CHECK(reply.body.Field(kResult) == nullptr, reply.name);
    const WireValue* code = error->Field(1);
    const WireValue* message = error->Field(2);
    STOCKPOT_CHECK(code != nullptr && message != nullptr && !message->text.empty(), reply.name);
    const auto known = static_cast<StatusCode>(code->number);
    STOCKPOT_CHECK(known != StatusCode::kInternal && known != StatusCode::kCorruption, reply.name,
                   message->text);
    STOCKPOT_CHECK(known >= StatusCode::kInvalidArgument && known <= StatusCode::kInternal);
  }
}

void Collect(WireValue& value, std::vector<WireValue*>& out) {
  out.push_back(&value);
  for (WireValue& item : value.items) Collect(item, out);
}

std::vector<WireValue*> AllValues(std::vector<WireMessage>& messages) {
  std::vector<WireValue*> values;
  for (WireMessage& message : messages) Collect(message.body, values);
  return values;
}

int64_t InterestingNumber(int64_t now, Random& random) {
  constexpr int64_t kNumbers[] = {0,         1,         -1,        2,         3,
                                  4,         7,         8,         64,        128,
                                  255,       65'536,    INT32_MAX, INT32_MIN, INT64_MAX,
                                  INT64_MIN, 1LL << 22, 1LL << 40, 1LL << 42, 1LL << 62};
  switch (random() % 4) {
    case 0:
      return static_cast<int64_t>(static_cast<uint64_t>(now) + 1);
    case 1:
      return static_cast<int64_t>(static_cast<uint64_t>(now) - 1);
    case 2:
      return static_cast<int64_t>(static_cast<uint64_t>(now) ^ random());
    default:
      return kNumbers[random() % std::size(kNumbers)];
  }
}

void ChangeText(std::string& text, const std::vector<WireValue*>& values, Random& random) {
  switch (random() % 4) {
    case 0:
    case 1: {  // another one of the connection: names, ids, digests
      const WireValue& other = *values[random() % values.size()];
      if (other.type == WireType::kString) text = std::string(other.text);
      return;
    }
    case 2: {
      static const std::string kTexts[] = {"",
                                           "run",
                                           "base",
                                           "run@1",
                                           "run@latest",
                                           "run@best",
                                           "run@1.merge",
                                           "bitdelta",
                                           "dense",
                                           "every",
                                           "F32",
                                           "U8",
                                           "a",
                                           "config.json",
                                           "loss",
                                           std::string(4097, 'x'),
                                           std::string("\0", 1),
                                           "\xff\xfe",
                                           "TASK/METRIC",
                                           ServedStore::SessionId(1),
                                           ServedStore::SessionId(2),
                                           std::string(kDigestBytes, '\0')};
      text = kTexts[random() % std::size(kTexts)];
      return;
    }
    default:
      MutateText(text, text.size() + kMaxStringGrowth);
  }
}

void ChangeValue(WireValue& value, const std::vector<WireValue*>& values, Random& random) {
  switch (value.type) {
    case WireType::kString:
      return ChangeText(value.text, values, random);
    case WireType::kStruct: {
      if (value.items.empty()) return;
      const auto at = static_cast<std::ptrdiff_t>(random() % value.items.size());
      if (random() % 2 == 0) {
        value.items.erase(value.items.begin() + at);
        value.ids.erase(value.ids.begin() + at);
      } else {
        value.ids[static_cast<size_t>(at)] = static_cast<int16_t>(random() % 8);
      }
      return;
    }
    case WireType::kMap:
    case WireType::kSet:
    case WireType::kList: {
      const size_t each = value.type == WireType::kMap ? 2 : 1;
      if (value.items.empty()) return;
      const size_t at = random() % (value.items.size() / each) * each;
      const auto begin = value.items.begin() + static_cast<std::ptrdiff_t>(at);
      if (random() % 2 == 0) {
        value.items.erase(begin, begin + static_cast<std::ptrdiff_t>(each));
      } else {
        const std::vector<WireValue> copy(begin, begin + static_cast<std::ptrdiff_t>(each));
        value.items.insert(value.items.end(), copy.begin(), copy.end());
      }
      return;
    }
    default:
      value.number = InterestingNumber(value.number, random);
  }
}

void ChangeMessages(std::vector<WireMessage>& messages, Random& random) {
  const size_t a = random() % messages.size(), b = random() % messages.size();
  const auto at = [&](size_t i) { return messages.begin() + static_cast<std::ptrdiff_t>(i); };
  switch (random() % 3) {
    case 0:
      messages.erase(at(a));
      break;
    case 1: {
      const WireMessage copy = messages[b];
      messages.insert(at(a), copy);
      break;
    }
    default:
      std::swap(messages[a], messages[b]);
  }
}

// Chunks get the digest they have, everywhere: put_chunk(session, digest, data).
void RepairDigests(std::vector<WireMessage>& messages) {
  std::map<std::string, std::string> renamed;
  for (WireMessage& message : messages) {
    if (!message.name.ends_with(":put_chunk")) continue;
    const WireValue* digest = message.body.Field(2);
    const WireValue* data = message.body.Field(3);
    if (digest == nullptr || data == nullptr || digest->text.size() != kDigestBytes) continue;
    const Digest right = Sha256(data->text);
    if (digest->text != right.raw()) renamed[digest->text] = right.raw();
  }
  for (WireValue* value : AllValues(messages)) {
    const auto found = renamed.find(value->text);
    if (value->type == WireType::kString && found != renamed.end()) value->text = found->second;
  }
}

size_t WriteBack(const std::string& bytes, uint8_t* data, size_t max_size) {
  if (bytes.size() > max_size) return 0;
  std::memcpy(data, bytes.data(), bytes.size());
  return bytes.size();
}

}  // namespace
}  // namespace stockpot::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stockpot::fuzz;
  ServedStore& served = Served();
  served.Restart();
  CheckReplies(served.Converse(AsText(data, size)));
  served.CheckWhole();
  return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  using namespace stockpot::fuzz;
  Random random(seed);
  std::string rest;
  std::vector<WireMessage> messages = ReadMessages(AsText(data, size), &rest);
  if (messages.empty() || random() % 8 == 0) return LLVMFuzzerMutate(data, size, max_size);
  for (size_t n = 1 + random() % 4; n > 0 && !messages.empty(); --n) {
    if (random() % 6 == 0) {
      ChangeMessages(messages, random);
      continue;
    }
    const std::vector<WireValue*> values = AllValues(messages);
    ChangeValue(*values[random() % values.size()], values, random);
  }
  if (random() % 4 != 0) RepairDigests(messages);
  const size_t written = WriteBack(WriteMessages(messages) + rest, data, max_size);
  return written > 0 ? written : LLVMFuzzerMutate(data, size, max_size);
}

// Calls of two connections in one.
extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t* a, size_t a_size, const uint8_t* b,
                                            size_t b_size, uint8_t* out, size_t max_size,
                                            unsigned int seed) {
  using namespace stockpot::fuzz;
  Random random(seed);
  std::vector<WireMessage> messages = ReadMessages(AsText(a, a_size), nullptr);
  const std::vector<WireMessage> others = ReadMessages(AsText(b, b_size), nullptr);
  if (messages.empty() || others.empty()) return 0;
  const size_t at = random() % (messages.size() + 1), from = random() % others.size();
  const size_t count = 1 + random() % (others.size() - from);
  messages.insert(messages.begin() + static_cast<std::ptrdiff_t>(at),
                  others.begin() + static_cast<std::ptrdiff_t>(from),
                  others.begin() + static_cast<std::ptrdiff_t>(from + count));
  return WriteBack(WriteMessages(messages), out, max_size);
}
