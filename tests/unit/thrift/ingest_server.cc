// A process with a store and its Thrift server and nothing else: what taking checkpoints costs,
// alone.
//
//   ingest_server DIRECTORY    prints its address, serves until its standard input ends
#include <unistd.h>

#include <cstdio>

#include "store/ingest.h"
#include "store/pipeline.h"
#include "thrift/server.h"

namespace stockpot {
namespace {

Result<Manifest> RefuseToMerge(CheckpointStore&, std::span<const Digest>, const std::string&,
                               int64_t, const MergeOptions&, const ProgressFunction&) {
  return Internal("this program does not merge");
}

Status Serve(const char* directory) {
  STOCKPOT_ASSIGN_OR_RETURN(
      const auto store, CheckpointStore::Open({.directory = directory, .clock = SystemClock()}));
  Ingest ingest(*store, IngestLimits{}, SystemClock());
  Pipeline pipeline(*store, {.merge = RefuseToMerge, .threads = 1, .clock = SystemClock()});
  STOCKPOT_ASSIGN_OR_RETURN(
      const auto server,
      RpcServer::Start(
          {.store = *store, .ingest = ingest, .pipeline = pipeline, .control = {.version = "test"}},
          {.addresses = {"127.0.0.1:0"}}));
  std::printf("%s\n", server->addresses()[0].ToString().c_str());
  std::fflush(stdout);
  char byte = 0;
  while (::read(STDIN_FILENO, &byte, 1) > 0) {
  }
  store->Shutdown();
  return OkStatus();
}

}  // namespace
}  // namespace stockpot

int main(int argc, char** argv) {
  const stockpot::Status status =
      argc == 2 ? stockpot::Serve(argv[1]) : stockpot::InvalidArgument("ingest_server DIRECTORY");
  if (status.ok()) return 0;
  std::fprintf(stderr, "ingest_server: %s\n", status.ToString().c_str());
  return 1;
}
