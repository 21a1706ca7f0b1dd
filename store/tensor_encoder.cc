#include "store/tensor_encoder.h"

#include <algorithm>
#include <span>

#include "store/bitdelta_parts.h"
#include "store/sparse_codec.h"

namespace stockpot {
namespace {

SparseShape SparseShapeOf(const WeightMatrix& w) {
  return {.d_out = w.rows, .d_in = w.cols, .element_bytes = DTypeSize(w.dtype)};
}

const std::byte* BytesOf(const WeightMatrix& w) { return static_cast<const std::byte*>(w.data); }

template <typename T>
Status PutPart(CheckpointStore& store, const std::vector<T>& values, Part& part) {
  STOCKPOT_ASSIGN_OR_RETURN(part, store.PutBytes(std::as_bytes(std::span(values))));
  return OkStatus();
}

}  // namespace

std::vector<int64_t> RanksUpTo(int64_t rank, const WeightMatrix& w) {
  std::vector<int64_t> ranks;
  for (const int64_t share : {4, 2, 1}) {
    const int64_t next = std::min({rank / share, w.rows, w.cols});
    if (next > 0 && (ranks.empty() || next > ranks.back())) ranks.push_back(next);
  }
  return ranks;
}

Status TensorEncoder::Measure(const ChangedMatrix& matrix, const WaysToEncode& ways) {
  matrix_ = matrix;
  ways_ = ways;
  candidates_.clear();
  residuals_.clear();
  const int64_t both = std::min(matrix.base.rows, matrix.tuned.rows);
  if (matrix.base.rows != matrix.tuned.rows) ways_.signs = false;
  matrix_.base.rows = matrix_.tuned.rows = both;
  behind_ = matrix.tuned;
  behind_.data = matrix.tuned.row(both);
  behind_.rows = matrix.tuned.rows - both;
  const WeightMatrix &base = matrix_.base, &tuned = matrix_.tuned;
  const int64_t count = ways_.signs ? ways.planes : 1;
  STOCKPOT_ASSIGN_OR_RETURN(planes_, MakePlanes(base, tuned, count, threads_));
  if (planes_.stats.non_finite > 0) return OkStatus();  // the caller refuses it
  if (ways.sparse && base.dtype == tuned.dtype) {
    const SparseShape shape = SparseShapeOf(base);
    const int64_t changed = CountChanged(BytesOf(base), BytesOf(tuned), shape);
    candidates_.push_back(
        {.codec = Codec::kSparse,
         .bytes = SparseBytes(shape.d_out, shape.d_in, shape.element_bytes, changed) +
                  behind_.rows * behind_.cols * DTypeSize(behind_.dtype),
         .left = 0});
  }
  if (!ways_.signs) return OkStatus();
  const auto add = [&](int64_t planes, int64_t rank, double left) {
    candidates_.push_back({.codec = Codec::kBitDelta,
                           .planes = planes,
                           .rank = rank,
                           .bytes = BitDeltaBytes(base.rows, base.cols, planes, rank),
                           .left = left});
  };
  for (int64_t k = 1; k <= count; ++k) {
    const auto first = std::span<const SignPlane>(planes_.planes).first(static_cast<size_t>(k));
    add(k, 0, first.back().left);
    if (ways.ranks.empty() || k < ways.ranks_from) continue;
    residuals_.push_back(MakeResidual(base, tuned, first, ways.ranks, matrix.name, threads_));
    for (size_t i = 0; i < ways.ranks.size(); ++i) {
      add(k, ways.ranks[i], residuals_.back().left[i]);
    }
  }
  return OkStatus();
}

Status TensorEncoder::Put(const Candidate& form, TensorEntry& stored) {
  stored.codec = form.codec;
  return form.codec == Codec::kSparse ? PutSparse(stored) : PutPlanes(form, stored);
}

Status TensorEncoder::PutSparse(TensorEntry& stored) {
  const SparseParts parts =
      EncodeSparse(BytesOf(matrix_.base), BytesOf(matrix_.tuned), SparseShapeOf(matrix_.base));
  STOCKPOT_RETURN_IF_ERROR(PutPart(store_, parts.counts, stored.parts["counts"]));
  STOCKPOT_RETURN_IF_ERROR(PutPart(store_, parts.columns, stored.parts["columns"]));
  STOCKPOT_RETURN_IF_ERROR(PutPart(store_, parts.values, stored.parts["values"]));
  if (behind_.rows == 0) return OkStatus();
  const auto bytes = static_cast<size_t>(behind_.rows * behind_.cols * DTypeSize(behind_.dtype));
  STOCKPOT_ASSIGN_OR_RETURN(stored.parts["rows"], store_.PutBytes({BytesOf(behind_), bytes}));
  return OkStatus();
}

Status TensorEncoder::PutPlanes(const Candidate& form, TensorEntry& stored) {
  for (int64_t k = 0; k < form.planes; ++k) {
    const SignPlane& plane = planes_.planes[static_cast<size_t>(k)];
    STOCKPOT_RETURN_IF_ERROR(PutPart(store_, plane.signs, stored.parts[SignsRole(k)]));
    STOCKPOT_RETURN_IF_ERROR(PutPart(store_, plane.alpha, stored.parts[AlphaRole(k)]));
  }
  if (form.rank == 0) return OkStatus();
  const DeltaResidual& residual = residuals_[static_cast<size_t>(form.planes - ways_.ranks_from)];
  std::vector<uint16_t> a = residual.a;
  a.resize(static_cast<size_t>(form.rank * matrix_.base.cols));
  STOCKPOT_RETURN_IF_ERROR(PutPart(store_, a, stored.parts[kResidualA]));
  return PutPart(store_, DeltaResidual::FirstColumns(residual.b, ways_.ranks.back(), form.rank),
                 stored.parts[kResidualB]);
}

}  // namespace stockpot
