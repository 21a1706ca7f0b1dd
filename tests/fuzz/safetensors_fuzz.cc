// safetensors files and model folders. An input that starts with 0xFF is a folder: three texts,
// each after its length (u16): config.json, model.safetensors.index.json (none if empty),
// model.safetensors; the rest is model-2.safetensors (none if empty). Any other is one file.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "kernels/base/check.h"
#include "store/manifest.h"
#include "store/safetensors.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/json_mutator.h"
#include "tests/fuzz/target.h"
#include "tests/fuzz/temporary_folder.h"

namespace stockpot::fuzz {
namespace {

using nlohmann::json;

constexpr uint8_t kFolder = 0xFF;
constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxRepairedDataBytes = 4096;  // of all tensors, when a mutation makes it fit

std::string WithLength(std::string_view header) {
  std::string out(kLengthBytes, '\0');
  for (size_t i = 0; i < kLengthBytes; ++i) out[i] = static_cast<char>(header.size() >> (8 * i));
  return out.append(header);
}

std::string HeaderText(const SafetensorsHeader& header) {
  json out = json::object();
  if (!header.metadata.empty()) out["__metadata__"] = header.metadata;
  for (const SafetensorsEntry& entry : header.tensors) {
    out[entry.info.name] = {{"dtype", DTypeName(entry.info.dtype)},
                            {"shape", entry.info.shape},
                            {"data_offsets", {entry.begin, entry.begin + entry.info.bytes()}}};
  }
  return out.dump();
}

// The tensors tile the data, and what was read says the same when it is written and read again.
void CheckFile(std::string_view file) {
  const auto bytes = AsBytes(file);
  const auto file_bytes = static_cast<int64_t>(file.size());
  const Result<SafetensorsHeader> header = ParseSafetensorsHeader(bytes, file_bytes);
  if (!header.ok()) {
    STOCKPOT_CHECK(header.status().code() == StatusCode::kCorruption ||
                   header.status().code() == StatusCode::kInvalidArgument);
    return;
  }
  int64_t at = 0;
  std::set<std::string> names;
  for (const SafetensorsEntry& entry : header->tensors) {
    STOCKPOT_CHECK(entry.begin == at, entry.info.name);
    STOCKPOT_CHECK(names.insert(entry.info.name).second, entry.info.name);
    at += entry.info.bytes();
  }
  STOCKPOT_CHECK(header->data_offset + at == file_bytes, at);
  const std::string again = WithLength(HeaderText(*header));
  const Result<SafetensorsHeader> second =
      ParseSafetensorsHeader(AsBytes(again), static_cast<int64_t>(again.size()) + at);
  STOCKPOT_CHECK(second.ok(), second.status().ToString(), again);
  STOCKPOT_CHECK(WithLength(HeaderText(*second)) == again);
  // A file cut anywhere is refused.
  if (file_bytes > 0) {
    STOCKPOT_CHECK(!ParseSafetensorsHeader(bytes.first(bytes.size() - 1), file_bytes - 1).ok());
  }
}

void WriteText(const std::filesystem::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string Prefixed(ByteReader& in) {
  std::string text(in.Integer<uint16_t>(), '\0');
  size_t size = 0;
  while (size < text.size() && !in.empty()) text[size++] = static_cast<char>(in.Byte());
  text.resize(size);
  return text;
}

// What opens is read to the end, exported, and opens again with the same bytes.
void CheckFolder(ByteReader& in) {
  static const TemporaryFolder temporary;
  const std::filesystem::path folder = temporary.path() / "in", copy = temporary.path() / "out";
  std::filesystem::remove_all(folder);
  std::filesystem::remove_all(copy);
  std::filesystem::create_directory(folder);
  WriteText(folder / "config.json", Prefixed(in));
  if (const std::string index = Prefixed(in); !index.empty()) {
    WriteText(folder / "model.safetensors.index.json", index);
  }
  WriteText(folder / "model.safetensors", Prefixed(in));
  if (!in.empty()) WriteText(folder / "model-2.safetensors", in.Rest());
  const auto source = OpenModelFolder(folder);
  if (!source.ok()) return;
  std::map<std::string, std::vector<std::byte>> values;
  for (const TensorInfo& tensor : (*source)->tensors()) {
    const Result<std::vector<std::byte>> bytes = (*source)->ReadAll(tensor.name);
    STOCKPOT_CHECK(bytes.ok(), bytes.status().ToString());
    values[tensor.name] = *bytes;
  }
  const Status written = WriteModelFolder(**source, copy);
  STOCKPOT_CHECK(written.ok(), written.ToString());
  const auto again = OpenModelFolder(copy);
  STOCKPOT_CHECK(again.ok(), again.status().ToString());
  STOCKPOT_CHECK((*again)->tensors().size() == values.size());
  for (const auto& [name, bytes] : values) STOCKPOT_CHECK(*(*again)->ReadAll(name) == bytes, name);
}

// Offsets that tile, in the order of the names.
size_t RepairOffsets(json& header) {
  int64_t at = 0;
  if (!header.is_object()) return 0;
  for (auto& [name, entry] : header.items()) {
    if (name == "__metadata__" || !entry.is_object() || !entry.contains("dtype")) continue;
    if (!entry["dtype"].is_string() || !entry.contains("shape")) continue;
    const auto dtype = DTypeFromName(entry["dtype"].get<std::string>());
    if (!dtype || !entry["shape"].is_array()) continue;
    int64_t bytes = DTypeSize(*dtype);
    for (const json& size : entry["shape"]) {
      if (!size.is_number_integer() || __builtin_mul_overflow(bytes, size.get<int64_t>(), &bytes)) {
        bytes = -1;
        break;
      }
    }
    if (bytes < 0 || bytes > static_cast<int64_t>(kMaxRepairedDataBytes) - at) continue;
    entry["data_offsets"] = {at, at + bytes};
    at += bytes;
  }
  return static_cast<size_t>(at);
}

// Mutates the header and makes length and data fit it again.
size_t MutateFile(uint8_t* data, size_t size, size_t max_size, Random& random) {
  if (size < kLengthBytes) return LLVMFuzzerMutate(data, size, max_size);
  uint64_t length = 0;
  std::memcpy(&length, data, kLengthBytes);
  length = std::min<uint64_t>(length, size - kLengthBytes);
  const std::string_view text = AsText(data + kLengthBytes, length);
  json header = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) return LLVMFuzzerMutate(data, size, max_size);
  MutateDocument(header, random);
  std::string bytes(AsText(data + kLengthBytes + length, size - kLengthBytes - length));
  if (random() % 4 != 0) bytes.resize(RepairOffsets(header));
  const std::string out =
      WithLength(header.dump(-1, ' ', false, json::error_handler_t::replace)) + bytes;
  if (out.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, out.data(), out.size());
  return out.size();
}

std::string Mutated(std::string text, Random& random, bool is_file) {
  std::vector<uint8_t> bytes(text.begin(), text.end());
  bytes.resize(text.size() + 256);
  const size_t size = is_file ? MutateFile(bytes.data(), text.size(), bytes.size(), random)
                              : MutateJson(bytes.data(), text.size(), bytes.size(), random());
  return std::string(AsText(bytes.data(), std::min<size_t>(size, UINT16_MAX)));
}

// One of the folder's files.
size_t MutateFolder(uint8_t* data, size_t size, size_t max_size, Random& random) {
  ByteReader in({data + 1, size - 1});
  std::string parts[4];
  for (size_t i = 0; i < 3; ++i) parts[i] = Prefixed(in);
  parts[3] = in.Rest();
  const size_t which = random() % 4;
  parts[which] = Mutated(parts[which], random, which >= 2);
  std::string out(1, static_cast<char>(kFolder));
  for (size_t i = 0; i < 3; ++i) {
    out += static_cast<char>(parts[i].size() & 0xFF);
    out += static_cast<char>(parts[i].size() >> 8);
    out += parts[i];
  }
  out += parts[3];
  if (out.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, out.data(), out.size());
  return out.size();
}

}  // namespace
}  // namespace stockpot::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stockpot::fuzz;
  if (size > 0 && data[0] == kFolder) {
    ByteReader in({data + 1, size - 1});
    CheckFolder(in);
  } else {
    CheckFile(AsText(data, size));
  }
  return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  using namespace stockpot::fuzz;
  Random random(seed);
  if (size == 0 || random() % 8 == 0) return LLVMFuzzerMutate(data, size, max_size);
  if (data[0] == kFolder) return MutateFolder(data, size, max_size, random);
  return MutateFile(data, size, max_size, random);
}
