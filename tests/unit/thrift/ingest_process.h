// ingest_server as a child process, and large models for it.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "store/tensor_source.h"

namespace stockpot {

class IngestProcess {
 public:
  // `program`: the path of ingest_server. Serves a store in `directory` when it returns.
  static Result<std::unique_ptr<IngestProcess>> Start(const std::string& program,
                                                      const std::filesystem::path& directory);
  ~IngestProcess();  // ends it and waits
  IngestProcess(const IngestProcess&) = delete;

  const std::string& address() const { return address_; }
  int64_t resident_bytes() const;       // now
  int64_t peak_resident_bytes() const;  // since its start

 private:
  IngestProcess(pid_t pid, int input) : pid_(pid), input_(input) {}
  int64_t StatusLine(const std::string& key) const;

  const pid_t pid_;
  const int input_;  // it serves as long as this is open
  std::string address_;
};

// A model of U8 tensors that are pieces of one memory, borrowed, as staging is: one a
// `tensor_bytes`.
class MemoryModel : public TensorSource {
 public:
  MemoryModel(std::span<const std::byte> data, int64_t tensor_bytes);

  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  Status Read(std::string_view name, int64_t offset, std::span<std::byte> out) const override;
  // The same bytes where they are.
  std::span<const std::byte> Borrow(std::string_view name, int64_t offset, int64_t bytes) const;
  Result<std::string> ReadFile(std::string_view name) const override;
  std::vector<std::string> files() const override { return {"config.json"}; }

 private:
  const std::span<const std::byte> data_;
  const int64_t tensor_bytes_;
  std::vector<TensorInfo> infos_;
};

}  // namespace stockpot
