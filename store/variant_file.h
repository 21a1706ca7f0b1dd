// A variant as ONE safetensors file that says itself what it is, for other daemons and for anybody
// with a safetensors reader (trainer_hooks/python/src/stockpot/variant_file.py is one).
//
//   tensors    of a tensor NAME of the variant its stored parts, each as it is in the store:
//                "NAME"        codec raw
//                "NAME.ROLE"   every other part: "NAME.signs", "NAME.alpha", "NAME.counts", ...
//                              "NAME.data/0" of a tensor in pieces
//                what equals the base's and what is tied has none
//              "file:NAME"     a config file that differs from the base's, U8
//   metadata   "stockpot.format"        "variant 1"
//              "stockpot.manifest"      the variant's canonical manifest (store/manifest.h): codec,
//                                       dtype and shape of every tensor, ties, and the digest of
//                                       every 4 MiB chunk of every part
//              "stockpot.base"          digest of the base, as in the manifest
//              "stockpot.base_tensors"  JSON {name: TreeDigest of the base's tensor}, of each that
//              the
//                                       variant refers to
//              "stockpot.how"           the rule to decode it, for a person
//
// A part's element type and shape in the file are for readers; its bytes are what counts. A role
// that is not known here travels as bytes.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "kernels/base/status.h"
#include "store/manifest.h"
#include "store/safetensors.h"

namespace stockpot {

inline constexpr std::string_view kVariantFileFormat = "variant 1";

// Gives the bytes of a part in order, in runs of any length.
using PartFetcher = std::function<Status(
    const Part& part, const std::function<Status(std::span<const std::byte>)>& sink)>;

// Writes FILE, which must not exist; it is there whole, or not at all. InvalidArgument: the
// artifact is no variant, or two of its parts would have one name.
Status WriteVariantFile(const Manifest& variant, const Manifest& base, const PartFetcher& fetch,
                        const std::filesystem::path& file);

// An open variant file. Untrusted: the header is checked against the file, the manifest by its own
// rules, and each chunk against its digest when it is read. Thread promise: one thread.
class VariantFile {
 public:
  // InvalidArgument: not a variant file of this format. Corruption: it contradicts itself.
  static Result<std::unique_ptr<VariantFile>> Open(const std::filesystem::path& file);
  ~VariantFile();
  VariantFile(const VariantFile&) = delete;
  VariantFile& operator=(const VariantFile&) = delete;

  const Manifest& manifest() const { return manifest_; }

  // Whether the variant was made against this base. InvalidArgument names the first tensor that
  // differs, and otherwise what does.
  Status CheckBase(const std::string& name, const Digest& digest, const Manifest& base) const;

  // Every chunk of the parts and config files, verified. Corruption names the tensor.
  using ChunkSink = std::function<Status(const Digest& digest, std::span<const std::byte> data)>;
  Status ForEachChunk(const ChunkSink& sink) const;

 private:
  VariantFile() = default;
  Status Read(const std::filesystem::path& file);
  Status ReadMetadata(std::map<std::string, std::string> metadata);
  Status MatchParts() const;
  Status ReadPart(const std::string& name, const Part& part, const ChunkSink& sink) const;

  std::string path_;
  int fd_ = -1;
  int64_t data_offset_ = 0;
  std::map<std::string, SafetensorsEntry, std::less<>> entries_;  // by name
  Manifest manifest_;
  std::map<std::string, Digest> base_tensors_;
};

}  // namespace stockpot
