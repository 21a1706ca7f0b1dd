// The sparse format: what is written comes back, wherever a read begins, and whatever else the
// parts hold is refused.
#include "store/sparse_codec.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>

#include "store/delta_reader.h"

namespace stockpot {
namespace {

using Bytes = std::vector<std::byte>;

Bytes Random(std::mt19937_64& random, int64_t size) {
  Bytes bytes(static_cast<size_t>(size));
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

// A tensor of codec sparse over a base, read from memory.
struct Stored {
  Stored(DType dtype, const SparseShape& shape, const Bytes& base_bytes, const SparseParts& sparse) {
    base.dtype = entry.dtype = dtype;
    base.shape = entry.shape = {shape.d_out, shape.d_in};
    entry.codec = Codec::kSparse;
    Put(base, "data", base_bytes);
    Put(entry, "columns", sparse.columns);
    Put(entry, "values", sparse.values);
    const auto counts = std::as_bytes(std::span(sparse.counts));
    Put(entry, "counts", {counts.begin(), counts.end()});
  }
  void Put(TensorEntry& to, const std::string& role, const Bytes& bytes) {
    to.parts[role] = {static_cast<int64_t>(bytes.size()), {Sha256(bytes)}};
    stored[to.parts[role].digest()] = bytes;
  }
  Result<Bytes> Read(int64_t offset, int64_t size) const {
    const DeltaReader reader(entry, base,
                             [this](const Part& part, int64_t at, std::span<std::byte> out) {
                               const Bytes& bytes = stored.at(part.digest());
                               if (at < 0 || at + static_cast<int64_t>(out.size()) >
                                                 static_cast<int64_t>(bytes.size())) {
                                 return InvalidArgument("past the end of a part");
                               }
                               std::copy_n(bytes.begin() + at, out.size(), out.begin());
                               return OkStatus();
                             });
    Bytes out(static_cast<size_t>(size));
    STOCKPOT_RETURN_IF_ERROR(reader.Read(offset, out));
    return out;
  }

  TensorEntry base;
  TensorEntry entry;
  std::map<Digest, Bytes> stored;
};

TEST(SparseCodec, WhatIsWrittenComesBack) {
  std::mt19937_64 random(7);
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 5}, {5, 0}, {1, 1}, {7, 13}, {64, 64}, {3, 65536}, {3, 65537}, {700, 4001}}) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const double share : {0.0, 0.01, 0.3, 1.0}) {
        const SparseShape shape{rows, cols, DTypeSize(dtype)};
        const Bytes base = Random(random, rows * cols * shape.element_bytes);
        Bytes tuned = base;
        int64_t changed = 0;
        for (int64_t i = 0; i < rows * cols; ++i) {
          if (std::uniform_real_distribution<>()(random) >= share) continue;
          tuned[static_cast<size_t>(i * shape.element_bytes)] ^= std::byte{0x80};
          ++changed;
        }
        ASSERT_EQ(CountChanged(base.data(), tuned.data(), shape), changed);
        const SparseParts parts = EncodeSparse(base.data(), tuned.data(), shape);
        ASSERT_EQ(static_cast<int64_t>(4 * parts.counts.size() + parts.columns.size() +
                                       parts.values.size()),
                  SparseBytes(rows, cols, shape.element_bytes, changed));
        const Stored stored(dtype, shape, base, parts);
        const int64_t size = static_cast<int64_t>(tuned.size());
        ASSERT_EQ(stored.Read(0, size).value(), tuned);
        for (int i = 0; i < 3; ++i) {
          const int64_t begin = static_cast<int64_t>(random() % static_cast<uint64_t>(size + 1));
          const int64_t length = static_cast<int64_t>(
              random() % static_cast<uint64_t>(std::min<int64_t>(size - begin, 5000) + 1));
          ASSERT_EQ(stored.Read(begin, length).value(),
                    Bytes(tuned.begin() + begin, tuned.begin() + begin + length));
        }
        EXPECT_FALSE(stored.Read(size, 1).ok());
        EXPECT_FALSE(stored.Read(-1, 1).ok());
      }
    }
  }
}

// A table that has more rows than the base's, or fewer: wherever a read begins.
TEST(SparseCodec, TablesOfAnotherHeightComeBack) {
  std::mt19937_64 random(9);
  const int64_t cols = 37;
  for (const auto& [base_rows, rows] :
       std::vector<std::pair<int64_t, int64_t>>{{5, 9}, {9, 5}, {7, 7}, {0, 3}, {1, 60'000}}) {
    const Bytes base = Random(random, base_rows * cols * 2);
    Bytes tuned = base;
    tuned.resize(static_cast<size_t>(std::min(base_rows, rows) * cols * 2));
    for (size_t i = 0; i < tuned.size(); i += 26) tuned[i] ^= std::byte{1};
    const SparseShape overlap{std::min(base_rows, rows), cols, 2};
    const SparseParts parts = EncodeSparse(base.data(), tuned.data(), overlap);
    Stored stored(DType::kBF16, {base_rows, cols, 2}, base, parts);
    stored.entry.shape[0] = rows;
    if (rows > base_rows) {
      const Bytes behind = Random(random, (rows - base_rows) * cols * 2);
      stored.Put(stored.entry, "rows", behind);
      tuned.insert(tuned.end(), behind.begin(), behind.end());
    }
    ASSERT_EQ(stored.entry.overlap_rows(), overlap.d_out);
    ASSERT_TRUE(DeltaReader::Check(stored.entry, stored.base).ok());
    const int64_t size = static_cast<int64_t>(tuned.size());
    ASSERT_EQ(stored.Read(0, size).value(), tuned) << base_rows << " -> " << rows;
    for (int i = 0; i < 20; ++i) {
      const int64_t begin = static_cast<int64_t>(random() % static_cast<uint64_t>(size + 1));
      const int64_t length = static_cast<int64_t>(
          random() % static_cast<uint64_t>(std::min<int64_t>(size - begin, 700) + 1));
      ASSERT_EQ(stored.Read(begin, length).value(),
                Bytes(tuned.begin() + begin, tuned.begin() + begin + length));
    }
    TensorEntry other = stored.base;  // the rows that lie over it are not its own
    other.shape[0] = rows > base_rows ? base_rows + 1 : rows - 1;
    EXPECT_FALSE(DeltaReader::Check(stored.entry, other).ok()) << base_rows << " -> " << rows;
  }
}

// Every single wrong number in counts or columns is an error or another matrix; never a read
// outside, which the sanitizers would see.
TEST(SparseCodec, PartsThatContradictThemselvesAreRefused) {
  std::mt19937_64 random(8);
  const SparseShape shape{11, 17, 2};
  const Bytes base = Random(random, 11 * 17 * 2);
  Bytes tuned = base;
  for (int i = 0; i < 40; ++i) tuned[(random() % (11 * 17)) * 2] ^= std::byte{1};
  const SparseParts parts = EncodeSparse(base.data(), tuned.data(), shape);
  for (size_t row = 0; row < parts.counts.size(); ++row) {
    for (const uint32_t wrong : {parts.counts[row] + 1, uint32_t{18}, ~uint32_t{0}}) {
      SparseParts bad = parts;
      bad.counts[row] = wrong;
      EXPECT_EQ(Stored(DType::kBF16, shape, base, bad).Read(0, 11 * 17 * 2).status().code(),
                StatusCode::kCorruption);
    }
  }
  for (size_t i = 0; i < parts.columns.size(); i += 2) {
    SparseParts bad = parts;
    bad.columns[i] = std::byte{17};  // one past the last
    EXPECT_EQ(Stored(DType::kBF16, shape, base, bad).Read(0, 11 * 17 * 2).status().code(),
              StatusCode::kCorruption);
  }
  for (int i = 0; i < 500; ++i) {
    SparseParts bad = parts;
    bad.columns[random() % bad.columns.size()] = static_cast<std::byte>(random());
    bad.counts[random() % bad.counts.size()] = static_cast<uint32_t>(random() % 18);
    const auto read = Stored(DType::kBF16, shape, base, bad).Read(0, 11 * 17 * 2);
    if (!read.ok()) EXPECT_EQ(read.status().code(), StatusCode::kCorruption);
  }
}

TEST(DeltaReader, ABaseThatDoesNotFitIsRefused) {
  const Bytes none;
  Stored stored(DType::kBF16, {2, 3, 2}, Bytes(12), EncodeSparse(nullptr, nullptr, {0, 3, 2}));
  EXPECT_TRUE(DeltaReader::Check(stored.entry, stored.base).ok());
  TensorEntry base = stored.base;
  base.shape = {3, 2};
  EXPECT_EQ(DeltaReader::Check(stored.entry, base).code(), StatusCode::kCorruption);
  base = stored.base;
  base.dtype = DType::kF32;
  EXPECT_EQ(DeltaReader::Check(stored.entry, base).code(), StatusCode::kCorruption);
  base = stored.base;
  base.codec = Codec::kBitDelta;
  EXPECT_EQ(DeltaReader::Check(stored.entry, base).code(), StatusCode::kCorruption);
}

}  // namespace
}  // namespace stockpot
