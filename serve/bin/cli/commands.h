// The commands of `stockpot`. Each Add function registers some of them; parsing the command line
// picks one as `action`, which main.cc runs. Stdout has the answer, stderr progress and the one
// line of an error.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "kernels/base/status.h"
#include "thrift/client.h"

namespace stockpot::cli {

struct Globals {
  std::string server{kDefaultRpcAddress};
  ClientTls tls;           // of a TCP address
  std::string token_file;  // empty: no token
  bool json = false;   // the answer for programs (json.h)
  bool quiet = false;  // no progress
};

struct Registry {
  CLI::App& app;
  Globals globals;
  std::function<Status()> action;  // of the chosen command
};

void AddReadCommands(Registry& registry);    // runs, log, show, routes, status, jobs, events
void AddUploadCommands(Registry& registry);  // import-base, push
void AddChangeCommands(Registry& registry);  // merge, publish, compress, alias, eval
void AddRetentionCommands(Registry& registry);  // retention, pin, unpin, delete, undelete, gc
void AddProbeCommands(Registry& registry);      // probe set, show, score
void AddPoolCommands(Registry& registry);       // pool create, add, list, show, remove, ...
void AddGateCommand(Registry& registry);        // gate
void AddBackupCommands(Registry& registry);     // scrub, backup; restore is main.cc's
void AddExportCommand(Registry& registry);      // export
void AddVariantCommands(Registry& registry);    // import-variant

// Who does it, for the log: $USER.
std::string Me();

// Connects, or says what to do about it.
Result<std::unique_ptr<Client>> ConnectTo(const Globals& globals);

// `export --delta`: the variant that is served under that name, or is that artifact, as one file.
Status ExportVariant(Client& client, const Globals& globals, const std::string& id,
                     const std::string& file);

// Prints a job that was just asked for, waiting for it unless told otherwise.
Status FinishJob(Client& client, const Globals& globals, rpc::Job job, bool wait);

// Waits until the job is done, showing its share. Internal with the job's error if it failed.
Result<rpc::Job> WaitForJob(Client& client, rpc::Job job, bool quiet);

}  // namespace stockpot::cli
