// Canonical JSON of manifests. Written by hand because the order and the spelling are the format;
// read with the SAX parser of nlohmann, straight into a Manifest: a hostile input never becomes a
// tree of objects, so memory stays in proportion to the input, which is at most kMaxManifestBytes.
#include <exception>
#include <nlohmann/json.hpp>

#include "store/manifest.h"
#include "store/names.h"

namespace stockpot {
namespace {

using nlohmann::json;

// --- writing: object keys in byte order, no spaces ---

void AppendString(std::string& out, std::string_view text) {
  out += json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

void AppendField(std::string& out, std::string_view key, std::string_view value) {
  out += '"';
  out += key;
  out += "\":";
  AppendString(out, value);
}

void AppendPart(std::string& out, const Part& part) {
  out += "{\"bytes\":" + std::to_string(part.bytes) + ",\"chunks\":[";
  for (size_t i = 0; i < part.chunks.size(); ++i) {
    if (i > 0) out += ',';
    out += '"' + part.chunks[i].Hex() + '"';
  }
  out += "]}";
}

void AppendParts(std::string& out, const std::map<std::string, Part>& parts) {
  out += '{';
  bool first = true;
  for (const auto& [name, part] : parts) {
    if (!first) out += ',';
    first = false;
    AppendString(out, name);
    out += ':';
    AppendPart(out, part);
  }
  out += '}';
}

void AppendNumbers(std::string& out, std::string_view key, const std::vector<int64_t>& numbers) {
  out += '"';
  out += key;
  out += "\":[";
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i > 0) out += ',';
    out += std::to_string(numbers[i]);
  }
  out += ']';
}

void AppendPieces(std::string& out, const std::vector<TensorBox>& pieces) {
  out += "\"pieces\":[";
  for (size_t i = 0; i < pieces.size(); ++i) {
    out += i > 0 ? ",{" : "{";
    AppendNumbers(out, "offsets", pieces[i].offsets);
    out += ',';
    AppendNumbers(out, "shape", pieces[i].shape);
    out += '}';
  }
  out += ']';
}

void AppendTensor(std::string& out, const TensorEntry& tensor) {
  out += '{';
  if (!tensor.alias_of.empty()) {
    AppendField(out, "alias_of", tensor.alias_of);
  } else {
    AppendField(out, "codec", CodecName(tensor.codec));
    if (tensor.codec == Codec::kBase) {
      out += ',';
      AppendField(out, "content", tensor.content.Hex());
    }
  }
  out += ',';
  AppendField(out, "dtype", DTypeName(tensor.dtype));
  out += ',';
  AppendField(out, "name", tensor.name);
  if (!tensor.parts.empty()) {
    out += ",\"parts\":";
    AppendParts(out, tensor.parts);
  }
  if (!tensor.pieces.empty()) {
    out += ',';
    AppendPieces(out, tensor.pieces);
  }
  out += ',';
  AppendNumbers(out, "shape", tensor.shape);
  out += '}';
}

// --- reading ---

// Where in the document the parser is; one per nesting level, so depth is bounded by the format.
enum class Place : uint8_t {
  kManifest,
  kAttributes,
  kFiles,
  kFile,
  kTensors,
  kTensor,
  kShape,
  kPieces,
  kPiece,
  kPieceNumbers,
  kParts,
  kPart,
  kChunks,
};

// A false return stops the parser; `error` then says why. Repeated keys need no check here: they do
// not survive the comparison with the canonical form.
class ManifestHandler : public nlohmann::json_sax<json> {
 public:
  explicit ManifestHandler(Manifest& manifest) : manifest_(manifest) {}

  const std::string& error() const { return error_; }

  bool null() override { return Fail("null"); }
  bool boolean(bool) override { return Fail("a boolean"); }
  bool number_float(double, const std::string&) override { return Fail("a fraction"); }
  bool binary(binary_t&) override { return Fail("binary"); }
  bool number_integer(int64_t value) override { return Integer(value); }
  bool number_unsigned(uint64_t value) override {
    if (value > static_cast<uint64_t>(INT64_MAX)) return Fail("a number over 2^63");
    return Integer(static_cast<int64_t>(value));
  }
  bool string(std::string& value) override { return String(value); }
  bool key(std::string& value) override {
    key_ = std::move(value);
    return true;
  }
  bool start_object(size_t) override;
  bool end_object() override { return Leave(); }
  bool start_array(size_t) override;
  bool end_array() override { return Leave(); }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return Fail("malformed JSON at byte " + std::to_string(position));
  }

 private:
  bool Fail(std::string what) {
    if (error_.empty()) error_ = std::move(what) + " near key '" + key_.substr(0, 64) + "'";
    return false;
  }
  bool Enter(Place place) {
    places_.push_back(place);
    return true;
  }
  bool Leave() {
    places_.pop_back();
    return true;
  }
  bool Integer(int64_t value);
  bool String(std::string& value);
  bool ManifestString(std::string& value);
  bool TensorString(std::string& value);
  bool ReadDigest(const std::string& hex, Digest& digest);
  TensorEntry& tensor() { return manifest_.tensors.back(); }

  Manifest& manifest_;
  std::vector<Place> places_;
  std::string key_;
  Part* part_ = nullptr;                     // the one being read
  std::vector<int64_t>* numbers_ = nullptr;  // of the piece being read
  int64_t pieces_ = 0;                       // of all tensors
  int64_t format_ = 0;
  std::string error_;

 public:
  int64_t format() const { return format_; }
};

bool ManifestHandler::start_object(size_t) {
  if (places_.empty()) return Enter(Place::kManifest);
  switch (places_.back()) {
    case Place::kManifest:
      if (key_ == "attributes") return Enter(Place::kAttributes);
      if (key_ == "files") return Enter(Place::kFiles);
      break;
    case Place::kFiles:
      if (static_cast<int64_t>(manifest_.files.size()) >= kMaxConfigFiles) break;
      part_ = &manifest_.files[key_];
      return Enter(Place::kFile);
    case Place::kTensors:
      if (static_cast<int64_t>(manifest_.tensors.size()) >= kMaxTensors) break;
      manifest_.tensors.emplace_back();
      return Enter(Place::kTensor);
    case Place::kTensor:
      if (key_ == "parts") return Enter(Place::kParts);
      break;
    case Place::kParts:
      part_ = &tensor().parts[key_];
      return Enter(Place::kPart);
    case Place::kPieces:
      if (++pieces_ > kMaxManifestPieces) break;
      tensor().pieces.emplace_back();
      return Enter(Place::kPiece);
    default:
      break;
  }
  return Fail("an object that does not belong here");
}

bool ManifestHandler::start_array(size_t) {
  if (!places_.empty()) {
    const Place place = places_.back();
    if (place == Place::kManifest && key_ == "tensors") return Enter(Place::kTensors);
    if (place == Place::kTensor && key_ == "shape") return Enter(Place::kShape);
    if (place == Place::kTensor && key_ == "pieces") return Enter(Place::kPieces);
    if (place == Place::kPiece && (key_ == "offsets" || key_ == "shape")) {
      TensorBox& piece = tensor().pieces.back();
      numbers_ = key_ == "shape" ? &piece.shape : &piece.offsets;
      return Enter(Place::kPieceNumbers);
    }
    if ((place == Place::kPart || place == Place::kFile) && key_ == "chunks") {
      return Enter(Place::kChunks);
    }
  }
  return Fail("an array that does not belong here");
}

bool ManifestHandler::Integer(int64_t value) {
  const Place place = places_.empty() ? Place::kTensors : places_.back();
  if (place == Place::kShape) {
    if (static_cast<int64_t>(tensor().shape.size()) >= kMaxRank) return Fail("too many sizes");
    tensor().shape.push_back(value);
    return true;
  }
  if (place == Place::kPieceNumbers) {
    if (static_cast<int64_t>(numbers_->size()) >= kMaxRank) return Fail("too many numbers");
    numbers_->push_back(value);
    return true;
  }
  if (place == Place::kManifest && key_ == "format") {
    format_ = value;
    return true;
  }
  if (place == Place::kManifest && key_ == "step") {
    manifest_.step = value;
    return true;
  }
  if ((place == Place::kPart || place == Place::kFile) && key_ == "bytes") {
    part_->bytes = value;
    return true;
  }
  return Fail("a number that does not belong here");
}

bool ManifestHandler::String(std::string& value) {
  switch (places_.empty() ? Place::kShape : places_.back()) {
    case Place::kManifest:
      return ManifestString(value);
    case Place::kTensor:
      return TensorString(value);
    case Place::kAttributes:
      if (static_cast<int64_t>(manifest_.attributes.size()) >= kMaxAttributes) {
        return Fail("too many attributes");
      }
      manifest_.attributes[key_] = std::move(value);
      return true;
    case Place::kChunks:
      return ReadDigest(value, part_->chunks.emplace_back());
    default:
      return Fail("a string that does not belong here");
  }
}

bool ManifestHandler::ManifestString(std::string& value) {
  if (key_ == "base") return ReadDigest(value, manifest_.base.emplace());
  if (key_ == "run" || key_ == "group") {
    (key_ == "run" ? manifest_.run : manifest_.group) = std::move(value);
    return true;
  }
  if (key_ == "kind") {
    const Result<ArtifactKind> kind = ArtifactKindFromName(value);
    if (!kind.ok()) return Fail("an unknown kind");
    manifest_.kind = *kind;
    return true;
  }
  return Fail("an unknown key");
}

bool ManifestHandler::TensorString(std::string& value) {
  if (key_ == "content") return ReadDigest(value, tensor().content);
  if (key_ == "name" || key_ == "alias_of") {
    (key_ == "name" ? tensor().name : tensor().alias_of) = std::move(value);
    return true;
  }
  if (key_ == "dtype") {
    const std::optional<DType> dtype = DTypeFromName(value);
    if (!dtype) return Fail("an unknown dtype");
    tensor().dtype = *dtype;
    return true;
  }
  if (key_ == "codec") {
    const Result<Codec> codec = CodecFromName(value);
    if (!codec.ok()) return Fail("an unknown codec");
    tensor().codec = *codec;
    return true;
  }
  return Fail("an unknown key");
}

bool ManifestHandler::ReadDigest(const std::string& hex, Digest& digest) {
  const Result<Digest> read = Digest::FromHex(hex);
  if (!read.ok()) return Fail(read.status().message());
  digest = *read;
  return true;
}

}  // namespace

std::string Manifest::ToJson() const {
  std::string out = "{\"attributes\":{";
  bool first = true;
  for (const auto& [key, value] : attributes) {
    if (!first) out += ',';
    first = false;
    AppendString(out, key);
    out += ':';
    AppendString(out, value);
  }
  out += '}';
  if (base) {
    out += ',';
    AppendField(out, "base", base->Hex());
  }
  out += ",\"files\":";
  AppendParts(out, files);
  out += ",\"format\":" + std::to_string(kManifestFormat) + ',';
  if (!group.empty()) {
    AppendField(out, "group", group);
    out += ',';
  }
  AppendField(out, "kind", ArtifactKindName(kind));
  if (!run.empty()) {
    out += ',';
    AppendField(out, "run", run);
  }
  if (step >= 0) out += ",\"step\":" + std::to_string(step);
  out += ",\"tensors\":[";
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i > 0) out += ',';
    AppendTensor(out, tensors[i]);
  }
  out += "]}";
  return out;
}

Result<Manifest> Manifest::FromJson(std::string_view text) {
  if (static_cast<int64_t>(text.size()) > kMaxManifestBytes) {
    return InvalidArgument("manifest: over " + std::to_string(kMaxManifestBytes) + " bytes");
  }
  Manifest manifest;
  ManifestHandler handler(manifest);
  try {
    if (!json::sax_parse(text, &handler)) {
      return InvalidArgument("manifest: " + handler.error());
    }
  } catch (const std::exception& e) {
    return InvalidArgument(std::string("manifest: ") + e.what());
  }
  if (handler.format() != kManifestFormat) {
    return InvalidArgument("manifest: format " + std::to_string(handler.format()) +
                           " is not one this version reads (1)");
  }
  STOCKPOT_RETURN_IF_ERROR(manifest.Validate());
  if (manifest.ToJson() != text) {
    return InvalidArgument("manifest: not in canonical form (sorted keys, no spaces, no repeats)");
  }
  return manifest;
}

}  // namespace stockpot
