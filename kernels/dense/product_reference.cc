#include "kernels/dense/product.h"

namespace stockpot {

void DenseProductReference(const ProductArgs& args) {
  for (int64_t i = 0; i < args.rows; ++i) {
    for (int64_t j = args.upper ? i / kProductBlock * kProductBlock : 0; j < args.cols; ++j) {
      double sum = 0;
      for (int64_t t = 0; t < args.terms; ++t) {
        sum += static_cast<double>(args.a[i * args.a_row + t * args.a_term]) *
               args.b[t * args.b_term + j * args.b_column];
      }
      float& c = args.c[i * args.c_stride + j];
      if (args.mode == ProductMode::kSet) c = static_cast<float>(sum);
      if (args.mode == ProductMode::kAdd) c = static_cast<float>(c + sum);
      if (args.mode == ProductMode::kSubtract) c = static_cast<float>(c - sum);
    }
  }
}

}  // namespace stockpot
