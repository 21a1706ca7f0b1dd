// bitdelta_linear by its definition, in double precision.
#include "kernels/bitdelta/linear.h"
#include "kernels/bitdelta/packed_signs.h"

namespace stockpot {
namespace {

double Dot(const WeightMatrix& weight, int64_t o, const LinearInput& x, int64_t t) {
  double sum = 0;
  for (int64_t i = 0; i < weight.cols; ++i)
    sum += static_cast<double>(weight.at(o, i)) * x.at(t, i);
  return sum;
}

double DeltaOf(const PackedSigns::Layout& signs, int64_t o, const LinearInput& x, int64_t t) {
  double sum = 0;
  for (int64_t p = 0; p < signs.planes; ++p) {
    double plane = 0;
    for (int64_t i = 0; i < signs.d_in; ++i) plane += signs.SignAt(p, o, i) * x.at(t, i);
    sum += signs.scales(p)[o] * plane;
  }
  return sum;
}

}  // namespace

Status BitDeltaLinearReference(const LinearArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckLinearArgs(args));
  for (const LinearOutput& output : args.outputs) {
    for (int64_t t = 0; t < args.x.rows; ++t) {
      const LayerDelta* variant = VariantOfRow(args, output, t);
      const float* bias = BiasOfRow(args, output, t);
      const bool has_dense = variant != nullptr && variant->dense != nullptr;
      for (int64_t o = 0; o < output.base.rows; ++o) {
        double y = Dot(has_dense ? *variant->dense : output.base, o, args.x, t);
        if (variant != nullptr && variant->signs != nullptr) {
          y += DeltaOf(variant->signs->layout(), o, args.x, t);
        }
        if (bias != nullptr) y += bias[o];
        output.y.row(t)[o] = static_cast<float>(y);
      }
    }
  }
  return OkStatus();
}

}  // namespace stockpot
