// PackedSigns: from canonical sign bytes to the layout of the CPU kernel (packed_signs.h).
#include "kernels/bitdelta/packed_signs.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/bitdelta/signs.h"

namespace stockpot {
namespace {

constexpr int64_t kMaxDimension = int64_t{1} << 31;
constexpr int64_t kBlocksAtOnce = 32;  // that a thread packs

Status CheckSigns(int64_t d_out, int64_t d_in, int64_t sign_bytes, int64_t scales, int64_t planes) {
  if (d_out < 0 || d_in < 0 || d_out > kMaxDimension || d_in > kMaxDimension) {
    return InvalidArgument("signs: shape [" + std::to_string(d_out) + ", " + std::to_string(d_in) +
                           "]");
  }
  if (planes < 1 || planes > kMaxSignPlanes) {
    return InvalidArgument("planes: " + std::to_string(planes) + ", need 1 to " +
                           std::to_string(kMaxSignPlanes));
  }
  if (sign_bytes != planes * SignBytes(d_out, d_in)) {
    return InvalidArgument("signs: " + std::to_string(sign_bytes) + " bytes, need " +
                           std::to_string(planes * SignBytes(d_out, d_in)));
  }
  if (scales != planes * d_out && scales != planes) {
    return InvalidArgument("alpha: " + std::to_string(scales) + " values, need " +
                           std::to_string(planes * d_out) + " or " + std::to_string(planes));
  }
  return OkStatus();
}

// The canonical bytes of 16 rows of a plane, of which `rows` exist, to words[word][row].
void PackBlock(const uint8_t* bytes, int64_t rows, int64_t row_bytes, int64_t column_words,
               uint32_t* words) {
  constexpr int64_t kWordBytes = kSignWordColumns / 8;
  for (int64_t word = 0; word < column_words; ++word, words += kSignBlockRows) {
    uint32_t bits[kSignBlockRows] = {};
    const uint8_t* first = bytes + word * kWordBytes;
    if ((word + 1) * kWordBytes <= row_bytes) {
      for (int64_t r = 0; r < rows; ++r) std::memcpy(&bits[r], first + r * row_bytes, kWordBytes);
    } else {
      const auto rest = static_cast<size_t>(row_bytes - word * kWordBytes);
      for (int64_t r = 0; r < rows; ++r) std::memcpy(&bits[r], first + r * row_bytes, rest);
    }
    for (int64_t r = 0; r < kSignBlockRows; ++r) words[r] = FoldSignGroups(bits[r]);
  }
}

}  // namespace

PackedSigns::PackedSigns(std::unique_ptr<Layout> layout) : layout_(std::move(layout)) {}
PackedSigns::PackedSigns(PackedSigns&&) noexcept = default;
PackedSigns& PackedSigns::operator=(PackedSigns&&) noexcept = default;
PackedSigns::~PackedSigns() = default;

int64_t PackedSigns::d_out() const { return layout_->d_out; }
int64_t PackedSigns::d_in() const { return layout_->d_in; }
int64_t PackedSigns::planes() const { return layout_->planes; }
int64_t PackedSigns::bytes() const {
  const int64_t rows = layout_->planes * layout_->row_blocks * kSignBlockRows;
  return rows * (layout_->column_words + 1) * static_cast<int64_t>(sizeof(uint32_t));
}

float PackedSigns::Layout::SignAt(int64_t plane, int64_t row, int64_t col) const {
  const int64_t word = col / kSignWordColumns * kSignBlockRows + row % kSignBlockRows;
  const uint32_t folded = block(plane, row / kSignBlockRows)[word];
  return (FoldSignGroups(folded) >> (col % kSignWordColumns)) & 1 ? 1.0f : -1.0f;
}

Result<PackedSigns> PackedSigns::Pack(int64_t d_out, int64_t d_in, std::span<const uint8_t> signs,
                                      std::span<const float> alpha, int64_t planes,
                                      ThreadPool* threads) {
  const int64_t scales = static_cast<int64_t>(alpha.size());
  STOCKPOT_RETURN_IF_ERROR(
      CheckSigns(d_out, d_in, static_cast<int64_t>(signs.size()), scales, planes));
  auto layout = std::make_unique<Layout>();
  layout->d_out = d_out;
  layout->d_in = d_in;
  layout->planes = planes;
  layout->row_blocks = (d_out + kSignBlockRows - 1) / kSignBlockRows;
  layout->column_words = (d_in + kSignWordColumns - 1) / kSignWordColumns;
  const int64_t padded_rows = layout->row_blocks * kSignBlockRows;
  uint32_t* words = layout->words.Reserve(planes * padded_rows * layout->column_words);
  float* row_alpha = layout->alpha.Reserve(planes * padded_rows);
  const int64_t row_bytes = SignRowBytes(d_in);
  const bool by_row = scales == planes * d_out;
  for (int64_t plane = 0; plane < planes; ++plane) {
    for (int64_t row = 0; row < padded_rows; ++row) {
      const int64_t scale = by_row ? plane * d_out + row : plane;
      row_alpha[plane * padded_rows + row] = row < d_out ? alpha[scale] : 0.0f;
    }
  }
  const int64_t blocks = layout->row_blocks;
  const auto pack = [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t plane = block / blocks, row = block % blocks * kSignBlockRows;
      PackBlock(signs.data() + (plane * d_out + row) * row_bytes,
                std::min(kSignBlockRows, d_out - row), row_bytes, layout->column_words,
                words + block * layout->column_words * kSignBlockRows);
    }
  };
  if (threads != nullptr) {
    threads->ParallelFor(planes * blocks, kBlocksAtOnce, pack);
  } else {
    pack(0, planes * blocks);
  }
  return PackedSigns(std::move(layout));
}

}  // namespace stockpot
