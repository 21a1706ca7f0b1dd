#include "thrift/server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <thrift/processor/TMultiplexedProcessor.h>
#include <thrift/server/TThreadedServer.h>
#include <thrift/transport/TServerSocket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "kernels/base/check.h"
#include "thrift/handlers.h"
#include "thrift/wire.h"

namespace stockpot {
namespace {

using apache::thrift::TException;
using apache::thrift::TMultiplexedProcessor;
using apache::thrift::TProcessor;
using apache::thrift::protocol::TProtocol;
using apache::thrift::protocol::TProtocolFactory;
using apache::thrift::server::TServerEventHandler;
using apache::thrift::server::TThreadedServer;
using apache::thrift::transport::TServerSocket;
using apache::thrift::transport::TSocket;
using apache::thrift::transport::TTransport;
using apache::thrift::transport::TTransportException;
using apache::thrift::transport::TTransportFactory;

constexpr int kAcceptRetryMs = 50;

// The open connections, so that stopping can cut those that neither read nor write.
class ConnectionSet {
 public:
  void Add(TSocket* socket) {
    const std::lock_guard lock(mutex_);
    sockets_.insert(socket);
  }
  // Before the socket is closed: after it the descriptor may be somebody else's.
  void Remove(TSocket* socket) {
    const std::lock_guard lock(mutex_);
    sockets_.erase(socket);
  }
  void CutAll() {
    const std::lock_guard lock(mutex_);
    for (TSocket* socket : sockets_) ::shutdown(socket->getSocketFD(), SHUT_RDWR);
  }

 private:
  std::mutex mutex_;
  std::set<TSocket*> sockets_;  // guarded
};

// The receiving half of a connection. Thrift closes it before the socket itself.
class ServerInput : public WireTransport {
 public:
  ServerInput(std::shared_ptr<TSocket> socket, const RpcServerOptions& options, ConnectionSet& set)
      : WireTransport(socket, {.idle_timeout_ms = options.idle_timeout_ms,
                               .message_timeout_ms = options.message_timeout_ms,
                               .max_message_bytes = options.max_message_bytes}),
        tracked_(std::move(socket)),
        set_(set) {
    set_.Add(tracked_.get());
  }
  ~ServerInput() override { set_.Remove(tracked_.get()); }
  void close() override {
    set_.Remove(tracked_.get());
    WireTransport::close();
  }

 private:
  const std::shared_ptr<TSocket> tracked_;
  ConnectionSet& set_;
};

class InputFactory : public TTransportFactory {
 public:
  InputFactory(const RpcServerOptions& options, ConnectionSet& set)
      : options_(options), set_(set) {}
  std::shared_ptr<TTransport> getTransport(std::shared_ptr<TTransport> transport) override {
    return std::make_shared<ServerInput>(std::dynamic_pointer_cast<TSocket>(transport), options_,
                                         set_);
  }

 private:
  const RpcServerOptions& options_;
  ConnectionSet& set_;
};

class OutputFactory : public TTransportFactory {
 public:
  std::shared_ptr<TTransport> getTransport(std::shared_ptr<TTransport> transport) override {
    return std::make_shared<WireTransport>(std::dynamic_pointer_cast<TSocket>(transport),
                                           WireOptions{});
  }
};

class WireProtocolFactory : public TProtocolFactory {
 public:
  std::shared_ptr<TProtocol> getProtocol(std::shared_ptr<TTransport> transport) override {
    return MakeWireProtocol(std::move(transport), rpc_limits::kServerMaxStringBytes);
  }
};

// Thrift's connection loop survives its own exceptions only; std::bad_alloc would end the process.
class GuardedProcessor : public TProcessor {
 public:
  explicit GuardedProcessor(std::shared_ptr<TProcessor> inner) : inner_(std::move(inner)) {}
  bool process(std::shared_ptr<TProtocol> in, std::shared_ptr<TProtocol> out,
               void* context) override {
    try {
      return inner_->process(std::move(in), std::move(out), context);
    } catch (const TException&) {
      throw;
    } catch (const std::exception& error) {
      throw TException(error.what());
    }
  }

 private:
  const std::shared_ptr<TProcessor> inner_;
};

// Running out of descriptors is a reason to wait, not to stop listening.
class PatientServerSocket : public TServerSocket {
 public:
  using TServerSocket::TServerSocket;

 protected:
  std::shared_ptr<TTransport> acceptImpl() override {
    try {
      return TServerSocket::acceptImpl();
    } catch (const TTransportException& error) {
      if (error.getType() != TTransportException::UNKNOWN) throw;
      ::poll(nullptr, 0, kAcceptRetryMs);
      throw TTransportException(TTransportException::TIMED_OUT, error.what());  // asked again
    }
  }
};

// How listening went, told once: by Thrift when it listens, or by the thread when that failed.
class ListeningSignal : public TServerEventHandler {
 public:
  void preServe() override { Settle(OkStatus()); }
  void Settle(Status status) {
    if (!settled_.exchange(true)) promise_.set_value(std::move(status));
  }
  Status Wait() { return promise_.get_future().get(); }

 private:
  std::atomic<bool> settled_{false};
  std::promise<Status> promise_;
};

// True if somebody accepts connections on the socket file.
bool SomebodyListens(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  STOCKPOT_CHECK(path.size() < sizeof address.sun_path, path);
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return true;  // unknown: leave the file alone
  const bool connected =
      ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  const bool dead = !connected && errno == ECONNREFUSED;
  ::close(fd);
  return !dead;
}

Status RemoveStaleSocket(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? OkStatus() : ErrnoStatus(errno, "stat '" + path + "'");
  }
  if (!S_ISSOCK(info.st_mode)) {
    return InvalidArgument("'" + path + "' exists and is no socket: choose another path");
  }
  if (SomebodyListens(path)) {
    return Unavailable("another process listens on 'unix:" + path + "'");
  }
  if (::unlink(path.c_str()) != 0) return ErrnoStatus(errno, "remove the stale '" + path + "'");
  return OkStatus();
}

void SetNoDelay(THRIFT_SOCKET fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// One address: its socket, Thrift's server over it, and the thread that accepts.
class Listener {
 public:
  Listener(RpcAddress address, const RpcServerOptions& options, ConnectionSet& set)
      : address_(std::move(address)), options_(options), set_(set) {}
  ~Listener() { Stop(); }

  Status Start(const std::shared_ptr<TProcessor>& processor);
  void Stop();
  const RpcAddress& address() const { return address_; }

 private:
  void Serve(ListeningSignal& signal);

  RpcAddress address_;
  const RpcServerOptions& options_;
  ConnectionSet& set_;
  std::shared_ptr<TServerSocket> socket_;
  std::unique_ptr<TThreadedServer> server_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
};

Status Listener::Start(const std::shared_ptr<TProcessor>& processor) {
  if (address_.is_unix()) {
    STOCKPOT_RETURN_IF_ERROR(RemoveStaleSocket(address_.unix_path));
    socket_ = std::make_shared<PatientServerSocket>(address_.unix_path);
    // Called between bind and listen: nobody can have connected yet.
    socket_->setListenCallback([path = address_.unix_path](THRIFT_SOCKET) {
      if (::chmod(path.c_str(), S_IRUSR | S_IWUSR) != 0) {
        throw TTransportException(TTransportException::NOT_OPEN, "cannot restrict " + path);
      }
    });
  } else {
    socket_ = std::make_shared<PatientServerSocket>(address_.host, address_.port);
    socket_->setAcceptCallback(SetNoDelay);
  }
  socket_->setSendTimeout(rpc_limits::kServerSendTimeoutMs);
  socket_->setRecvTimeout(options_.message_timeout_ms);
  server_ = std::make_unique<TThreadedServer>(
      processor, socket_, std::make_shared<InputFactory>(options_, set_),
      std::make_shared<OutputFactory>(), std::make_shared<WireProtocolFactory>(),
      std::make_shared<WireProtocolFactory>());
  server_->setConcurrentClientLimit(options_.max_connections);

  const auto signal = std::make_shared<ListeningSignal>();
  server_->setServerEventHandler(signal);
  thread_ = std::thread([this, signal] { Serve(*signal); });
  if (Status status = signal->Wait(); !status.ok()) {
    stopping_ = true;
    thread_.join();
    return status.WithContext("cannot listen on " + address_.ToString());
  }
  if (!address_.is_unix()) address_.port = socket_->getPort();
  return OkStatus();
}

// Thrift ends serve() when it is stopped, and by an exception when it cannot listen or, later, when
// the system gives it no thread: then it is started anew.
void Listener::Serve(ListeningSignal& signal) {
  while (!stopping_) {
    try {
      server_->serve();
    } catch (const std::exception& error) {
      signal.Settle(Unavailable(error.what()));
    }
    if (stopping_) return;
    ::poll(nullptr, 0, kAcceptRetryMs);
    socket_->close();
    if (address_.is_unix()) ::unlink(address_.unix_path.c_str());
  }
}

void Listener::Stop() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  server_->stop();
  set_.CutAll();
  thread_.join();
  if (address_.is_unix()) ::unlink(address_.unix_path.c_str());
}

}  // namespace

struct RpcServer::State {
  RpcServerOptions options;
  ServerFacts facts;
  ConnectionSet connections;
  std::vector<std::unique_ptr<Listener>> listeners;
};

RpcServer::RpcServer() : state_(std::make_unique<State>()) {}

RpcServer::~RpcServer() { Stop(); }

Result<std::unique_ptr<RpcServer>> RpcServer::Start(RpcServerParts parts,
                                                    RpcServerOptions options) {
  SilenceThriftOutput();
  if (options.addresses.empty()) return InvalidArgument("no address to listen on");
  std::vector<RpcAddress> addresses;
  for (const std::string& text : options.addresses) {
    STOCKPOT_ASSIGN_OR_RETURN(RpcAddress address, ParseRpcAddress(text));
    addresses.push_back(std::move(address));
  }
  std::unique_ptr<RpcServer> server(new RpcServer());
  State& state = *server->state_;
  state.options = std::move(options);

  const auto services = std::make_shared<TMultiplexedProcessor>();
  services->registerProcessor("checkpoint", std::make_shared<rpc::CheckpointServiceProcessor>(
                                                MakeCheckpointHandler(parts)));
  services->registerProcessor(
      "lineage", std::make_shared<rpc::LineageServiceProcessor>(MakeLineageHandler(parts)));
  services->registerProcessor("control", std::make_shared<rpc::ControlServiceProcessor>(
                                             MakeControlHandler(parts, state.facts)));
  const auto processor = std::make_shared<GuardedProcessor>(services);
  for (RpcAddress& address : addresses) {
    state.listeners.push_back(
        std::make_unique<Listener>(std::move(address), state.options, state.connections));
    STOCKPOT_RETURN_IF_ERROR(state.listeners.back()->Start(processor));
    server->addresses_.push_back(state.listeners.back()->address());
    state.facts.AddAddress(server->addresses_.back().ToString());
  }
  return server;
}

void RpcServer::Stop() {
  state_->facts.Stop();
  for (const auto& listener : state_->listeners) listener->Stop();
}

}  // namespace stockpot
