// The C++ client of the daemon: one connection, every call as a Result. Links neither RocksDB nor
// Torch.
//
//   STOCKPOT_ASSIGN_OR_RETURN(auto client, Client::Connect("127.0.0.1:7070"));
//   STOCKPOT_ASSIGN_OR_RETURN(std::vector<rpc::Run> runs, client->Runs());
//
// Errors: a refusal of the daemon comes back as the Status it was there (code and message). A
// connection that cannot be made, breaks or times out is Unavailable; an answer that is no answer
// of this protocol is Corruption. No exception leaves this class.
//
// Connections: made by the first call that needs one; each says hello first, with the token. One
// that the daemon closed while it was idle is noticed before the next call and made anew. A daemon
// may hang up just while the next call is on its way: a call that meets the end of a connection
// that had served others is repeated once on a fresh one. Every call of this interface may be
// repeated, by the caller too: all of them are idempotent.
//
// Thread promise: one thread at a time per Client, but for Shutdown; make several for several
// threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"
#include "stockpot_rpc/stockpot_types.h"
#include "store/digest.h"
#include "store/manifest.h"
#include "thrift/address.h"
#include "thrift/security.h"

namespace stockpot {

struct ClientOptions {
  int connect_timeout_ms = 5'000;
  int send_timeout_ms = 30'000;  // the daemon does not read
  int receive_timeout_ms =
      120'000;               // it does not answer; Watch and Scrub wait longer by themselves
  int chunks_in_flight = 4;  // put_chunk and fetch_chunk calls that await their answer
  ClientTls tls;             // of TCP addresses; none by default
  std::string token;         // what the daemon's --token-file holds; empty: none
};

// A chunk to send: the bytes are borrowed for the call.
struct ChunkView {
  Digest digest;
  std::span<const std::byte> data;
};

class Client {
 public:
  // Connects and says hello. InvalidArgument: no address, unusable TLS files, a token that would
  // travel readable, or a wrong one. Unavailable: nobody answers there, or one of the two ends does
  // not trust the other's certificate. Refuses a daemon of another protocol version
  // (InvalidArgument).
  static Result<std::unique_ptr<Client>> Connect(std::string_view address,
                                                 const ClientOptions& options = {});
  // Without connecting: the first call does. For those who outlive a daemon's restart.
  static Result<std::unique_ptr<Client>> Create(std::string_view address,
                                                const ClientOptions& options = {});
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const RpcAddress& address() const;
  // Closes the connection; the next call makes a new one.
  void Disconnect();
  // From any thread, for good: a call that waits for the daemon and all later ones fail,
  // Unavailable. An attempt to connect ends with its own time-out.
  void Shutdown();

  // --- sending ---
  Result<rpc::HelloReply> Hello();
  // Without `config` an existing run keeps its own, and a new one gets the defaults.
  Result<rpc::Run> CreateRun(const std::string& name, const std::string& base,
                             const std::optional<rpc::RunConfig>& config,
                             const std::map<std::string, std::string>& tags);
  Result<std::string> OpenSession(const rpc::SessionRequest& request);
  Result<std::vector<bool>> HaveChunks(const std::string& session, std::span<const Digest> digests);
  // Sends all of them, several in flight. The first refusal, after all answers are in.
  Status PutChunks(const std::string& session, std::span<const ChunkView> chunks);
  Result<rpc::CommitReply> CommitShard(const std::string& session, const rpc::Shard& shard);
  // How the checkpoint is coming along that ranks gather; waits up to `timeout_ms` (at most 30 s)
  // while it is open.
  Result<rpc::StepState> StepState(const rpc::StepKey& key, int32_t timeout_ms);
  // Where the start of a job that is named `key` resumes from: the same for all who ask.
  Result<rpc::ResumePoint> ResumePoint(const std::string& run, const std::string& key);
  Status Abort(const std::string& session);
  Status ReportEval(const std::string& id, const std::string& task, const std::string& metric,
                    double value, const std::string& by);

  // --- fetching ---
  // Checked against `id` when that is a full digest.
  Result<Manifest> FetchManifest(const std::string& id);
  // Calls sink(index, bytes) in order, several requests in flight, every chunk checked against its
  // digest (Corruption). A failing sink ends the fetch with its status.
  Status FetchChunks(std::span<const Digest> digests,
                     const std::function<Status(size_t, std::string&&)>& sink);

  // --- lineage ---
  Result<std::vector<rpc::Run>> Runs();
  Result<std::vector<rpc::LogEntry>> Log(const std::string& run);
  Result<rpc::ArtifactInfo> Show(const std::string& id);
  Result<std::vector<rpc::Alias>> Aliases();
  // `expected`: compare-and-set, see stockpot.thrift. An empty `id` deletes the name.
  Result<rpc::Alias> MoveAlias(const std::string& name, const std::string& id,
                               const std::string& by,
                               const std::optional<std::string>& expected = std::nullopt);
  Result<Digest> Resolve(const std::string& id);
  Result<rpc::RetentionPolicy> SetRetention(const std::string& run,
                                            const rpc::RetentionPolicy& policy);
  Result<rpc::RetentionReport> Retention(const std::string& run);
  Status Pin(const std::string& id, const std::string& by, const std::string& why);
  Status Unpin(const std::string& id);
  Status Delete(const std::string& id, int64_t grace_ms, const std::string& by,
                const std::string& why);
  Status Undelete(const std::string& id);
  // No texts: the run has none any more.
  Result<rpc::ProbeSet> SetProbe(const std::string& run, const std::vector<rpc::ProbeText>& texts,
                                 const std::string& by);
  Result<rpc::ProbeSet> Probe(const std::string& run);
  // The texts that scales of 1-bit variants are found on; likewise.
  Result<rpc::ProbeSet> SetCalibration(const std::string& run,
                                       const std::vector<rpc::ProbeText>& texts,
                                       const std::string& by);
  Result<rpc::ProbeSet> Calibration(const std::string& run);
  Result<rpc::Gate> SetGate(const std::string& run, const rpc::Gate& gate);
  Result<rpc::Gate> GetGate(const std::string& run);
  // Waits as long as the daemon works on it. 0: no throttle.
  Result<rpc::GcReply> CollectGarbage(bool dry_run, int64_t bytes_per_second);

  // --- pools of adapters ---
  Result<rpc::Pool> CreatePool(const std::string& name, const std::string& base,
                               const rpc::PoolConfig& config);
  Result<std::vector<rpc::Pool>> Pools();
  Result<rpc::Pool> GetPool(const std::string& name);
  Result<rpc::Job> AddToPool(const rpc::PoolAdd& request);
  Result<rpc::Job> RemoveFromPool(const std::string& pool, const std::string& task);
  Result<rpc::Job> EvictFromPool(const std::string& pool);
  Result<rpc::Job> DeletePool(const std::string& pool, bool force);

  // --- control ---
  struct MergeRequest {
    std::vector<std::string> ids;  // checkpoints and merges; with `last` one run or checkpoint
    std::string run;               // empty: the first parent's
    int64_t step = -1;             // -1: the newest parent's
    double energy = 0.95;
    int64_t rank = 0;
    bool force = false;
    rpc::MergeOptions options;  // method, weights, spectral, last: see stockpot.thrift
  };
  Result<rpc::Job> Merge(const MergeRequest& request);
  // `codec`: "bitdelta", "dense", "auto" or "sparse", empty: the run's; `name`: empty for the
  // default routes.
  Result<rpc::Job> Publish(const std::string& id, const std::string& codec, const std::string& name,
                           const rpc::PublishOptions& options = {});
  // Over the gate's limits too; `why` must not be empty.
  Result<rpc::Job> PublishForced(const std::string& id, const std::string& codec,
                                 const std::string& name, const std::string& why,
                                 const std::string& by, const rpc::PublishOptions& options = {});
  // `id`: a run, or one checkpoint or state.
  Result<rpc::Job> Compress(const std::string& id);
  // Held-out loss on the run's probe texts.
  Result<rpc::Job> Score(const std::string& id);
  Result<rpc::Job> GetJob(const std::string& key);
  Result<std::vector<rpc::Job>> Jobs();
  Status Unpublish(const std::string& name);
  Result<std::vector<rpc::Alias>> Routes();
  Result<rpc::DaemonStatus> GetStatus();
  // Events after `since`; waits up to `timeout_ms` (at most 30 s) for the first one.
  Result<std::vector<rpc::Event>> Watch(int64_t since, int32_t limit, int32_t timeout_ms);
  // Reads the whole store: waits as long as the daemon works on it. `repair_from`: a backup on the
  // daemon's machine that has what is damaged; empty: only reports.
  Result<rpc::ScrubReply> Scrub(const std::string& repair_from = "");
  // Into a folder of the daemon's machine, absolute. Waits likewise.
  Result<rpc::BackupReply> Backup(const std::string& directory);

 private:
  struct Connection;
  Client(RpcAddress address, const ClientOptions& options, TlsFactory tls);

  Status Ensure();
  // One try. `hung_up`: it met the end of the connection, without an answer.
  Status Attempt(std::string_view call, int receive_timeout_ms, const std::function<void()>& body,
                 bool& hung_up);
  Status Guarded(std::string_view call, int receive_timeout_ms, const std::function<void()>& body);
  template <typename T, typename Body>
  Result<T> Call(std::string_view call, Body body);

  const RpcAddress address_;
  const ClientOptions options_;
  const TlsFactory tls_;                    // null: plain
  std::mutex mutex_;                        // held where connection_ changes, and by Shutdown
  bool shut_down_ = false;                  // guarded
  std::unique_ptr<Connection> connection_;  // null: not connected
};

}  // namespace stockpot
