// A real store with its sessions, jobs and Thrift server in a fresh folder, for the tests of
// thrift/ and of the hook.
#pragma once

#include <memory>
#include <string>

#include "store/ingest.h"
#include "store/pipeline.h"
#include "tests/unit/pipeline/test_model.h"
#include "thrift/client.h"
#include "thrift/server.h"

namespace stockpot {

Result<Manifest> RefuseToMerge(CheckpointStore&, std::span<const Digest>, const std::string&,
                               int64_t, const MergeOptions&, const ProgressFunction&);

class RpcWorld {
 public:
  // `merge`: BuildMerge where a merge happens; it brings LibTorch, so others go without.
  explicit RpcWorld(RpcServerOptions options = {}, MergeFunction merge = RefuseToMerge,
                    DaemonControl control = {.version = "test"});
  ~RpcWorld();

  // Stops everything as a daemon would; Start brings it back on the same port and folder.
  void Stop();
  void Start();

  std::string tcp() const { return tcp_; }
  std::string unix_socket() const;
  const std::filesystem::path& folder() const { return folder_.path(); }
  CheckpointStore& store() { return *store_; }
  Pipeline& pipeline() { return *pipeline_; }
  RpcServer& server() { return *server_; }
  std::unique_ptr<Client> NewClient(const ClientOptions& options = {});

 private:
  TemporaryFolder folder_;
  RpcServerOptions options_;
  MergeFunction merge_;
  DaemonControl control_;
  std::string tcp_ = "127.0.0.1:0";
  std::unique_ptr<CheckpointStore> store_;
  std::unique_ptr<Ingest> ingest_;
  std::unique_ptr<Pipeline> pipeline_;
  std::unique_ptr<RpcServer> server_;
};

// Uploads `model` as a base or as a checkpoint; fails the test if that fails.
Digest UploadBase(Client& client, const std::string& name, const TensorSource& model);
Digest UploadCheckpoint(Client& client, const std::string& run, int64_t step,
                        const TensorSource& model,
                        const std::map<std::string, double>& metrics = {});

}  // namespace stockpot
