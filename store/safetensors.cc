// The header of a safetensors file. It is read by a state machine over the JSON events, so that a
// hostile header (deep, huge, wrongly shaped) is refused at its first wrong token, before it has
// cost more memory than its own text.
#include "store/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "store/manifest.h"

namespace stockpot {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr std::string_view kMetadataKey = "__metadata__";

std::string Quoted(std::string_view name) { return "tensor '" + std::string(name) + "'"; }

// header := {"__metadata__": {string: string}, name: {"dtype": string, "shape": [unsigned],
//            "data_offsets": [unsigned, unsigned]}}
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<SafetensorsEntry> entries;
  std::vector<int64_t> ends;  // byte offset behind entries[i]
  std::map<std::string, std::string> metadata;
  Status status;

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { return Unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { return Unexpected("a fraction"); }
  bool binary(binary_t&) override { return Unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (depth_ != 3) return Unexpected("a number");
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<int64_t>::max())) {
      return Refuse("a number is over 2^63");
    }
    const size_t limit = field_ == "shape" ? static_cast<size_t>(kMaxRank) : 2;
    if (numbers_.size() == limit) return Refuse(field_ + " has too many elements");
    numbers_.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (depth_ == 2 && in_metadata_) {
      metadata[field_] = value;
      return true;
    }
    if (depth_ != 2 || field_ != "dtype") return Unexpected("a string");
    const std::optional<DType> dtype = DTypeFromName(value);
    if (!dtype) {
      status = InvalidArgument(Quoted(name_) + ": unknown dtype '" + value.substr(0, 32) + "'");
      return false;
    }
    entries.back().info.dtype = *dtype;
    return true;
  }

  bool start_object(std::size_t) override {
    if (depth_ > 1) return Unexpected("an object");
    ++depth_;
    if (depth_ == 2 && !in_metadata_) {
      if (static_cast<int64_t>(entries.size()) == kMaxTensors) {
        return Refuse("more than " + std::to_string(kMaxTensors) + " tensors");
      }
      entries.emplace_back().info.name = name_;
      ends.push_back(0);
    }
    fields_.clear();
    return true;
  }

  bool key(string_t& key) override {
    if (static_cast<int64_t>(key.size()) > kMaxNameBytes || (depth_ == 1 && key.empty())) {
      return Refuse("a name of " + std::to_string(key.size()) + " bytes");
    }
    if (depth_ == 1) {
      name_ = key;
      in_metadata_ = key == kMetadataKey;
      if (!names_.insert(key).second) return Refuse("'" + key + "' appears twice");
      return true;
    }
    field_ = key;
    if (!fields_.insert(key).second) return Refuse("field '" + key + "' appears twice");
    if (!in_metadata_ && key != "dtype" && key != "shape" && key != "data_offsets") {
      return Refuse("unknown field '" + key + "'");
    }
    return true;
  }

  bool end_object() override {
    if (depth_ == 2 && !in_metadata_ && fields_.size() != 3) {
      return Refuse("needs dtype, shape and data_offsets");
    }
    in_metadata_ = false;
    --depth_;
    return true;
  }

  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_metadata_ || field_ == "dtype") return Unexpected("an array");
    ++depth_;
    numbers_.clear();
    return true;
  }

  bool end_array() override {
    --depth_;
    if (field_ == "shape") {
      entries.back().info.shape = numbers_;
      return true;
    }
    if (numbers_.size() != 2) return Refuse("data_offsets needs two numbers");
    entries.back().begin = numbers_[0];
    ends.back() = numbers_[1];
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    status = Corruption("the header is not valid JSON at byte " + std::to_string(position));
    return false;
  }

 private:
  bool Refuse(const std::string& what) {
    status = Corruption(name_.empty() ? what : Quoted(name_) + ": " + what);
    return false;
  }
  bool Unexpected(const std::string& what) {
    return Refuse("unexpected " + what + " in the header");
  }

  int depth_ = 0;
  bool in_metadata_ = false;
  std::string name_;
  std::string field_;
  std::set<std::string> names_;
  std::set<std::string> fields_;
  std::vector<int64_t> numbers_;
};

// prod(shape) * size(dtype), or an error where that is no sensible size.
Result<int64_t> DeclaredBytes(const TensorInfo& info) {
  int64_t bytes = DTypeSize(info.dtype);
  for (const int64_t d : info.shape) {
    if (__builtin_mul_overflow(bytes, d, &bytes) || bytes > kMaxTensorBytes) {
      return Corruption(Quoted(info.name) + ": shape " + ShapeText(info.shape) + " is over " +
                        std::to_string(kMaxTensorBytes) + " bytes");
    }
  }
  return bytes;
}

// The tensors, by offset, must tile [0, data_bytes) and be as long as their shape says.
Status CheckTiling(const HeaderReader& header, const std::vector<size_t>& order,
                   int64_t data_bytes) {
  int64_t at = 0;
  for (const size_t i : order) {
    const SafetensorsEntry& entry = header.entries[i];
    const std::string who = Quoted(entry.info.name);
    const std::string range =
        "[" + std::to_string(entry.begin) + ", " + std::to_string(header.ends[i]) + ")";
    if (header.ends[i] < entry.begin || header.ends[i] > data_bytes) {
      return Corruption(who + ": offsets " + range + " do not fit the " +
                        std::to_string(data_bytes) + " bytes of data");
    }
    if (entry.begin != at) {
      return Corruption(who + ": offsets " + range +
                        (entry.begin < at ? " overlap" : " leave a gap") +
                        ", expected to begin at " + std::to_string(at));
    }
    STOCKPOT_ASSIGN_OR_RETURN(const int64_t declared, DeclaredBytes(entry.info));
    if (declared != header.ends[i] - entry.begin) {
      return Corruption(who + ": " + std::string(DTypeName(entry.info.dtype)) + " " +
                        ShapeText(entry.info.shape) + " needs " + std::to_string(declared) +
                        " bytes, offsets " + range + " hold " +
                        std::to_string(header.ends[i] - entry.begin));
    }
    at = header.ends[i];
  }
  if (at != data_bytes) {
    return Corruption("the tensors end at byte " + std::to_string(at) + " of " +
                      std::to_string(data_bytes) + " bytes of data");
  }
  return OkStatus();
}

}  // namespace

std::string SafetensorsHead(std::span<const TensorInfo* const> tensors,
                            const std::map<std::string, std::string>& metadata) {
  // "format": transformers refuses a file that does not say which framework wrote it.
  nlohmann::ordered_json header = {{kMetadataKey, {{"format", "pt"}}}};
  for (const auto& [key, value] : metadata) header[kMetadataKey][key] = value;
  int64_t offset = 0;
  for (const TensorInfo* tensor : tensors) {
    header[tensor->name] = {{"dtype", DTypeName(tensor->dtype)},
                            {"shape", tensor->shape},
                            {"data_offsets", {offset, offset + tensor->bytes()}}};
    offset += tensor->bytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string head(kLengthBytes, '\0');
  std::memcpy(head.data(), &length, sizeof length);
  return head + text;
}

Result<int64_t> SafetensorsHeaderBytes(std::span<const std::byte> first, int64_t file_bytes) {
  if (file_bytes < kLengthBytes || static_cast<int64_t>(first.size()) < kLengthBytes) {
    return Corruption("a file of " + std::to_string(file_bytes) + " bytes has no header");
  }
  uint64_t length = 0;
  std::memcpy(&length, first.data(), kLengthBytes);  // little-endian, as every machine we run on
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return Corruption("the header claims " + std::to_string(length) + " bytes, over the limit of " +
                      std::to_string(kMaxSafetensorsHeaderBytes));
  }
  if (static_cast<int64_t>(length) > file_bytes - kLengthBytes) {
    return Corruption("the header claims " + std::to_string(length) + " bytes, the file has " +
                      std::to_string(file_bytes));
  }
  return kLengthBytes + static_cast<int64_t>(length);
}

Result<SafetensorsHeader> ParseSafetensorsHeader(std::span<const std::byte> head,
                                                 int64_t file_bytes) {
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t data_offset, SafetensorsHeaderBytes(head, file_bytes));
  if (static_cast<int64_t>(head.size()) < data_offset) {
    return Corruption("the header is cut off at byte " + std::to_string(head.size()));
  }
  const std::string_view text(reinterpret_cast<const char*>(head.data()) + kLengthBytes,
                              static_cast<size_t>(data_offset - kLengthBytes));
  if (text.empty() || text.front() != '{') return Corruption("the header is no JSON object");
  HeaderReader reader;
  const bool parsed = nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  if (!reader.status.ok()) return reader.status;
  if (!parsed) return Corruption("the header is not valid JSON");

  std::vector<size_t> order(reader.entries.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(reader.entries[a].begin, reader.ends[a]) <
           std::pair(reader.entries[b].begin, reader.ends[b]);
  });
  STOCKPOT_RETURN_IF_ERROR(CheckTiling(reader, order, file_bytes - data_offset));

  SafetensorsHeader header;
  header.metadata = std::move(reader.metadata);
  header.data_offset = data_offset;
  for (const size_t i : order) header.tensors.push_back(std::move(reader.entries[i]));
  return header;
}

}  // namespace stockpot
