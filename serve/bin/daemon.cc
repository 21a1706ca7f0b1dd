#include "serve/bin/daemon.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "kernels/base/device.h"
#include "serve/bin/model_host.h"
#include "serve/bin/version.h"
#include "serve/http/server.h"
#include "store/ingest.h"
#include "store/merge.h"
#include "store/pipeline.h"
#include "thrift/server.h"

namespace stockpot {
namespace {

constexpr int64_t kTickMs = 1000;  // how often idle sessions are looked for

// Calls `body` every kTickMs until it is destroyed.
class Ticker {
 public:
  explicit Ticker(std::function<void()> body)
      : thread_([this, body = std::move(body)] {
          std::unique_lock lock(mutex_);
          while (!wake_.wait_for(lock, std::chrono::milliseconds(kTickMs), [&] { return stop_; })) {
            lock.unlock();
            body();
            lock.lock();
          }
        }) {}
  ~Ticker() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;  // last: starts when the rest is made
};

// 0, no quota, where the option is so large that it cannot be bytes.
int64_t QuotaBytes(const DaemonOptions& options) {
  constexpr int64_t kMostMib = int64_t{1} << 40;
  return options.quota_mib >= kMostMib ? 0 : options.quota_mib << 20;
}

std::string DescribeDevices(const DeviceReport& report) {
  std::string text = "CPU (" + report.simd_target + ")";
  for (const CudaDevice& device : report.cuda) text += ", " + device.name;
  if (report.cuda.empty()) text += "; no GPU: " + report.cuda_reason;
  return text;
}

// Writes a small file so that a reader sees all of it or nothing.
Status WriteFileAtomically(const std::filesystem::path& path, const std::string& text) {
  const std::filesystem::path temporary = path.string() + ".tmp";
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoStatus(errno, temporary.string());
  const ssize_t written = ::write(fd, text.data(), text.size());
  const int error = errno;
  ::close(fd);
  if (written != static_cast<ssize_t>(text.size())) {
    return ErrnoStatus(written < 0 ? error : EIO, temporary.string());
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) return ErrnoStatus(errno, path.string());
  return OkStatus();
}

}  // namespace

// In the order of their making; destroyed in the opposite one.
struct Daemon::Parts {
  DaemonOptions options;
  std::string devices;
  std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();

  std::unique_ptr<CheckpointStore> store;
  std::unique_ptr<Ingest> ingest;
  std::unique_ptr<HttpServer> http;
  std::unique_ptr<ModelHost> host;
  std::unique_ptr<Pipeline> pipeline;  // its jobs score models with the host
  std::unique_ptr<RpcServer> rpc;
  std::unique_ptr<Ticker> ticker;
  RpcAddress http_address;

  Status OpenStore();
  Status StartHttp();
  void StartHost();
  void StartJobs();
  Status StartRpc();
  void WarnAboutOpenDoors() const;
  Status WriteAddresses() const;
  void Describe(rpc::DaemonStatus& status) const;
  int64_t Requests(const std::string& route) const;
};

// STOCKPOT_FAILPOINTS: where a test kills the daemon or makes its store fail (store/failpoints.h).
// Without it a place costs a comparison with null.
Result<std::shared_ptr<Failpoints>> FailpointsFromEnvironment() {
  const char* text = std::getenv("STOCKPOT_FAILPOINTS");
  if (text == nullptr || *text == 0) return std::shared_ptr<Failpoints>();
  spdlog::warn("failpoints of a test are set: {}", text);
  Result<std::shared_ptr<Failpoints>> failpoints = Failpoints::FromText(text);
  if (!failpoints.ok()) return failpoints.status().WithContext("STOCKPOT_FAILPOINTS");
  return failpoints;
}

Status Daemon::Parts::OpenStore() {
  STOCKPOT_ASSIGN_OR_RETURN(auto failpoints, FailpointsFromEnvironment());
  STOCKPOT_ASSIGN_OR_RETURN(store, CheckpointStore::Open({.directory = options.data,
                                                          .clock = SystemClock(),
                                                          .quota_bytes = QuotaBytes(options),
                                                          .failpoints = std::move(failpoints)}));
  IngestLimits limits;
  limits.session_idle_ms = options.session_idle_seconds * 1000;
  limits.session_bytes = options.session_mib << 20;
  ingest = std::make_unique<Ingest>(*store, limits, SystemClock());
  return OkStatus();
}

Status Daemon::Parts::StartHttp() {
  STOCKPOT_ASSIGN_OR_RETURN(http_address, ParseRpcAddress(options.http));
  if (http_address.is_unix()) return InvalidArgument("--http wants HOST:PORT");
  HttpServerOptions http_options;
  http_options.address = http_address.host;
  http_options.port = static_cast<uint16_t>(http_address.port);
  http_options.version = kStockpotVersion;
  http_options.max_connections = options.http_connections;
  http = std::make_unique<HttpServer>(http_options);
  STOCKPOT_RETURN_IF_ERROR(http->Start());
  http_address.port = http->port();
  return OkStatus();
}

void Daemon::Parts::StartHost() {
  ModelHostOptions host_options;
  host_options.base = options.base;
  host_options.threads = options.threads;
  host_options.distill_seconds = static_cast<double>(options.distill_seconds);
  host_options.distill_steps = options.distill_steps;
  host_options.engine.running_sequences = options.running_sequences;
  host_options.engine.waiting_requests = options.waiting_requests;
  host_options.engine.step_rows = options.step_rows;
  host_options.engine.distinct_variants = options.distinct_variants;
  host_options.engine.kv_bytes = options.kv_mib << 20;
  host_options.cache.budget_bytes = options.variants_mib << 20;
  host = std::make_unique<ModelHost>(
      *store, std::move(host_options),
      [this](std::shared_ptr<ServingModel> model) { http->SetModel(std::move(model)); });
}

void Daemon::Parts::StartJobs() {
  Pipeline::Options jobs;
  jobs.merge = BuildMerge;
  jobs.score = [this](const ScoreRequest& request, const ProgressFunction& progress) {
    return host->Score(request, progress);
  };
  jobs.requests = [this](const std::string& route) { return Requests(route); };
  jobs.followed = [this](int64_t event) {
    const Router* router = host->router();
    return router == nullptr || router->followed_sequence() >= event;
  };
  jobs.calibrate = [this](const CalibrationRequest& request, const ProgressFunction& progress) {
    return host->Calibrate(request, progress);
  };
  jobs.threads = options.threads;
  jobs.clock = SystemClock();
  jobs.history_bytes_per_second = options.history_mib_per_second << 20;
  pipeline = std::make_unique<Pipeline>(*store, std::move(jobs));
}

Status Daemon::Parts::StartRpc() {
  DaemonControl control;
  control.version = kStockpotVersion;
  control.requests = [this](const std::string& route) { return Requests(route); };
  control.describe = [this](rpc::DaemonStatus& status) { Describe(status); };
  RpcServerOptions rpc_options;
  rpc_options.addresses = {options.thrift};
  if (!options.unix_socket.empty()) rpc_options.addresses.push_back("unix:" + options.unix_socket);
  rpc_options.max_connections = options.thrift_clients;
  rpc_options.tls = {.cert_file = options.tls_cert,
                     .key_file = options.tls_key,
                     .client_ca_file = options.tls_client_ca};
  if (!options.token_file.empty()) {
    STOCKPOT_ASSIGN_OR_RETURN(rpc_options.token, ReadTokenFile(options.token_file));
  }
  WarnAboutOpenDoors();
  STOCKPOT_ASSIGN_OR_RETURN(rpc,
                            RpcServer::Start({.store = *store,
                                              .ingest = *ingest,
                                              .pipeline = *pipeline,
                                              .control = std::move(control)},
                                             std::move(rpc_options)));
  return OkStatus();
}

void Daemon::Parts::WarnAboutOpenDoors() const {
  const Result<RpcAddress> address = ParseRpcAddress(options.thrift);
  if (!address.ok() || IsLocal(*address)) return;
  if (options.tls_cert.empty()) {
    spdlog::warn("Thrift on {} without TLS: checkpoints travel readable, use --tls-cert and --tls-key",
                 options.thrift);
  }
  if (options.token_file.empty() && options.tls_client_ca.empty()) {
    spdlog::warn("Thrift on {} lets anybody in: use --token-file or --tls-client-ca", options.thrift);
  }
}

Status Daemon::Parts::WriteAddresses() const {
  nlohmann::json addresses = {{"http", http_address.ToString()},
                              {"thrift", rpc->addresses()[0].ToString()}};
  if (!options.unix_socket.empty()) addresses["unix"] = options.unix_socket;
  return WriteFileAtomically(options.data / "addresses.json", addresses.dump() + "\n");
}

// Runs on connection threads, perhaps before Start() has returned: what is not made yet is left out.
void Daemon::Parts::Describe(rpc::DaemonStatus& status) const {
  status.uptime_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                         std::chrono::steady_clock::now() - started)
                         .count();
  status.devices = devices;
  status.http_address = http_address.ToString();
  const ModelHost::State state = host->state();
  status.base = state.base;
  status.base_state = state.phase;
  const Router* router = host->router();
  if (router == nullptr) return;
  for (const ServedModel& model : router->Models()) {
    rpc::ServedModel served;
    served.name = model.name;
    served.digest = model.digest.Hex();
    served.state = model.state;
    served.resident_bytes = model.resident_bytes;
    status.served.push_back(std::move(served));
  }
}

// Of the last day, since the process began.
int64_t Daemon::Parts::Requests(const std::string& route) const {
  const Router* router = host->router();
  return router == nullptr ? 0 : router->Requests(route);
}

Daemon::Daemon(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

Result<std::unique_ptr<Daemon>> Daemon::Start(const DaemonOptions& options) {
  auto parts = std::make_unique<Parts>();
  parts->options = options;
  parts->devices = DescribeDevices(ProbeDevices());
  spdlog::info("stockpotd {}: {}, {} threads", kStockpotVersion, parts->devices, options.threads);
  // From here on the destructor takes down what was made.
  std::unique_ptr<Daemon> daemon(new Daemon(std::move(parts)));
  Parts& made = *daemon->parts_;
  STOCKPOT_RETURN_IF_ERROR(
      made.OpenStore().WithContext("while opening the store in " + options.data.string()));
  STOCKPOT_RETURN_IF_ERROR(made.StartHttp().WithContext("HTTP on " + options.http));
  made.StartHost();
  made.StartJobs();
  STOCKPOT_RETURN_IF_ERROR(made.StartRpc().WithContext("Thrift on " + options.thrift));
  made.ticker = std::make_unique<Ticker>([ingest = made.ingest.get()] {
    const int64_t expired = ingest->ExpireIdle();
    if (expired > 0) spdlog::warn("{} upload sessions expired without a commit", expired);
  });
  STOCKPOT_RETURN_IF_ERROR(made.WriteAddresses());
  spdlog::info("listening: http {}, thrift {}{}", made.http_address.ToString(),
               made.rpc->addresses()[0].ToString(),
               options.unix_socket.empty() ? "" : " and unix:" + options.unix_socket);
  return daemon;
}

void Daemon::Drain() {
  parts_->http->BeginDrain();
  if (!parts_->host->Drain(parts_->options.drain_seconds * 1000)) {
    spdlog::warn("requests still run after {} s: they are cancelled", parts_->options.drain_seconds);
  }
}

Daemon::~Daemon() {
  parts_->ticker.reset();
  if (parts_->http != nullptr) parts_->http->Stop();
  if (parts_->store != nullptr) parts_->store->Shutdown();
  if (parts_->rpc != nullptr) parts_->rpc->Stop();
  parts_->rpc.reset();
  parts_->pipeline.reset();
  parts_->host.reset();  // after the HTTP server stopped: its requests refer to the model
  parts_->http.reset();
}

}  // namespace stockpot
