// Matrices of known singular values, for the tests and the bench of the SVD: A = P diag(s) Q^T with
// P and Q products of random reflections, so that the optimum is known without a decomposition.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <string>
#include <vector>

namespace stockpot {

struct Spectrum {
  std::string name;
  at::Tensor s;  // float64 [n], descending
};

// The spectra of the table in kernels/svd/svd.h, 64 strong values (90 % of the energy) over noise,
// and a geometric one.
inline std::vector<Spectrum> Spectra(int64_t n) {
  const at::Tensor i = at::arange(1, n + 1, at::kDouble);
  // The quarter circle law of square Gaussian matrices, from a small one's values.
  const at::Tensor small = at::linalg_svdvals(at::randn({256, 256}, at::kDouble));
  const at::Tensor noise = at::upsample_linear1d(small.view({1, 1, -1}), {n}, false).view({-1});
  at::Tensor strong = noise * (std::sqrt(0.1) / noise.norm());
  strong.slice(0, 0, 64).fill_(std::sqrt(0.9 / 64));
  return {{"noise", noise},
          {"i^-0.5", i.pow(-0.5)},
          {"i^-1", i.pow(-1)},
          {"64 strong + noise", strong},
          {"2^(-i/32)", at::pow(2.0, -i / 32)}};
}

// float32 [n, n], contiguous.
inline at::Tensor MatrixWith(const at::Tensor& s) {
  at::Tensor a = at::diag(s);
  for (int i = 0; i < 8; ++i) {
    at::Tensor v = at::randn({s.size(0), 1}, at::kDouble);
    v = v / v.norm();
    a = (a - at::mm(2 * v, at::mm(v.t(), a))).t();
  }
  return a.to(at::kFloat).contiguous();
}

// Share of the energy in the r largest.
inline double BestCaptured(const at::Tensor& s, int64_t r) {
  return (s.slice(0, 0, r).square().sum() / s.square().sum()).item<double>();
}

}  // namespace stockpot
