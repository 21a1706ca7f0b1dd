// Reading logical bytes and boxes out of tensors that are stored in pieces, against flat arrays.
#include "store/raw_tensor_reader.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <random>

namespace stockpot {
namespace {

// A tensor in memory, and the same in pieces. A part is found by the address of its entry.
class CutTensor {
 public:
  CutTensor(DType dtype, std::vector<int64_t> shape, std::vector<TensorBox> pieces,
            std::mt19937_64& random)
      : width_(DTypeSize(dtype)) {
    entry_ = {.name = "w", .dtype = dtype, .shape = std::move(shape), .pieces = std::move(pieces)};
    bytes_.resize(static_cast<size_t>(entry_.logical_bytes()));
    for (size_t i = 0; i < bytes_.size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(bytes_.data() + i, &word, std::min<size_t>(8, bytes_.size() - i));
    }
    if (entry_.pieces.empty()) {
      Put("data", bytes_);
      return;
    }
    for (size_t i = 0; i < entry_.pieces.size(); ++i) Put(PieceRole(i), BoxBytes(entry_.pieces[i]));
  }

  const TensorEntry& entry() const { return entry_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  int64_t read_bytes() const { return read_bytes_; }

  RawTensorReader Reader() {
    return RawTensorReader(
        entry_, [this](const Part& part, int64_t offset, std::span<std::byte> out) -> Status {
          const std::vector<std::byte>& stored = stored_.at(&part);
          const auto size = static_cast<int64_t>(out.size());
          if (offset < 0 || size > static_cast<int64_t>(stored.size()) - offset) {
            return InvalidArgument("past the end of a part");
          }
          std::copy_n(stored.begin() + offset, size, out.begin());
          read_bytes_ += size;
          return OkStatus();
        });
  }

  // Element by element.
  std::vector<std::byte> BoxBytes(const TensorBox& box) const {
    std::vector<std::byte> out;
    std::vector<int64_t> index = box.offsets;
    for (int64_t left = box.elements(); left > 0; --left) {
      int64_t flat = 0;
      for (size_t dim = 0; dim < index.size(); ++dim) flat = flat * entry_.shape[dim] + index[dim];
      const auto from = bytes_.begin() + flat * width_;
      out.insert(out.end(), from, from + width_);
      for (size_t dim = index.size(); dim-- > 0;) {
        if (++index[dim] < box.offsets[dim] + box.shape[dim]) break;
        index[dim] = box.offsets[dim];
      }
    }
    return out;
  }

 private:
  void Put(const std::string& role, std::vector<std::byte> bytes) {
    Part& part = entry_.parts[role];
    part.bytes = static_cast<int64_t>(bytes.size());
    stored_[&part] = std::move(bytes);
  }

  const int64_t width_;
  TensorEntry entry_;
  std::vector<std::byte> bytes_;
  std::map<const Part*, std::vector<std::byte>> stored_;
  int64_t read_bytes_ = 0;
};

uint64_t Seed() {
  const char* given = std::getenv("STOCKPOT_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : 20261130;
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  return seed;
}

int64_t Number(std::mt19937_64& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
}

TensorBox RandomBox(std::mt19937_64& random, const std::vector<int64_t>& shape) {
  TensorBox box;
  for (const int64_t size : shape) {
    box.offsets.push_back(Number(random, 0, size));
    box.shape.push_back(Number(random, 0, size - box.offsets.back()));
  }
  return box;
}

std::vector<TensorBox> RandomCut(std::mt19937_64& random, const std::vector<int64_t>& shape) {
  std::vector<TensorBox> boxes{WholeBox(shape)};
  for (int64_t cuts = Number(random, 1, 8); cuts > 0; --cuts) {
    TensorBox& low =
        boxes[static_cast<size_t>(Number(random, 0, static_cast<int64_t>(boxes.size()) - 1))];
    const auto dim = static_cast<size_t>(Number(random, 0, static_cast<int64_t>(shape.size()) - 1));
    if (low.shape[dim] < 2) continue;
    TensorBox high = low;
    low.shape[dim] = Number(random, 1, high.shape[dim] - 1);
    high.offsets[dim] += low.shape[dim];
    high.shape[dim] -= low.shape[dim];
    boxes.push_back(high);
  }
  std::sort(boxes.begin(), boxes.end());
  if (boxes.size() == 1) boxes.clear();
  return boxes;
}

TEST(RawTensorReaderTest, C11_EveryRangeAndBoxOfEveryCutIsBitExact) {
  std::mt19937_64 random(Seed());
  for (int i = 0; i < 400; ++i) {
    std::vector<int64_t> shape(static_cast<size_t>(Number(random, 1, 5)));
    for (int64_t& size : shape) size = Number(random, 1, 9);
    const DType dtype = std::array{DType::kU8, DType::kBF16, DType::kF32, DType::kF64}[i % 4];
    CutTensor tensor(dtype, shape, RandomCut(random, shape), random);
    const RawTensorReader reader = tensor.Reader();
    for (int r = 0; r < 40; ++r) {
      const int64_t bytes = tensor.entry().logical_bytes();
      const int64_t offset = Number(random, 0, bytes);
      std::vector<std::byte> out(static_cast<size_t>(Number(random, 0, bytes - offset)));
      ASSERT_TRUE(reader.Read(offset, out).ok());
      ASSERT_TRUE(std::equal(out.begin(), out.end(), tensor.bytes().begin() + offset));
      const TensorBox box = RandomBox(random, shape);
      out.assign(static_cast<size_t>(box.elements() * DTypeSize(dtype)), std::byte{0});
      ASSERT_TRUE(reader.ReadBox(box, out).ok());
      ASSERT_EQ(out, tensor.BoxBytes(box)) << BoxText(box);
    }
  }
}

TEST(RawTensorReaderTest, ScalarsAndEmptyTensors) {
  std::mt19937_64 random(1);
  CutTensor scalar(DType::kF64, {}, {}, random);
  std::vector<std::byte> out(8);
  ASSERT_TRUE(scalar.Reader().Read(0, out).ok());
  EXPECT_EQ(out, scalar.bytes());
  ASSERT_TRUE(scalar.Reader().ReadBox(WholeBox({}), out).ok());
  EXPECT_EQ(out, scalar.bytes());
  CutTensor empty(DType::kF64, {3, 0}, {}, random);
  EXPECT_TRUE(empty.Reader().Read(0, {}).ok());
  EXPECT_TRUE(empty.Reader().ReadBox(WholeBox({3, 0}), {}).ok());
  EXPECT_TRUE(empty.Reader().ReadBox({{1, 0}, {1, 0}}, {}).ok());
}

TEST(RawTensorReaderTest, RefusesWhatIsNotThere) {
  std::mt19937_64 random(1);
  CutTensor tensor(DType::kU8, {4, 4}, {{{0, 0}, {4, 1}}, {{0, 1}, {4, 3}}}, random);
  const RawTensorReader reader = tensor.Reader();
  std::vector<std::byte> out(4);
  EXPECT_EQ(reader.Read(13, out).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(reader.Read(-1, out).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(reader.Read(INT64_MAX, out).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(reader.ReadBox({{0, 0}, {4, 2}}, out).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(reader.ReadBox({{0, 4}, {4, 1}}, out).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(reader.ReadBox({{0}, {4}}, out).code(), StatusCode::kInvalidArgument);
}

// A rank that loads a few rows of a large tensor reads the chunks of these rows.
TEST(RawTensorReaderTest, ABoxReadsLittleButItsChunks) {
  std::mt19937_64 random(1);
  constexpr int64_t kRows = 24;
  constexpr int64_t kColumns = int64_t{1} << 20;  // 1 MiB a row: 4 rows a chunk
  CutTensor whole(DType::kU8, {kRows, kColumns}, {}, random);
  std::vector<std::byte> rows(2 * kColumns);
  ASSERT_TRUE(whole.Reader().ReadBox({{8, 0}, {2, kColumns}}, rows).ok());
  EXPECT_EQ(whole.read_bytes(), 2 * kColumns);
  EXPECT_EQ(rows, whole.BoxBytes({{8, 0}, {2, kColumns}}));
  // A few columns of all rows are in all chunks, each of which is read once.
  CutTensor columns(DType::kU8, {kRows, kColumns}, {}, random);
  std::vector<std::byte> few(kRows * 10);
  ASSERT_TRUE(columns.Reader().ReadBox({{0, 500}, {kRows, 10}}, few).ok());
  EXPECT_EQ(columns.read_bytes(), kRows * kColumns);
  EXPECT_EQ(few, columns.BoxBytes({{0, 500}, {kRows, 10}}));
  // Of a piece that holds nothing of the box nothing is read; rows over a chunk long are skipped.
  CutTensor wide(DType::kU8, {4, 6 * kColumns},
                 {{{0, 0}, {2, 6 * kColumns}}, {{2, 0}, {2, 6 * kColumns}}}, random);
  std::vector<std::byte> one(2 * 10);
  ASSERT_TRUE(wide.Reader().ReadBox({{0, 5}, {2, 10}}, one).ok());
  EXPECT_EQ(one, wide.BoxBytes({{0, 5}, {2, 10}}));
  EXPECT_LE(wide.read_bytes(), 2 * kChunkBytes);
}

}  // namespace
}  // namespace stockpot
