// One merged tensor out of a base's and its parents': the formulas of store/merge.h, block by
// block.
//
// Memory of a call: at most about 64 MiB for what is an average (weights, cosines), whatever the
// tensor's size and the number of parents; for a matrix that is decomposed MatrixBytes().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "store/digest.h"
#include "store/merge_matrix.h"
#include "store/model_structure.h"
#include "store/records.h"
#include "store/tensor_source.h"

namespace stockpot {

// Tensors are read and averaged in blocks: of a 16-bit type one chunk, so that none is read and
// hashed twice.
inline constexpr int64_t kMergeBlockElements = kChunkBytes / 2;

// Takes the bytes of a tensor in order, in runs of any length.
using ByteSink = std::function<Status(std::span<const std::byte> bytes)>;

struct MergedTensorReport {
  std::vector<MatrixReport> matrices;   // one a decomposed delta, in the order of the parents
  std::map<std::string, double> facts;  // model-stock: "cosine", "t"
};

// Thread promise: any thread.
class TensorMerger {
 public:
  // The sources must outlive it. REQUIRES: at least one parent, all with the tensors (names,
  // shapes) of the first; CheckMergeOptions().
  TensorMerger(const TensorSource& base, std::vector<const TensorSource*> parents,
               const ModelStructure& structure, const MergeOptions& options);

  // Whether the base's values count, beside the parents': else it is a mean.
  bool UsesBase(const TensorInfo& tensor) const;
  // Whether singular values do.
  bool IsDecomposed(const TensorInfo& tensor) const;
  // The most bytes that Merge() holds of a tensor that is decomposed. In units of its float32
  // values, for a square one: 8.
  int64_t MatrixBytes(const TensorInfo& tensor) const;

  // The merged tensor, of the first parent's dtype (`tensor` is its entry, no alias). Its elements
  // are computed in float64 or from float32 deltas, and rounded once. InvalidArgument: what
  // store/merge.h says; what the sink got then is nothing to keep.
  Result<MergedTensorReport> Merge(const TensorInfo& tensor, const ByteSink& sink) const;

 private:
  Result<MergedTensorReport> MergeDeltas(const TensorInfo& tensor, const ByteSink& sink) const;
  Result<MergedTensorReport> MergeSpectrally(const TensorInfo& tensor, const ByteSink& sink) const;
  Result<MergedTensorReport> ModelStock(const TensorInfo& tensor, const ByteSink& sink) const;
  Result<double> MeanCosine(const TensorInfo& tensor) const;
  Result<std::vector<double>> DeltaEnergies(const TensorInfo& tensor) const;
  Status Mean(const TensorInfo& tensor, const ByteSink& sink) const;
  Status CheckTypes(const TensorInfo& tensor) const;

  const TensorSource& base_;
  const std::vector<const TensorSource*> parents_;
  const ModelStructure& structure_;
  const MergeOptions& options_;
};

}  // namespace stockpot
