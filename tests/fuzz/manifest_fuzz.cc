// Manifests: a JSON text from outside (the input starts with '{'), or a manifest made in memory.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "kernels/base/check.h"
#include "store/manifest.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/json_mutator.h"
#include "tests/fuzz/target.h"

namespace stockpot::fuzz {
namespace {

using nlohmann::json;

constexpr size_t kMostChunks = 2000;  // that a repair adds: an input has 64 KiB at most

// Whatever holds for every manifest that passed Validate().
void CheckValid(const Manifest& manifest) {
  STOCKPOT_CHECK(manifest.logical_bytes() >= 0);
  STOCKPOT_CHECK(manifest.stored_bytes() >= 0);
  for (const TensorEntry& tensor : manifest.tensors) {
    STOCKPOT_CHECK(manifest.Find(tensor.name) == &tensor, tensor.name);
    const TensorEntry* resolved = manifest.Resolve(tensor.name);
    STOCKPOT_CHECK(resolved != nullptr && resolved->alias_of.empty(), tensor.name);
    STOCKPOT_CHECK(resolved->logical_bytes() == tensor.logical_bytes(), tensor.name);
    STOCKPOT_CHECK(tensor.logical_bytes() >= 0 && tensor.logical_bytes() <= kMaxTensorBytes);
  }
}

// What was accepted is canonical, and means to any other reader of JSON what it means to ours.
void CheckAccepted(const Manifest& manifest, std::string_view text) {
  CheckValid(manifest);
  STOCKPOT_CHECK(manifest.ToJson() == text, manifest.ToJson());
  STOCKPOT_CHECK(manifest.digest() == Sha256(text));
  const json other = json::parse(text);
  STOCKPOT_CHECK(other.dump() == text, other.dump());
  STOCKPOT_CHECK(other.at("kind") == ArtifactKindName(manifest.kind));
  STOCKPOT_CHECK(other.at("tensors").size() == manifest.tensors.size());
  STOCKPOT_CHECK(other.at("files").size() == manifest.files.size());
  STOCKPOT_CHECK(other.at("attributes").get<decltype(manifest.attributes)>() ==
                 manifest.attributes);
  STOCKPOT_CHECK(other.contains("base") == manifest.base.has_value());
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    STOCKPOT_CHECK(other["tensors"][i].at("name") == manifest.tensors[i].name);
    STOCKPOT_CHECK(other["tensors"][i].at("shape") == json(manifest.tensors[i].shape));
    STOCKPOT_CHECK(other["tensors"][i].at("dtype") == DTypeName(manifest.tensors[i].dtype));
  }
}

Part MakePart(ByteReader& in, int64_t bytes) {
  Part part{.bytes = in.OneIn(16) ? in.Integer<int64_t>() : bytes};
  const int64_t chunks = std::clamp<int64_t>(ChunkCount(bytes), 0, 4) + (in.OneIn(16) ? 1 : 0);
  for (int64_t i = 0; i < chunks; ++i) part.chunks.push_back(Sha256(std::string(1, in.Byte())));
  return part;
}

TensorEntry MakeTensor(ByteReader& in) {
  TensorEntry tensor;
  tensor.name = in.String(12);
  tensor.dtype = static_cast<DType>(in.Below(15));
  for (size_t rank = in.Below(4); rank > 0; --rank) {
    tensor.shape.push_back(in.OneIn(16) ? in.Integer<int64_t>() : int64_t{in.Byte()});
  }
  if (in.OneIn(4)) {
    tensor.alias_of = in.String(12);
    return tensor;
  }
  tensor.codec = static_cast<Codec>(in.Below(4));
  const bool hostile = std::any_of(tensor.shape.begin(), tensor.shape.end(),
                                   [](int64_t d) { return d < 0 || d > 255; });
  const int64_t bytes = hostile ? 1 : tensor.logical_bytes();
  switch (tensor.codec) {
    case Codec::kRaw:
      tensor.parts["data"] = MakePart(in, bytes);
      break;
    case Codec::kBase:
      tensor.content = Sha256("content");
      break;
    case Codec::kBitDelta: {
      const int64_t rows = hostile || tensor.shape.size() != 2 ? 1 : tensor.shape[0];
      const int64_t columns = hostile || tensor.shape.size() != 2 ? 1 : tensor.shape[1];
      tensor.parts["signs"] = MakePart(in, rows * ((columns + 7) / 8));
      tensor.parts["alpha"] = MakePart(in, 4 * rows);
      for (size_t plane = in.OneIn(2) ? 0 : in.Below(10); plane > 0; --plane) {
        tensor.parts["signs/" + std::to_string(plane)] = MakePart(in, rows * ((columns + 7) / 8));
        if (!in.OneIn(16)) tensor.parts["alpha/" + std::to_string(plane)] = MakePart(in, 4 * rows);
      }
      if (in.OneIn(4)) {
        const int64_t rank = in.Byte();
        tensor.parts["residual_a"] = MakePart(in, 2 * rank * columns);
        if (!in.OneIn(8)) tensor.parts["residual_b"] = MakePart(in, 2 * rank * rows);
      }
      break;
    }
    case Codec::kSparse: {
      const int64_t changed = in.Byte();
      tensor.parts["counts"] =
          MakePart(in, hostile || tensor.shape.empty() ? 4 : 4 * tensor.shape[0]);
      tensor.parts["columns"] = MakePart(in, 2 * changed);
      tensor.parts["values"] = MakePart(in, DTypeSize(tensor.dtype) * changed);
      break;
    }
  }
  return tensor;
}

Manifest MakeManifest(ByteReader& in) {
  Manifest manifest;
  manifest.kind = static_cast<ArtifactKind>(in.Below(5));
  if (manifest.kind != ArtifactKind::kBase || in.OneIn(16)) manifest.base = Sha256("base");
  if (manifest.kind != ArtifactKind::kBase) {
    manifest.run = in.OneIn(8) ? in.String(140) : "demo";
    manifest.step = in.OneIn(8) ? in.Integer<int64_t>() : in.Byte();
  }
  for (size_t n = in.Below(5); n > 0; --n) manifest.tensors.push_back(MakeTensor(in));
  for (size_t n = in.Below(3); n > 0; --n) manifest.files[in.String(12)] = MakePart(in, in.Byte());
  for (size_t n = in.Below(4); n > 0; --n) manifest.attributes[in.String(12)] = in.String(24);
  if (!in.OneIn(8)) {
    std::sort(manifest.tensors.begin(), manifest.tensors.end(),
              [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  }
  return manifest;
}

// Bytes as shape and dtype say, chunks as the bytes say, tensors in order.
void RepairPart(json& part, int64_t bytes) {
  if (!part.is_object() || bytes < 0 || bytes > kMaxTensorBytes) return;
  part["bytes"] = bytes;
  json& chunks = part["chunks"];
  if (!chunks.is_array()) chunks = json::array();
  const auto count = static_cast<size_t>(ChunkCount(bytes));
  if (count > kMostChunks) return;
  while (chunks.size() > count) chunks.erase(chunks.size() - 1);
  while (chunks.size() < count) chunks.push_back(Sha256(std::to_string(chunks.size())).Hex());
}

void RepairTensor(json& tensor, const std::string& role_of_data) {
  if (!tensor.is_object() || !tensor.contains("parts") || !tensor["parts"].is_object()) return;
  if (!tensor.contains("dtype") || !tensor["dtype"].is_string()) return;
  const auto dtype = DTypeFromName(tensor["dtype"].get<std::string>());
  if (!dtype || !tensor.contains("shape") || !tensor["shape"].is_array()) return;
  int64_t bytes = DTypeSize(*dtype);
  for (const json& size : tensor["shape"]) {
    if (!size.is_number_integer()) return;
    if (__builtin_mul_overflow(bytes, size.get<int64_t>(), &bytes)) return;
  }
  if (tensor["parts"].contains(role_of_data)) RepairPart(tensor["parts"][role_of_data], bytes);
}

void Repair(json& document, Random& random) {
  if (random() % 4 == 0 || !document.is_object()) return;
  if (document.contains("files") && document["files"].is_object()) {
    for (json& file : document["files"]) {
      if (!file.is_object() || !file.contains("bytes")) continue;
      if (file["bytes"].is_number_integer()) RepairPart(file, file["bytes"].get<int64_t>());
    }
  }
  if (!document.contains("tensors") || !document["tensors"].is_array()) return;
  json& tensors = document["tensors"];
  for (json& tensor : tensors) RepairTensor(tensor, "data");
  if (random() % 2 == 0) return;
  const auto name = [](const json& tensor) {
    return tensor.is_object() ? tensor.value("name", json()) : json();
  };
  std::sort(tensors.begin(), tensors.end(),
            [&](const json& a, const json& b) { return name(a) < name(b); });
}

}  // namespace
}  // namespace stockpot::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stockpot;
  using namespace stockpot::fuzz;
  if (size > 0 && data[0] == '{') {
    const Result<Manifest> manifest = Manifest::FromJson(AsText(data, size));
    if (manifest.ok()) CheckAccepted(*manifest, AsText(data, size));
    return 0;
  }
  ByteReader in({data, size});
  const Manifest made = MakeManifest(in);
  if (!made.Validate().ok()) return 0;
  // What is valid survives the way through its text.
  const std::string text = made.ToJson();
  const Result<Manifest> read = Manifest::FromJson(text);
  STOCKPOT_CHECK(read.ok(), read.status().ToString(), text);
  CheckAccepted(*read, text);
  STOCKPOT_CHECK(read->digest() == made.digest());
  return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  return stockpot::fuzz::MutateJson(data, size, max_size, seed, stockpot::fuzz::Repair);
}
