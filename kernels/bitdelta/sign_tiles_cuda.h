// Sign bits as the CUDA kernels of bitdelta_linear read them.
//
// A tile is 16 outputs x 64 columns, one 32-bit word a lane of a warp, 128 bytes in a row:
//
//   words[plane][output / 16][column / 64][lane]
//
// Within a tile, lane 4 g + t holds outputs g and g + 8, and of each half c of 32 columns its
// columns 32 c + 8 t .. + 7: those 16 bytes of a bf16 row that the lane copies of W. They are
// dealt to two steps of mma.m16n8k16 (cuda_mma.cuh), the same way for W, signs and x, so that the
// order of columns within a step does not matter. Register i (0 .. 3) of step s of half c:
//
//   output g + 8 (i % 2), columns 32 c + 8 t + 4 s + 2 (i / 2) + {0, 1}
//
// Its two signs stand at bits 15 - j and 31 - j, j = (2 c + s) * 4 + i, 1 for -1 (the inverse of
// the canonical bit), so that a register of two bf16 +-1.0 costs one shift and one lop3:
//
//   ((word << j) & 0x80008000) | 0x3F803F80
//
// Outputs are padded to 16 and columns to 64 with +1: x is 0 there, and such outputs are not kept.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/base/status.h"

namespace stockpot {

inline constexpr int kSignTileRows = 16;     // outputs
inline constexpr int kSignTileColumns = 64;  // columns
inline constexpr int kSignTileWords = 32;    // one a lane

constexpr int64_t SignTileRowCount(int64_t d_out) {
  return (d_out + kSignTileRows - 1) / kSignTileRows;
}
constexpr int64_t SignTileColumnCount(int64_t d_in) {
  return (d_in + kSignTileColumns - 1) / kSignTileColumns;
}
// Words of one plane, and of all.
constexpr int64_t SignTileWords(int64_t d_out, int64_t d_in) {
  return SignTileRowCount(d_out) * SignTileColumnCount(d_in) * kSignTileWords;
}

// Where the sign of (output, column) of one plane lies.
struct SignTilePlace {
  int64_t word = 0;  // index in the plane
  int bit = 0;
};
constexpr SignTilePlace PlaceInSignTiles(int64_t d_in, int64_t output, int64_t column) {
  const int row = static_cast<int>(output % kSignTileRows);
  const int col = static_cast<int>(column % kSignTileColumns);
  const int lane = row % 8 * 4 + col % 32 / 8;
  const int step = col / 32 * 2 + col % 8 / 4;
  const int reg = row / 8 + col % 4 / 2 * 2;
  const int64_t tile =
      output / kSignTileRows * SignTileColumnCount(d_in) + column / kSignTileColumns;
  return {tile * kSignTileWords + lane, (col % 2 == 1 ? 31 : 15) - (step * 4 + reg)};
}

// Canonical signs (signs.h), `planes` matrices one after another, to tiles.
// words: [planes * SignTileWords(d_out, d_in)], every one is written. InvalidArgument names the
// field that does not fit; words are untouched then. Thread promise: pure function.
Status PackSignTiles(int64_t planes, int64_t d_out, int64_t d_in, std::span<const uint8_t> signs,
                     std::span<uint32_t> words);

// The same on a GPU, from canonical signs in device memory to `words` in device memory, 128-byte
// aligned: enqueues on `stream` (a cudaStream_t) and returns. InvalidArgument names the field that
// does not fit, Unavailable without a CUDA backend.
struct CudaSignTilesArgs {
  int64_t planes = 0, d_out = 0, d_in = 0;
  const uint8_t* signs = nullptr;
  uint32_t* words = nullptr;
};
Status CheckCudaSignTilesArgs(const CudaSignTilesArgs& args);
Status LaunchPackSignTilesCuda(const CudaSignTilesArgs& args, void* stream);

}  // namespace stockpot
