// What the tests of the device code expect is what BitDeltaLinearReference gives.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "kernels/bitdelta/linear.h"
#include "tests/unit/kernels/linear_cuda_problem.h"

namespace stockpot {
namespace {

TEST(LinearCudaProblem, ExpectsWhatTheReferenceGives) {
  for (const CudaProblemShape& shape :
       {CudaProblemShape{.rows = 0, .d_out = 3, .d_in = 5}, CudaProblemShape{.rows = 9, .d_out = 0},
        CudaProblemShape{.rows = 9, .d_out = 7, .d_in = 0},
        CudaProblemShape{.rows = 31, .d_out = 17, .d_in = 65, .planes = 3, .other_dense = true},
        CudaProblemShape{.rows = 31, .d_out = 5, .d_in = 130, .dtype = DType::kF32, .planes = 8}}) {
    CudaProblem p(shape);
    std::vector<PackedSigns> packed;
    packed.reserve(p.deltas.size());
    for (const auto& delta : p.deltas) {
      packed.push_back(
          PackedSigns::Pack(shape.d_out, shape.d_in, delta->signs, delta->alpha, delta->planes)
              .value());
    }
    std::vector<LayerDelta> variants(p.table.size());
    for (size_t v = 0; v < variants.size(); ++v) {
      if (p.table[v].signs != nullptr) variants[v].signs = &packed[v == 4 ? 2 : v];
      if (p.table[v].dense.data != nullptr) variants[v].dense = &p.table[v].dense;
      variants[v].bias = p.table[v].bias;
    }
    std::vector<int32_t> variant_of_row = p.variant_of_row;
    for (int32_t& index : variant_of_row) {
      if (index >= static_cast<int32_t>(variants.size())) index = -1;
    }
    const LinearOutput output{p.base.view(), p.bias.data(), variants, p.y.view()};
    const Status status = BitDeltaLinearReference(
        {.x = p.x.cview(), .outputs = {&output, 1}, .variant_of_row = variant_of_row});
    ASSERT_TRUE(status.ok()) << status.ToString();
    for (int64_t t = 0; t < shape.rows; ++t) {
      for (int64_t o = 0; o < shape.d_out; ++o) {  // the reference rounds to float32 once
        ASSERT_NEAR(p.Y(t, o), p.Expected(t, o), std::ldexp(p.Scale(t, o), -23)) << t << ' ' << o;
      }
    }
  }
}

}  // namespace
}  // namespace stockpot
