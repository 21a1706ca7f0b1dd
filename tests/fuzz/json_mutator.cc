#include "tests/fuzz/json_mutator.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/fuzz/target.h"

namespace stockpot::fuzz {
namespace {

using nlohmann::json;

constexpr size_t kMaxMutatedDepth = 200;  // nlohmann writes a document by recursion
constexpr size_t kMaxStringGrowth = 64;

size_t Below(Random& random, size_t limit) { return limit == 0 ? 0 : random() % limit; }

size_t Depth(std::string_view text) {
  size_t depth = 0, most = 0;
  for (const char c : text) {
    if (c == '[' || c == '{') most = std::max(most, ++depth);
    if ((c == ']' || c == '}') && depth > 0) --depth;
  }
  return most;
}

// Where readers of JSON and checks of sizes have their edges.
json InterestingValue(Random& random) {
  static const std::vector<json> kValues = {
      nullptr,
      true,
      false,
      0,
      1,
      -1,
      2,
      7,
      8,
      65'536,
      int64_t{4} << 20,
      (int64_t{4} << 20) + 1,
      INT32_MAX,
      int64_t{1} << 32,
      int64_t{1} << 42,
      int64_t{1} << 53,
      INT64_MAX,
      INT64_MIN,
      UINT64_MAX,
      uint64_t{1} << 63,
      0.5,
      -0.0,
      1e-320,
      1.7e308,
      "",
      "a",
      ".",
      "..",
      "../x",
      "a/b",
      "a@b",
      std::string("a\0b", 3),
      "\x7f",
      "\u00e9",
      "\U0001F600",
      "\ufffd",
      "__metadata__",
      std::string(127, 'n'),
      std::string(129, 'n'),
      std::string(513, 'n'),
      std::string(64, '0'),
      std::string(64, 'a'),
      json::array(),
      json::object(),
      json::array({0}),
      json::array({1, 2}),
      json::array({json::array({json::array()})}),
      {{"a", json::object()}},
  };
  return kValues[Below(random, kValues.size())];
}

void Collect(json& node, std::vector<json*>& out) {
  out.push_back(&node);
  for (json& child : node) {
    if (node.is_structured()) Collect(child, out);
  }
}

json& AnyNode(json& document, Random& random) {
  std::vector<json*> nodes;
  Collect(document, nodes);
  return *nodes[Below(random, nodes.size())];
}

std::string AnyKey(json& document, Random& random) {
  for (int attempt = 0; attempt < 4; ++attempt) {
    const json& node = AnyNode(document, random);
    if (node.is_object() && !node.empty()) {
      return std::next(node.begin(), static_cast<std::ptrdiff_t>(Below(random, node.size()))).key();
    }
  }
  const json value = InterestingValue(random);
  return value.is_string() ? value.get<std::string>() : "x";
}

void ChangeNumber(json& node, Random& random) {
  if (node.is_number_float()) {
    node = node.get<double>() * (random() % 2 == 0 ? -1 : 1e9);
    return;
  }
  const auto value = node.get<uint64_t>();
  const uint64_t changed[] = {value + 1, value - 1,        value * 2,        value / 2,
                              0 - value, value ^ random(), value + 0x400000, value << 32};
  const uint64_t out = changed[random() % std::size(changed)];
  node = random() % 2 == 0 ? json(out) : json(static_cast<int64_t>(out));
}

void ChangeChild(json& document, json& node, Random& random) {
  if (node.is_array()) {
    const auto at = static_cast<std::ptrdiff_t>(Below(random, node.size() + 1));
    const bool inside = at < static_cast<std::ptrdiff_t>(node.size());
    if (inside && random() % 2 == 0) {
      node.erase(node.begin() + at);
    } else {
      json copy = random() % 2 == 0 ? AnyNode(document, random) : InterestingValue(random);
      if (inside && random() % 2 == 0) copy = node[static_cast<size_t>(at)];
      node.insert(node.begin() + at, std::move(copy));
    }
    return;
  }
  const std::string key = AnyKey(document, random);
  if (!node.empty() && random() % 2 == 0) {
    const auto at =
        std::next(node.begin(), static_cast<std::ptrdiff_t>(Below(random, node.size())));
    json moved = at.value();
    node.erase(at);
    if (random() % 2 == 0) node[key] = std::move(moved);  // renamed
    return;
  }
  json copy = random() % 2 == 0 ? AnyNode(document, random) : InterestingValue(random);
  node[key] = std::move(copy);
}

void ChangeOnce(json& document, Random& random) {
  json& node = AnyNode(document, random);
  switch (random() % 5) {
    case 0:
      node = InterestingValue(random);
      return;
    case 1: {
      json copy = AnyNode(document, random);  // by value: the node may hold it, or be in it
      node = std::move(copy);
      return;
    }
    default:
      break;
  }
  if (node.is_structured()) {
    ChangeChild(document, node, random);
  } else if (node.is_number()) {
    ChangeNumber(node, random);
  } else if (node.is_string()) {
    auto text = node.get<std::string>();
    MutateText(text, text.size() + kMaxStringGrowth);
    node = std::move(text);
  } else {
    node = InterestingValue(random);
  }
}

}  // namespace

void MutateText(std::string& text, size_t max_size) {
  std::vector<uint8_t> bytes(std::max<size_t>(max_size, 1));
  std::memcpy(bytes.data(), text.data(), std::min(text.size(), bytes.size()));
  const size_t size =
      LLVMFuzzerMutate(bytes.data(), std::min(text.size(), bytes.size()), bytes.size());
  text.assign(reinterpret_cast<const char*>(bytes.data()), size);
}

void MutateDocument(json& document, Random& random) {
  for (size_t n = 1 + random() % 3; n > 0; --n) ChangeOnce(document, random);
}

size_t MutateJson(uint8_t* data, size_t size, size_t max_size, unsigned int seed,
                  const JsonRepair& repair) {
  Random random(seed);
  const std::string_view text = AsText(data, size);
  if (random() % 8 == 0 || Depth(text) > kMaxMutatedDepth) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  json document = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (document.is_discarded()) return LLVMFuzzerMutate(data, size, max_size);
  MutateDocument(document, random);
  if (repair) repair(document, random);
  const std::string out = document.dump(-1, ' ', false, json::error_handler_t::replace);
  if (out.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, out.data(), out.size());
  return out.size();
}

}  // namespace stockpot::fuzz
