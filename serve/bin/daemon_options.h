// What stockpotd is told: defaults, overridden by a TOML file, overridden by flags.
//
//   stockpotd --data DIR [--base NAME] [--http HOST:PORT] [--thrift HOST:PORT] [--unix PATH]
//             [--config FILE] [--threads N] ...
//
// The TOML file has the flags' names without the dashes, `-` as `_`:  data = "/var/lib/stockpot"
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "kernels/base/status.h"

namespace stockpot {

struct DaemonOptions {
  std::filesystem::path data;                // the store; REQUIRED
  std::string base;                          // served base by name; empty: the first one imported
  std::string http = "127.0.0.1:8080";       // port 0: any free one
  std::string thrift = "127.0.0.1:7070";
  std::string unix_socket;                   // path; empty: none
  std::string tls_cert, tls_key;             // PEM, of the Thrift address; empty: no TLS
  std::string tls_client_ca;                 // PEM; not empty: clients show a certificate of these
  std::string token_file;                    // what Thrift clients must know; empty: nothing
  int threads = 0;                           // of the engine; 0: the machine's cores
  int64_t kv_mib = 1024;                     // keys and values of running sequences
  int64_t variants_mib = 2048;               // resident variants
  int64_t step_rows = 512;                   // tokens of one forward pass
  int64_t running_sequences = 64;
  int64_t waiting_requests = 1024;
  int64_t distinct_variants = 32;            // of one forward pass
  int64_t http_connections = 1024;
  int64_t thrift_clients = 256;
  int64_t session_idle_seconds = 600;
  int64_t session_mib = int64_t{16} << 20;   // of one upload
  int64_t drain_seconds = 20;                // on SIGTERM
  int64_t quota_mib = int64_t{1} << 40;      // of the packs on disk; so large: no quota
  int64_t history_mib_per_second = 100;      // of chunks that are compressed in the background
  int64_t distill_seconds = 300;             // of computing, for the scales of one variant
  int64_t distill_steps = 200;               // likewise, of the optimizer
  std::string log_level = "info";            // debug, info, warn, error
};

// Parses argv. An empty result with `exit_code` set: --help or --version was printed, or the usage was
// wrong (2) and said so on stderr.
struct ParsedDaemonOptions {
  DaemonOptions options;
  bool run = false;
  int exit_code = 0;
};
ParsedDaemonOptions ParseDaemonOptions(int argc, char** argv);

// Limits and relations that flags cannot say. InvalidArgument names the option.
Status ValidateDaemonOptions(const DaemonOptions& options);

}  // namespace stockpot
