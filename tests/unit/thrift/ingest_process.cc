#include "tests/unit/thrift/ingest_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

extern char** environ;

namespace stockpot {

Result<std::unique_ptr<IngestProcess>> IngestProcess::Start(
    const std::string& program, const std::filesystem::path& directory) {
  int input[2];
  int output[2];
  if (::pipe2(input, O_CLOEXEC) != 0 || ::pipe2(output, O_CLOEXEC) != 0) {
    return ErrnoStatus(errno, "pipe");
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output[1], STDOUT_FILENO);
  const std::string folder = directory.string();
  char* const arguments[] = {const_cast<char*>(program.c_str()), const_cast<char*>(folder.c_str()),
                             nullptr};
  pid_t pid = 0;
  const int error = ::posix_spawn(&pid, program.c_str(), &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(input[0]);
  ::close(output[1]);
  if (error != 0) return ErrnoStatus(error, program);
  std::unique_ptr<IngestProcess> process(new IngestProcess(pid, input[1]));
  FILE* lines = ::fdopen(output[0], "r");
  char line[256] = {};
  const bool told = std::fgets(line, sizeof line, lines) != nullptr;
  std::fclose(lines);
  if (!told) return Unavailable(program + " does not serve");
  process->address_.assign(line, std::strcspn(line, "\n"));
  return process;
}

IngestProcess::~IngestProcess() {
  ::close(input_);
  ::waitpid(pid_, nullptr, 0);
}

int64_t IngestProcess::StatusLine(const std::string& key) const {
  std::ifstream in("/proc/" + std::to_string(pid_) + "/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(key)) return std::strtoll(line.c_str() + key.size(), nullptr, 10) * 1024;
  }
  return -1;
}

int64_t IngestProcess::resident_bytes() const { return StatusLine("VmRSS:"); }
int64_t IngestProcess::peak_resident_bytes() const { return StatusLine("VmHWM:"); }

MemoryModel::MemoryModel(std::span<const std::byte> data, int64_t tensor_bytes)
    : data_(data), tensor_bytes_(tensor_bytes) {
  for (int64_t i = 0; i * tensor_bytes < static_cast<int64_t>(data.size()); ++i) {
    char name[32];
    std::snprintf(name, sizeof name, "tensor%05ld", static_cast<long>(i));
    infos_.push_back({name, DType::kU8, {tensor_bytes}, ""});
  }
}

std::span<const std::byte> MemoryModel::Borrow(std::string_view name, int64_t offset,
                                               int64_t bytes) const {
  const int64_t index = std::strtoll(std::string(name.substr(6)).c_str(), nullptr, 10);
  return data_.subspan(static_cast<size_t>(index * tensor_bytes_ + offset),
                       static_cast<size_t>(bytes));
}

Status MemoryModel::Read(std::string_view name, int64_t offset, std::span<std::byte> out) const {
  const auto from = Borrow(name, offset, static_cast<int64_t>(out.size()));
  std::memcpy(out.data(), from.data(), out.size());
  return OkStatus();
}

Result<std::string> MemoryModel::ReadFile(std::string_view) const { return std::string("{}"); }

}  // namespace stockpot
