// The proof that boxes tile a tensor, against counting every element in a bitmap.
#include "store/tensor_box.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <random>

namespace stockpot {
namespace {

uint64_t Seed() {
  const char* given = std::getenv("STOCKPOT_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : 20261130;
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  return seed;
}

// Calls visit(flat index of the element in a tensor of `shape`) for each element of a box.
template <typename Visit>
void ForEachElement(const std::vector<int64_t>& shape, const TensorBox& box, Visit visit) {
  if (box.elements() == 0) return;
  std::vector<int64_t> index = box.offsets;
  while (true) {
    int64_t flat = 0;
    for (size_t dim = 0; dim < shape.size(); ++dim) flat = flat * shape[dim] + index[dim];
    visit(static_cast<size_t>(flat));
    size_t dim = shape.size();
    while (dim > 0 && ++index[dim - 1] == box.offsets[dim - 1] + box.shape[dim - 1]) {
      index[dim - 1] = box.offsets[dim - 1];
      --dim;
    }
    if (dim == 0) return;
  }
}

// How often each element is held: the slow, obvious truth.
std::vector<int> CountElements(const std::vector<int64_t>& shape,
                               const std::vector<TensorBox>& boxes) {
  std::vector<int> counts(static_cast<size_t>(WholeBox(shape).elements()), 0);
  for (const TensorBox& box : boxes) {
    ForEachElement(shape, box, [&](size_t element) { ++counts[element]; });
  }
  return counts;
}

// What FindCoverFault says is what the counts say, and its example is one.
void ExpectRight(const std::vector<int64_t>& shape, const std::vector<TensorBox>& boxes) {
  for (const TensorBox& box : boxes) ASSERT_TRUE(CheckBox(shape, box).ok()) << BoxText(box);
  const std::vector<int> counts = CountElements(shape, boxes);
  const bool is_cover = std::all_of(counts.begin(), counts.end(), [](int n) { return n == 1; });
  const std::optional<CoverFault> fault = FindCoverFault(shape, boxes);
  std::string all;
  for (const TensorBox& box : boxes) all += BoxText(box) + " ";
  ASSERT_EQ(!fault.has_value(), is_cover) << all << "of " << BoxText(WholeBox(shape));
  if (is_cover) return;
  ASSERT_TRUE(CheckBox(shape, fault->range).ok()) << BoxText(fault->range);
  ASSERT_GT(fault->range.elements(), 0) << all;
  ForEachElement(shape, fault->range, [&](size_t element) {
    if (fault->is_overlap) {
      EXPECT_GE(counts[element], 2) << all << BoxText(fault->range);
    } else {
      EXPECT_EQ(counts[element], 0) << all << BoxText(fault->range);
    }
  });
  if (!fault->is_overlap) return;
  ASSERT_NE(fault->first, fault->second);
  for (const size_t i : {fault->first, fault->second}) {
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      EXPECT_GE(fault->range.offsets[dim], boxes[i].offsets[dim]);
      EXPECT_LE(fault->range.offsets[dim] + fault->range.shape[dim],
                boxes[i].offsets[dim] + boxes[i].shape[dim]);
    }
  }
}

class RandomBoxes {
 public:
  explicit RandomBoxes(uint64_t seed) : random_(seed) {}

  int64_t Number(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  std::vector<int64_t> Shape() {
    std::vector<int64_t> shape(static_cast<size_t>(Number(0, 5)));
    for (int64_t& size : shape) size = Number(0, 19) == 0 ? 0 : Number(1, 6);
    return shape;
  }
  // Cuts a box in two again and again: never a grid only.
  std::vector<TensorBox> Tiling(const std::vector<int64_t>& shape) {
    std::vector<TensorBox> boxes{WholeBox(shape)};
    for (int64_t cuts = shape.empty() ? 0 : Number(0, 12); cuts > 0; --cuts) {
      const auto victim = static_cast<size_t>(Number(0, static_cast<int64_t>(boxes.size()) - 1));
      const auto dim = static_cast<size_t>(Number(0, static_cast<int64_t>(shape.size()) - 1));
      TensorBox& low = boxes[victim];
      TensorBox high = low;
      const int64_t at = Number(0, low.shape[dim]);  // an empty side is a rank with nothing
      low.shape[dim] = at;
      high.offsets[dim] += at;
      high.shape[dim] -= at;
      boxes.push_back(high);
    }
    std::shuffle(boxes.begin(), boxes.end(), random_);
    return boxes;
  }
  // One of the mistakes that a rank can make.
  void Spoil(const std::vector<int64_t>& shape, std::vector<TensorBox>& boxes) {
    const auto victim = static_cast<size_t>(Number(0, static_cast<int64_t>(boxes.size()) - 1));
    TensorBox& box = boxes[victim];
    switch (Number(0, shape.empty() ? 1 : 5)) {
      case 0:
        boxes.erase(boxes.begin() + static_cast<ptrdiff_t>(victim));
        return;
      case 1:
        boxes.push_back(TensorBox(box));
        return;
      default:
        break;
    }
    const auto dim = static_cast<size_t>(Number(0, static_cast<int64_t>(shape.size()) - 1));
    box.offsets[dim] = Number(0, shape[dim]);
    box.shape[dim] = Number(0, shape[dim] - box.offsets[dim]);
  }

 private:
  std::mt19937_64 random_;
};

TEST(TensorBoxTest, C11_TheCoverProofSaysWhatCountingEveryElementSays) {
  RandomBoxes random(Seed());
  int covers = 0;
  for (int i = 0; i < 20'000; ++i) {
    const std::vector<int64_t> shape = random.Shape();
    std::vector<TensorBox> boxes = random.Tiling(shape);
    ExpectRight(shape, boxes);
    ASSERT_FALSE(FindCoverFault(shape, boxes));
    for (int64_t spoils = random.Number(0, 3); spoils > 0 && !boxes.empty(); --spoils) {
      random.Spoil(shape, boxes);
      ExpectRight(shape, boxes);
    }
    covers += !FindCoverFault(shape, boxes);
    if (HasFailure()) return;
  }
  std::printf("%d of 20000 were covers at the end\n", covers);
}

// Sets that have the right number of elements and are no tilings all the same.
TEST(TensorBoxTest, TheRightSumIsNotEnough) {
  ExpectRight({4}, {{{0}, {2}}, {{1}, {2}}});
  ExpectRight({2, 2}, {{{0, 0}, {1, 2}}, {{0, 0}, {2, 1}}});
  ExpectRight({2, 2}, {{{0, 0}, {1, 1}}, {{0, 0}, {1, 1}}, {{1, 1}, {1, 1}}, {{1, 1}, {1, 1}}});
  // A pinwheel is a tiling that no sequence of cuts makes.
  const std::vector<TensorBox> pinwheel = {
      {{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 0}, {2, 1}}, {{1, 1}, {1, 1}}};
  ExpectRight({3, 3}, pinwheel);
  EXPECT_FALSE(FindCoverFault({3, 3}, pinwheel));
}

TEST(TensorBoxTest, FaultsAreNamedByTheirRange) {
  const auto gap =
      FindCoverFault({8, 6}, std::vector<TensorBox>{{{0, 0}, {3, 6}}, {{5, 0}, {3, 6}}});
  ASSERT_TRUE(gap);
  EXPECT_FALSE(gap->is_overlap);
  EXPECT_EQ(BoxText(gap->range), "[3:5, 0:6]");
  const auto overlap =
      FindCoverFault({8, 6}, std::vector<TensorBox>{{{0, 0}, {8, 4}}, {{0, 3}, {8, 3}}});
  ASSERT_TRUE(overlap);
  EXPECT_TRUE(overlap->is_overlap);
  EXPECT_EQ(BoxText(overlap->range), "[0:8, 3:4]");
  EXPECT_EQ(overlap->first + overlap->second, 1u);
  EXPECT_EQ(BoxText(WholeBox({})), "[]");
  EXPECT_TRUE(FindCoverFault({}, {}));
  EXPECT_FALSE(FindCoverFault({}, std::vector<TensorBox>{WholeBox({})}));
  EXPECT_FALSE(FindCoverFault({3, 0}, {}));
}

TEST(TensorBoxTest, BoxesOutsideTheTensorAreRefused) {
  const std::vector<int64_t> shape = {4, 6};
  EXPECT_TRUE(CheckBox(shape, {{4, 0}, {0, 6}}).ok());
  const std::vector<TensorBox> bad = {
      {{0}, {4}},                       // of another rank
      {{0, 0, 0}, {1, 1, 1}},           // likewise
      {{0, 0}, {4}},                    // of two ranks
      {{-1, 0}, {1, 6}},                // before the beginning
      {{0, 0}, {-1, 6}},                // less than nothing
      {{0, 0}, {5, 6}},                 // past the end
      {{3, 0}, {2, 6}},                 // likewise
      {{5, 0}, {0, 6}},                 // likewise, without elements
      {{INT64_MAX, 0}, {INT64_MAX, 6}}  // a sum that overflows
  };
  for (const TensorBox& box : bad) {
    EXPECT_EQ(CheckBox(shape, box).code(), StatusCode::kInvalidArgument) << BoxText(box);
  }
}

// Many boxes, cut in all dimensions: the proof still ends soon.
TEST(TensorBoxTest, TheWorkIsBounded) {
  std::vector<int64_t> shape(7, 4);
  std::vector<TensorBox> boxes;
  for (int64_t i = 0; i < 16'384; ++i) {
    TensorBox box{std::vector<int64_t>(7), std::vector<int64_t>(7, 1)};
    for (size_t dim = 0; dim < 7; ++dim) box.offsets[dim] = i >> (2 * dim) & 3;
    boxes.push_back(box);
  }
  EXPECT_EQ(CoverCorners(shape, boxes), int64_t{16'384} * 128);
  static_assert(16'384 * 128 <= kMaxCorners);
  EXPECT_FALSE(FindCoverFault(shape, boxes));
  boxes.pop_back();
  const auto fault = FindCoverFault(shape, boxes);
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->range.elements(), 1);
  // Cut in one dimension of eight, as ranks do, it costs two corners a piece.
  const std::vector<int64_t> rows = {65'536, 2, 2, 2, 2, 2, 2, 2};
  boxes.clear();
  for (int64_t i = 0; i < 65'536; ++i) {
    boxes.push_back({{i, 0, 0, 0, 0, 0, 0, 0}, {1, 2, 2, 2, 2, 2, 2, 2}});
  }
  EXPECT_EQ(CoverCorners(rows, boxes), int64_t{65'536} * 2);
  EXPECT_FALSE(FindCoverFault(rows, boxes));
  // Sizes near the limits of a number.
  const int64_t huge = int64_t{1} << 41;
  EXPECT_FALSE(
      FindCoverFault({huge}, std::vector<TensorBox>{{{0}, {huge - 1}}, {{huge - 1}, {1}}}));
  EXPECT_TRUE(FindCoverFault({huge}, std::vector<TensorBox>{{{0}, {huge - 1}}}));
}

}  // namespace
}  // namespace stockpot
