#include "serve/bin/daemon_options.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <map>
#include <thread>
#include <toml++/toml.h>

#include "serve/bin/version.h"

namespace stockpot {
namespace {

// Every option once: its TOML key, where it goes and what it means. Flags and the file read this table.
struct Option {
  const char* key;
  std::string DaemonOptions::* text = nullptr;
  int64_t DaemonOptions::* number = nullptr;
  const char* help = "";
};

const std::vector<Option>& Options() {
  using O = DaemonOptions;
  static const std::vector<Option> table = {
      {"base", &O::base, nullptr, "name of the served base; default: the first one imported"},
      {"http", &O::http, nullptr, "HTTP address, HOST:PORT (port 0: any free one)"},
      {"thrift", &O::thrift, nullptr, "Thrift address, HOST:PORT (port 0: any free one)"},
      {"unix_socket", &O::unix_socket, nullptr, "also serve Thrift on this Unix socket"},
      {"tls_cert", &O::tls_cert, nullptr, "PEM certificate chain: TLS on the Thrift address"},
      {"tls_key", &O::tls_key, nullptr, "PEM key of --tls-cert"},
      {"tls_client_ca", &O::tls_client_ca, nullptr,
       "PEM authorities: Thrift clients must show a certificate of one of them"},
      {"token_file", &O::token_file, nullptr,
       "file with the token that Thrift clients must bring (16 to 4096 bytes)"},
      {"log_level", &O::log_level, nullptr, "debug, info, warn or error"},
      {"kv_mib", nullptr, &O::kv_mib, "MiB of keys and values of running sequences"},
      {"variants_mib", nullptr, &O::variants_mib, "MiB of resident variants"},
      {"step_rows", nullptr, &O::step_rows, "tokens of one forward pass"},
      {"running_sequences", nullptr, &O::running_sequences, "sequences in the batch"},
      {"waiting_requests", nullptr, &O::waiting_requests, "requests in the queue"},
      {"distinct_variants", nullptr, &O::distinct_variants, "variants of one forward pass"},
      {"http_connections", nullptr, &O::http_connections, "open HTTP connections"},
      {"thrift_clients", nullptr, &O::thrift_clients, "open Thrift connections"},
      {"session_idle_seconds", nullptr, &O::session_idle_seconds, "an idle upload expires after"},
      {"session_mib", nullptr, &O::session_mib, "MiB that one upload may send"},
      {"quota_mib", nullptr, &O::quota_mib, "MiB of the store's packs, the default is no quota"},
      {"history_mib_per_second", nullptr, &O::history_mib_per_second,
       "MiB of checkpoints per second that compression of history reads"},
      {"distill_seconds", nullptr, &O::distill_seconds,
       "of computing for the scales of one variant, --alpha distilled"},
      {"distill_steps", nullptr, &O::distill_steps, "of the optimizer, likewise"},
      {"drain_seconds", nullptr, &O::drain_seconds, "wait for running requests on SIGTERM"},
  };
  return table;
}

std::string FlagOf(const char* key) {
  std::string flag = "--";
  for (const char* c = key; *c != 0; ++c) flag += *c == '_' ? '-' : *c;
  return flag;
}

Status ReadTomlInto(const std::string& path, DaemonOptions& options) {
  toml::table file;
  try {
    file = toml::parse_file(path);
  } catch (const toml::parse_error& e) {
    return InvalidArgument(path + ": line " + std::to_string(e.source().begin.line) + ": " +
                           std::string(e.description()));
  }
  for (auto&& [key_node, value] : file) {
    const std::string key(key_node.str());
    if (key == "data" && value.is_string()) {
      options.data = value.as_string()->get();
      continue;
    }
    if (key == "threads" && value.is_integer()) {
      options.threads = static_cast<int>(value.as_integer()->get());
      continue;
    }
    const Option* found = nullptr;
    for (const Option& option : Options()) {
      if (key == option.key) found = &option;
    }
    if (found == nullptr) return InvalidArgument(path + ": unknown option '" + key + "'");
    if (found->text != nullptr && value.is_string()) {
      options.*found->text = value.as_string()->get();
    } else if (found->number != nullptr && value.is_integer()) {
      options.*found->number = value.as_integer()->get();
    } else {
      return InvalidArgument(path + ": option '" + key + "' wants " +
                             (found->text != nullptr ? "a string" : "an integer"));
    }
  }
  return OkStatus();
}

}  // namespace

ParsedDaemonOptions ParseDaemonOptions(int argc, char** argv) {
  ParsedDaemonOptions parsed;
  DaemonOptions from_flags;
  std::string config;
  std::string data;
  CLI::App app{"Stockpot's daemon: keeps checkpoints, merges and publishes them, serves the variants."};
  app.set_version_flag("--version", std::string(kStockpotVersion));
  app.add_option("--data", data, "folder of the store (created if missing)");
  app.add_option("--config", config, "TOML file with the same names, - as _")->check(CLI::ExistingFile);
  CLI::Option* threads =
      app.add_option("--threads", from_flags.threads, "of the engine; 0: the machine's cores");
  std::map<const Option*, CLI::Option*> flags;
  for (const Option& option : Options()) {
    flags[&option] = option.text != nullptr
                         ? app.add_option(FlagOf(option.key), from_flags.*option.text, option.help)
                         : app.add_option(FlagOf(option.key), from_flags.*option.number, option.help);
    flags[&option]->capture_default_str();
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e);
    parsed.exit_code = code == 0 ? 0 : 2;
    return parsed;
  }
  if (!config.empty()) {
    const Status read = ReadTomlInto(config, parsed.options);
    if (!read.ok()) {
      std::fprintf(stderr, "stockpotd: %s\n", read.message().c_str());
      parsed.exit_code = 2;
      return parsed;
    }
  }
  if (!data.empty()) parsed.options.data = data;
  if (threads->count() > 0) parsed.options.threads = from_flags.threads;
  for (const auto& [option, flag] : flags) {
    if (flag->count() == 0) continue;
    if (option->text != nullptr) {
      parsed.options.*option->text = from_flags.*option->text;
    } else {
      parsed.options.*option->number = from_flags.*option->number;
    }
  }
  if (parsed.options.threads == 0) {
    parsed.options.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  }
  const Status valid = ValidateDaemonOptions(parsed.options);
  if (!valid.ok()) {
    std::fprintf(stderr, "stockpotd: %s\n", valid.message().c_str());
    parsed.exit_code = 2;
    return parsed;
  }
  parsed.run = true;
  return parsed;
}

Status ValidateDaemonOptions(const DaemonOptions& options) {
  if (options.data.empty()) {
    return InvalidArgument("--data DIR is required: the folder where checkpoints are kept");
  }
  if (options.threads < 1 || options.threads > 1024) {
    return InvalidArgument("--threads must be 1 to 1024, or 0 for the machine's cores");
  }
  for (const Option& option : Options()) {
    if (option.number != nullptr && options.*option.number < 1) {
      return InvalidArgument(FlagOf(option.key) + " must be at least 1");
    }
  }
  const std::string& level = options.log_level;
  if (level != "debug" && level != "info" && level != "warn" && level != "error") {
    return InvalidArgument("--log-level must be debug, info, warn or error, not '" + level + "'");
  }
  return OkStatus();
}

}  // namespace stockpot
