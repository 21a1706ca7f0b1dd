// stockpotd: options, signals, and one Daemon between them.
#include <malloc.h>
#include <spdlog/spdlog.h>

#include <csignal>
#include <cstdio>

#include "serve/bin/daemon.h"
#include "serve/bin/daemon_options.h"

namespace {

// From this size on a block goes back to the system when it is freed. Left alone, glibc raises the
// limit to 32 MiB as large blocks come and go, and its aligned ones (matrices, LAPACK's workspaces) do
// not find their way back into a heap: a merge of two small models then kept 0.7 GB for good.
constexpr int kMmapThresholdBytes = 1 << 20;

// Blocks the signals that end the daemon in this thread and all it starts, so that sigwait gets them.
sigset_t BlockStopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);  // a client that goes away is an error of one write, no more
  return signals;
}

}  // namespace

int main(int argc, char** argv) {
  ::mallopt(M_MMAP_THRESHOLD, kMmapThresholdBytes);
  const stockpot::ParsedDaemonOptions parsed = stockpot::ParseDaemonOptions(argc, argv);
  if (!parsed.run) return parsed.exit_code;
  spdlog::set_level(spdlog::level::from_str(parsed.options.log_level));
  spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%l%$ %v");
  spdlog::flush_on(spdlog::level::info);

  const sigset_t signals = BlockStopSignals();
  auto daemon = stockpot::Daemon::Start(parsed.options);
  if (!daemon.ok()) {
    std::fprintf(stderr, "stockpotd: %s\n", daemon.status().message().c_str());
    return 1;
  }
  int signal = 0;
  sigwait(&signals, &signal);
  spdlog::info("signal {}: draining", signal);
  (*daemon)->Drain();
  daemon->reset();
  spdlog::info("stopped");
  return 0;
}
