// Device code of LaunchPackSignTilesCuda (sign_tiles_cuda.h): a thread gathers one word's 32 signs.
//
// Include kernels/base/cuda_platform.cuh, or the tests' emulation of it, before this file.
#pragma once

#include <cstdint>

#include "kernels/bitdelta/sign_tiles_cuda.h"
#include "kernels/bitdelta/signs.h"

namespace stockpot {

inline constexpr int kSignTilesThreads = 128;

__global__ void PackSignTilesKernel(CudaSignTilesArgs args) {
  const int64_t plane_words = SignTileWords(args.d_out, args.d_in);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kSignTilesThreads + threadIdx.x;
  if (index >= args.planes * plane_words) return;
  const uint8_t* plane = args.signs + index / plane_words * SignBytes(args.d_out, args.d_in);
  const int64_t tile = index % plane_words / kSignTileWords;
  const int lane = static_cast<int>(index % kSignTileWords);
  const int64_t column_tiles = SignTileColumnCount(args.d_in);
  const int64_t first_output = tile / column_tiles * kSignTileRows + lane / 4;
  const int64_t first_column = tile % column_tiles * kSignTileColumns + lane % 4 * 8;
  uint32_t word = 0;
  for (int lower = 0; lower < 2; ++lower) {
    const int64_t output = first_output + lower * 8;
    if (output >= args.d_out) continue;
    for (int half = 0; half < 2; ++half) {
      const int64_t first = first_column + half * 32;  // eight columns: one canonical byte
      if (first >= args.d_in) continue;
      const unsigned byte = plane[output * SignRowBytes(args.d_in) + first / 8];
      for (int bit = 0; bit < 8 && first + bit < args.d_in; ++bit) {
        const SignTilePlace place = PlaceInSignTiles(args.d_in, output, first + bit);
        if (((byte >> bit) & 1) == 0) word |= 1u << place.bit;
      }
    }
  }
  args.words[index] = word;
}

inline int64_t SignTilesBlocks(const CudaSignTilesArgs& args) {
  const int64_t words = args.planes * SignTileWords(args.d_out, args.d_in);
  return (words + kSignTilesThreads - 1) / kSignTilesThreads;
}

}  // namespace stockpot
