#include "kernels/svd/partial_eigen.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/svd/panel_products.h"

namespace stockpot {
namespace {

constexpr int64_t kPanel = 32;          // reflectors that are applied together
constexpr int64_t kUpdateRows = 48;     // of the matrix, by a panel: multiple of 16
constexpr int64_t kVectorsAtOnce = 16;  // of T, written to the columns together
constexpr int kMaxQlIterations = 60;    // of one eigenvalue; two are usual
constexpr double kOrthogonal = 1e-6;    // most |x_i . x_j| that is let pass

// Eigenvalues of a tridiagonal matrix, into `d`, in no order: the QL iteration without square roots
// of Pal, Walker and Kahan (LAPACK's sterf). `squares`, of what is beside the diagonal, is
// destroyed. In a sweep every step waits for the division of the one before; so sweeps are cut into
// runs of steps, and those of two matrices can go side by side.
class QlIteration {
 public:
  QlIteration(std::vector<double>& d, std::vector<double>& squares)
      : d_(d.data()), squares_(squares.data()), n_(static_cast<int64_t>(d.size())) {
    double norm = 0;
    for (int64_t i = 0; i < n_; ++i) {
      norm = std::max(norm, std::fabs(d_[i]));
      if (i < n_ - 1) norm = std::max(norm, std::sqrt(squares_[i]));
    }
    const double least = std::numeric_limits<double>::epsilon() * norm;
    least_square_ = least * least;
    BeginSweep();
  }

  bool has_converged() const { return l_ == n_; }
  // Of the sweep under way; 0: there is none any more.
  int64_t steps_left() const { return steps_left_; }

  // REQUIRES: count <= steps_left() of all.
  static void Run(QlIteration& a, int64_t count) {
    Chain chain = a.chain_;
    for (int64_t k = 0; k < count; ++k) chain.Step();
    a.Ran(chain, count);
  }
  static void RunBoth(QlIteration& a, QlIteration& b, int64_t count) {
    Chain of_a = a.chain_, of_b = b.chain_;
    for (int64_t k = 0; k < count; ++k) {
      of_a.Step();
      of_b.Step();
    }
    a.Ran(of_a, count);
    b.Ran(of_b, count);
  }

 private:
  // What a sweep carries from element i + 1 to i.
  struct Chain {
    double* d = nullptr;
    double* squares = nullptr;
    int64_t i = 0;
    double sigma = 0, c = 1, s = 0, gamma = 0, p = 0;

    void Step() {
      const double square = squares[i], r = p + square;
      squares[i + 1] = s * r;  // of the first step: 0, where a 0 or less than `least` is
      const double c_before = c, gamma_before = gamma;
      // 1 / c is r / p: made beside c, so that the next p does not wait for two divisions.
      const double inverse = r * (1 / p);
      c = p / r;
      s = square / r;
      gamma = c * (d[i] - sigma) - s * gamma_before;
      d[i + 1] = gamma_before + (d[i] - gamma);
      if (c == 0) {
        p = c_before * square;
      } else {
        p = std::isfinite(inverse) ? gamma * gamma * inverse : gamma * gamma / c;
      }
      --i;
    }
  };

  void BeginSweep() {
    steps_left_ = 0;
    for (; l_ < n_; ++l_, iterations_ = 0) {
      int64_t m = l_;
      while (m < n_ - 1 && squares_[m] > least_square_) ++m;
      if (m == l_) continue;
      if (iterations_++ == kMaxQlIterations) return;
      const double beside = std::sqrt(squares_[l_]);
      const double half = (d_[l_ + 1] - d_[l_]) / (2 * beside);
      const double root = std::copysign(std::sqrt(half * half + 1), half);
      const double sigma = d_[l_] - beside / (half + root);
      const double gamma = d_[m] - sigma;
      chain_ = {.d = d_,
                .squares = squares_,
                .i = m - 1,
                .sigma = sigma,
                .gamma = gamma,
                .p = gamma * gamma};
      steps_left_ = m - l_;
      return;
    }
  }

  void Ran(const Chain& chain, int64_t count) {
    chain_ = chain;
    steps_left_ -= count;
    if (steps_left_ > 0) return;
    squares_[l_] = chain.s * chain.p;
    d_[l_] = chain.sigma + chain.gamma;
    BeginSweep();
  }

  double* const d_;
  double* const squares_;
  const int64_t n_;
  double least_square_ = 0;
  int64_t l_ = 0;  // eigenvalues that are found
  int iterations_ = 0;
  Chain chain_;
  int64_t steps_left_ = 0;
};

}  // namespace

void PartialEigen::Resize(int64_t n) {
  n_ = n;
  stride_ = PanelStride(n);
  for (auto* per_row : {&diagonal_, &beside_}) per_row->resize(static_cast<size_t>(n));
  taus_.resize(static_cast<size_t>(n));
  std::fill_n(matrix_.Reserve(n * stride_), n * stride_, 0.0f);
}

int64_t PartialEigen::bytes() const {
  int64_t floats = 0;
  for (const auto* buffer : {&matrix_, &reflectors_, &panel_, &vectors_}) {
    floats += buffer->capacity();
  }
  return floats * static_cast<int64_t>(sizeof(float));
}

// Row j of the matrix, by which the panel's earlier reflectors have been applied, gives v_j; then
// w_j, so that the panel's reflectors together make A - V^T W - W^T V.
void PartialEigen::Reflect(int64_t j, int64_t in_panel) {
  float* v_rows = panel_.data();
  float* w_rows = v_rows + kPanel * stride_;
  float* row = matrix_.data() + j * stride_;
  const PanelProduct earlier = {.c = row,
                                .c_stride = stride_,
                                .rows = 1,
                                .begin = j,
                                .end = n_,
                                .row_step = 1,
                                .term_step = stride_,
                                .b_stride = stride_,
                                .terms = in_panel,
                                .subtract = true};
  PanelProduct step = earlier;
  step.coefficients = v_rows + j;
  step.b = w_rows;
  AddPanelProduct(step);
  step.coefficients = w_rows + j;
  step.b = v_rows;
  AddPanelProduct(step);
  diagonal_[j] = row[j];
  float* v = v_rows + in_panel * stride_;
  float* w = w_rows + in_panel * stride_;
  std::fill_n(v, stride_, 0.0f);
  std::fill_n(w, stride_, 0.0f);
  if (j == n_ - 1) return;
  double tail = 0;
  for (int64_t i = j + 2; i < n_; ++i) tail += static_cast<double>(row[i]) * row[i];
  const double head = row[j + 1];
  beside_[j] = head;
  if (tail == 0) return;
  const double beta = -std::copysign(std::sqrt(head * head + tail), head);
  beside_[j] = beta;
  const auto tau = static_cast<float>((beta - head) / beta);
  const auto scale = static_cast<float>(1 / (head - beta));
  v[j + 1] = 1;
  for (int64_t i = j + 2; i < n_; ++i) v[i] = row[i] * scale;
  taus_[j] = tau;
  std::copy_n(v, stride_, reflectors_.data() + j * stride_);

  PanelSymmetricMatVec(matrix_.data(), stride_, j + 1, n_, v, w);
  float dots[2 * kPanel];
  PanelMatVec(v_rows, stride_, in_panel, j + 1, n_, v, dots);
  PanelMatVec(w_rows, stride_, in_panel, j + 1, n_, v, dots + kPanel);
  step.c = w;
  step.begin = j + 1;
  step.term_step = 1;
  step.coefficients = dots;
  step.b = w_rows;
  AddPanelProduct(step);
  step.coefficients = dots + kPanel;
  step.b = v_rows;
  AddPanelProduct(step);
  std::fill_n(w, j + 1, 0.0f);
  float dot = 0;
  PanelMatVec(w, stride_, 1, j + 1, n_, v, &dot);
  const float half = 0.5f * tau * tau * dot;
  for (int64_t i = j + 1; i < n_; ++i) w[i] = tau * w[i] - half * v[i];
}

void PartialEigen::ReducePanel(int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; ++j) Reflect(j, j - begin);
  if (end == n_) return;
  float* v_rows = panel_.data();
  const float* w_rows = v_rows + kPanel * stride_;
  std::copy_n(v_rows, kPanel * stride_, v_rows + 2 * kPanel * stride_);
  // Rows V, W against rows W, V; what is left of the diagonal's blocks nobody reads.
  for (int64_t row = end; row < n_; row += kUpdateRows) {
    AddPanelProduct({.c = matrix_.data() + row * stride_,
                     .c_stride = stride_,
                     .rows = std::min(kUpdateRows, n_ - row),
                     .begin = row,
                     .end = n_,
                     .coefficients = v_rows + row,
                     .row_step = 1,
                     .term_step = stride_,
                     .b = w_rows,
                     .b_stride = stride_,
                     .terms = 2 * kPanel,
                     .subtract = true});
  }
}

void PartialEigen::Reduce() {
  std::fill_n(panel_.Reserve(3 * kPanel * stride_), 3 * kPanel * stride_, 0.0f);
  std::fill_n(reflectors_.Reserve(n_ * stride_), n_ * stride_, 0.0f);
  std::fill(taus_.begin(), taus_.end(), 0.0f);
  std::fill(beside_.begin(), beside_.end(), 0.0);
  for (int64_t j = 0; j < n_; j += kPanel) ReducePanel(j, std::min(n_, j + kPanel));
  values_ = diagonal_;
  squares_ = beside_;
  for (double& e : squares_) e *= e;
}

bool PartialEigen::Decompose() {
  Reduce();
  QlIteration ql(values_, squares_);
  while (ql.steps_left() > 0) QlIteration::Run(ql, ql.steps_left());
  std::sort(values_.begin(), values_.end());
  return ql.has_converged();
}

std::pair<bool, bool> PartialEigen::DecomposeBoth(PartialEigen& a, PartialEigen& b) {
  a.Reduce();
  b.Reduce();
  QlIteration of_a(a.values_, a.squares_), of_b(b.values_, b.squares_);
  while (of_a.steps_left() > 0 && of_b.steps_left() > 0) {
    QlIteration::RunBoth(of_a, of_b, std::min(of_a.steps_left(), of_b.steps_left()));
  }
  while (of_a.steps_left() > 0) QlIteration::Run(of_a, of_a.steps_left());
  while (of_b.steps_left() > 0) QlIteration::Run(of_b, of_b.steps_left());
  std::sort(a.values_.begin(), a.values_.end());
  std::sort(b.values_.begin(), b.values_.end());
  return {of_a.has_converged(), of_b.has_converged()};
}

// T - value = L D L^T from the top and U D U^T from the bottom; they meet where the last pivot is
// least, and from there the vector needs products only.
double PartialEigen::TwistedVector(double value, double* z) {
  const double tiny = std::numeric_limits<double>::min() / std::numeric_limits<double>::epsilon();
  const auto pivot = [&](double p) { return std::fabs(p) < tiny ? std::copysign(tiny, p) : p; };
  from_top_[0] = pivot(diagonal_[0] - value);
  from_bottom_[n_ - 1] = pivot(diagonal_[n_ - 1] - value);
  for (int64_t i = 0, k = n_ - 2; i < n_ - 1; ++i, --k) {
    lower_[i] = beside_[i] / from_top_[i];
    from_top_[i + 1] = pivot(diagonal_[i + 1] - value - lower_[i] * beside_[i]);
    upper_[k] = beside_[k] / from_bottom_[k + 1];
    from_bottom_[k] = pivot(diagonal_[k] - value - upper_[k] * beside_[k]);
  }
  int64_t twist = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < n_; ++i) {
    const double gamma = std::fabs(from_top_[i] + from_bottom_[i] - (diagonal_[i] - value));
    if (gamma < least) {
      least = gamma;
      twist = i;
    }
  }
  z[twist] = 1;
  for (int64_t i = twist - 1; i >= 0; --i) z[i] = -lower_[i] * z[i + 1];
  for (int64_t i = twist; i < n_ - 1; ++i) z[i + 1] = -upper_[i] * z[i];
  double energy = 0, residual = 0;
  for (int64_t i = 0; i < n_; ++i) {
    double r = (diagonal_[i] - value) * z[i];
    if (i > 0) r += beside_[i - 1] * z[i - 1];
    if (i < n_ - 1) r += beside_[i] * z[i + 1];
    energy += z[i] * z[i];
    residual += r * r;
  }
  const double scale = 1 / std::sqrt(energy);
  for (int64_t i = 0; i < n_; ++i) z[i] *= scale;
  return std::sqrt(residual) * scale;
}

bool PartialEigen::Vectors(int64_t first, int64_t count, Columns* out) {
  for (auto* buffer : {&upper_, &lower_, &from_top_, &from_bottom_}) buffer->resize(n_);
  vectors_stride_ = PanelStride(count);
  float* x = vectors_.Reserve(n_ * vectors_stride_);
  std::fill_n(x, n_ * vectors_stride_, 0.0f);
  std::vector<double> z(static_cast<size_t>(kVectorsAtOnce * n_));
  double residual_before = 0;
  for (int64_t c = 0; c < count; c += kVectorsAtOnce) {
    const int64_t end = std::min(kVectorsAtOnce, count - c);
    for (int64_t k = 0; k < end; ++k) {
      const int64_t index = first + c + k;
      const double residual = TwistedVector(values_[index], z.data() + k * n_);
      const double gap = c + k == 0 ? std::numeric_limits<double>::infinity()
                                    : values_[index] - values_[index - 1];
      if (!(residual + residual_before < kOrthogonal * gap)) return false;
      residual_before = residual;
    }
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t k = 0; k < end; ++k) {
        x[i * vectors_stride_ + c + k] = static_cast<float>(z[k * n_ + i]);
      }
    }
  }
  Transform(count);
  *out = {x, vectors_stride_};
  return true;
}

// x <- H_0 H_1 ... x, the last panel first: H_q ... H_{q + 31} = I - Y^T T Y with the rows v_j of
// Y.
void PartialEigen::Transform(int64_t count) {
  const int64_t width = vectors_stride_;
  AlignedBuffer<float> dot_buffer, next_buffer;
  float* dots = dot_buffer.Reserve(kPanel * width);
  float* next = next_buffer.Reserve(kPanel * width);
  const int64_t reflected = std::max<int64_t>(n_ - 2, 0);
  for (int64_t q = (reflected - 1) / kPanel * kPanel; q >= 0 && reflected > 0; q -= kPanel) {
    const int64_t terms = std::min(kPanel, reflected - q);
    const float* y = reflectors_.data() + q * stride_;
    float t[kPanel * kPanel] = {};
    for (int64_t i = 0; i < terms; ++i) {
      float meets[kPanel];
      PanelMatVec(y, stride_, i, q, n_, y + i * stride_, meets);
      t[i * kPanel + i] = taus_[q + i];
      for (int64_t r = 0; r < i; ++r) {
        float sum = 0;
        for (int64_t k = r; k < i; ++k) sum += t[r * kPanel + k] * meets[k];
        t[r * kPanel + i] = -taus_[q + i] * sum;
      }
    }
    float* x = vectors_.data() + (q + 1) * width;
    std::fill_n(dots, kPanel * width, 0.0f);
    std::fill_n(next, kPanel * width, 0.0f);
    AddPanelProduct({.c = dots,
                     .c_stride = width,
                     .rows = terms,
                     .end = count,
                     .coefficients = y + q + 1,
                     .row_step = stride_,
                     .term_step = 1,
                     .b = x,
                     .b_stride = width,
                     .terms = n_ - q - 1});
    AddPanelProduct({.c = next,
                     .c_stride = width,
                     .rows = terms,
                     .end = count,
                     .coefficients = t,
                     .row_step = kPanel,
                     .term_step = 1,
                     .b = dots,
                     .b_stride = width,
                     .terms = terms});
    AddPanelProduct({.c = x,
                     .c_stride = width,
                     .rows = n_ - q - 1,
                     .end = count,
                     .coefficients = y + q + 1,
                     .row_step = 1,
                     .term_step = stride_,
                     .b = next,
                     .b_stride = width,
                     .terms = terms,
                     .subtract = true});
  }
}

}  // namespace stockpot
