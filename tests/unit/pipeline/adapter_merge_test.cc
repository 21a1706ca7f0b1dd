#include "store/adapter_merge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

constexpr double kTolerance = 1e-5;  // of the norm

// --- a slow reference: dense matrices, loops, SVD by one-sided Jacobi ---

struct Dense {
  int64_t rows = 0, cols = 0;
  std::vector<double> v;
  Dense(int64_t r, int64_t c) : rows(r), cols(c), v(static_cast<size_t>(r * c)) {}
  double& at(int64_t i, int64_t j) { return v[static_cast<size_t>(i * cols + j)]; }
  double at(int64_t i, int64_t j) const { return v[static_cast<size_t>(i * cols + j)]; }
  double square() const {
    double sum = 0;
    for (const double x : v) sum += x * x;
    return sum;
  }
};

Dense Multiply(const Dense& x, const Dense& y) {
  Dense out(x.rows, y.cols);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t k = 0; k < x.cols; ++k) {
      for (int64_t j = 0; j < y.cols; ++j) out.at(i, j) += x.at(i, k) * y.at(k, j);
    }
  }
  return out;
}

Dense Transposed(const Dense& x) {
  Dense out(x.cols, x.rows);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < x.cols; ++j) out.at(j, i) = x.at(i, j);
  }
  return out;
}

Dense DenseOf(const AdapterLayer& layer) {
  Dense b(layer.d_out, layer.rank), a(layer.rank, layer.d_in);
  b.v = layer.b;
  a.v = layer.a;
  return Multiply(b, a);
}

struct Triple {
  std::vector<double> s;    // descending
  std::vector<Dense> u, v;  // columns [n, 1]
};

// Rotates pairs of columns of x until all are orthogonal: x V = U S.
Triple JacobiSvd(Dense x) {
  Dense v(x.cols, x.cols);
  for (int64_t i = 0; i < x.cols; ++i) v.at(i, i) = 1;
  const auto rotate = [](Dense& m, int64_t p, int64_t q, double c, double s) {
    for (int64_t i = 0; i < m.rows; ++i) {
      const double a = m.at(i, p), b = m.at(i, q);
      m.at(i, p) = c * a - s * b;
      m.at(i, q) = s * a + c * b;
    }
  };
  bool turned = true;
  for (int sweep = 0; turned && sweep < 60; ++sweep) {
    turned = false;
    for (int64_t p = 0; p < x.cols; ++p) {
      for (int64_t q = p + 1; q < x.cols; ++q) {
        double pp = 0, qq = 0, pq = 0;
        for (int64_t i = 0; i < x.rows; ++i) {
          pp += x.at(i, p) * x.at(i, p);
          qq += x.at(i, q) * x.at(i, q);
          pq += x.at(i, p) * x.at(i, q);
        }
        if (std::abs(pq) <= 1e-15 * std::sqrt(pp * qq)) continue;
        turned = true;
        const double zeta = (qq - pp) / (2 * pq);
        const double t = (zeta < 0 ? -1 : 1) / (std::abs(zeta) + std::sqrt(1 + zeta * zeta));
        const double c = 1 / std::sqrt(1 + t * t);
        rotate(x, p, q, c, c * t);
        rotate(v, p, q, c, c * t);
      }
    }
  }
  std::vector<std::pair<double, int64_t>> order;
  for (int64_t j = 0; j < x.cols; ++j) {
    double square = 0;
    for (int64_t i = 0; i < x.rows; ++i) square += x.at(i, j) * x.at(i, j);
    order.emplace_back(-std::sqrt(square), j);
  }
  std::sort(order.begin(), order.end());
  Triple out;
  for (const auto& [negative, j] : order) {
    if (-negative <= 1e-13 * -order[0].first || negative == 0) break;
    out.s.push_back(-negative);
    out.u.emplace_back(x.rows, 1);
    out.v.emplace_back(v.rows, 1);
    for (int64_t i = 0; i < x.rows; ++i) out.u.back().at(i, 0) = x.at(i, j) / -negative;
    for (int64_t i = 0; i < v.rows; ++i) out.v.back().at(i, 0) = v.at(i, j);
  }
  return out;
}

void AddOuter(Dense& out, double scale, const Dense& u, const Dense& v) {
  for (int64_t i = 0; i < out.rows; ++i) {
    for (int64_t j = 0; j < out.cols; ++j) out.at(i, j) += scale * u.at(i, 0) * v.at(j, 0);
  }
}

Dense CutDense(const Dense& x, int64_t rank) {
  const Triple svd = JacobiSvd(x);
  Dense out(x.rows, x.cols);
  for (size_t i = 0; i < svd.s.size() && (rank == 0 || i < static_cast<size_t>(rank)); ++i) {
    AddOuter(out, svd.s[i], svd.u[i], svd.v[i]);
  }
  return out;
}

// tau' of OPCM, by its definition.
Dense ProjectDense(const Dense& member, const Dense& added, double share) {
  const Triple svd = JacobiSvd(member);
  double sum = 0, all = 0;
  for (const double s : svd.s) all += s;
  size_t block = 0;
  for (; block < svd.s.size(); ++block) {
    sum += svd.s[block];
    if (sum / all > share) break;
  }
  Dense out = added;
  for (size_t i = 0; i < svd.s.size(); ++i) {
    for (size_t j = 0; j < svd.s.size(); ++j) {
      if (i != j && !(i < block && j < block)) continue;
      const double p = Multiply(Multiply(Transposed(svd.u[i]), added), svd.v[j]).at(0, 0);
      AddOuter(out, -p, svd.u[i], svd.v[j]);
    }
  }
  return out;
}

// --- adapters ---

struct LayerShape {
  std::string weight;
  int64_t d_out, d_in, rank;
};

AdapterDelta RandomAdapter(std::mt19937_64& random, const std::vector<LayerShape>& shapes,
                           double sigma = 0.3) {
  std::normal_distribution<double> normal;  // scaled here: it takes no deviation of 0
  AdapterDelta out;
  for (const LayerShape& shape : shapes) {
    AdapterLayer layer{shape.weight, shape.d_out, shape.d_in, shape.rank, {}, {}};
    layer.b.resize(static_cast<size_t>(shape.d_out * shape.rank));
    layer.a.resize(static_cast<size_t>(shape.rank * shape.d_in));
    for (double& x : layer.b) x = sigma * normal(random);
    for (double& x : layer.a) x = sigma * normal(random);
    out.layers.push_back(std::move(layer));
  }
  return out;
}

nlohmann::json ToJson(const AdapterDelta& delta) {
  nlohmann::json out = nlohmann::json::array();
  for (const AdapterLayer& layer : delta.layers) {
    out.push_back({{"weight", layer.weight},
                   {"d_out", layer.d_out},
                   {"d_in", layer.d_in},
                   {"rank", layer.rank},
                   {"b", layer.b},
                   {"a", layer.a}});
  }
  return out;
}

struct Case {
  AdapterDelta member, added;
  AdapterMergeState state;
  AdapterMergeOptions options;
};

// Ranks from 1 up to more than a side has, layers of one, layers of zeros, cuts of every size.
std::vector<Case> Cases() {
  std::mt19937_64 random(TestSeed());
  std::vector<Case> cases;
  const std::vector<std::pair<int64_t, int64_t>> shapes = {{1, 1}, {1, 9},   {7, 1},  {5, 5},
                                                           {8, 3}, {24, 17}, {13, 40}};
  const std::vector<int64_t> ranks = {1, 2, 3, 5, 8};
  for (int i = 0; i < 60; ++i) {
    std::vector<LayerShape> of_member, of_added;
    for (size_t j = 0; j < shapes.size(); ++j) {
      const LayerShape shape{"layer" + std::to_string(j), shapes[j].first, shapes[j].second,
                             ranks[random() % ranks.size()]};
      LayerShape other = shape;
      other.rank = ranks[random() % ranks.size()];
      const uint64_t who = random() % 8;
      if (who != 0) of_member.push_back(shape);
      if (who != 1) of_added.push_back(other);
    }
    Case one{RandomAdapter(random, of_member), RandomAdapter(random, of_added), {}, {}};
    if (i % 10 == 7) one.member = RandomAdapter(random, of_member, 0);
    if (i % 10 == 8) one.added = RandomAdapter(random, of_added, 0);
    if (i == 28) one.member = RandomAdapter(random, of_member, 0);  // both are nothing
    one.state = *FreshState(one.member);
    if (i % 3 == 1) one.state = {3, 1.7, 3 * one.state.norm_sum};
    one.options.method = static_cast<PoolMethod>(i % 3);
    one.options.projection = std::vector{0.0, 0.3, 0.5, 0.7, 0.99}[random() % 5];
    one.options.rank = std::vector<int64_t>{0, 1, 2, 4, 8, 16, 100}[random() % 7];
    cases.push_back(std::move(one));
  }
  return cases;
}

std::map<std::string, Dense> DenseMap(const AdapterDelta& delta) {
  std::map<std::string, Dense> out;
  for (const AdapterLayer& layer : delta.layers) out.emplace(layer.weight, DenseOf(layer));
  return out;
}

std::map<std::string, Dense> MergeDense(const Case& c) {
  std::map<std::string, Dense> member = DenseMap(c.member), added = DenseMap(c.added);
  for (const auto& [name, x] : added) member.emplace(name, Dense(x.rows, x.cols));
  for (const auto& [name, x] : member) added.emplace(name, Dense(x.rows, x.cols));
  const auto n = static_cast<double>(c.state.count + 1);
  double of_member = 1 - 1 / n, of_added = 1 / n;
  if (c.options.method == PoolMethod::kTaskArithmetic) {
    of_member = c.state.count == 1 ? c.options.scale : 1;
    of_added = c.options.scale;
  }
  double square = 0, added_square = 0;
  std::map<std::string, Dense> out;
  for (const auto& [name, m] : member) {
    Dense t = added.at(name);
    added_square += t.square();
    if (c.options.method == PoolMethod::kOpcm) {
      t = ProjectDense(m, t, c.options.projection);
      of_member = c.state.lambda;
      of_added = 1;
    }
    for (size_t i = 0; i < t.v.size(); ++i) t.v[i] = of_member * m.v[i] + of_added * t.v[i];
    square += t.square();
    out.emplace(name, std::move(t));
  }
  const double mean_norm = (c.state.norm_sum + std::sqrt(added_square)) / n;
  for (auto& [name, x] : out) {
    if (c.options.method != PoolMethod::kOpcm || square == 0) continue;
    for (double& value : x.v) value /= std::sqrt(square) / mean_norm;
  }
  return out;
}

void ExpectClose(const Dense& got, const Dense& wanted, double norm, const std::string& what) {
  ASSERT_EQ(got.v.size(), wanted.v.size()) << what;
  double square = 0;
  for (size_t i = 0; i < got.v.size(); ++i) {
    square += (got.v[i] - wanted.v[i]) * (got.v[i] - wanted.v[i]);
  }
  EXPECT_LE(std::sqrt(square), kTolerance * norm + 1e-30) << what;
}

TEST(AdapterMerge, IsTheDenseFormInDoublePrecision) {
  for (const Case& c : Cases()) {
    const Result<AdapterMerge> merge = MergeAdapter(c.member, c.state, c.added, c.options);
    ASSERT_OK(merge);
    const std::map<std::string, Dense> wanted = MergeDense(c);
    const std::string what(PoolMethodName(c.options.method));
    ASSERT_EQ(merge->merged.layers.size(), wanted.size()) << what;
    double kept = 0, all = 0;
    for (const AdapterLayer& layer : merge->merged.layers) {
      const Dense& full = wanted.at(layer.weight);
      if (c.options.rank > 0) {
        EXPECT_LE(layer.rank, c.options.rank);
      }
      EXPECT_GE(layer.rank, 1);
      const Dense cut = CutDense(full, c.options.rank);
      ExpectClose(DenseOf(layer), cut, std::sqrt(full.square()), what + " " + layer.weight);
      kept += cut.square();
      all += full.square();
    }
    EXPECT_NEAR(merge->kept_energy, all > 0 ? kept / all : 1, kTolerance) << what;
    EXPECT_LE(merge->kept_energy_min, merge->kept_energy + kTolerance) << what;
  }
}

TEST(AdapterMerge, AgreesWithNumPy) {
  TemporaryFolder folder;
  nlohmann::json cases = nlohmann::json::array();
  for (const Case& c : Cases()) {
    const Result<AdapterMerge> merge = MergeAdapter(c.member, c.state, c.added, c.options);
    ASSERT_OK(merge);
    cases.push_back(
        {{"member", ToJson(c.member)},
         {"added", ToJson(c.added)},
         {"state",
          {{"count", c.state.count}, {"lambda", c.state.lambda}, {"norm_sum", c.state.norm_sum}}},
         {"method", PoolMethodName(c.options.method)},
         {"projection", c.options.projection},
         {"scale", c.options.scale},
         {"rank", c.options.rank},
         {"similarity", *AdapterSimilarity(c.member, c.added)},
         {"merged", ToJson(merge->merged)},
         {"new_lambda", merge->state.lambda},
         {"kept_energy", merge->kept_energy}});
  }
  std::ofstream(folder.path() / "cases.json") << cases.dump();
  EXPECT_TRUE(RunPython("adapter_merge_oracle.py", {folder.path().string()}));
}

TEST(AdapterMerge, OneOfWeightOneComesBackExactly) {
  std::mt19937_64 random(3);
  const AdapterDelta one = RandomAdapter(random, {{"x", 6, 4, 3}, {"y", 5, 9, 2}});
  for (const int64_t rank : {0, 3, 7}) {
    const Result<AdapterMerge> sum = WeightedSum({&one}, {1.0}, rank);
    ASSERT_OK(sum);
    for (size_t i = 0; i < one.layers.size(); ++i) {
      EXPECT_EQ(sum->merged.layers[i].b, one.layers[i].b);
      EXPECT_EQ(sum->merged.layers[i].a, one.layers[i].a);
    }
    EXPECT_EQ(sum->kept_energy, 1);
  }
  const Result<AdapterMerge> cut = WeightedSum({&one}, {1.0}, 2);
  ASSERT_OK(cut);
  EXPECT_EQ(cut->merged.layers[0].rank, 2);
  EXPECT_LT(cut->kept_energy, 1);
}

TEST(AdapterMerge, SimilarityIsTheMeanCosineOfTheLayers) {
  std::mt19937_64 random(4);
  const AdapterDelta x = RandomAdapter(random, {{"p", 8, 6, 2}, {"q", 5, 7, 3}});
  EXPECT_NEAR(*AdapterSimilarity(x, x), 1, 1e-12);
  AdapterDelta turned = x;  // the same product out of other factors, and five times as large
  for (double& b : turned.layers[0].b) b *= -2;
  for (double& a : turned.layers[0].a) a *= -2.5;
  for (double& b : turned.layers[1].b) b *= 5;
  EXPECT_NEAR(*AdapterSimilarity(x, turned), 1, 1e-12);
  AdapterDelta half = x;
  half.layers.pop_back();
  EXPECT_NEAR(*AdapterSimilarity(x, half), 0.5, 1e-12) << "a layer that one lacks counts as 0";
  EXPECT_EQ(*AdapterSimilarity(x, {}), 0);
  EXPECT_EQ(*AdapterSimilarity({}, {}), 0);
  EXPECT_EQ(*AdapterSimilarity(x, RandomAdapter(random, {{"p", 8, 6, 2}, {"q", 5, 7, 3}}, 0)), 0);
}

// Two independent adapters of rank 16 keep about 68 % of their mean at rank 16.
TEST(AdapterMerge, ReportsTheEnergyThatACutKeeps) {
  std::mt19937_64 random(5);
  const AdapterDelta x = RandomAdapter(random, {{"p", 512, 512, 16}});
  const AdapterDelta y = RandomAdapter(random, {{"p", 512, 512, 16}});
  const auto at = [&](int64_t rank) {
    return MergeAdapter(x, *FreshState(x), y, {.method = PoolMethod::kMean, .rank = rank})
        ->kept_energy;
  };
  EXPECT_NEAR(at(16), 0.6, 0.1);
  EXPECT_NEAR(at(32), 1, 1e-12);
}

TEST(AdapterMerge, RefusesByName) {
  std::mt19937_64 random(6);
  const AdapterDelta x = RandomAdapter(random, {{"p", 8, 6, 2}});
  const auto says = [](const auto& result, const std::string& text) {
    EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(result.status().message().find(text), std::string::npos)
        << result.status().ToString();
  };
  const AdapterDelta other = RandomAdapter(random, {{"p", 8, 7, 2}});
  says(AdapterSimilarity(x, other), "'p'");
  says(WeightedSum({&x, &other}, {1, 1}, 0), "'p'");
  AdapterDelta broken = x;
  broken.layers[0].a[3] = std::numeric_limits<double>::quiet_NaN();
  says(AdapterSimilarity(x, broken), "not finite");
  says(MergeAdapter(x, {}, broken, {}), "not finite");
  broken = x;
  broken.layers[0].a.pop_back();
  says(AdapterNorm(broken), "sizes");
  says(MergeAdapter(x, {}, x, {.projection = 1}), "projection");
  says(MergeAdapter(x, {}, x, {.method = PoolMethod::kTaskArithmetic, .scale = 0}), "scale");
  says(MergeAdapter(x, {.lambda = 0}, x, {}), "damaged");
  says(PoolMethodFromName("linear"), "linear");
}

}  // namespace
}  // namespace stockpot
