#include "trainer_hooks/cpp/staging.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "kernels/base/check.h"
#include "store/names.h"

namespace stockpot {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kCopyPiece = int64_t{4} << 20;  // what one thread copies before it asks for more

// A run of bytes of one tensor.
struct Piece {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t bytes = 0;
};

// The bytes of the view. InvalidArgument: a negative or too large shape, no data.
Result<int64_t> CheckedBytes(const TensorView& view) {
  const std::string what = "tensor '" + view.name + "'";
  if (view.name.empty()) return InvalidArgument("a tensor has no name");
  if (static_cast<int64_t>(view.shape.size()) > kMaxRank) {
    return InvalidArgument(what + " has more than " + std::to_string(kMaxRank) + " dimensions");
  }
  int64_t bytes = DTypeSize(view.dtype);
  for (const int64_t size : view.shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes) || bytes > kMaxTensorBytes) {
      return InvalidArgument(what + " has an impossible shape");
    }
  }
  if (view.alias_of.empty() && view.data == nullptr && view.read == nullptr && bytes > 0) {
    return InvalidArgument(what + " has no data");
  }
  return bytes;
}

// That a piece lies within its tensor.
Status CheckPiece(const TensorView& view) {
  if (view.global_shape.empty() && view.offsets.empty()) return OkStatus();
  const std::string what = "tensor '" + view.name + "'";
  if (!view.alias_of.empty()) return InvalidArgument(what + ": an alias is of the whole tensor");
  const size_t rank = view.shape.size();
  if (view.global_shape.size() != rank || view.offsets.size() != rank) {
    return InvalidArgument(what + ": shape, global_shape and offsets of a piece have one length");
  }
  for (size_t i = 0; i < rank; ++i) {
    if (view.offsets[i] < 0 || view.offsets[i] > view.global_shape[i] - view.shape[i]) {
      return InvalidArgument(what + ": a piece of " + ShapeText(view.shape) + " at " +
                             ShapeText(view.offsets) + " is not within " +
                             ShapeText(view.global_shape));
    }
  }
  return OkStatus();
}

}  // namespace

Result<StagingBuffer> StagingBuffer::Allocate(int64_t bytes, const StagingAllocator& allocator) {
  StagingBuffer buffer;
  if (bytes == 0) return buffer;
  if (allocator != nullptr) {
    buffer.memory_ = allocator(bytes);
    if (buffer.memory_ == nullptr) {
      return ResourceExhausted("no staging memory of " + std::to_string(bytes) + " bytes");
    }
  } else {
    void* memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return ErrnoStatus(errno, "staging memory for a checkpoint");
    ::madvise(memory, bytes, MADV_HUGEPAGE);  // fewer faults in the first copy; may be refused
    buffer.memory_ = std::shared_ptr<void>(memory, [bytes](void* p) { ::munmap(p, bytes); });
  }
  buffer.bytes_ = bytes;
  return buffer;
}

StagingBuffer::StagingBuffer(StagingBuffer&& other) noexcept
    : memory_(std::move(other.memory_)), bytes_(std::exchange(other.bytes_, 0)) {}

StagingBuffer& StagingBuffer::operator=(StagingBuffer&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Status StagedCheckpoint::Add(const TensorView& view) {
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t bytes, CheckedBytes(view));
  STOCKPOT_RETURN_IF_ERROR(CheckPiece(view));
  if (!view.group.empty() && !IsValidGroupName(view.group)) {
    return InvalidArgument("tensor '" + view.name + "': '" + view.group +
                           "' is no name of a group");
  }
  infos_.push_back({view.name, view.dtype, view.shape, view.alias_of});
  if (!view.group.empty() || !view.offsets.empty()) {
    placements_[view.name] = {
        .group = view.group, .global_shape = view.global_shape, .offsets = view.offsets};
  }
  if (!view.alias_of.empty()) return OkStatus();
  places_.emplace(view.name, Place{bytes_, bytes});
  bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return OkStatus();
}

// REQUIRES: infos_ is sorted.
Status StagedCheckpoint::CheckAliases() {
  const auto group_of = [&](const std::string& name) {
    const auto found = placements_.find(name);
    return found == placements_.end() ? std::string() : found->second.group;
  };
  for (const TensorInfo& info : infos_) {
    if (info.alias_of.empty()) continue;
    const std::string what =
        "tensor '" + info.name + "' is tied to '" + info.alias_of + "', which ";
    if (!places_.contains(info.alias_of)) return InvalidArgument(what + "is not there");
    if (group_of(info.name) != group_of(info.alias_of)) {
      return InvalidArgument(what + "is of another group");
    }
  }
  return OkStatus();
}

Result<std::unique_ptr<StagedCheckpoint>> StagedCheckpoint::Plan(
    int64_t step, std::span<const TensorView> tensors, const std::map<std::string, double>& metrics,
    const std::map<std::string, std::string>& files, int32_t world) {
  if (step < 0) return InvalidArgument("step " + std::to_string(step) + " is negative");
  if (tensors.empty() && world == 1) return InvalidArgument("a checkpoint without tensors");
  std::unique_ptr<StagedCheckpoint> staged(new StagedCheckpoint(files));
  staged->step_ = step;
  staged->metrics_ = metrics;
  for (const TensorView& view : tensors) STOCKPOT_RETURN_IF_ERROR(staged->Add(view));
  std::vector<TensorInfo>& infos = staged->infos_;
  std::sort(infos.begin(), infos.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  const auto twice =
      std::adjacent_find(infos.begin(), infos.end(),
                         [](const TensorInfo& a, const TensorInfo& b) { return a.name == b.name; });
  if (twice != infos.end()) return InvalidArgument("tensor '" + twice->name + "' is there twice");
  STOCKPOT_RETURN_IF_ERROR(staged->CheckAliases());
  return staged;
}

Status StagedCheckpoint::Fill(StagingBuffer buffer, std::span<const TensorView> tensors,
                              ThreadPool& threads) {
  STOCKPOT_CHECK(buffer.bytes() >= bytes_, buffer.bytes(), bytes_);
  buffer_ = std::move(buffer);
  std::vector<Piece> pieces;
  for (const TensorView& view : tensors) {
    if (!view.alias_of.empty()) continue;
    const Place& place = places_.find(view.name)->second;
    std::byte* const to = buffer_.data() + place.offset;
    if (view.data == nullptr && view.read != nullptr) {
      STOCKPOT_RETURN_IF_ERROR(view.read(std::span(to, static_cast<size_t>(place.bytes)))
                                   .WithContext("tensor '" + view.name + "'"));
      continue;
    }
    for (int64_t done = 0; done < place.bytes; done += kCopyPiece) {
      pieces.push_back({static_cast<const std::byte*>(view.data) + done, to + done,
                        std::min(kCopyPiece, place.bytes - done)});
    }
  }
  threads.ParallelFor(static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(pieces[i].to, pieces[i].from, pieces[i].bytes);
    }
  });
  return OkStatus();
}

const StagedCheckpoint::Place* StagedCheckpoint::FindPlace(std::string_view name) const {
  const TensorInfo* info = Find(name);
  if (info == nullptr) return nullptr;
  return &places_.find(info->alias_of.empty() ? info->name : info->alias_of)->second;
}

std::span<const std::byte> StagedCheckpoint::Borrow(std::string_view name, int64_t offset,
                                                    int64_t bytes) const {
  const Place* place = FindPlace(name);
  if (place == nullptr || offset < 0 || bytes > place->bytes - offset) return {};
  return {buffer_.data() + place->offset + offset, static_cast<size_t>(bytes)};
}

Status StagedCheckpoint::Read(std::string_view name, int64_t offset,
                              std::span<std::byte> out) const {
  if (Find(name) == nullptr) return NotFound("no tensor '" + std::string(name) + "'");
  const auto bytes = Borrow(name, offset, static_cast<int64_t>(out.size()));
  if (bytes.size() != out.size()) {
    return InvalidArgument("a read past the end of '" + std::string(name) + "'");
  }
  if (!out.empty()) std::memcpy(out.data(), bytes.data(), out.size());
  return OkStatus();
}

Result<std::string> StagedCheckpoint::ReadFile(std::string_view name) const {
  const auto found = files_.find(std::string(name));
  if (found == files_.end()) return NotFound("no file '" + std::string(name) + "'");
  return found->second;
}

std::vector<std::string> StagedCheckpoint::files() const {
  std::vector<std::string> names;
  for (const auto& [name, contents] : files_) names.push_back(name);
  return names;
}

}  // namespace stockpot
