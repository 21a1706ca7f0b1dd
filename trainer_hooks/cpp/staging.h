// The memory between a training loop and its uploads. Internal to the hook.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/threads.h"
#include "store/tensor_source.h"
#include "thrift/upload.h"
#include "trainer_hooks/cpp/checkpoint_hook.h"

namespace stockpot {

// Memory that is given back when it dies.
class StagingBuffer {
 public:
  // ResourceExhausted if there is none. `allocator` null: page-aligned memory of the system, whose
  // pages are touched by the first copy.
  static Result<StagingBuffer> Allocate(int64_t bytes, const StagingAllocator& allocator);
  StagingBuffer() = default;
  StagingBuffer(StagingBuffer&& other) noexcept;
  StagingBuffer& operator=(StagingBuffer&& other) noexcept;

  std::byte* data() const { return static_cast<std::byte*>(memory_.get()); }
  int64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<void> memory_;
  int64_t bytes_ = 0;
};

// A checkpoint, or one rank's part of it, as it was at the call. Immutable once filled.
class StagedCheckpoint : public TensorSource {
 public:
  // Checks names, shapes, pieces and aliases; lays the tensors out. InvalidArgument names the
  // tensor. Copies nothing yet. `files` must outlive this. One of several ranks may hold nothing.
  static Result<std::unique_ptr<StagedCheckpoint>> Plan(
      int64_t step, std::span<const TensorView> tensors,
      const std::map<std::string, double>& metrics, const std::map<std::string, std::string>& files,
      int32_t world = 1);

  // Copies the bytes into `buffer` (of at least bytes()). The views are those of Plan. A status
  // that is not OK is of a view's `read`, and names the tensor; the buffer is kept.
  Status Fill(StagingBuffer buffer, std::span<const TensorView> tensors, ThreadPool& threads);
  StagingBuffer TakeBuffer() { return std::move(buffer_); }
  int64_t buffer_bytes() const { return buffer_.bytes(); }

  int64_t step() const { return step_; }
  int64_t bytes() const { return bytes_; }
  const std::map<std::string, double>& metrics() const { return metrics_; }
  const TensorPlacements& placements() const { return placements_; }

  // Of a piece: its own shape; of an alias: that of the whole tensor.
  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  Status Read(std::string_view name, int64_t offset, std::span<std::byte> out) const override;
  // The same bytes where they are.
  std::span<const std::byte> Borrow(std::string_view name, int64_t offset, int64_t bytes) const;
  Result<std::string> ReadFile(std::string_view name) const override;
  std::vector<std::string> files() const override;

 private:
  explicit StagedCheckpoint(const std::map<std::string, std::string>& files) : files_(files) {}

  struct Place {
    int64_t offset = 0;  // in the buffer
    int64_t bytes = 0;
  };
  Status Add(const TensorView& view);
  Status CheckAliases();
  const Place* FindPlace(std::string_view name) const;  // of the target, for an alias

  int64_t step_ = 0;
  int64_t bytes_ = 0;
  std::map<std::string, double> metrics_;
  TensorPlacements placements_;
  const std::map<std::string, std::string>& files_;
  std::vector<TensorInfo> infos_;                     // by name
  std::map<std::string, Place, std::less<>> places_;  // of tensors with bytes of their own
  StagingBuffer buffer_;
};

}  // namespace stockpot
