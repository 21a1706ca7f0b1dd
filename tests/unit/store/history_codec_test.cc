// The history form of a chunk against a second reader of the format, written from its description
// with plain loops, and against bytes that nobody wrote.
#include "store/history_codec.h"

#include <gtest/gtest.h>
#include <zstd.h>

#include <cstring>
#include <random>

#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

using Bytes = std::vector<std::byte>;

size_t Little(const Bytes& in, size_t at) {
  size_t value = 0;
  for (size_t i = 0; i < 4; ++i) value += static_cast<size_t>(in[at + i]) << (8 * i);
  return value;
}

// What a chunk is by the format's description, given the whole parent.
Bytes SlowDecode(const Bytes& stored, const Bytes& parent) {
  const auto e = static_cast<size_t>(stored[1]);
  const size_t length = Little(stored, 4);
  Bytes chunk(length);
  size_t at = 40 + 5 * e;
  for (size_t p = 0; p < e; ++p) {
    const size_t bytes = Little(stored, 40 + 5 * p + 1);
    Bytes plane(length / e);
    if (stored[40 + 5 * p] == std::byte{1}) {
      EXPECT_EQ(ZSTD_decompress(plane.data(), plane.size(), stored.data() + at, bytes),
                plane.size());
    } else {
      for (size_t i = 0; i < bytes; ++i) plane[i] = stored[at + i];
    }
    for (size_t i = 0; i < plane.size(); ++i) chunk[i * e + p] = plane[i];
    at += bytes;
  }
  for (size_t i = length / e * e; i < length; ++i) chunk[i] = stored[at++];
  EXPECT_EQ(at, stored.size());
  for (size_t i = 0; i < parent.size(); ++i) chunk[i] ^= parent[i];
  return chunk;
}

// Floats of `e` bytes that a step of training moved a little.
Bytes Moved(std::mt19937_64& random, const Bytes& from, size_t e) {
  Bytes to = from;
  for (size_t i = 0; i + e <= to.size(); i += e) {
    if (random() % 3 == 0) continue;
    to[i] ^= static_cast<std::byte>(random());
    if (e > 2) to[i + 1] ^= static_cast<std::byte>(random() % 16);
  }
  return to;
}

TEST(HistoryCodecTest, EveryElementSizeAndOddLengths) {
  std::mt19937_64 random(7);
  const Digest parent_digest = Sha256(std::string_view("parent"));
  for (const int e : {1, 2, 4, 8}) {
    for (const size_t size : {1u, 2u, 3u, 7u, 8u, 9u, 31u, 4096u, 4099u, 65543u, 4194304u}) {
      const Bytes parent = RandomBytes(random, size);
      const Bytes kinds[] = {RandomBytes(random, size), Moved(random, parent, e), parent,
                             Bytes(size)};
      for (const Bytes& chunk : kinds) {
        for (const bool delta : {false, true}) {
          const Bytes before = delta ? parent : Bytes();
          const Digest digest = delta ? parent_digest : Digest{};
          const Bytes stored = EncodeHistory(chunk, before, digest, e);
          ASSERT_EQ(SlowDecode(stored, before), chunk) << e << " " << size << " " << delta;
          Bytes out = delta ? parent : Bytes(size);
          const Status status = DecodeHistory(stored, digest, out);
          ASSERT_TRUE(status.ok()) << status.ToString();
          ASSERT_EQ(out, chunk) << e << " " << size << " " << delta;
          ASSERT_EQ(*HistoryElementBytes(stored), e);
          // Noise costs its headers, never more.
          ASSERT_LE(stored.size(), size + 40 + 5 * static_cast<size_t>(e));
        }
      }
    }
  }
}

TEST(HistoryCodecTest, ADifferenceIsSmallAndOnlyTakenWhereItPays) {
  std::mt19937_64 random(8);
  const Bytes parent = RandomBytes(random, 1 << 20);
  const Bytes near = Moved(random, parent, 4);
  EXPECT_LT(EncodeHistory(near, parent, {}, 4).size(), parent.size() / 2);
  EXPECT_TRUE(DeltaPays(near, parent, 4));
  const Bytes zeros(1 << 20);
  EXPECT_FALSE(DeltaPays(zeros, parent, 4));
}

TEST(HistoryCodecTest, RefusesAnotherParentAndAnotherLength) {
  std::mt19937_64 random(9);
  const Bytes parent = RandomBytes(random, 1000);
  const Digest digest = Sha256(std::string_view("p"));
  const Bytes stored = EncodeHistory(Moved(random, parent, 2), parent, digest, 2);
  Bytes out(1000);
  EXPECT_EQ(DecodeHistory(stored, Digest{}, out).code(), StatusCode::kCorruption);
  Bytes shorter(999);
  EXPECT_EQ(DecodeHistory(stored, digest, shorter).code(), StatusCode::kCorruption);
  EXPECT_TRUE(DecodeHistory(stored, digest, out).ok());
}

// Cut anywhere and flipped anywhere: an error or other bytes (which SHA-256 finds), never a read or
// write outside; a giant length costs nothing.
TEST(HistoryCodecTest, BytesNobodyWrote) {
  std::mt19937_64 random(10);
  const Bytes parent = RandomBytes(random, 5003);
  const Bytes stored = EncodeHistory(Moved(random, parent, 4), parent, {}, 4);
  for (size_t cut = 0; cut < stored.size(); ++cut) {
    Bytes out = parent;
    ASSERT_EQ(DecodeHistory(std::span(stored).first(cut), {}, out).code(),
              StatusCode::kCorruption)
        << cut;
  }
  for (int i = 0; i < 20'000; ++i) {
    Bytes broken = stored;
    const size_t flips = 1 + random() % 4;
    for (size_t f = 0; f < flips; ++f) {
      const size_t at = random() % 2 == 0 ? random() % 60 : random() % broken.size();
      broken[at] ^= static_cast<std::byte>(1 << random() % 8);
    }
    Bytes out = parent;
    static_cast<void>(DecodeHistory(broken, {}, out));
  }
  for (size_t header = 41; header < 60; header += 5) {
    Bytes giant = stored;
    for (size_t i = 0; i < 4; ++i) giant[header + i] = std::byte{0xff};
    Bytes out = parent;
    EXPECT_EQ(DecodeHistory(giant, {}, out).code(), StatusCode::kCorruption);
  }
}

}  // namespace
}  // namespace stockpot::test
