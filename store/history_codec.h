// The history form of a chunk: its byte planes, each compressed if that helps, of the chunk itself
// or of its XOR with the chunk at the same place of an earlier checkpoint.
//
// A float that training moved a little keeps its sign, exponent and leading mantissa bits: XOR makes
// them zeros, and sorting bytes by significance puts these zeros side by side, where zstd finds
// them; the low mantissa bytes are noise and stay as they are. Lossless for any bytes.
//
//   u8 format = 1, u8 bytes of an element e (1, 2, 4 or 8), u16 zero, u32 length of the chunk
//   32 bytes: the parent's digest, zeros without one
//   e times: u8 method (0 stored, 1 zstd), u32 stored bytes
//   e planes, back to back: plane i holds byte i of every whole element
//   the bytes behind the last whole element (fewer than e), as they are, XOR-ed too
//
// All integers little-endian. Thread promise: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/status.h"
#include "store/digest.h"

namespace stockpot {

// The planes of `chunk`, XOR-ed with `parent` where that is not empty. REQUIRES: `element_bytes` is
// 1, 2, 4 or 8; `parent` is empty or as long as `chunk`.
std::vector<std::byte> EncodeHistory(std::span<const std::byte> chunk,
                                     std::span<const std::byte> parent,
                                     const Digest& parent_digest, int element_bytes);

// XORs what `stored` holds into `out`: after this for every link of a chain, over zeros, and with
// the whole chunk at its end, `out` is the chunk. Corruption if `stored` is not a history form of a
// chunk of out.size() bytes with this parent (zero: none); takes memory of out.size() at most,
// whatever `stored` claims.
Status DecodeHistory(std::span<const std::byte> stored, const Digest& parent_digest,
                     std::span<std::byte> out);

// Bytes of an element, as EncodeHistory was told. Corruption likewise.
Result<int> HistoryElementBytes(std::span<const std::byte> stored);

// Whether the difference to `parent` promises fewer bytes than the planes of `chunk` alone, judged
// by a sample.
bool DeltaPays(std::span<const std::byte> chunk, std::span<const std::byte> parent,
               int element_bytes);

// out[i] ^= in[i]. REQUIRES: equal sizes.
void XorInto(std::span<const std::byte> in, std::span<std::byte> out);

}  // namespace stockpot
