// bitdelta_linear by its definition, in double precision.
#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/packed_signs.h"

namespace stockpot {

Status BitDeltaLinearReference(const LinearArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckLinearArgs(args));
  for (int64_t t = 0; t < args.x.rows; ++t) {
    const LayerDelta* variant = VariantOfRow(args, t);
    const float* bias = BiasOfRow(args, t);
    const float* x = args.x.row(t);
    const bool has_dense = variant != nullptr && variant->dense != nullptr;
    const WeightMatrix& weight = has_dense ? *variant->dense : args.base;
    for (int64_t o = 0; o < args.base.rows; ++o) {
      double y = bias != nullptr ? bias[o] : 0.0;
      for (int64_t i = 0; i < args.base.cols; ++i) y += static_cast<double>(weight.at(o, i)) * x[i];
      if (variant != nullptr && variant->signs != nullptr) {
        const PackedSigns::Layout& signs = variant->signs->layout();
        double delta = 0;
        for (int64_t i = 0; i < args.base.cols; ++i) delta += signs.SignAt(o, i) * x[i];
        y += signs.alpha.data()[o] * delta;
      }
      args.y.row(t)[o] = static_cast<float>(y);
    }
  }
  return OkStatus();
}

}  // namespace stockpot
