// Pack files. The first byte says which of:
//   0  a whole file from outside: an index entry (20 bytes), a digest (32 bytes), the file
//   1  a file of ours, damaged: chunks, then places and bytes to put there. Every record that is
//      touched must be refused, and no other
//   2  an index entry
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "kernels/base/check.h"
#include "store/crc32c.h"
#include "store/pack_format.h"
#include "store/pack_reader.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/target.h"
#include "tests/fuzz/temporary_folder.h"

namespace stockpot::fuzz {
namespace {

constexpr uint32_t kPack = 7;
constexpr size_t kLocationBytes = 20;
constexpr size_t kMaxReadBytes = 1 << 20;

struct Record {
  Digest digest;
  ChunkLocation location;
};

// One pack file that is replaced for every input.
class PackFile {
 public:
  PackFile() : file_(::open(PackPath(folder_.path(), kPack).c_str(), O_CREAT | O_RDWR, 0600)) {
    STOCKPOT_CHECK(file_ >= 0);
  }
  ~PackFile() { ::close(file_); }

  void Write(std::string_view bytes) const {
    STOCKPOT_CHECK(::ftruncate(file_, 0) == 0);
    STOCKPOT_CHECK(::pwrite(file_, bytes.data(), bytes.size(), 0) ==
                   static_cast<ssize_t>(bytes.size()));
  }
  const std::filesystem::path& folder() const { return folder_.path(); }

 private:
  TemporaryFolder folder_;
  int file_;
};

const PackFile& TheFile() {
  static const PackFile file;
  return file;
}

void Append(std::string& image, std::span<const std::byte> bytes) {
  image.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

void ReadOutsideFile(ByteReader& in) {
  std::string entry, raw_digest;
  for (size_t i = 0; i < kLocationBytes; ++i) entry += static_cast<char>(in.Byte());
  for (size_t i = 0; i < 32; ++i) raw_digest += static_cast<char>(in.Byte());
  Result<ChunkLocation> location = ChunkLocation::Decode(entry);
  if (!location.ok() || location->length > kMaxReadBytes) return;
  location->pack = kPack;
  const std::string file = in.Rest();
  TheFile().Write(file);
  // In one of two the digest is that of what stands there, as far as there is something.
  Digest digest = *Digest::FromRaw(raw_digest);
  const uint64_t begin = location->offset + kRecordHeaderBytes;
  const bool inside =
      begin >= kRecordHeaderBytes && begin < file.size() && file.size() - begin >= location->length;
  const std::string_view there =
      inside ? std::string_view(file).substr(begin, location->length) : std::string_view();
  if (inside && digest.bytes[0] % 2 == 0) digest = Sha256(there);

  const PackReader reader(TheFile().folder());
  std::vector<std::byte> out(location->length);
  const Status read = reader.Read(digest, *location, out);
  if (read.ok()) STOCKPOT_CHECK(Sha256(out) == digest);
  if (inside && Sha256(there) == digest) {
    STOCKPOT_CHECK(read.ok(), read.ToString());
    STOCKPOT_CHECK(std::memcmp(out.data(), there.data(), out.size()) == 0);
  }
  const Status record = reader.ReadAndCheckRecord(digest, *location, out);
  if (record.ok()) {
    const auto header = EncodeRecordHeader(digest, location->length, location->crc);
    STOCKPOT_CHECK(read.ok() && inside && Crc32c(AsBytes(there)) == location->crc);
    STOCKPOT_CHECK(std::memcmp(header.data(), file.data() + location->offset, header.size()) == 0);
  }
  if (reader.CheckPack(kPack).ok()) STOCKPOT_CHECK(file.starts_with("STKPACK1"));
}

std::string WritePack(ByteReader& in, std::vector<Record>& records) {
  std::string image(kPackHeaderBytes, '\0');
  EncodePackHeader(kPack, std::as_writable_bytes(std::span(image)));
  for (size_t n = 1 + in.Below(6); n > 0; --n) {
    std::string chunk = in.String(255);
    if (in.OneIn(4)) chunk.resize(1 + in.Below(20'000), 'x');
    if (chunk.empty()) chunk = "x";
    const ChunkLocation location{kPack, image.size(), static_cast<uint32_t>(chunk.size()),
                                 Crc32c(AsBytes(chunk))};
    records.push_back({Sha256(chunk), location});
    Append(image, EncodeRecordHeader(records.back().digest, location.length, location.crc));
    image += chunk;
    if (in.OneIn(4)) image.resize(static_cast<size_t>(RoundUpToBlock(image.size())), '\0');
  }
  return image;
}

void DamageOwnFile(ByteReader& in) {
  std::vector<Record> records;
  const std::string whole = WritePack(in, records);
  std::string image = whole;
  for (size_t n = in.Below(4); n > 0; --n) {
    image[in.Integer<uint32_t>() % image.size()] = static_cast<char>(in.Byte());
  }
  if (in.OneIn(4)) image.resize(in.Integer<uint32_t>() % (image.size() + 1));
  TheFile().Write(image);

  const auto same = [&](uint64_t begin, uint64_t end) {
    return end <= image.size() && image.compare(begin, end - begin, whole, begin, end - begin) == 0;
  };
  const PackReader reader(TheFile().folder());
  STOCKPOT_CHECK(reader.CheckPack(kPack).ok() == same(0, kPackHeaderBytes));
  for (const Record& record : records) {
    std::vector<std::byte> out(record.location.length);
    const Status read = reader.Read(record.digest, record.location, out);
    STOCKPOT_CHECK(
        read.ok() == same(record.location.offset + kRecordHeaderBytes, record.location.end()),
        read.ToString());
    const Status checked = reader.ReadAndCheckRecord(record.digest, record.location, out);
    STOCKPOT_CHECK(checked.ok() == same(record.location.offset, record.location.end()),
                   checked.ToString());
    if (checked.ok()) continue;
    STOCKPOT_CHECK(checked.code() == StatusCode::kCorruption, checked.ToString());
    STOCKPOT_CHECK(checked.message().find(record.digest.Hex()) != std::string::npos,
                   checked.message());
  }
}

void ReadIndexEntry(ByteReader& in) {
  const std::string entry = in.Rest();
  const Result<ChunkLocation> location = ChunkLocation::Decode(entry);
  if (!location.ok()) return;
  STOCKPOT_CHECK(location->Encode() == entry);
  STOCKPOT_CHECK(location->length > 0 && location->length <= kChunkBytes);
}

}  // namespace
}  // namespace stockpot::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stockpot::fuzz;
  ByteReader in({data, size});
  switch (in.Below(3)) {
    case 0:
      ReadOutsideFile(in);
      break;
    case 1:
      DamageOwnFile(in);
      break;
    default:
      ReadIndexEntry(in);
      break;
  }
  return 0;
}
