// The daemon's remote interface over a real store in a temporary folder, without a port: what a
// connection sends goes through the real transport, processor, handlers and sessions. The world is
// the same for every input: a base, a run with a checkpoint, and session ids that count from 1, so
// that an input can name the sessions it opens.
//
// Programs that use it are linked with -Wl,--wrap=getrandom. Thread promise: one thread.
#pragma once

#include <thrift/TProcessor.h>
#include <thrift/transport/TVirtualTransport.h>

#include <memory>
#include <string>
#include <string_view>

#include "store/checkpoint_store.h"
#include "store/ingest.h"
#include "store/pipeline.h"
#include "tests/fuzz/temporary_folder.h"
#include "thrift/handlers.h"

namespace stockpot::fuzz {

class ServedStore {
 public:
  // Names of what is there from the start: base "base", run "run", checkpoint run@1 with the metric
  // loss; tensors "a" F32 [2, 3], "b" BF16 [4], and "big" U8 [70000], which stands in a pack.
  ServedStore();
  ~ServedStore();

  // Back to that world; no session is open. Cheap if nothing was changed since.
  void Restart();

  // What one connection that sends `bytes` and then no more is answered, until it is closed.
  // Paths that a call names are replaced by ones in the temporary folder.
  std::string Converse(std::string_view bytes);

  // Lets queued jobs end and the pipeline rest, then: whatever was acknowledged is whole.
  void CheckWhole();

  CheckpointStore& store() { return *store_; }
  bool changed() const;  // since Restart()

  // Of the n-th session since Restart(), from 1.
  static std::string SessionId(int n);

 private:
  void Open(const std::filesystem::path& folder);
  void Close();
  void MakeParts();

  TemporaryFolder folder_;
  std::unique_ptr<CheckpointStore> store_;
  std::unique_ptr<Ingest> ingest_;
  std::unique_ptr<Pipeline> pipeline_;
  ServerFacts facts_{rpc_limits::kMaxConnections};
  std::shared_ptr<apache::thrift::TProcessor> processor_;
  int64_t first_event_ = 0;
  bool chunks_put_ = false;
};

// A transport for generated clients: what is flushed is one connection to the store, and what it
// answers is there to be read.
class LoopTransport : public apache::thrift::transport::TVirtualTransport<LoopTransport> {
 public:
  explicit LoopTransport(ServedStore& served) : served_(served) {}

  bool isOpen() const override { return true; }
  bool peek() override { return true; }
  uint32_t read(uint8_t* buffer, uint32_t length);
  void write(const uint8_t* buffer, uint32_t length);
  void flush() override;

  // Everything that was ever sent.
  const std::string& sent() const { return sent_; }

 private:
  ServedStore& served_;
  std::string request_, reply_, sent_;
};

}  // namespace stockpot::fuzz
