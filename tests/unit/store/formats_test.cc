// Digests, CRC32C and the bytes of packs against published values and their own reference.
#include <gtest/gtest.h>

#include <random>

#include "store/crc32c.h"
#include "store/digest.h"
#include "store/pack_format.h"
#include "store/record_codec.h"

namespace stockpot {
namespace {

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

TEST(DigestTest, KnownValues) {
  // FIPS 180-2, appendix B.
  EXPECT_EQ(Sha256("abc").Hex(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256("").Hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  Sha256Stream stream;
  stream.Update(Bytes("a"));
  stream.Update(Bytes("bc"));
  EXPECT_EQ(stream.Finish(), Sha256("abc"));
}

TEST(DigestTest, HexAndRaw) {
  const Digest d = Sha256("abc");
  EXPECT_EQ(*Digest::FromHex(d.Hex()), d);
  EXPECT_EQ(*Digest::FromRaw(d.raw()), d);
  EXPECT_EQ(d.ShortHex(), "ba7816bf8f01");
  EXPECT_FALSE(Digest::FromHex(d.Hex().substr(1)).ok());
  EXPECT_FALSE(Digest::FromHex("B" + d.Hex().substr(1)).ok());
  EXPECT_FALSE(Digest::FromHex("g" + d.Hex().substr(1)).ok());
  EXPECT_FALSE(Digest::FromRaw("short").ok());
  EXPECT_TRUE(Digest{}.IsZero());
}

TEST(DigestTest, TreeDigestIsTheHashOfTheChunkDigests) {
  const Digest chunks[] = {Sha256("a"), Sha256("b")};
  EXPECT_EQ(TreeDigest(chunks),
            Sha256(std::string(chunks[0].raw()) + std::string(chunks[1].raw())));
  EXPECT_EQ(TreeDigest({}), Sha256(""));
}

TEST(Crc32cTest, KnownValues) {
  // RFC 3720, B.4.
  EXPECT_EQ(Crc32c(Bytes("123456789")), 0xE3069283u);
  EXPECT_EQ(Crc32c(std::vector<std::byte>(32, std::byte{0})), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(std::vector<std::byte>(32, std::byte{0xff})), 0x62A8AB43u);
  EXPECT_EQ(Crc32c({}), 0u);
}

TEST(Crc32cTest, BothImplementationsAgreeAtEverySizeAndAlignment) {
  std::mt19937_64 random(1);
  std::vector<std::byte> data(200'000);
  for (std::byte& b : data) b = static_cast<std::byte>(random());
  // Around the three streams of 8 KiB of the fast one, and everything small.
  std::vector<size_t> sizes;
  for (size_t i = 0; i < 70; ++i) sizes.push_back(i);
  for (const size_t block : {size_t{8192}, size_t{24576}, size_t{49152}}) {
    for (size_t i = block - 9; i < block + 10; ++i) sizes.push_back(i);
  }
  sizes.push_back(199'990);
  for (const size_t size : sizes) {
    for (size_t offset = 0; offset < 9; ++offset) {
      const auto part = std::span(data).subspan(offset, size);
      ASSERT_EQ(Crc32c(part), Crc32cPortable(part)) << size << " at " << offset;
    }
  }
}

TEST(PackFormatTest, LocationsRoundTripAndAreChecked) {
  const ChunkLocation location{7, 123'456'789'012, 4'000'000, 0xDEADBEEF};
  EXPECT_EQ(*ChunkLocation::Decode(location.Encode()), location);
  EXPECT_FALSE(ChunkLocation::Decode("").ok());
  EXPECT_FALSE(ChunkLocation::Decode(location.Encode() + "x").ok());
  ChunkLocation bad = location;
  bad.length = 0;
  EXPECT_FALSE(ChunkLocation::Decode(bad.Encode()).ok());
  bad.length = static_cast<uint32_t>(kChunkBytes) + 1;
  EXPECT_FALSE(ChunkLocation::Decode(bad.Encode()).ok());
}

TEST(PackFormatTest, EveryFlippedBitOfAHeaderIsSeen) {
  const Digest digest = Sha256("chunk");
  const ChunkLocation location{3, 4096, 5, 77};
  auto record = EncodeRecordHeader(digest, location.length, location.crc);
  ASSERT_TRUE(CheckRecordHeader(record, digest, location).ok());
  for (size_t bit = 0; bit < record.size() * 8; ++bit) {
    record[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_FALSE(CheckRecordHeader(record, digest, location).ok()) << bit;
    record[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  }
  std::vector<std::byte> block(kPackHeaderBytes);
  EncodePackHeader(3, block);
  ASSERT_TRUE(CheckPackHeader(block, 3).ok());
  EXPECT_FALSE(CheckPackHeader(block, 4).ok());
  for (size_t bit = 0; bit < block.size() * 8; bit += 7) {
    block[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_FALSE(CheckPackHeader(block, 3).ok()) << bit;
    block[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  }
}

TEST(PackFormatTest, FileNames) {
  EXPECT_EQ(PackPath("d", 12).string(), "d/00000012.pack");
  EXPECT_EQ(PackNumber("d/00000012.pack"), 12u);
  EXPECT_EQ(PackNumber(PackPath("", UINT32_MAX)), UINT32_MAX);
  for (const char* bad : {"0000001.pack", "00000000.pack", "00000001.tmp", "0000000x.pack",
                          "99999999999.pack", "9999999999.pack", ".pack"}) {
    EXPECT_EQ(PackNumber(bad), std::nullopt) << bad;
  }
}

// A float would be cut, and 1e300 fits no integer at all.
TEST(RecordCodecTest, IntegersAreIntegersThatFit) {
  const auto tombstone = [](const std::string& number) {
    return DecodeTombstone(Sha256("a"),
                           R"({"by":"me","why":"","deleted_ms":1,"purge_ms":)" + number + "}");
  };
  const auto run = [](const std::string& field) {
    return DecodeRun(R"({"name":"r","base":")" + Sha256("b").Hex() + R"(",)" + field + "}");
  };
  ASSERT_TRUE(tombstone("9223372036854775807").ok());
  EXPECT_EQ(tombstone("-7")->purge_ms, -7);
  ASSERT_TRUE(run(R"("merge_every":5)").ok());
  for (const std::string number :
       {"1e300", "-1e300", "1.5", "2.0", "9223372036854775808", "true"}) {
    EXPECT_EQ(tombstone(number).status().code(), StatusCode::kCorruption) << number;
    EXPECT_EQ(run("\"created_ms\":" + number).status().code(), StatusCode::kCorruption) << number;
    EXPECT_EQ(run("\"merge_every\":" + number).status().code(), StatusCode::kCorruption) << number;
  }
}

}  // namespace
}  // namespace stockpot
