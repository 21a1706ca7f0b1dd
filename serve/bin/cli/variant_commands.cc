// Variants as files: `export --delta` and `import-variant`.
#include <cstdio>

#include "serve/bin/cli/commands.h"
#include "serve/bin/cli/json.h"
#include "serve/bin/cli/output.h"
#include "store/variant_file.h"

namespace stockpot::cli {
namespace {

constexpr int64_t kBatchBytes = int64_t{16} << 20;  // asked about and sent together

// Chunks on their way to the daemon: those that it lacks, a batch at a time.
class ChunkSender {
 public:
  ChunkSender(Client& client, std::string session, ProgressLine& line, int64_t total_bytes)
      : client_(client), session_(std::move(session)), line_(line), total_bytes_(total_bytes) {}

  Status Add(const Digest& digest, std::span<const std::byte> data) {
    digests_.push_back(digest);
    chunks_.emplace_back(data.begin(), data.end());
    pending_bytes_ += static_cast<int64_t>(data.size());
    return pending_bytes_ >= kBatchBytes ? Send() : OkStatus();
  }

  Status Send() {
    if (digests_.empty()) return OkStatus();
    STOCKPOT_ASSIGN_OR_RETURN(const std::vector<bool> have, client_.HaveChunks(session_, digests_));
    std::vector<ChunkView> missing;
    for (size_t i = 0; i < digests_.size(); ++i) {
      if (have[i]) continue;
      missing.push_back({digests_[i], chunks_[i]});
      sent_bytes_ += static_cast<int64_t>(chunks_[i].size());
    }
    STOCKPOT_RETURN_IF_ERROR(client_.PutChunks(session_, missing));
    done_bytes_ += pending_bytes_;
    line_.Show(
        static_cast<double>(done_bytes_) / static_cast<double>(std::max<int64_t>(1, total_bytes_)),
        HumanBytes(done_bytes_) + " of " + HumanBytes(total_bytes_));
    digests_.clear();
    chunks_.clear();
    pending_bytes_ = 0;
    return OkStatus();
  }

  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  Client& client_;
  const std::string session_;
  ProgressLine& line_;
  const int64_t total_bytes_;
  std::vector<Digest> digests_;
  std::vector<std::vector<std::byte>> chunks_;
  int64_t pending_bytes_ = 0;
  int64_t done_bytes_ = 0;
  int64_t sent_bytes_ = 0;
};

// The manifest travels as chunks too: it is longer than what a call takes.
Result<rpc::Shard> SendManifest(const Manifest& manifest, ChunkSender& sender) {
  const std::string json = manifest.ToJson();
  const std::span<const std::byte> bytes = std::as_bytes(std::span(json));
  rpc::Part part;
  part.bytes = static_cast<int64_t>(bytes.size());
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(kChunkBytes)) {
    const auto chunk =
        bytes.subspan(at, std::min(static_cast<size_t>(kChunkBytes), bytes.size() - at));
    const Digest digest = Sha256(chunk);
    STOCKPOT_RETURN_IF_ERROR(sender.Add(digest, chunk));
    part.chunks.emplace_back(digest.raw());
  }
  rpc::Shard shard;
  shard.files["manifest.json"] = std::move(part);
  return shard;
}

// The base that the variant will be over. Refuses another one by the first tensor that differs.
Status CheckBase(Client& client, const VariantFile& file, const std::string& base) {
  std::string name = base;
  if (name.empty()) {
    const Digest& wanted = *file.manifest().base;
    if (client.FetchManifest(wanted.Hex()).ok()) return OkStatus();
    STOCKPOT_ASSIGN_OR_RETURN(const rpc::DaemonStatus status, client.GetStatus());
    name = status.base;
    if (name.empty() || !client.Resolve(name).ok()) {
      return NotFound("its base " + wanted.ShortHex() + " is not stored here: import it first");
    }
  }
  STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, client.Resolve(name));
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, client.FetchManifest(digest.Hex()));
  return file.CheckBase(name, digest, manifest);
}

// RUN@STEP names a checkpoint elsewhere; here what answers by that name is meant.
Result<Digest> ResolveServed(Client& client, const std::string& id) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<rpc::Alias> routes, client.Routes());
  for (const rpc::Alias& route : routes) {
    if (route.name == id) return Digest::FromRaw(route.target);
  }
  return client.Resolve(id);
}

struct ImportOptions {
  std::string file;
  std::string name;
  std::string base;
};

Status ImportVariant(const Globals& globals, const ImportOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto file, VariantFile::Open(options.file));
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_RETURN_IF_ERROR(CheckBase(*client, *file, options.base));
  rpc::SessionRequest request;
  request.kind = rpc::Kind::VARIANT;
  request.run = options.name;
  STOCKPOT_ASSIGN_OR_RETURN(const std::string session, client->OpenSession(request));
  ProgressLine line("sending", globals.quiet);
  ChunkSender sender(*client, session, line, file->manifest().stored_bytes());
  Status status = file->ForEachChunk([&](const Digest& digest, std::span<const std::byte> data) {
    return sender.Add(digest, data);
  });
  if (!status.ok()) {
    if (status.code() != StatusCode::kUnavailable) (void)client->Abort(session);
    return status;
  }
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::Shard shard, SendManifest(file->manifest(), sender));
  STOCKPOT_RETURN_IF_ERROR(sender.Send());
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::CommitReply reply, client->CommitShard(session, shard));
  if (globals.json) {
    PrintJson({{"artifact", HexDigest(reply.artifact)},
               {"name", options.name},
               {"existed", reply.existed},
               {"bytes", file->manifest().stored_bytes()},
               {"sent_bytes", sender.sent_bytes()}});
  } else {
    std::printf("variant %s %s %s: %s, of which %s travelled\n", options.name.c_str(),
                reply.existed ? "was there already:" : "is", ShortDigest(reply.artifact).c_str(),
                HumanBytes(file->manifest().stored_bytes()).c_str(),
                HumanBytes(sender.sent_bytes()).c_str());
  }
  return OkStatus();
}

}  // namespace

Status ExportVariant(Client& client, const Globals& globals, const std::string& id,
                     const std::string& file) {
  STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, ResolveServed(client, id));
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest variant, client.FetchManifest(digest.Hex()));
  Manifest base;
  if (variant.base) {
    STOCKPOT_ASSIGN_OR_RETURN(base, client.FetchManifest(variant.base->Hex()));
  }
  ProgressLine line("fetching", globals.quiet);
  const int64_t total = variant.stored_bytes();
  int64_t done = 0;
  const PartFetcher fetch = [&](const Part& part, const auto& sink) {
    return client.FetchChunks(part.chunks, [&](size_t, std::string&& data) {
      done += static_cast<int64_t>(data.size());
      line.Show(static_cast<double>(done) / static_cast<double>(std::max<int64_t>(1, total)),
                HumanBytes(done) + " of " + HumanBytes(total));
      return sink(std::as_bytes(std::span(data)));
    });
  };
  STOCKPOT_RETURN_IF_ERROR(WriteVariantFile(variant, base, fetch, file));
  if (globals.json) {
    PrintJson({{"artifact", digest.Hex()},
               {"file", file},
               {"tensors", variant.tensors.size()},
               {"bytes", total}});
  } else {
    std::printf("%s is in %s: %zu tensors, %s\n", digest.ShortHex().c_str(), file.c_str(),
                variant.tensors.size(), HumanBytes(total).c_str());
  }
  return OkStatus();
}

void AddVariantCommands(Registry& registry) {
  const auto options = std::make_shared<ImportOptions>();
  CLI::App* command = registry.app.add_subcommand(
      "import-variant", "Store a variant that `export --delta` wrote, and serve it under a name");
  command->add_option("FILE", options->file, "The safetensors file")->required();
  command->add_option("--as", options->name, "Name it is served under")->required();
  command->add_option("--base", options->base,
                      "The base it must be over; without it, the one that the file names");
  command->callback([&registry, options] {
    registry.action = [&registry, options] { return ImportVariant(registry.globals, *options); };
  });
}

}  // namespace stockpot::cli
