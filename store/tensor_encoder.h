// The forms in which one changed matrix can be stored beside its base: measured, and put into the
// store. What is chosen among them: store/tensor_choice.h, store/bitdelta_codec.h.
#pragma once

#include <string>
#include <vector>

#include "kernels/base/threads.h"
#include "kernels/base/view.h"
#include "kernels/bitdelta/compress.h"
#include "store/checkpoint_store.h"
#include "store/delta_planes.h"
#include "store/tensor_choice.h"

namespace stockpot {

// A weight [d_out, d_in] and its base's, which may have another d_out (a vocabulary of another size):
// then the rows that both have are a delta, and those behind the base's are stored as they are. The
// views must outlive what is made of them.
struct ChangedMatrix {
  std::string name;
  WeightMatrix base;
  WeightMatrix tuned;
};

// Which forms are looked at.
struct WaysToEncode {
  int64_t planes = 1;          // 1 .. this many sign planes
  std::vector<int64_t> ranks;  // of residuals; ascending, at most min(d_out, d_in)
  int64_t ranks_from = 1;      // beside that many planes and more
  bool signs = true;           // false: no planes, but their first is measured all the same
  bool sparse = true;          // the changed elements, where both are of one dtype
};

// {rank / 4, rank / 2, rank}, cut at the matrix's sides; none for rank 0.
std::vector<int64_t> RanksUpTo(int64_t rank, const WeightMatrix& w);

// A matrix's delta, encoded; holds its planes until it is gone.
class TensorEncoder {
 public:
  TensorEncoder(CheckpointStore& store, ThreadPool& threads) : store_(store), threads_(threads) {}

  // Measures. Afterwards stats() and candidates(), the forms of `ways` in a fixed order: sparse,
  // then by planes and rank; of different heights sparse alone. InvalidArgument: shapes that do not
  // fit.
  Status Measure(const ChangedMatrix& matrix, const WaysToEncode& ways);
  const DeltaStats& stats() const { return planes_.stats; }  // of the rows that both have
  const ChangedMatrix& matrix() const { return matrix_; }    // likewise
  // Rows of the weight behind the base's last; none of most.
  const WeightMatrix& rows_behind() const { return behind_; }
  const std::vector<Candidate>& candidates() const { return candidates_; }

  // Puts the parts of a form that was measured. The same matrix and ways make the same parts.
  Status Put(const Candidate& form, TensorEntry& stored);

 private:
  Status PutSparse(TensorEntry& stored);
  Status PutPlanes(const Candidate& form, TensorEntry& stored);

  CheckpointStore& store_;
  ThreadPool& threads_;
  ChangedMatrix matrix_;  // the rows that both have
  WeightMatrix behind_;
  WaysToEncode ways_;
  DeltaPlanes planes_;
  std::vector<DeltaResidual> residuals_;  // beside ranks_from, ... planes
  std::vector<Candidate> candidates_;
};

}  // namespace stockpot
