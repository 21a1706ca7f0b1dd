// A call of bitdelta_linear for the device code: its data in host memory (the emulation reads it
// there; a test on a GPU copies it), what it should give in double precision, and how far from that
// it may be.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/bitdelta/linear_cuda.h"
#include "kernels/bitdelta/sign_tiles_cuda.h"
#include "kernels/bitdelta/signs.h"
#include "tests/unit/kernels/matrices.h"

namespace stockpot {

// A 1-bit delta of several planes, canonical and in tiles.
struct CudaDelta {
  CudaDelta(int64_t plane_count, int64_t d_out, int64_t d_in, Random& random)
      : planes(plane_count),
        signs(static_cast<size_t>(planes * SignBytes(d_out, d_in))),
        alpha(static_cast<size_t>(planes * d_out)),
        tiles(static_cast<size_t>(planes * SignTileWords(d_out, d_in) / 4)) {
    for (int64_t row = 0; row < planes * d_out; ++row) {
      for (int64_t c = 0; c < d_in; ++c) {
        if (random() & 1) {
          signs[static_cast<size_t>(row * SignRowBytes(d_in) + c / 8)] |= 1u << (c % 8);
        }
      }
    }
    for (float& a : alpha) a = 0.01f * std::fabs(Gaussian(random));
    const Status packed = PackSignTiles(planes, d_out, d_in, signs, tile_words());
    if (!packed.ok()) std::abort();
  }

  std::span<uint32_t> tile_words() {
    return {reinterpret_cast<uint32_t*>(tiles.data()), tiles.size() * 4};
  }

  struct alignas(16) Four {
    uint32_t words[4];
  };
  int64_t planes;
  std::vector<uint8_t> signs;  // [planes] canonical matrices
  std::vector<float> alpha;    // [planes, d_out]
  std::vector<Four> tiles;
};

// A bf16 copy whose rows begin on 16 bytes, with not an element more than it needs.
struct AlignedWeight {
  explicit AlignedWeight(const WeightMatrix& w) : view(w) {
    view.stride = (w.cols + 7) / 8 * 8;
    const int64_t elements = w.rows == 0 ? 0 : (w.rows - 1) * view.stride + w.cols;
    memory.reset(new uint16_t[static_cast<size_t>(elements)]);
    for (int64_t r = 0; r < w.rows; ++r) {
      std::memcpy(memory.get() + r * view.stride, w.row(r), static_cast<size_t>(w.cols) * 2);
    }
    view.data = memory.get();
  }
  WeightMatrix view;
  std::unique_ptr<uint16_t[]> memory;
};

struct CudaProblemShape {
  int64_t rows = 0, d_out = 0, d_in = 0;
  DType dtype = DType::kBF16;
  int64_t planes = 1;          // of the variants that have the most
  bool aligned = true;         // base and x
  bool bf16_x = false;         // every x is a bf16
  bool other_dense = false;    // rows use dense weights of other dtypes too
  int64_t variants_used = 99;  // rows use -1 .. variants_used - 1
  uint64_t seed = 1;
};

class CudaProblem {
 public:
  // Entries of the table: 0: one plane; 1: planes and a bias; 2: dense BF16, misaligned; 3: only a
  // bias; 4: planes; 5: dense F32; 6: dense F16. 7 is outside the table, and counts as base only.
  explicit CudaProblem(const CudaProblemShape& problem)
      : shape(problem),
        random(problem.seed),
        x(OwnedFloats::Gaussian(shape.rows, shape.d_in, random, XPadding())),
        y(shape.rows, shape.d_out, 5, std::nanf("")),
        base(RandomWeight(shape.dtype, 7)),
        aligned_base(shape.dtype == DType::kBF16 ? base.view() : WeightMatrix()),
        bias(RandomBias()),
        variant_bias(RandomBias()) {
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
      dense.push_back(RandomWeight(dtype, 1));
    }
    for (const int64_t planes : {int64_t{1}, shape.planes, shape.planes}) {
      deltas.push_back(std::make_unique<CudaDelta>(planes, shape.d_out, shape.d_in, random));
    }
    MakeTable();
    if (shape.bf16_x) {
      for (int64_t t = 0; t < shape.rows; ++t) {
        for (int64_t c = 0; c < shape.d_in; ++c) {
          float& value = x.view().row(t)[c];
          value = FloatFromBF16(BF16FromFloat(value));
        }
      }
    }
    for (int64_t t = 0; t < shape.rows; ++t) variant_of_row.push_back(RandomVariant());
    plan = PlanCudaRows(shape.rows, variant_of_row);
  }

  CudaLinearArgs args() {
    const bool aligned = shape.aligned && shape.dtype == DType::kBF16;
    return {.x = x.cview(),
            .base = aligned ? aligned_base.view : base.view(),
            .bias = bias.data(),
            .variants = table.data(),
            .variant_count = static_cast<int64_t>(table.size()),
            .variant_of_row = variant_of_row.data(),
            .order = plan.order.data(),
            .tiles = plan.tiles.data(),
            .tile_count = static_cast<int64_t>(plan.tiles.size()),
            .segments = plan.segments,
            .max_planes = static_cast<int32_t>(shape.planes),
            .other_dense = shape.other_dense,
            .y = y.view()};
  }

  // The table entry of row t, or null.
  const CudaLayerDelta* Variant(int64_t t) const {
    const int32_t index = variant_of_row[static_cast<size_t>(t)];
    return index < 0 || index >= static_cast<int32_t>(table.size()) ? nullptr : &table[index];
  }

  // The planes of row t's variant, or null.
  const CudaDelta* Delta(int64_t t) const {
    const CudaLayerDelta* variant = Variant(t);
    if (variant == nullptr || variant->signs == nullptr) return nullptr;
    const int32_t index = variant_of_row[static_cast<size_t>(t)];
    return deltas[index == 4 ? 2 : static_cast<size_t>(index)].get();
  }

  // W[o, i] of row t, without its planes; folded: with them, added in float32 and rounded to bf16,
  // where tensor cores take the row.
  double Weight(int64_t t, int64_t o, int64_t i, bool folded = false) const {
    const CudaLayerDelta* variant = Variant(t);
    const bool has_dense = variant != nullptr && variant->dense.data != nullptr;
    float w = has_dense ? variant->dense.at(o, i) : base.view().at(o, i);
    const CudaDelta* delta = Delta(t);
    if (!folded || delta == nullptr || delta->planes > kCudaTensorPlanes) return w;
    for (int64_t p = 0; p < delta->planes; ++p) {
      const float alpha = delta->alpha[static_cast<size_t>(p * shape.d_out + o)];
      w += alpha * Sign(*delta, p, o, i);
    }
    return FloatFromBF16(BF16FromFloat(w));
  }

  float Sign(const CudaDelta& delta, int64_t plane, int64_t o, int64_t i) const {
    return SignAt(delta.signs.data() + plane * SignBytes(shape.d_out, shape.d_in), shape.d_in, o,
                  i);
  }

  // y[t, o] by its definition.
  double Expected(int64_t t, int64_t o, bool folded = false) const {
    const CudaLayerDelta* variant = Variant(t);
    double sum = variant != nullptr && variant->bias != nullptr ? variant->bias[o] : bias[o];
    for (int64_t i = 0; i < shape.d_in; ++i) sum += Weight(t, o, i, folded) * X(t, i);
    const CudaDelta* delta = Delta(t);
    if (delta == nullptr || (folded && delta->planes <= kCudaTensorPlanes)) return sum;
    for (int64_t p = 0; p < delta->planes; ++p) {
      double product = 0;
      for (int64_t i = 0; i < shape.d_in; ++i) product += Sign(*delta, p, o, i) * X(t, i);
      sum += delta->alpha[static_cast<size_t>(p * shape.d_out + o)] * product;
    }
    return sum;
  }

  // The scale of an error of y[t, o]: |x[t]| (|w[o]| + sum_p |alpha_p[o]| sqrt(d_in)) + |bias|,
  // Euclidean norms: by Cauchy-Schwarz no partial sum is larger.
  double Scale(int64_t t, int64_t o) const {
    double x_square = 0, w_square = 0, planes = 0;
    for (int64_t i = 0; i < shape.d_in; ++i) {
      x_square += std::pow(X(t, i), 2);
      w_square += std::pow(Weight(t, o, i), 2);
    }
    const CudaDelta* delta = Delta(t);
    for (int64_t p = 0; delta != nullptr && p < delta->planes; ++p) {
      planes += delta->alpha[static_cast<size_t>(p * shape.d_out + o)];
    }
    return std::sqrt(x_square) * (std::sqrt(w_square) + planes * std::sqrt(shape.d_in)) +
           std::fabs(bias[static_cast<size_t>(o)]) + std::fabs(variant_bias[o]);
  }

  // Relative to Scale. A quarter of the columns is summed in steps of 8 columns, thrice for the
  // terms of x, each step cut by at most 2^-23 of a partial sum; the rest rounds a few times.
  double Tolerance() const {
    const double steps = 3.0 * 8 * std::ceil(std::ceil(shape.d_in / 64.0) / 4);
    return std::min(1e-5, std::ldexp(steps + 8, -23));
  }

  double X(int64_t t, int64_t i) const { return x.cview().row(t)[i]; }
  float Y(int64_t t, int64_t o) { return y.view().row(t)[o]; }

  const CudaProblemShape shape;
  Random random;
  OwnedFloats x, y;
  OwnedWeight base;
  AlignedWeight aligned_base;
  std::vector<float> bias, variant_bias;
  std::vector<OwnedWeight> dense;
  std::vector<std::unique_ptr<CudaDelta>> deltas;
  std::vector<CudaLayerDelta> table;
  std::vector<int32_t> variant_of_row;
  CudaRowPlan plan;

 private:
  int64_t XPadding() const { return shape.aligned ? (4 - shape.d_in % 4) % 4 : 3; }

  OwnedWeight RandomWeight(DType dtype, int64_t padding) {
    return OwnedWeight::Gaussian(dtype, shape.d_out, shape.d_in, 0.02f, random, padding);
  }

  std::vector<float> RandomBias() {
    std::vector<float> values(static_cast<size_t>(shape.d_out) + 1);
    for (float& value : values) value = 0.1f * Gaussian(random);
    return values;
  }

  CudaLayerDelta Planes(CudaDelta& delta) {
    return {.signs = delta.tile_words().data(),
            .alpha = delta.alpha.data(),
            .planes = static_cast<int32_t>(delta.planes)};
  }

  void MakeTable() {
    table = {Planes(*deltas[0]),         Planes(*deltas[1]),
             {.dense = dense[0].view()}, {.bias = variant_bias.data()},
             Planes(*deltas[2]),         {.dense = dense[1].view()},
             {.dense = dense[2].view()}};
    table[1].bias = variant_bias.data();
  }

  int32_t RandomVariant() {
    const int64_t most = std::min<int64_t>(shape.variants_used, shape.other_dense ? 8 : 5);
    const int32_t index = static_cast<int32_t>(random() % static_cast<uint64_t>(most + 1)) - 1;
    return !shape.other_dense && index == 4 && random() % 8 == 0 ? 7 : index;
  }
};

}  // namespace stockpot
