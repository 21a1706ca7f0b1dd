#include "thrift/upload.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/base/check.h"
#include "thrift/limits.h"

namespace stockpot {
namespace {

constexpr int64_t kBatchBytes = int64_t{16} << 20;  // read, hashed, asked about and sent together
constexpr size_t kBatchChunks = 1024;               // of small tensors

// A tensor or a file: the digests of its chunks are filled in as they are hashed.
struct Item {
  std::string name;
  const TensorInfo* tensor = nullptr;  // null: a file
  std::string contents;                // of a file
  int64_t bytes = 0;
  std::vector<Digest> chunks;
};

struct ChunkRef {
  size_t item = 0;
  int64_t index = 0;
  int64_t offset = 0;  // in the item
  int64_t bytes = 0;
};

class Upload {
 public:
  Upload(const TensorSource& source, const UploadOptions& options)
      : source_(source), options_(options) {}

  Status Plan();
  Status Send(std::span<Client* const> clients, const std::string& session);
  rpc::Shard MakeShard(const std::map<std::string, double>& metrics) const;
  const UploadProgress& progress() const { return progress_; }

 private:
  void AddItem(Item item);
  void Work(Client& client, const std::string& session);
  Status SendBatch(Client& client, const std::string& session, std::span<const ChunkRef> batch,
                   std::vector<std::byte>& buffer);
  std::span<const std::byte> Borrow(const ChunkRef& chunk) const;
  Status Load(const ChunkRef& chunk, std::span<std::byte> out) const;
  std::span<const ChunkRef> NextBatch();
  void Advance(int64_t done_bytes, int64_t sent_bytes);
  void Fail(Status status);
  bool Stopped();

  const TensorSource& source_;
  const UploadOptions& options_;
  std::vector<Item> items_;
  std::vector<ChunkRef> chunks_;

  std::mutex mutex_;
  size_t next_chunk_ = 0;    // guarded
  Status status_;            // guarded: the first failure
  UploadProgress progress_;  // guarded
};

void Upload::AddItem(Item item) {
  const int64_t count = ChunkCount(item.bytes);
  item.chunks.resize(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t offset = i * kChunkBytes;
    chunks_.push_back({items_.size(), i, offset, std::min(kChunkBytes, item.bytes - offset)});
  }
  progress_.total_bytes += item.bytes;
  items_.push_back(std::move(item));
}

Status Upload::Plan() {
  for (const TensorInfo& tensor : source_.tensors()) {
    AddItem({.name = tensor.name,
             .tensor = &tensor,
             .bytes = tensor.alias_of.empty() ? tensor.bytes() : 0});
  }
  for (const std::string& name : source_.files()) {
    Result<std::string> contents = source_.ReadFile(name);
    if (!contents.ok()) return contents.status().WithContext("file '" + name + "'");
    const int64_t bytes = static_cast<int64_t>(contents->size());
    AddItem({.name = name, .contents = *std::move(contents), .bytes = bytes});
  }
  return OkStatus();
}

std::span<const ChunkRef> Upload::NextBatch() {
  const std::lock_guard lock(mutex_);
  const size_t begin = next_chunk_;
  int64_t bytes = 0;
  while (next_chunk_ < chunks_.size() && next_chunk_ - begin < kBatchChunks &&
         bytes + chunks_[next_chunk_].bytes <= kBatchBytes) {
    bytes += chunks_[next_chunk_++].bytes;
  }
  return std::span(chunks_).subspan(begin, next_chunk_ - begin);
}

void Upload::Fail(Status status) {
  const std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = std::move(status);
}

bool Upload::Stopped() {
  if (options_.cancel != nullptr && options_.cancel->load()) Fail(Unavailable("upload given up"));
  const std::lock_guard lock(mutex_);
  return !status_.ok();
}

void Upload::Advance(int64_t done_bytes, int64_t sent_bytes) {
  const std::lock_guard lock(mutex_);
  progress_.done_bytes += done_bytes;
  progress_.sent_bytes += sent_bytes;
  if (options_.progress) options_.progress(progress_);
}

// Staged tensors are hashed and sent from where they are.
std::span<const std::byte> Upload::Borrow(const ChunkRef& chunk) const {
  const Item& item = items_[chunk.item];
  if (item.tensor == nullptr || !options_.borrow) return {};
  return options_.borrow(item.name, chunk.offset, chunk.bytes);
}

Status Upload::Load(const ChunkRef& chunk, std::span<std::byte> out) const {
  const Item& item = items_[chunk.item];
  if (item.tensor == nullptr) {
    std::memcpy(out.data(), item.contents.data() + chunk.offset, out.size());
    return OkStatus();
  }
  return source_.Read(item.name, chunk.offset, out).WithContext("tensor '" + item.name + "'");
}

Status Upload::SendBatch(Client& client, const std::string& session,
                         std::span<const ChunkRef> batch, std::vector<std::byte>& buffer) {
  std::vector<ChunkView> views;
  std::vector<Digest> digests;
  int64_t used = 0;
  for (const ChunkRef& chunk : batch) {
    std::span<const std::byte> bytes = Borrow(chunk);
    if (bytes.empty()) {
      buffer.resize(kBatchBytes);
      const std::span<std::byte> copy = std::span(buffer).subspan(used, chunk.bytes);
      STOCKPOT_RETURN_IF_ERROR(Load(chunk, copy));
      bytes = copy;
    }
    used += chunk.bytes;
    const Digest digest = Sha256(bytes);
    items_[chunk.item].chunks[chunk.index] = digest;  // each element has one writer
    views.push_back({digest, bytes});
    digests.push_back(digest);
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<bool> have, client.HaveChunks(session, digests));
  std::vector<ChunkView> missing;
  int64_t missing_bytes = 0;
  for (size_t i = 0; i < views.size(); ++i) {
    if (have[i]) continue;
    missing.push_back(views[i]);
    missing_bytes += static_cast<int64_t>(views[i].data.size());
  }
  STOCKPOT_RETURN_IF_ERROR(client.PutChunks(session, missing));
  Advance(used, missing_bytes);
  return OkStatus();
}

void Upload::Work(Client& client, const std::string& session) {
  std::vector<std::byte> buffer;
  while (!Stopped()) {
    const std::span<const ChunkRef> batch = NextBatch();
    if (batch.empty()) return;
    if (Status status = SendBatch(client, session, batch, buffer); !status.ok()) Fail(status);
  }
}

Status Upload::Send(std::span<Client* const> clients, const std::string& session) {
  std::vector<std::thread> threads;
  for (Client* client : clients.subspan(1)) {
    threads.emplace_back([this, client, &session] { Work(*client, session); });
  }
  Work(*clients[0], session);
  for (std::thread& thread : threads) thread.join();
  return status_;
}

rpc::Shard Upload::MakeShard(const std::map<std::string, double>& metrics) const {
  rpc::Shard shard;
  shard.metrics = metrics;
  for (const Item& item : items_) {
    rpc::Part part;
    part.bytes = item.bytes;
    for (const Digest& digest : item.chunks) part.chunks.emplace_back(digest.raw());
    if (item.tensor == nullptr) {
      shard.files[item.name] = std::move(part);
      continue;
    }
    rpc::Tensor tensor;
    tensor.name = item.name;
    tensor.dtype = DTypeName(item.tensor->dtype);
    tensor.shape = item.tensor->shape;
    tensor.alias_of = item.tensor->alias_of;
    tensor.data = std::move(part);
    if (options_.placements != nullptr) {
      const auto placed = options_.placements->find(item.name);
      if (placed != options_.placements->end()) {
        if (!placed->second.name.empty()) tensor.name = placed->second.name;
        tensor.group = placed->second.group;
        tensor.global_shape = placed->second.global_shape;
        tensor.offsets = placed->second.offsets;
      }
    }
    shard.tensors.push_back(std::move(tensor));
  }
  return shard;
}

}  // namespace

Result<UploadReport> UploadArtifact(std::span<Client* const> clients,
                                    const rpc::SessionRequest& request, const TensorSource& source,
                                    const std::map<std::string, double>& metrics,
                                    const UploadOptions& options) {
  STOCKPOT_CHECK(
      !clients.empty() && static_cast<int64_t>(clients.size()) <= rpc_limits::kMaxUploadConnections,
      clients.size());
  Upload upload(source, options);
  STOCKPOT_RETURN_IF_ERROR(upload.Plan());
  STOCKPOT_ASSIGN_OR_RETURN(const std::string session, clients[0]->OpenSession(request));
  Status status = upload.Send(clients, session);
  if (!status.ok()) {
    // Courtesy: without it the session ends when it has been idle for long enough.
    if (status.code() != StatusCode::kUnavailable) (void)clients[0]->Abort(session);
    return status;
  }
  STOCKPOT_ASSIGN_OR_RETURN(rpc::CommitReply commit,
                            clients[0]->CommitShard(session, upload.MakeShard(metrics)));
  return UploadReport{std::move(commit), upload.progress()};
}

}  // namespace stockpot
