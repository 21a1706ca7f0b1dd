#include "tests/fuzz/served_store.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <thrift/processor/TMultiplexedProcessor.h>
#include <thrift/protocol/TProtocolDecorator.h>
#include <thrift/transport/TBufferTransports.h>
#include <thrift/transport/TSocket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "kernels/base/check.h"
#include "tests/fuzz/target.h"
#include "thrift/wire.h"

namespace {

uint8_t g_random_numbers = 0;  // given since the last restart: one a session

}  // namespace

// What getrandom(2) is to the code under test: session ids come from it.
extern "C" ssize_t __wrap_getrandom(void* buffer, size_t length, unsigned int) {
  std::memset(buffer, 0, length);
  static_cast<uint8_t*>(buffer)[length - 1] = ++g_random_numbers;
  return static_cast<ssize_t>(length);
}

// glibc's list of what a thread destroys at its end hangs on a variable of that thread, which
// LeakSanitizer does not read for RocksDB's pool: the pool's threads live as long as the process.
extern "C" const char* __lsan_default_suppressions() { return "leak:__cxa_thread_atexit_impl"; }

namespace stockpot::fuzz {
namespace {

using apache::thrift::protocol::TMessageType;
using apache::thrift::protocol::TProtocol;
using apache::thrift::protocol::TProtocolDecorator;
using apache::thrift::transport::TMemoryBuffer;
using apache::thrift::transport::TSocket;

constexpr size_t kMaxConversationBytes = 150'000;  // what a socket takes before anybody reads
constexpr int64_t kNowMs = 4'000'000'000'000;      // 2096: every grace is over
constexpr int64_t kJobsMs = 60'000;
constexpr size_t kBigBytes = 70'000;

Part Put(CheckpointStore& store, std::string_view bytes) {
  const Result<Part> part = store.PutBytes(AsBytes(bytes));
  STOCKPOT_CHECK(part.ok(), part.status().ToString());
  return *part;
}

TensorEntry PutTensor(CheckpointStore& store, const std::string& name, DType dtype,
                      std::vector<int64_t> shape, std::string_view bytes) {
  TensorEntry tensor{.name = name, .dtype = dtype, .shape = std::move(shape)};
  tensor.parts["data"] = Put(store, bytes);
  return tensor;
}

ShardCommit Model(CheckpointStore& store, char fill) {
  ShardCommit shard;
  shard.tensors.push_back(PutTensor(store, "a", DType::kF32, {2, 3}, std::string(24, fill)));
  shard.tensors.push_back(PutTensor(store, "b", DType::kBF16, {4}, std::string(8, fill)));
  shard.tensors.push_back(PutTensor(store, "big", DType::kU8, {static_cast<int64_t>(kBigBytes)},
                                    std::string(kBigBytes, 'b')));
  shard.files["config.json"] = Put(store, "{}");
  return shard;
}

void CommitTo(Ingest& ingest, const SessionRequest& request, ShardCommit shard) {
  const Result<std::string> session = ingest.OpenSession(request);
  STOCKPOT_CHECK(session.ok(), session.status().ToString());
  const Result<CommitReply> reply = ingest.CommitShard(*session, std::move(shard));
  STOCKPOT_CHECK(reply.ok(), reply.status().ToString());
}

Result<Manifest> RefuseToMerge(CheckpointStore&, std::span<const Digest>, const std::string&,
                               int64_t, const MergeOptions&, const ProgressFunction&) {
  return InvalidArgument("the fuzzers do not merge");
}

template <typename Parts, typename Facts>
std::shared_ptr<rpc::CheckpointServiceIf> CheckpointHandlerOf(const Parts& parts,
                                                              const Facts& facts) {
  if constexpr (requires { MakeCheckpointHandler(parts, facts); }) {
    return MakeCheckpointHandler(parts, facts);
  } else {
    return MakeCheckpointHandler(parts);
  }
}

// Hears which call is read, and keeps the paths that it names inside a folder.
class ConfinedProtocol : public TProtocolDecorator {
 public:
  ConfinedProtocol(const std::shared_ptr<TProtocol>& inner, std::filesystem::path folder)
      : TProtocolDecorator(inner), inner_(inner), folder_(std::move(folder)) {}

  uint32_t readMessageBegin_virt(std::string& name, TMessageType& type,
                                 int32_t& sequence) override {
    const uint32_t size = inner_->readMessageBegin(name, type, sequence);
    names_path_ = name.ends_with(":backup") || name.ends_with(":scrub");
    puts_chunks_ |= name.ends_with(":put_chunk");
    return size;
  }
  uint32_t readString_virt(std::string& text) override {
    const uint32_t size = inner_->readString(text);
    if (names_path_ && !text.empty()) {
      text = (folder_ / ("backup" + std::to_string(text.size() % 2))).string();
    }
    return size;
  }
  bool puts_chunks() const { return puts_chunks_; }

 private:
  const std::shared_ptr<TProtocol> inner_;
  const std::filesystem::path folder_;
  bool names_path_ = false;
  bool puts_chunks_ = false;
};

}  // namespace

ServedStore::ServedStore() {
  facts_.Stop();  // who waits for events does not wait
  Open(folder_.path() / "template");
  CommitTo(*ingest_, {.kind = ArtifactKind::kBase, .run = "base"}, Model(*store_, '0'));
  const RunConfig config{.publish = PublishPolicy::kOnRequest};
  STOCKPOT_CHECK(ingest_->CreateRun("run", "base", config, {}).ok());
  ShardCommit shard = Model(*store_, '1');
  shard.metrics["loss"] = 2.5;
  CommitTo(*ingest_, {.run = "run", .step = 1}, std::move(shard));
  Close();
  std::filesystem::copy(folder_.path() / "template", folder_.path() / "store",
                        std::filesystem::copy_options::recursive);
  Open(folder_.path() / "store");
}

ServedStore::~ServedStore() { Close(); }

void ServedStore::Open(const std::filesystem::path& folder) {
  Result<std::unique_ptr<CheckpointStore>> store = CheckpointStore::Open(
      {.directory = folder, .clock = [] { return kNowMs; }, .free_bytes_reserve = 0});
  STOCKPOT_CHECK(store.ok(), store.status().ToString());
  store_ = *std::move(store);
  pipeline_ = std::make_unique<Pipeline>(
      *store_, Pipeline::Options{.merge = RefuseToMerge, .threads = 1, .clock = SystemClock()});
  first_event_ = store_->LastEvent();
  MakeParts();
}

// Sessions live in the ingest: a new one has none.
void ServedStore::MakeParts() {
  g_random_numbers = 0;
  chunks_put_ = false;
  processor_.reset();
  ingest_ = std::make_unique<Ingest>(*store_, IngestLimits{}, [] { return kNowMs; });
  const RpcServerParts parts{
      .store = *store_, .ingest = *ingest_, .pipeline = *pipeline_, .control = {.version = "fuzz"}};
  const auto services = std::make_shared<apache::thrift::TMultiplexedProcessor>();
  services->registerProcessor("checkpoint", std::make_shared<rpc::CheckpointServiceProcessor>(
                                                CheckpointHandlerOf(parts, facts_)));
  services->registerProcessor(
      "lineage", std::make_shared<rpc::LineageServiceProcessor>(MakeLineageHandler(parts)));
  services->registerProcessor(
      "control", std::make_shared<rpc::ControlServiceProcessor>(MakeControlHandler(parts, facts_)));
  services->registerProcessor("pool",
                              std::make_shared<rpc::PoolServiceProcessor>(MakePoolHandler(parts)));
  processor_ = services;
}

void ServedStore::Close() {
  processor_.reset();
  if (store_) store_->Shutdown();
  pipeline_.reset();
  ingest_.reset();
  store_.reset();
}

bool ServedStore::changed() const { return store_->LastEvent() != first_event_; }

void ServedStore::Restart() {
  if (!changed() && !chunks_put_) {
    MakeParts();
    return;
  }
  Close();
  for (const char* name : {"store", "backup0", "backup1"}) {
    std::filesystem::remove_all(folder_.path() / name);
  }
  std::filesystem::copy(folder_.path() / "template", folder_.path() / "store",
                        std::filesystem::copy_options::recursive);
  Open(folder_.path() / "store");
}

std::string ServedStore::Converse(std::string_view bytes) {
  if (bytes.size() > kMaxConversationBytes) return {};
  int ends[2];
  STOCKPOT_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  STOCKPOT_CHECK(::send(ends[1], bytes.data(), bytes.size(), MSG_DONTWAIT) ==
                 static_cast<ssize_t>(bytes.size()));
  ::shutdown(ends[1], SHUT_WR);
  const auto input =
      std::make_shared<WireTransport>(std::make_shared<TSocket>(ends[0]), WireOptions{});
  CallMemory memory(rpc_limits::kAllCallsBytes);
  const auto wire = MakeWireProtocol(input, rpc_limits::kServerMaxStringBytes, &memory);
  const auto in = std::make_shared<ConfinedProtocol>(wire, folder_.path());
  const auto output = std::make_shared<TMemoryBuffer>();
  const auto out = MakeWireProtocol(output, rpc_limits::kServerMaxStringBytes);
  try {
    while (processor_->process(in, out, nullptr) && input->peek()) wire->EndCall();
  } catch (const apache::thrift::TException&) {  // the connection is closed
  }
  chunks_put_ |= in->puts_chunks();
  ::close(ends[1]);
  return output->getBufferAsString();
}

void ServedStore::CheckWhole() {
  // Always: what a thread that still works holds for a moment can look like a leak.
  STOCKPOT_CHECK(pipeline_->WaitIdle(kJobsMs));
  if (!changed()) return;
  const Result<ScrubReport> report = store_->Scrub(nullptr);
  STOCKPOT_CHECK(report.ok(), report.status().ToString());
  for (const auto& damage : report->damaged) STOCKPOT_CHECK(false, damage.error);
  for (const Digest& artifact : store_->ListArtifacts()) {
    const Result<Manifest> manifest = store_->GetManifest(artifact);
    STOCKPOT_CHECK(manifest.ok(), manifest.status().ToString());
  }
  for (const Alias& alias : store_->ListAliases()) {
    STOCKPOT_CHECK(store_->HasArtifact(alias.artifact), alias.name);
  }
}

std::string ServedStore::SessionId(int n) {
  char id[33];
  std::snprintf(id, sizeof id, "%032x", n & 0xFF);
  return id;
}

uint32_t LoopTransport::read(uint8_t* buffer, uint32_t length) {
  const size_t size = std::min<size_t>(length, reply_.size());
  std::memcpy(buffer, reply_.data(), size);
  reply_.erase(0, size);
  return static_cast<uint32_t>(size);
}

void LoopTransport::write(const uint8_t* buffer, uint32_t length) {
  request_.append(reinterpret_cast<const char*>(buffer), length);
}

void LoopTransport::flush() {
  sent_ += request_;
  reply_ = served_.Converse(request_);
  request_.clear();
}

}  // namespace stockpot::fuzz
