#include "store/adapter_merge.h"

#include <Eigen/Dense>
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>

namespace stockpot {
namespace {

using Eigen::MatrixXd;
using Eigen::VectorXd;
using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr std::array<std::string_view, 3> kMethodNames = {"opcm", "mean", "task-arithmetic"};

// One layer while it is worked on: tau = b a.
struct Factors {
  MatrixXd b;  // [d_out, r]
  MatrixXd a;  // [r, d_in]
};

// U S V^T of a product of two thin factors; S descending.
struct ThinSvd {
  MatrixXd u;  // [d_out, k]
  VectorXd s;  // [k]
  MatrixXd v;  // [d_in, k]
};

Status CheckLayer(const AdapterLayer& layer) {
  const auto product = [](int64_t x, int64_t y) {
    return static_cast<size_t>(x) * static_cast<size_t>(y);
  };
  const auto finite = [](const std::vector<double>& values) {
    return std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); });
  };
  if (layer.d_out < 1 || layer.d_in < 1 || layer.rank < 0 ||
      layer.b.size() != product(layer.d_out, layer.rank) ||
      layer.a.size() != product(layer.rank, layer.d_in)) {
    return InvalidArgument("layer '" + layer.weight + "': its factors do not have its sizes");
  }
  if (finite(layer.b) && finite(layer.a)) return OkStatus();
  return InvalidArgument("layer '" + layer.weight + "': a factor is not finite");
}

Status CheckDelta(const AdapterDelta& delta) {
  for (size_t i = 0; i < delta.layers.size(); ++i) {
    STOCKPOT_RETURN_IF_ERROR(CheckLayer(delta.layers[i]));
    if (i > 0 && delta.layers[i - 1].weight >= delta.layers[i].weight) {
      return InvalidArgument("layer '" + delta.layers[i].weight + "' is there twice or unsorted");
    }
  }
  return OkStatus();
}

Factors FactorsOf(const AdapterLayer& layer) {
  return {Eigen::Map<const RowMajor>(layer.b.data(), layer.d_out, layer.rank),
          Eigen::Map<const RowMajor>(layer.a.data(), layer.rank, layer.d_in)};
}

AdapterLayer LayerOf(const AdapterLayer& like, const MatrixXd& b, const MatrixXd& a) {
  AdapterLayer out{.weight = like.weight,
                 .d_out = like.d_out,
                 .d_in = like.d_in,
                 .rank = b.cols(),
                 .b = {},
                 .a = {}};
  out.b.resize(static_cast<size_t>(b.size()));
  out.a.resize(static_cast<size_t>(a.size()));
  Eigen::Map<RowMajor>(out.b.data(), b.rows(), b.cols()) = b;
  Eigen::Map<RowMajor>(out.a.data(), a.rows(), a.cols()) = a;
  return out;
}

// Q [n, k] and R [k, m] of a matrix [n, m], k = min(n, m).
struct ThinQr {
  explicit ThinQr(const MatrixXd& matrix) {
    const Eigen::Index k = std::min(matrix.rows(), matrix.cols());
    const Eigen::HouseholderQR<MatrixXd> qr(matrix);
    q = qr.householderQ() * MatrixXd::Identity(matrix.rows(), k);
    r = qr.matrixQR().topRows(k).triangularView<Eigen::Upper>();
  }
  MatrixXd q, r;
};

ThinSvd SvdOf(const Factors& factors) {
  const Eigen::Index rank = factors.b.cols();
  if (rank == 0 || factors.b.isZero(0) || factors.a.isZero(0)) {
    return {MatrixXd(factors.b.rows(), 0), VectorXd(0), MatrixXd(factors.a.cols(), 0)};
  }
  const ThinQr left(factors.b);
  const ThinQr right(factors.a.transpose());
  const Eigen::JacobiSVD<MatrixXd> core(left.r * right.r.transpose(),
                                        Eigen::ComputeThinU | Eigen::ComputeThinV);
  return {left.q * core.matrixU(), core.singularValues(), right.q * core.matrixV()};
}

// Singular values that are not rounding.
Eigen::Index NumericalRank(const ThinSvd& svd) {
  if (svd.s.size() == 0) return 0;
  const double sides = static_cast<double>(std::max(svd.u.rows(), svd.v.rows()));
  const double floor = svd.s[0] * sides * std::numeric_limits<double>::epsilon();
  Eigen::Index rank = 0;
  while (rank < svd.s.size() && svd.s[rank] > floor) ++rank;
  return rank;
}

double Dot(const Factors& x, const Factors& y) {
  if (x.b.cols() == 0 || y.b.cols() == 0) return 0;
  return (x.b.transpose() * y.b).cwiseProduct(x.a * y.a.transpose()).sum();
}

Status SameSizes(const AdapterLayer& x, const AdapterLayer& y) {
  if (x.d_out == y.d_out && x.d_in == y.d_in) return OkStatus();
  return InvalidArgument("layer '" + x.weight + "' has other sizes in the other adapter");
}

using LayerPair = std::pair<const AdapterLayer*, const AdapterLayer*>;

// Every layer that either has; null where one has not. Checks both.
Result<std::map<std::string_view, LayerPair>> PairLayers(const AdapterDelta& x,
                                                         const AdapterDelta& y) {
  STOCKPOT_RETURN_IF_ERROR(CheckDelta(x));
  STOCKPOT_RETURN_IF_ERROR(CheckDelta(y));
  std::map<std::string_view, LayerPair> pairs;
  for (const AdapterLayer& layer : x.layers) pairs[layer.weight].first = &layer;
  for (const AdapterLayer& layer : y.layers) pairs[layer.weight].second = &layer;
  for (const auto& [weight, pair] : pairs) {
    if (pair.first == nullptr || pair.second == nullptr) continue;
    STOCKPOT_RETURN_IF_ERROR(SameSizes(*pair.first, *pair.second));
  }
  return pairs;
}

// Cuts layers to a rank and counts what was kept.
class Cutter {
 public:
  explicit Cutter(int64_t rank) : rank_(rank) {}

  // sqrt(S) on both sides, so that both factors have the same size. At least one direction, since
  // an adapter has no layer of rank 0.
  void Add(const AdapterLayer& like, const ThinSvd& svd) {
    const Eigen::Index significant = std::max<Eigen::Index>(NumericalRank(svd), 1);
    const Eigen::Index rank = rank_ > 0 ? std::min<Eigen::Index>(rank_, significant) : significant;
    if (svd.s.size() == 0) {
      out_.merged.layers.push_back(
          LayerOf(like, MatrixXd::Zero(like.d_out, 1), MatrixXd::Zero(1, like.d_in)));
      return;
    }
    const double all = svd.s.squaredNorm();
    const double kept = svd.s.head(rank).squaredNorm();
    all_ += all;
    kept_ += kept;
    if (all > 0) out_.kept_energy_min = std::min(out_.kept_energy_min, kept / all);
    const VectorXd root = svd.s.head(rank).cwiseSqrt();
    out_.merged.layers.push_back(LayerOf(like, svd.u.leftCols(rank) * root.asDiagonal(),
                                         root.asDiagonal() * svd.v.leftCols(rank).transpose()));
  }

  AdapterMerge Done() {
    if (all_ > 0) out_.kept_energy = kept_ / all_;
    return std::move(out_);
  }

 private:
  const int64_t rank_;
  double all_ = 0, kept_ = 0;
  AdapterMerge out_;
};

// [U, B_t] blockdiag(lambda S - D, I) [V, A_t^T]^T = lambda tau_m + tau'.
Factors ProjectedSum(const Factors& member, const Factors& added, double lambda,
                     double projection) {
  const ThinSvd svd = SvdOf(member);
  const Eigen::Index k = NumericalRank(svd);
  const MatrixXd u = svd.u.leftCols(k);
  const MatrixXd v = svd.v.leftCols(k);
  MatrixXd core = (lambda * svd.s.head(k)).asDiagonal();
  if (added.b.cols() > 0) {
    const MatrixXd p = (u.transpose() * added.b) * (added.a * v);
    Eigen::Index block = 0;
    for (double sum = 0; block < k; ++block) {
      sum += svd.s[block];
      if (sum / svd.s.head(k).sum() > projection) break;
    }
    for (Eigen::Index i = 0; i < k; ++i) {
      for (Eigen::Index j = 0; j < k; ++j) {
        if (i == j || (i < block && j < block)) core(i, j) -= p(i, j);
      }
    }
  }
  Factors out{MatrixXd(member.b.rows(), k + added.b.cols()),
              MatrixXd(k + added.b.cols(), member.a.cols())};
  out.b << u * core, added.b;
  out.a << v.transpose(), added.a;
  return out;
}

// The layer's factors, or a zero delta of the partner's size.
Factors FactorsOrZero(const AdapterLayer* layer, const AdapterLayer& partner) {
  if (layer != nullptr) return FactorsOf(*layer);
  return {MatrixXd(partner.d_out, 0), MatrixXd(0, partner.d_in)};
}

Result<AdapterMerge> MergeByOpcm(const AdapterDelta& member, const AdapterMergeState& state,
                                 const AdapterDelta& added, const AdapterMergeOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto pairs, PairLayers(member, added));
  STOCKPOT_ASSIGN_OR_RETURN(const double norm, AdapterNorm(added));
  AdapterMergeState next = state;
  ++next.count;
  next.norm_sum += norm;
  std::vector<std::pair<const AdapterLayer*, ThinSvd>> sums;
  double square = 0;
  for (const auto& [weight, pair] : pairs) {
    const AdapterLayer& like = pair.first != nullptr ? *pair.first : *pair.second;
    const Factors sum =
        ProjectedSum(FactorsOrZero(pair.first, like), FactorsOrZero(pair.second, like),
                     state.lambda, options.projection);
    sums.emplace_back(&like, SvdOf(sum));
    square += sums.back().second.s.squaredNorm();
  }
  const double mean_norm = next.norm_sum / static_cast<double>(next.count);
  // Nothing but zeros: there is nothing to scale.
  next.lambda = square > 0 && mean_norm > 0 ? std::sqrt(square) / mean_norm : 1;
  Cutter cutter(options.rank);
  for (auto& [like, svd] : sums) {
    svd.s /= next.lambda;
    cutter.Add(*like, svd);
  }
  AdapterMerge out = cutter.Done();
  out.state = next;
  return out;
}

bool FitsRank(const AdapterDelta& delta, int64_t rank) {
  return rank == 0 || std::all_of(delta.layers.begin(), delta.layers.end(),
                                  [&](const AdapterLayer& layer) { return layer.rank <= rank; });
}

}  // namespace

std::string_view PoolMethodName(PoolMethod method) {
  return kMethodNames[static_cast<size_t>(method)];
}

Result<PoolMethod> PoolMethodFromName(std::string_view name) {
  for (size_t i = 0; i < kMethodNames.size(); ++i) {
    if (kMethodNames[i] == name) return static_cast<PoolMethod>(i);
  }
  return InvalidArgument("'" + std::string(name.substr(0, 64)) +
                         "' is no way to merge adapters (opcm, mean, task-arithmetic)");
}

Result<double> AdapterDot(const AdapterDelta& a, const AdapterDelta& b) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto pairs, PairLayers(a, b));
  double sum = 0;
  for (const auto& [weight, pair] : pairs) {
    if (pair.first == nullptr || pair.second == nullptr) continue;
    sum += Dot(FactorsOf(*pair.first), FactorsOf(*pair.second));
  }
  return sum;
}

Result<double> AdapterNorm(const AdapterDelta& delta) {
  STOCKPOT_ASSIGN_OR_RETURN(const double square, AdapterDot(delta, delta));
  return std::sqrt(std::max(square, 0.0));
}

Result<double> AdapterSimilarity(const AdapterDelta& a, const AdapterDelta& b) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto pairs, PairLayers(a, b));
  double sum = 0;
  for (const auto& [weight, pair] : pairs) {
    if (pair.first == nullptr || pair.second == nullptr) continue;
    const Factors x = FactorsOf(*pair.first);
    const Factors y = FactorsOf(*pair.second);
    const double norms = std::sqrt(std::max(Dot(x, x), 0.0)) * std::sqrt(std::max(Dot(y, y), 0.0));
    if (norms > 0) sum += std::clamp(Dot(x, y) / norms, -1.0, 1.0);
  }
  return pairs.empty() ? 0 : sum / static_cast<double>(pairs.size());
}

Result<AdapterMerge> WeightedSum(const std::vector<const AdapterDelta*>& deltas,
                                 const std::vector<double>& weights, int64_t rank) {
  if (deltas.empty() || deltas.size() != weights.size() || rank < 0) {
    return InvalidArgument("a sum of adapters takes one weight each, and a rank of at least 0");
  }
  std::map<std::string_view, std::vector<size_t>> users;  // by layer
  std::map<std::string_view, const AdapterLayer*> likes;
  for (size_t i = 0; i < deltas.size(); ++i) {
    STOCKPOT_RETURN_IF_ERROR(CheckDelta(*deltas[i]));
    if (!std::isfinite(weights[i])) return InvalidArgument("a weight is not finite");
    for (const AdapterLayer& layer : deltas[i]->layers) {
      const auto [like, is_new] = likes.emplace(layer.weight, &layer);
      if (!is_new) STOCKPOT_RETURN_IF_ERROR(SameSizes(*like->second, layer));
      users[layer.weight].push_back(i);
    }
  }
  if (deltas.size() == 1 && weights[0] == 1 && FitsRank(*deltas[0], rank)) {
    AdapterMerge same;
    same.merged = *deltas[0];
    return same;
  }
  Cutter cutter(rank);
  for (const auto& [weight, indices] : users) {
    const AdapterLayer& like = *likes.at(weight);
    Factors sum{MatrixXd(like.d_out, 0), MatrixXd(0, like.d_in)};
    for (const size_t i : indices) {
      const auto& layers = deltas[i]->layers;
      const auto layer = std::find_if(
          layers.begin(), layers.end(),
          [&name = weight](const AdapterLayer& l) { return l.weight == name; });  // clang 14
      const Factors one = FactorsOf(*layer);
      Factors both{MatrixXd(like.d_out, sum.b.cols() + one.b.cols()),
                   MatrixXd(sum.b.cols() + one.b.cols(), like.d_in)};
      both.b << sum.b, weights[i] * one.b;
      both.a << sum.a, one.a;
      sum = std::move(both);
    }
    cutter.Add(like, SvdOf(sum));
  }
  return cutter.Done();
}

Result<AdapterMergeState> FreshState(const AdapterDelta& delta) {
  AdapterMergeState state;
  STOCKPOT_ASSIGN_OR_RETURN(state.norm_sum, AdapterNorm(delta));
  return state;
}

Result<AdapterMerge> MergeAdapter(const AdapterDelta& member, const AdapterMergeState& state,
                                  const AdapterDelta& added, const AdapterMergeOptions& options) {
  if (!(options.projection >= 0 && options.projection < 1)) {
    return InvalidArgument("projection is " + std::to_string(options.projection) +
                           ": it must be in [0, 1)");
  }
  if (!(options.scale > 0 && std::isfinite(options.scale))) {
    return InvalidArgument("scale is " + std::to_string(options.scale) + ": it must be over 0");
  }
  if (options.rank < 0) return InvalidArgument("the rank is negative");
  if (state.count < 1 || !(state.lambda > 0 && std::isfinite(state.lambda)) ||
      !(state.norm_sum >= 0 && std::isfinite(state.norm_sum))) {
    return InvalidArgument("the state of the merged adapter is damaged");
  }
  if (options.method == PoolMethod::kOpcm) return MergeByOpcm(member, state, added, options);
  const auto count = static_cast<double>(state.count + 1);
  const bool mean = options.method == PoolMethod::kMean;
  const double of_member = mean ? 1 - 1 / count : state.count == 1 ? options.scale : 1;
  const double of_added = mean ? 1 / count : options.scale;
  STOCKPOT_ASSIGN_OR_RETURN(AdapterMerge out,
                            WeightedSum({&member, &added}, {of_member, of_added}, options.rank));
  STOCKPOT_ASSIGN_OR_RETURN(const double norm, AdapterNorm(added));
  out.state = {state.count + 1, state.lambda, state.norm_sum + norm};
  return out;
}

}  // namespace stockpot
