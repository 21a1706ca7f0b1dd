// stockpot: the operator's program, a client of stockpotd. README.md describes its JSON.
// Exit status: 0 done, 1 failed (one line on stderr says what and what to do), 2 wrong usage.
#include <limits.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "serve/bin/cli/commands.h"
#include "serve/bin/cli/output.h"

namespace stockpot::cli {

Result<std::unique_ptr<Client>> ConnectTo(const Globals& globals) {
  ClientOptions options;
  options.tls = globals.tls;
  if (!globals.token_file.empty()) {
    STOCKPOT_ASSIGN_OR_RETURN(options.token, ReadTokenFile(globals.token_file));
  }
  Result<std::unique_ptr<Client>> client = Client::Connect(globals.server, options);
  if (client.ok() || client.status().code() != StatusCode::kUnavailable) return client;
  return Unavailable(client.status().message() +
                     ": start one with `stockpot serve --data DIR`, or name another with --server");
}

namespace {

// Who the daemon is and who we are, also from the environment, so that scripts need not say it.
void AddSecurityOptions(CLI::App& app, Globals& globals) {
  app.add_option("--tls-ca", globals.tls.ca_file, "PEM of the authority to trust: speak TLS")
      ->envname("STOCKPOT_TLS_CA");
  app.add_option("--tls-cert", globals.tls.cert_file, "PEM certificate to show to the daemon")
      ->envname("STOCKPOT_TLS_CERT");
  app.add_option("--tls-key", globals.tls.key_file, "PEM key of --tls-cert")
      ->envname("STOCKPOT_TLS_KEY");
  app.add_option("--token-file", globals.token_file, "File with the daemon's token")
      ->envname("STOCKPOT_TOKEN_FILE");
}

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

// `stockpot serve ...` becomes `stockpotd ...`, `stockpot restore ...` `stockpot-restore ...`: the
// program beside this one, or the one in PATH.
int Become(std::string program, char** argv) {
  char self[PATH_MAX];
  const ssize_t length = ::readlink("/proc/self/exe", self, sizeof self - 1);
  if (length > 0) {
    const std::string_view path(self, length);
    const std::string beside = std::string(path.substr(0, path.rfind('/') + 1)) + program;
    if (::access(beside.c_str(), X_OK) == 0) program = beside;
  }
  argv[0] = program.data();
  ::execvp(program.c_str(), argv);
  std::fprintf(stderr, "stockpot: cannot run '%s': %s\n", program.c_str(), std::strerror(errno));
  return kExitFailed;
}

int Main(int argc, char** argv) {
  if (argc >= 2 && std::string_view(argv[1]) == "serve") return Become("stockpotd", argv + 1);
  if (argc >= 2 && std::string_view(argv[1]) == "restore") {
    return Become("stockpot-restore", argv + 1);
  }

  CLI::App app("Checkpoints on their way from training to answers", "stockpot");
  app.require_subcommand(1);
  app.fallthrough();
  Registry registry{app, {}, nullptr};
  app.add_option("--server", registry.globals.server, "HOST:PORT or unix:/path of the daemon")
      ->envname("STOCKPOT_SERVER")
      ->capture_default_str();
  AddSecurityOptions(app, registry.globals);
  app.add_flag("--json", registry.globals.json, "Answer for programs");
  app.add_flag("--quiet,-q", registry.globals.quiet, "No progress");
  app.add_subcommand("serve", "Run the daemon (stockpotd) with the arguments that follow");
  app.add_subcommand("restore", "Make a new store from a backup (stockpot-restore BACKUP DATA)");
  AddUploadCommands(registry);
  AddReadCommands(registry);
  AddChangeCommands(registry);
  AddRetentionCommands(registry);
  AddProbeCommands(registry);
  AddPoolCommands(registry);
  AddGateCommand(registry);
  AddBackupCommands(registry);
  AddExportCommand(registry);
  AddVariantCommands(registry);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (!registry.action) {
    std::fprintf(stderr,
                 "stockpot: put `serve` or `restore` first: stockpot serve --data DIR ...\n");
    return kExitUsage;
  }
  const Status status = registry.action();
  std::fflush(stdout);
  if (status.ok()) return 0;
  std::fprintf(stderr, "stockpot: %s: %s\n", app.get_subcommands().front()->get_name().c_str(),
               Printable(status.message()).c_str());
  return kExitFailed;
}

}  // namespace
}  // namespace stockpot::cli

int main(int argc, char** argv) { return stockpot::cli::Main(argc, argv); }
