#include "store/raw_tensor_reader.h"

#include <algorithm>
#include <cstring>

namespace stockpot {
namespace {

// --- limits ---
// A run of stored bytes this long is read where it belongs; shorter ones come out of a window of
// whole chunks, which may be this many where the runs lie close together.
constexpr int64_t kDirectBytes = kChunkBytes;
constexpr int64_t kWindowChunks = 4;

// Bytes that are neighbours both in the piece and in what is read.
struct Run {
  int64_t from = 0;  // in the piece
  int64_t to = 0;    // in the output
};

int64_t End(const TensorBox& box, size_t dim) { return box.offsets[dim] + box.shape[dim]; }

bool Overlap(const TensorBox& a, const TensorBox& b) {
  for (size_t dim = 0; dim < a.shape.size(); ++dim) {
    if (std::max(a.offsets[dim], b.offsets[dim]) >= std::min(End(a, dim), End(b, dim)))
      return false;
  }
  return true;
}

// The part of a piece that a target box wants: runs of equal length, in the order in which they are
// stored.
class RunWalk {
 public:
  // REQUIRES: they overlap; ranks of at least 1.
  RunWalk(const TensorBox& piece, const TensorBox& target)
      : piece_(piece), target_(target), common_(piece), index_(piece.shape.size(), 0) {
    for (size_t dim = 0; dim < piece.shape.size(); ++dim) {
      common_.offsets[dim] = std::max(piece.offsets[dim], target.offsets[dim]);
      common_.shape[dim] = std::min(End(piece, dim), End(target, dim)) - common_.offsets[dim];
    }
    outer_ = piece.shape.size() - 1;
    run_bytes_ = common_.shape[outer_];
    // A dimension joins the run while everything inside it is whole on both sides.
    while (outer_ > 0 && common_.shape[outer_] == piece.shape[outer_] &&
           common_.shape[outer_] == target.shape[outer_]) {
      --outer_;
      run_bytes_ *= common_.shape[outer_];
    }
  }

  bool is_done() const { return is_done_; }
  int64_t run_bytes() const { return run_bytes_; }
  Run run() const { return {Offset(piece_), Offset(target_)}; }
  // Where the last run begins in the piece.
  int64_t last_from() const {
    int64_t offset = 0;
    for (size_t dim = 0; dim < piece_.shape.size(); ++dim) {
      const int64_t last = dim < outer_ ? common_.shape[dim] - 1 : 0;
      offset = offset * piece_.shape[dim] + common_.offsets[dim] - piece_.offsets[dim] + last;
    }
    return offset;
  }
  void Next() {
    for (size_t dim = outer_; dim-- > 0;) {
      if (++index_[dim] < common_.shape[dim]) return;
      index_[dim] = 0;
    }
    is_done_ = true;
  }

 private:
  int64_t Offset(const TensorBox& box) const {
    int64_t offset = 0;
    for (size_t dim = 0; dim < box.shape.size(); ++dim) {
      offset = offset * box.shape[dim] + common_.offsets[dim] + index_[dim] - box.offsets[dim];
    }
    return offset;
  }

  const TensorBox& piece_;
  const TensorBox& target_;
  TensorBox common_;
  size_t outer_ = 0;  // the run spans dimension outer_ and those inside it
  int64_t run_bytes_ = 0;
  std::vector<int64_t> index_;  // of the run, in the dimensions before outer_
  bool is_done_ = false;
};

// Copies what `target` wants of a piece of `piece_bytes` bytes.
Status CopyRuns(const TensorBox& piece, const ByteReader& read, const TensorBox& target,
                std::span<std::byte> out) {
  if (!Overlap(piece, target)) return OkStatus();
  RunWalk walk(piece, target);
  const int64_t length = walk.run_bytes();
  const int64_t end = walk.last_from() + length;
  const int64_t piece_bytes = piece.elements();
  const bool is_one_run = walk.run().from + length == end;
  std::vector<std::byte> window;
  int64_t window_begin = 0;
  for (; !walk.is_done(); walk.Next()) {
    Run run = walk.run();
    const int64_t run_end = run.from + length;
    if (is_one_run || length >= kDirectBytes) {
      STOCKPOT_RETURN_IF_ERROR(
          read(run.from, out.subspan(static_cast<size_t>(run.to), static_cast<size_t>(length))));
      continue;
    }
    while (run.from < run_end) {
      int64_t window_end = window_begin + static_cast<int64_t>(window.size());
      if (run.from >= window_end) {
        // The chunks up to the end of this run, and more where the next runs begin in them.
        window_begin = run.from - run.from % kChunkBytes;
        RunWalk ahead = walk;
        ahead.Next();
        const bool is_dense = !ahead.is_done() && ahead.run().from - run_end < kChunkBytes;
        const int64_t wanted =
            is_dense ? std::min(end, window_begin + kWindowChunks * kChunkBytes) : run_end;
        window_end = std::min(piece_bytes, (wanted + kChunkBytes - 1) / kChunkBytes * kChunkBytes);
        window.resize(static_cast<size_t>(window_end - window_begin));
        STOCKPOT_RETURN_IF_ERROR(read(window_begin, window));
      }
      const int64_t n = std::min(run_end, window_end) - run.from;
      std::memcpy(out.data() + run.to, window.data() + (run.from - window_begin),
                  static_cast<size_t>(n));
      run.from += n;
      run.to += n;
    }
  }
  return OkStatus();
}

}  // namespace

TensorBox ByteBox(const TensorBox& box, int64_t element_bytes) {
  TensorBox bytes = box;
  if (bytes.shape.empty()) return {.offsets = {0}, .shape = {element_bytes}};
  bytes.offsets.back() *= element_bytes;
  bytes.shape.back() *= element_bytes;
  return bytes;
}

Status ReadByteBox(const std::vector<int64_t>& shape, const ByteReader& read, const TensorBox& box,
                   std::span<std::byte> out) {
  const TensorBox whole = WholeBox(shape);
  return CopyRuns(whole, read, box, out);
}

RawTensorReader::RawTensorReader(const TensorEntry& entry, PartReader read)
    : entry_(entry), read_(std::move(read)) {
  const int64_t width = DTypeSize(entry.dtype);
  const TensorBox whole = ByteBox(WholeBox(entry.shape), width);
  byte_shape_ = whole.shape;
  if (entry.pieces.empty()) {
    pieces_.push_back({whole, &entry.parts.at("data")});
    return;
  }
  pieces_.reserve(entry.pieces.size());
  for (size_t i = 0; i < entry.pieces.size(); ++i) {
    pieces_.push_back({ByteBox(entry.pieces[i], width), &entry.parts.at(PieceRole(i))});
  }
}

Status RawTensorReader::ReadBytes(const TensorBox& target, std::span<std::byte> out) const {
  for (const Piece& piece : pieces_) {
    const auto read = [&](int64_t offset, std::span<std::byte> bytes) {
      return read_(*piece.part, offset, bytes);
    };
    STOCKPOT_RETURN_IF_ERROR(CopyRuns(piece.bytes, read, target, out));
  }
  return OkStatus();
}

// A range of bytes is a few boxes: whole rows of some dimension, as far out as they fit.
Status RawTensorReader::Read(int64_t offset, std::span<std::byte> out) const {
  const auto size = static_cast<int64_t>(out.size());
  const int64_t bytes = entry_.logical_bytes();
  if (offset < 0 || offset > bytes || size > bytes - offset) {
    return InvalidArgument("bytes [" + std::to_string(offset) + ", +" + std::to_string(size) +
                           ") of a tensor of " + std::to_string(bytes));
  }
  if (pieces_.size() == 1) return read_(*pieces_[0].part, offset, out);
  const int64_t end = offset + size;
  while (offset < end) {
    TensorBox box{.offsets = std::vector<int64_t>(byte_shape_.size(), 0), .shape = byte_shape_};
    int64_t row = bytes;  // bytes of a step in dimension `dim`
    for (size_t dim = 0; dim < byte_shape_.size(); ++dim) {
      row /= byte_shape_[dim];
      const int64_t index = offset / row % byte_shape_[dim];
      box.offsets[dim] = index;
      box.shape[dim] = 1;
      if (offset % row != 0 || offset + row > end) continue;
      box.shape[dim] = std::min((end - offset) / row, byte_shape_[dim] - index);
      break;  // and all of the dimensions inside
    }
    const int64_t n = box.elements();
    STOCKPOT_RETURN_IF_ERROR(ReadBytes(box, out.first(static_cast<size_t>(n))));
    out = out.subspan(static_cast<size_t>(n));
    offset += n;
  }
  return OkStatus();
}

Status RawTensorReader::ReadBox(const TensorBox& box, std::span<std::byte> out) const {
  STOCKPOT_RETURN_IF_ERROR(CheckBox(entry_.shape, box));
  const TensorBox bytes = ByteBox(box, DTypeSize(entry_.dtype));
  if (bytes.elements() != static_cast<int64_t>(out.size())) {
    return InvalidArgument(BoxText(box) + " has " + std::to_string(bytes.elements()) +
                           " bytes, not " + std::to_string(out.size()));
  }
  return ReadBytes(bytes, out);
}

}  // namespace stockpot
