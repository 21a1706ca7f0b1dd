#include "serve/http/server.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/thread_pool.hpp>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/check.h"
#include "serve/http/api.h"
#include "serve/http/connection.h"
#include "serve/http/limits.h"

namespace stockpot {
namespace {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;
using boost::system::error_code;

constexpr auto kAcceptPause = std::chrono::milliseconds(100);  // after "too many open files"
constexpr auto kStopPoll = std::chrono::milliseconds(2);

}  // namespace

struct HttpServer::State {
  explicit State(HttpServerOptions o)
      : options(std::move(o)),
        workers(static_cast<size_t>(options.worker_threads)),
        api(options.version,
            [this](std::function<void()> task) { asio::post(workers, std::move(task)); }),
        acceptor(asio::make_strand(io)),
        pause(acceptor.get_executor()) {
    connections.handler = [this](std::shared_ptr<Exchange> e) { api.Handle(std::move(e)); };
    connections.observer = [this](const HttpRequest& request, int status) {
      api.Observe(request, status);
    };
    connections.idle_timeout_ms = options.idle_timeout_ms;
    connections.read_timeout_ms = options.read_timeout_ms;
    connections.write_timeout_ms = options.write_timeout_ms;
  }

  const HttpServerOptions options;
  asio::io_context io;
  asio::thread_pool workers;
  Api api;
  ConnectionContext connections{.open = api.metrics()->connections};
  tcp::acceptor acceptor;
  asio::steady_timer pause;
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work;
  std::vector<std::thread> threads;
  uint16_t port = 0;

  std::mutex mutex;
  std::vector<std::weak_ptr<ConnectionHandle>> handles;  // guarded

  Status Listen();
  void Accept();
  void OnAccept(error_code error, tcp::socket socket);
  void Remember(const std::shared_ptr<ConnectionHandle>& connection);
  template <typename Visit>
  void ForEachConnection(const Visit& visit);
};

Status HttpServer::State::Listen() {
  error_code error;
  const auto address = asio::ip::make_address(options.address, error);
  if (error) return InvalidArgument("'" + options.address + "' is not an IP address");
  const tcp::endpoint endpoint(address, options.port);
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(asio::socket_base::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (error) {
    return Unavailable("cannot listen on " + options.address + ":" + std::to_string(options.port) +
                       ": " + error.message());
  }
  port = acceptor.local_endpoint(error).port();
  return OkStatus();
}

void HttpServer::State::Accept() {
  acceptor.async_accept(asio::make_strand(io), [this](error_code error, tcp::socket socket) {
    OnAccept(error, std::move(socket));
  });
}

void HttpServer::State::OnAccept(error_code error, tcp::socket socket) {
  if (!acceptor.is_open()) return;
  if (error) {
    pause.expires_after(kAcceptPause);
    pause.async_wait([this](error_code e) {
      if (!e && acceptor.is_open()) Accept();
    });
    return;
  }
  const int64_t open = connections.open.load();
  if (open < options.max_connections + kRefusedConnections) {
    Remember(StartConnection(std::move(socket), connections, open >= options.max_connections));
  }
  Accept();
}

void HttpServer::State::Remember(const std::shared_ptr<ConnectionHandle>& connection) {
  std::lock_guard lock(mutex);
  if (handles.size() > 2 * static_cast<size_t>(connections.open.load()) + 16) {
    std::erase_if(handles, [](const auto& handle) { return handle.expired(); });
  }
  handles.push_back(connection);
}

template <typename Visit>
void HttpServer::State::ForEachConnection(const Visit& visit) {
  std::vector<std::weak_ptr<ConnectionHandle>> all;
  {
    std::lock_guard lock(mutex);
    all = handles;
  }
  for (const auto& weak : all) {
    if (const auto connection = weak.lock()) visit(*connection);
  }
}

HttpServer::HttpServer(HttpServerOptions options)
    : state_(std::make_unique<State>(std::move(options))) {}

HttpServer::~HttpServer() { Stop(); }

void HttpServer::AddRoute(std::string method, std::string path, HttpHandler handler) {
  STOCKPOT_CHECK(state_->threads.empty(), "AddRoute after Start");
  state_->api.AddRoute(std::move(method), std::move(path), std::move(handler));
}

Status HttpServer::Start() {
  State& state = *state_;
  STOCKPOT_RETURN_IF_ERROR(state.Listen());
  state.work.emplace(state.io.get_executor());
  state.Accept();
  for (int i = 0; i < state.options.io_threads; ++i) {
    state.threads.emplace_back([&state] { state.io.run(); });
  }
  return OkStatus();
}

uint16_t HttpServer::port() const { return state_->port; }

void HttpServer::SetModel(std::shared_ptr<const ServingModel> model) {
  state_->api.SetModel(std::move(model));
}

void HttpServer::BeginDrain() {
  state_->api.BeginDrain();
  state_->connections.closing = true;
  state_->ForEachConnection([](ConnectionHandle& connection) { connection.CloseIfIdle(); });
}

void HttpServer::Stop() {
  State& state = *state_;
  if (state.threads.empty()) return;
  state.api.BeginDrain();
  state.connections.closing = true;
  std::mutex done_mutex;
  std::condition_variable done;
  bool closed = false;
  asio::post(state.acceptor.get_executor(), [&] {
    error_code ignored;
    state.acceptor.close(ignored);
    state.pause.cancel();
    std::lock_guard lock(done_mutex);
    closed = true;
    done.notify_one();
  });
  {
    std::unique_lock lock(done_mutex);
    done.wait(lock, [&] { return closed; });
  }
  // Closing cancels what a connection waits for; the engine then lets go of its exchange.
  state.ForEachConnection([](ConnectionHandle& connection) { connection.Close(); });
  while (state.connections.open.load() > 0) std::this_thread::sleep_for(kStopPoll);
  state.workers.join();
  state.work.reset();
  state.io.stop();
  for (std::thread& thread : state.threads) thread.join();
  state.threads.clear();
}

}  // namespace stockpot
