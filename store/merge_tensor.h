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

#include "kernels/base/aligned_buffer.h"
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

// Memory of Merge() that one call leaves to the next: pages that are new cost more than what is
// done with them. One user at a time; what it was used for before changes no result.
struct MergeWorkspace {
  AlignedBuffer<float> sum, delta, other_delta;
  AlignedBuffer<std::byte> base;        // of a tensor that is decomposed, as it is stored
  AlignedBuffer<std::byte> read_bytes;  // of a block
  AlignedBuffer<float> read_values;     // likewise
  AlignedBuffer<double> made_values;    // likewise, before they are rounded
  AlignedBuffer<std::byte> made_bytes;  // likewise
  MatrixWorkspace matrix;

  int64_t bytes() const;
};

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
  // The most bytes that Merge() needs of a tensor that is decomposed. In units of its float32
  // values, for a square one: 15, and 16 with more than two parents.
  int64_t MatrixBytes(const TensorInfo& tensor) const;

  // The merged tensor, of the first parent's dtype (`tensor` is its entry, no alias). Its elements
  // are computed in float64 or from float32 deltas, and rounded once. InvalidArgument: what
  // store/merge.h says; what the sink got then is nothing to keep.
  Result<MergedTensorReport> Merge(const TensorInfo& tensor, const ByteSink& sink,
                                   MergeWorkspace& workspace) const;

 private:
  Result<MergedTensorReport> MergeDeltas(const TensorInfo& tensor, const ByteSink& sink,
                                         MergeWorkspace& workspace) const;
  Result<MergedTensorReport> MergeSpectrally(const TensorInfo& tensor, const ByteSink& sink,
                                             MergeWorkspace& workspace) const;
  Result<MergedTensorReport> ModelStock(const TensorInfo& tensor, const ByteSink& sink,
                                        MergeWorkspace& workspace) const;
  Result<double> MeanCosine(const TensorInfo& tensor, MergeWorkspace& workspace) const;
  Result<std::vector<double>> DeltaEnergies(const TensorInfo& tensor,
                                            MergeWorkspace& workspace) const;
  Status Mean(const TensorInfo& tensor, const ByteSink& sink, MergeWorkspace& workspace) const;
  Status CheckTypes(const TensorInfo& tensor) const;

  const TensorSource& base_;
  const std::vector<const TensorSource*> parents_;
  const ModelStructure& structure_;
  const MergeOptions& options_;
};

}  // namespace stockpot
