// All eigenvalues of a symmetric matrix, and the eigenvectors of some of them: what a cut of a
// spectrum needs, in a good third of the time that LAPACK's syevd takes in float32 for all vectors.
//
//   T = Q^T A Q     Householder, in panels (LAPACK's latrd), in float32
//   eigenvalues     QL iteration on T, in float64
//   vectors of T    twisted factorisations (Dhillon, Parlett, "Multiple representations",
//   2004, 3.1),
//                   in float64; x = Q z through the reflectors, in float32
//
// Errors are those of float32: an eigenvalue is off by a few 2^-24 ||A||, a vector by that over the
// distance to its neighbours. Where vectors cannot be told to be orthogonal, Vectors() says so.
//
// Sums run in an order that depends on the sizes and on the widest SIMD of the machine alone: the
// same bytes give the same bits. Thread promise: one caller at a time; works on the caller's
// thread.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/base/aligned_buffer.h"

namespace stockpot {

class PartialEigen {
 public:
  // For matrices [n, n]. Holds about 2 n^2 floats, and n a vector; what it holds it keeps.
  explicit PartialEigen(int64_t n = 0) { Resize(n); }
  // For matrices of another size from now on; `matrix()` is zero.
  void Resize(int64_t n);
  int64_t bytes() const;

  // REQUIRES of all that follows: n >= 1.
  // To be filled: row-major, every row `stride()` floats apart; what is behind n stays as it is.
  // Only the 16 x 16 blocks on the diagonal and right of it are read (kPanelAlign,
  // panel_products.h). Nothing of the rest may be infinite or NaN either. Decompose() overwrites
  // it.
  float* matrix() { return matrix_.data(); }
  int64_t stride() const { return stride_; }

  // False: an eigenvalue did not converge.
  bool Decompose();
  // Decompose() of each, with the same bits, in less time: most of what an eigenvalue takes is one
  // division waiting for another, and here the two wait together. REQUIRES: two objects.
  static std::pair<bool, bool> DecomposeBoth(PartialEigen& a, PartialEigen& b);
  // Ascending, of the matrix that was decomposed.
  std::span<const double> values() const { return values_; }

  // Column c of [n, count], rows `stride` floats apart.
  struct Columns {
    float* data = nullptr;
    int64_t stride = 0;
  };
  // The vectors of values()[first, first + count), orthonormal up to about 1e-6, in memory of this
  // object. False: two eigenvalues are too close to tell their vectors apart.
  // REQUIRES: Decompose() was true.
  bool Vectors(int64_t first, int64_t count, Columns* out);

 private:
  void Reduce();
  void ReducePanel(int64_t begin, int64_t end);
  void Reflect(int64_t j, int64_t in_panel);
  // The eigenvector of T; returns ||T z - value z||.
  double TwistedVector(double value, double* z);
  void Transform(int64_t count);

  int64_t n_ = 0;
  int64_t stride_ = 0;
  AlignedBuffer<float> matrix_;
  AlignedBuffer<float> reflectors_;        // [n, stride]: row j is v_j, zero up to j
  AlignedBuffer<float> panel_;             // rows V, W, V of the panel under way
  std::vector<float> taus_;                // H_j = I - tau_j v_j v_j^T
  std::vector<double> diagonal_, beside_;  // of T
  std::vector<double> values_;
  std::vector<double> squares_;                                 // of beside_
  std::vector<double> upper_, lower_, from_top_, from_bottom_;  // of a twisted factorisation
  AlignedBuffer<float> vectors_;
  int64_t vectors_stride_ = 0;
};

}  // namespace stockpot
