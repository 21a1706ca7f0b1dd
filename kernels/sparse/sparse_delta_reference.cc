// sparse_delta_linear by its definition, in double precision.
#include "kernels/sparse/sparse_delta.h"
#include "kernels/sparse/sparse_layout.h"

namespace stockpot {

Status SparseDeltaLinearReference(const SparseDeltaArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckSparseArgs(args));
  if (args.delta_of_row.empty()) return OkStatus();
  for (int64_t t = 0; t < args.x.rows; ++t) {
    const int32_t index = args.delta_of_row[t];
    if (index < 0 || args.deltas[index] == nullptr) continue;
    const SparseDelta::Layout& delta = args.deltas[index]->layout();
    for (int64_t i = 0; i < delta.stored_rows(); ++i) {
      float& y = args.y.row(t)[delta.outputs.data()[i]];
      double sum = 0;
      for (int64_t k = delta.starts.data()[i]; k < delta.starts.data()[i + 1]; ++k) {
        sum += static_cast<double>(delta.values.data()[k]) * args.x.row(t)[delta.column(k)];
      }
      y = static_cast<float>(y + sum);
    }
  }
  return OkStatus();
}

}  // namespace stockpot
