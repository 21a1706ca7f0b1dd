#include "thrift/server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <thrift/processor/TMultiplexedProcessor.h>
#include <thrift/server/TThreadedServer.h>
#include <thrift/transport/TSSLSocket.h>
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

using apache::thrift::TConnectionInfo;
using apache::thrift::TException;
using apache::thrift::TMultiplexedProcessor;
using apache::thrift::TProcessor;
using apache::thrift::TProcessorFactory;
using apache::thrift::protocol::TMessageType;
using apache::thrift::protocol::TProtocol;
using apache::thrift::protocol::TProtocolException;
using apache::thrift::protocol::TProtocolFactory;
using apache::thrift::server::TServerEventHandler;
using apache::thrift::server::TThreadedServer;
using apache::thrift::transport::TServerSocket;
using apache::thrift::transport::TSocket;
using apache::thrift::transport::TTransport;
using apache::thrift::transport::TTransportException;
using apache::thrift::transport::TTransportFactory;

constexpr int kAcceptRetryMs = 50;

static_assert(sizeof(rpc::Tensor) <= rpc_limits::kStructElementBytes,
              "the largest struct of a list");
static_assert(sizeof(std::string) <= rpc_limits::kStringElementBytes);

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
                               .max_message_bytes = options.max_message_bytes,
                               .write_buffer_bytes = rpc_limits::kUnusedBufferBytes}),
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
    return std::make_shared<WireTransport>(
        std::dynamic_pointer_cast<TSocket>(transport),
        WireOptions{.read_buffer_bytes = rpc_limits::kUnusedBufferBytes});
  }
};

class WireProtocolFactory : public TProtocolFactory {
 public:
  explicit WireProtocolFactory(CallMemory* memory) : memory_(memory) {}
  std::shared_ptr<TProtocol> getProtocol(std::shared_ptr<TTransport> transport) override {
    return MakeWireProtocol(std::move(transport), rpc_limits::kServerMaxStringBytes, memory_);
  }

 private:
  CallMemory* const memory_;
};

// What all connections of a server share.
struct Services {
  std::shared_ptr<TProcessor> all;                       // by service name
  std::shared_ptr<rpc::CheckpointServiceIf> checkpoint;  // answers a hello
  std::string token;                                     // empty: anybody
};

// One connection's calls: the first must bring the token, where there is one. Thread promise: the
// connection's thread.
class ConnectionProcessor : public TProcessor {
 public:
  ConnectionProcessor(const Services& services, std::shared_ptr<WireProtocol> input)
      : services_(services), input_(std::move(input)), is_known_(services.token.empty()) {
    if (!is_known_) LimitTo(rpc_limits::kStrangerStringBytes, rpc_limits::kStrangerElements);
  }

  // Thrift's connection loop survives its own exceptions only; std::bad_alloc would end the
  // process.
  bool process(std::shared_ptr<TProtocol> in, std::shared_ptr<TProtocol> out,
               void* context) override {
    try {
      const bool goes_on = is_known_
                               ? services_.all->process(std::move(in), std::move(out), context)
                               : Admit(*in, *out);
      input_->EndCall();
      return goes_on;
    } catch (const TException&) {
      throw;
    } catch (const std::exception& error) {
      throw TException(error.what());
    }
  }

 private:
  void LimitTo(int32_t string_bytes, int32_t elements) {
    input_->setStringSizeLimit(string_bytes);
    input_->setContainerSizeLimit(elements);
  }

  // A call of somebody unknown. False: the connection ends.
  bool Admit(TProtocol& in, TProtocol& out);

  const Services& services_;
  const std::shared_ptr<WireProtocol> input_;
  bool is_known_;
};

// Every call of the four services declares Error as field 1 of its result, as hello does.
void Reply(TProtocol& out, const std::string& name, int32_t sequence,
           const rpc::CheckpointService_hello_result& result) {
  out.writeMessageBegin(name, apache::thrift::protocol::T_REPLY, sequence);
  result.write(&out);
  out.writeMessageEnd();
  out.getTransport()->writeEnd();
  out.getTransport()->flush();
}

bool ConnectionProcessor::Admit(TProtocol& in, TProtocol& out) {
  constexpr std::string_view kHello = "checkpoint:hello";
  std::string name;
  TMessageType type{};
  int32_t sequence = 0;
  in.readMessageBegin(name, type, sequence);
  if (type != apache::thrift::protocol::T_CALL) {
    throw TProtocolException(TProtocolException::INVALID_DATA, "not a call");
  }
  const bool is_hello = name == kHello;
  rpc::CheckpointService_hello_args arguments;
  if (is_hello) {
    arguments.read(&in);
  } else {
    in.skip(apache::thrift::protocol::T_STRUCT);
  }
  in.readMessageEnd();
  in.getTransport()->readEnd();

  rpc::CheckpointService_hello_result result;
  try {
    if (!is_hello || arguments.token.empty()) {
      ThrowUnlessOk(InvalidArgument(
          "this daemon asks for a token: name the file that holds it, with --token-file or "
          "STOCKPOT_TOKEN_FILE"));
    }
    if (!SameToken(arguments.token, services_.token)) {
      ThrowUnlessOk(InvalidArgument("the token is not this daemon's"));
    }
    services_.checkpoint->hello(result.success, arguments.protocol, arguments.token);
    result.__isset.success = true;
    is_known_ = true;
    LimitTo(rpc_limits::kServerMaxStringBytes, rpc_limits::kMaxContainerElements);
  } catch (const rpc::Error& error) {
    result.error = error;
    result.__isset.error = true;
  }
  Reply(out, name.substr(name.find(':') + 1), sequence, result);
  return is_known_ || !is_hello;
}

class ConnectionProcessorFactory : public TProcessorFactory {
 public:
  explicit ConnectionProcessorFactory(const Services& services) : services_(services) {}
  std::shared_ptr<TProcessor> getProcessor(const TConnectionInfo& connection) override {
    return std::make_shared<ConnectionProcessor>(
        services_, std::dynamic_pointer_cast<WireProtocol>(connection.input));
  }

 private:
  const Services& services_;
};

// Running out of descriptors is a reason to wait, not to stop listening. With TLS, a connection
// shakes hands when it is first read, in its own thread.
class PatientServerSocket : public TServerSocket {
 public:
  explicit PatientServerSocket(const std::string& path) : TServerSocket(path) {}
  PatientServerSocket(const std::string& host, int port, TlsFactory tls)
      : TServerSocket(host, port), tls_(std::move(tls)) {}

 protected:
  std::shared_ptr<TSocket> createSocket(THRIFT_SOCKET client) override {
    if (tls_ == nullptr) return TServerSocket::createSocket(client);
    if (interruptableChildren_) return tls_->createSocket(client, pChildInterruptSockReader_);
    return tls_->createSocket(client);
  }
  std::shared_ptr<TTransport> acceptImpl() override {
    try {
      return TServerSocket::acceptImpl();
    } catch (const TTransportException& error) {
      if (error.getType() != TTransportException::UNKNOWN) throw;
      ::poll(nullptr, 0, kAcceptRetryMs);
      throw TTransportException(TTransportException::TIMED_OUT, error.what());  // asked again
    }
  }

 private:
  const TlsFactory tls_;  // null: plain
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

  // `services`, `memory`: must outlive this.
  Status Start(const Services& services, CallMemory& memory, const TlsFactory& tls);
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

Status Listener::Start(const Services& services, CallMemory& memory, const TlsFactory& tls) {
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
    socket_ = std::make_shared<PatientServerSocket>(address_.host, address_.port, tls);
    socket_->setAcceptCallback(SetNoDelay);
  }
  socket_->setSendTimeout(rpc_limits::kServerSendTimeoutMs);
  socket_->setRecvTimeout(options_.message_timeout_ms);
  server_ = std::make_unique<TThreadedServer>(
      std::make_shared<ConnectionProcessorFactory>(services), socket_,
      std::make_shared<InputFactory>(options_, set_), std::make_shared<OutputFactory>(),
      std::make_shared<WireProtocolFactory>(&memory),
      std::make_shared<WireProtocolFactory>(nullptr));
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
  const SigpipeBlock no_signal;  // inherited by the threads of connections
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
  explicit State(RpcServerOptions given)
      : options(std::move(given)), facts(options.max_connections) {}

  const RpcServerOptions options;
  ServerFacts facts;
  Services services;
  CallMemory memory{rpc_limits::kAllCallsBytes};
  ConnectionSet connections;
  std::vector<std::unique_ptr<Listener>> listeners;
};

RpcServer::RpcServer(RpcServerOptions options)
    : state_(std::make_unique<State>(std::move(options))) {}

RpcServer::~RpcServer() { Stop(); }

Result<std::unique_ptr<RpcServer>> RpcServer::Start(RpcServerParts parts,
                                                    RpcServerOptions options) {
  SilenceThriftOutput();
  if (options.addresses.empty()) return InvalidArgument("no address to listen on");
  STOCKPOT_ASSIGN_OR_RETURN(const TlsFactory tls, MakeTlsFactory(options.tls));
  std::vector<RpcAddress> addresses;
  for (const std::string& text : options.addresses) {
    STOCKPOT_ASSIGN_OR_RETURN(RpcAddress address, ParseRpcAddress(text));
    STOCKPOT_RETURN_IF_ERROR(CheckTokenPath(address, !options.token.empty(), tls != nullptr));
    addresses.push_back(std::move(address));
  }
  std::unique_ptr<RpcServer> server(new RpcServer(std::move(options)));
  State& state = *server->state_;

  state.services.token = state.options.token;
  state.services.checkpoint = MakeCheckpointHandler(parts, state.facts);
  const auto services = std::make_shared<TMultiplexedProcessor>();
  services->registerProcessor(
      "checkpoint", std::make_shared<rpc::CheckpointServiceProcessor>(state.services.checkpoint));
  services->registerProcessor(
      "lineage", std::make_shared<rpc::LineageServiceProcessor>(MakeLineageHandler(parts)));
  services->registerProcessor("control", std::make_shared<rpc::ControlServiceProcessor>(
                                             MakeControlHandler(parts, state.facts)));
  services->registerProcessor("pool",
                              std::make_shared<rpc::PoolServiceProcessor>(MakePoolHandler(parts)));
  state.services.all = services;
  for (RpcAddress& address : addresses) {
    state.listeners.push_back(
        std::make_unique<Listener>(std::move(address), state.options, state.connections));
    STOCKPOT_RETURN_IF_ERROR(state.listeners.back()->Start(state.services, state.memory, tls));
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
