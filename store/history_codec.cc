#include "store/history_codec.h"

#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/base/check.h"

namespace stockpot {
namespace {

constexpr uint8_t kFormat = 1;
constexpr size_t kHeaderBytes = 8 + 32;
constexpr size_t kPlaneHeaderBytes = 5;
constexpr int kZstdLevel = 1;                      // higher ones gain little on planes
constexpr size_t kSampleBytes = size_t{64} << 10;  // that stand for a chunk
enum Method : uint8_t { kStored = 0, kZstd = 1 };

void PutU32(std::byte* out, uint32_t value) {
  for (int i = 0; i < 4; ++i) out[i] = static_cast<std::byte>(value >> (8 * i));
}

uint32_t GetU32(const std::byte* in) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value |= uint32_t{static_cast<uint8_t>(in[i])} << (8 * i);
  return value;
}

bool IsElementSize(int bytes) { return bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8; }

template <typename Word>
Word Load(const std::byte* in) {
  Word word;
  std::memcpy(&word, in, sizeof word);
  return word;
}

// planes[p * count + i] = byte p of element i of a, or of a ^ b where b is not null.
template <typename Word>
void SplitWords(const std::byte* a, const std::byte* b, size_t count, std::byte* planes) {
  for (size_t i = 0; i < count; ++i) {
    Word word = Load<Word>(a + i * sizeof(Word));
    if (b != nullptr) word = static_cast<Word>(word ^ Load<Word>(b + i * sizeof(Word)));
    for (size_t p = 0; p < sizeof(Word); ++p) {
      planes[p * count + i] = static_cast<std::byte>(word >> (8 * p));
    }
  }
}

void Split(const std::byte* a, const std::byte* b, size_t count, int element_bytes,
           std::byte* planes) {
  switch (element_bytes) {
    case 1:
      return SplitWords<uint8_t>(a, b, count, planes);
    case 2:
      return SplitWords<uint16_t>(a, b, count, planes);
    case 4:
      return SplitWords<uint32_t>(a, b, count, planes);
    default:
      return SplitWords<uint64_t>(a, b, count, planes);
  }
}

// The other way: XORs the elements into `out`.
template <typename Word>
void JoinWords(const std::byte* planes, size_t count, std::byte* out) {
  for (size_t i = 0; i < count; ++i) {
    Word word = Load<Word>(out + i * sizeof(Word));
    for (size_t p = 0; p < sizeof(Word); ++p) {
      const auto byte = static_cast<Word>(static_cast<uint8_t>(planes[p * count + i]));
      word = static_cast<Word>(word ^ static_cast<Word>(byte << (8 * p)));
    }
    std::memcpy(out + i * sizeof(Word), &word, sizeof word);
  }
}

void Join(const std::byte* planes, size_t count, int element_bytes, std::byte* out) {
  switch (element_bytes) {
    case 1:
      return JoinWords<uint8_t>(planes, count, out);
    case 2:
      return JoinWords<uint16_t>(planes, count, out);
    case 4:
      return JoinWords<uint32_t>(planes, count, out);
    default:
      return JoinWords<uint64_t>(planes, count, out);
  }
}

// Appends a plane in the shorter of its two forms and notes which at `header`.
void AppendPlane(std::span<const std::byte> plane, std::byte* header, std::vector<std::byte>& out) {
  const size_t begin = out.size();
  size_t stored = plane.size();
  // Room for less than the plane: zstd gives up where it would not help.
  out.resize(begin + plane.size());
  if (plane.size() > 1) {
    const size_t packed = ZSTD_compress(out.data() + begin, plane.size() - 1, plane.data(),
                                        plane.size(), kZstdLevel);
    if (!ZSTD_isError(packed)) stored = packed;
  }
  const bool compressed = stored < plane.size();
  if (!compressed && !plane.empty()) std::memcpy(out.data() + begin, plane.data(), plane.size());
  out.resize(begin + stored);
  header[0] = static_cast<std::byte>(compressed ? kZstd : kStored);
  PutU32(header + 1, static_cast<uint32_t>(stored));
}

}  // namespace

void XorInto(std::span<const std::byte> in, std::span<std::byte> out) {
  STOCKPOT_CHECK(in.size() == out.size(), in.size(), out.size());
  for (size_t i = 0; i < in.size(); ++i) out[i] ^= in[i];
}

std::vector<std::byte> EncodeHistory(std::span<const std::byte> chunk,
                                     std::span<const std::byte> parent,
                                     const Digest& parent_digest, int element_bytes) {
  STOCKPOT_CHECK(IsElementSize(element_bytes), element_bytes);
  STOCKPOT_CHECK(parent.empty() || parent.size() == chunk.size(), parent.size(), chunk.size());
  const auto planes = static_cast<size_t>(element_bytes);
  const size_t count = chunk.size() / planes;
  std::vector<std::byte> split(count * planes);
  Split(chunk.data(), parent.empty() ? nullptr : parent.data(), count, element_bytes,
        split.data());

  const size_t headers = kHeaderBytes + planes * kPlaneHeaderBytes;
  std::vector<std::byte> out;
  out.reserve(headers + chunk.size());
  out.resize(headers);
  out[0] = static_cast<std::byte>(kFormat);
  out[1] = static_cast<std::byte>(element_bytes);
  PutU32(out.data() + 4, static_cast<uint32_t>(chunk.size()));
  if (!parent.empty()) std::memcpy(out.data() + 8, parent_digest.bytes.data(), 32);
  std::array<std::byte, 8 * kPlaneHeaderBytes> notes{};
  for (size_t p = 0; p < planes; ++p) {
    AppendPlane(std::span(split).subspan(p * count, count), notes.data() + p * kPlaneHeaderBytes,
                out);
  }
  std::memcpy(out.data() + kHeaderBytes, notes.data(), planes * kPlaneHeaderBytes);
  for (size_t i = count * planes; i < chunk.size(); ++i) {
    out.push_back(parent.empty() ? chunk[i] : chunk[i] ^ parent[i]);
  }
  return out;
}

Result<int> HistoryElementBytes(std::span<const std::byte> stored) {
  if (stored.size() < kHeaderBytes || stored[0] != static_cast<std::byte>(kFormat)) {
    return Corruption("no history form of a chunk");
  }
  const int element_bytes = static_cast<int>(stored[1]);
  if (!IsElementSize(element_bytes) || stored[2] != std::byte{0} || stored[3] != std::byte{0}) {
    return Corruption("a history form with elements of " + std::to_string(element_bytes) +
                      " bytes");
  }
  return element_bytes;
}

Status DecodeHistory(std::span<const std::byte> stored, const Digest& parent_digest,
                     std::span<std::byte> out) {
  STOCKPOT_ASSIGN_OR_RETURN(const int element_bytes, HistoryElementBytes(stored));
  const auto planes = static_cast<size_t>(element_bytes);
  const size_t headers = kHeaderBytes + planes * kPlaneHeaderBytes;
  if (stored.size() < headers || GetU32(stored.data() + 4) != out.size() ||
      std::memcmp(stored.data() + 8, parent_digest.bytes.data(), 32) != 0) {
    return Corruption("a history form of another chunk");
  }
  const size_t count = out.size() / planes;
  const size_t tail = out.size() - count * planes;
  std::vector<std::byte> unpacked(count * planes);
  size_t at = headers;
  for (size_t p = 0; p < planes; ++p) {
    const std::byte* note = stored.data() + kHeaderBytes + p * kPlaneHeaderBytes;
    const size_t bytes = GetU32(note + 1);
    if (bytes > stored.size() - at) return Corruption("a plane past the end of its record");
    const std::byte* plane = stored.data() + at;
    at += bytes;
    if (note[0] == static_cast<std::byte>(kZstd)) {
      if (ZSTD_decompress(unpacked.data() + p * count, count, plane, bytes) != count) {
        return Corruption("a plane that does not decompress to its size");
      }
    } else if (note[0] != static_cast<std::byte>(kStored) || bytes != count) {
      return Corruption("a plane of an unknown method or another size");
    } else if (count > 0) {
      std::memcpy(unpacked.data() + p * count, plane, count);
    }
  }
  if (stored.size() - at != tail) return Corruption("bytes behind the last plane");
  Join(unpacked.data(), count, element_bytes, out.data());
  XorInto(stored.subspan(at), out.last(tail));
  return OkStatus();
}

bool DeltaPays(std::span<const std::byte> chunk, std::span<const std::byte> parent,
               int element_bytes) {
  // From the middle: the beginning of a tensor may be special (padding, the first rows).
  const size_t element = static_cast<size_t>(element_bytes);
  const size_t size = std::min(chunk.size(), kSampleBytes);
  const size_t begin = (chunk.size() - size) / 2 / element * element;
  const auto a = chunk.subspan(begin, size);
  const auto b = parent.subspan(begin, size);
  return EncodeHistory(a, b, {}, element_bytes).size() <
         EncodeHistory(a, {}, {}, element_bytes).size();
}

}  // namespace stockpot
