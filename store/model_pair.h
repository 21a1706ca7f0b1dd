// A checkpoint or merge beside the base that it is published against: what each holds, which tensor
// of one belongs to which of the other, and whether they fit.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "store/artifact_source.h"
#include "store/checkpoint_store.h"
#include "store/model_structure.h"

namespace stockpot {

// A tensor that has the bytes of another.
struct Tie {
  std::string name;
  std::string target;
};

// Immutable once opened. Borrows the store. Thread promise: as TensorSource.
class ModelPair {
 public:
  // InvalidArgument, naming the tensor: the artifact is no checkpoint or merge, or compressed
  // already; a tensor of the base is missing, has another shape (a table may have other rows, and
  // config.json says how many then), or one is extra.
  static Result<std::unique_ptr<ModelPair>> Open(CheckpointStore& store, const Digest& artifact);

  // The artifact. Of two tied tensors the one that the base stores holds the bytes.
  const Manifest& source() const { return source_; }
  const Manifest& base() const { return base_; }
  const TensorSource& source_reader() const { return *source_reader_; }
  const TensorSource& base_reader() const { return *base_reader_; }
  const std::string& config_text() const { return config_text_; }  // the artifact's; empty: none
  const ModelStructure& structure() const { return *structure_; }
  // The artifact's aliases, and tensors of the base that it ties by leaving them out.
  const std::vector<Tie>& ties() const { return ties_; }

  // A table of a vocabulary of another size than the base's: the rows that both have are compared.
  bool IsResized(const TensorEntry& entry, const TensorEntry& base) const;

  // Whether a tensor of the artifact has the bytes of one of the base's, or of its own.
  Result<bool> EqualsBase(const TensorEntry& entry, const TensorEntry& base) const {
    return Equals(entry, *base_reader_, base);
  }
  Result<bool> EqualsOwn(const TensorEntry& entry, const TensorEntry& other) const {
    return Equals(entry, *source_reader_, other);
  }

 private:
  ModelPair() = default;
  Status CheckKinds(const Digest& artifact) const;
  Status KnowStructure();
  void DirectTies();
  Status CheckComplete();
  Status TieMissing(const TensorEntry& base);
  Status CheckShape(const TensorEntry& entry, const TensorEntry& base) const;
  bool IsUntiedHead(const TensorEntry& entry) const;
  Result<bool> Equals(const TensorEntry& entry, const TensorSource& reader,
                      const TensorEntry& other) const;

  Manifest source_;
  Manifest base_;
  std::unique_ptr<TensorSource> source_reader_;
  std::unique_ptr<TensorSource> base_reader_;
  std::string config_text_;
  std::optional<ModelStructure> structure_;
  std::optional<int64_t> vocabulary_;  // that the artifact's config.json says
  std::vector<Tie> ties_;
};

// Of a tensor that is not in pieces: the digest of its bytes.
Digest ContentOf(const TensorEntry& entry);

}  // namespace stockpot
