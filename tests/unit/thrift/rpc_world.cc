#include "tests/unit/thrift/rpc_world.h"

#include "thrift/upload.h"

namespace stockpot {

Result<Manifest> RefuseToMerge(CheckpointStore&, std::span<const Digest>, const std::string&,
                               int64_t, const MergeOptions&, const ProgressFunction&) {
  return Internal("this test does not merge");
}

RpcWorld::RpcWorld(RpcServerOptions options, MergeFunction merge, DaemonControl control)
    : options_(std::move(options)), merge_(std::move(merge)), control_(std::move(control)) {
  Start();
}

RpcWorld::~RpcWorld() { Stop(); }

void RpcWorld::Start() {
  Result<std::unique_ptr<CheckpointStore>> store = CheckpointStore::Open(
      {.directory = folder_.path() / "store", .clock = SystemClock(), .free_bytes_reserve = 0});
  ASSERT_OK(store);
  store_ = *std::move(store);
  ingest_ = std::make_unique<Ingest>(*store_, IngestLimits{}, SystemClock());
  pipeline_ = std::make_unique<Pipeline>(
      *store_, Pipeline::Options{.merge = merge_, .threads = 1, .clock = SystemClock()});
  RpcServerOptions options = options_;
  options.addresses = {tcp_, unix_socket()};
  Result<std::unique_ptr<RpcServer>> server = RpcServer::Start(
      {.store = *store_, .ingest = *ingest_, .pipeline = *pipeline_, .control = control_}, options);
  ASSERT_OK(server);
  server_ = *std::move(server);
  tcp_ = server_->addresses()[0].ToString();
}

void RpcWorld::Stop() {
  if (server_) server_->Stop();
  if (store_) store_->Shutdown();
  server_.reset();
  pipeline_.reset();
  ingest_.reset();
  store_.reset();
}

std::string RpcWorld::unix_socket() const {
  return "unix:" + (folder_.path() / "rpc.sock").string();
}

std::unique_ptr<Client> RpcWorld::NewClient(const ClientOptions& options) {
  Result<std::unique_ptr<Client>> client = Client::Connect(tcp_, options);
  EXPECT_OK(client);
  return client.ok() ? *std::move(client) : nullptr;
}

namespace {

Digest Upload(Client& client, const rpc::SessionRequest& request, const TensorSource& model,
              const std::map<std::string, double>& metrics) {
  Client* const clients[] = {&client};
  const Result<UploadReport> report = UploadArtifact(clients, request, model, metrics);
  EXPECT_OK(report);
  return report.ok() ? *Digest::FromRaw(report->commit.artifact) : Digest{};
}

}  // namespace

Digest UploadBase(Client& client, const std::string& name, const TensorSource& model) {
  rpc::SessionRequest request;
  request.kind = rpc::Kind::BASE;
  request.run = name;
  return Upload(client, request, model, {});
}

Digest UploadCheckpoint(Client& client, const std::string& run, int64_t step,
                        const TensorSource& model, const std::map<std::string, double>& metrics) {
  rpc::SessionRequest request;
  request.kind = rpc::Kind::CHECKPOINT;
  request.run = run;
  request.step = step;
  return Upload(client, request, model, metrics);
}

}  // namespace stockpot
