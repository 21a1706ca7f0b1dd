// Sequences of calls that are nearly right, made from the input's bytes, through the generated
// clients. What is acknowledged is checked: it can be fetched, it is what was sent, it has the
// digest that was said, and it is in the log.
#include <thrift/protocol/TMultiplexedProtocol.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "kernels/base/check.h"
#include "stockpot_rpc/CheckpointService.h"
#include "stockpot_rpc/ControlService.h"
#include "stockpot_rpc/LineageService.h"
#include "store/manifest.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/served_store.h"
#include "tests/fuzz/target.h"
#include "thrift/wire.h"

namespace stockpot::fuzz {
namespace {

using apache::thrift::protocol::TMultiplexedProtocol;

constexpr int kMaxCalls = 48;
constexpr size_t kPackedChunkBytes = 66'000;  // over what the catalogue holds itself

ServedStore& Served() {
  static ServedStore served;
  return served;
}

class Caller {
 public:
  Caller(ServedStore& served, ByteReader& in)
      : in_(in),
        loop_(std::make_shared<LoopTransport>(served)),
        checkpoint_(Channel("checkpoint")),
        lineage_(Channel("lineage")),
        control_(Channel("control")) {}

  void Run() {
    for (int i = 0; i < kMaxCalls && !in_.empty(); ++i) CallOnce();
  }

 private:
  std::shared_ptr<apache::thrift::protocol::TProtocol> Channel(const std::string& service) {
    return std::make_shared<TMultiplexedProtocol>(
        MakeWireProtocol(loop_, rpc_limits::kClientMaxStringBytes), service);
  }

  // True if the call was answered; refused otherwise, and never by a fault of ours.
  template <typename Call>
  bool Try(const Call& call) {
    try {
      call();
      return true;
    } catch (const rpc::Error& error) {
      STOCKPOT_CHECK(error.code != rpc::ErrorCode::INTERNAL, error.message);
      STOCKPOT_CHECK(error.code != rpc::ErrorCode::CORRUPTION, error.message);
      STOCKPOT_CHECK(!error.message.empty());
      return false;
    } catch (const apache::thrift::TException&) {  // a connection that was closed on us
      return false;
    }
  }

  void CallOnce();
  void OpenSession();
  void PutChunk();
  void Commit();
  void CommitRanks();
  void CheckCommitted(const rpc::CommitReply& reply, const rpc::Shard& shard);
  void CreateRun();
  void Fetch();
  void Lineage();
  void Retention();
  void Control();

  std::string Session();
  std::string Id();
  std::string Name();
  std::string ChunkBytes();
  std::string Upload(const std::string& session, const std::string& data);
  rpc::Part MakePart(const std::string& session, std::string data);
  rpc::Tensor MakeTensor(const std::string& session);
  void Distort(rpc::Shard& shard);
  int64_t Number();

  ByteReader& in_;
  const std::shared_ptr<LoopTransport> loop_;
  rpc::CheckpointServiceClient checkpoint_;
  rpc::LineageServiceClient lineage_;
  rpc::ControlServiceClient control_;
  std::vector<std::string> sessions_;
  std::vector<std::string> artifacts_;  // hex digests that were acknowledged
  std::set<std::string> chunks_;        // raw digests, put
  bool may_expire_ = false;             // a policy may delete what was acknowledged, in a job
};

int64_t Caller::Number() {
  constexpr int64_t kNumbers[] = {0,    1,         -1,        2,         3,         7,
                                  1000, INT32_MAX, INT64_MAX, INT64_MIN, 1LL << 40, 1LL << 43};
  return in_.OneIn(8) ? in_.Integer<int64_t>() : kNumbers[in_.Below(std::size(kNumbers))];
}

std::string Caller::Session() {
  if (sessions_.empty() || in_.OneIn(16)) return in_.String(40);
  return sessions_[sessions_.size() - 1 - in_.Below(sessions_.size())];
}

std::string Caller::Name() {
  static const std::string kNames[] = {"run",        "base",      "r2",          "b2",
                                       "run@latest", "run@best",  "run@1",       "r2@7",
                                       "served",     "r2@latest", "run@2.merge", "run@1.full"};
  return in_.OneIn(8) ? in_.String(20) : kNames[in_.Below(std::size(kNames))];
}

std::string Caller::Id() {
  if (artifacts_.empty() || in_.OneIn(2)) return Name();
  const std::string& hex = artifacts_[in_.Below(artifacts_.size())];
  return in_.OneIn(4) ? hex.substr(0, 4 + in_.Below(16)) : hex;
}

std::string Caller::ChunkBytes() {
  std::string data = in_.String(32);
  if (in_.OneIn(32)) data.resize(kPackedChunkBytes, 'p');
  if (data.empty()) data = "x";
  return data;
}

// The digest; puts the chunk unless told otherwise by the input.
std::string Caller::Upload(const std::string& session, const std::string& data) {
  const std::string digest(Sha256(data).raw());
  if (in_.OneIn(16)) return digest;
  if (Try([&] { checkpoint_.put_chunk(session, digest, data); })) chunks_.insert(digest);
  return digest;
}

rpc::Part Caller::MakePart(const std::string& session, std::string data) {
  rpc::Part part;
  part.bytes = static_cast<int64_t>(data.size());
  if (!data.empty()) part.chunks.push_back(Upload(session, data));
  return part;
}

rpc::Tensor Caller::MakeTensor(const std::string& session) {
  static const std::string kTensorNames[] = {
      "a", "b", "big", "c", "model.layers.0.w.weight", "lm_head.weight", "a"};
  static const std::pair<std::string, int64_t> kTypes[] = {{"F32", 4}, {"BF16", 2}, {"U8", 1},
                                                           {"F64", 8}, {"BOOL", 1}, {"F16", 2}};
  rpc::Tensor tensor;
  tensor.name = in_.OneIn(16) ? in_.String(12) : kTensorNames[in_.Below(7)];
  const auto& [dtype, size] = kTypes[in_.Below(std::size(kTypes))];
  tensor.dtype = dtype;
  int64_t bytes = size;
  for (size_t rank = in_.Below(4); rank > 0; --rank) {
    tensor.shape.push_back(static_cast<int64_t>(in_.Below(6)));
    bytes *= tensor.shape.back();
  }
  if (in_.OneIn(16)) tensor.group = in_.OneIn(2) ? "optimizer" : in_.String(8);
  if (in_.OneIn(8)) {
    tensor.alias_of = kTensorNames[in_.Below(7)];
    return tensor;
  }
  if (in_.OneIn(16)) {
    tensor.global_shape = tensor.shape;
    tensor.offsets.assign(tensor.shape.size(), 0);
    if (!tensor.shape.empty() && in_.OneIn(2)) tensor.global_shape[0] = Number();
    if (!tensor.shape.empty() && in_.OneIn(2)) tensor.offsets[0] = Number();
  }
  tensor.data =
      MakePart(session, std::string(static_cast<size_t>(bytes), static_cast<char>(in_.Byte())));
  return tensor;
}

// One thing that is not as it should be.
void Caller::Distort(rpc::Shard& shard) {
  if (shard.tensors.empty()) return;
  rpc::Tensor& tensor = shard.tensors[in_.Below(shard.tensors.size())];
  switch (in_.Below(7)) {
    case 0:
      tensor.data.bytes = Number();
      break;
    case 1:
      tensor.shape.assign(in_.Below(10), Number());
      break;
    case 2:
      tensor.data.chunks.push_back(in_.String(40));
      break;
    case 3:
      tensor.dtype = in_.String(8);
      break;
    case 4:
      shard.metrics[in_.String(8)] = std::numeric_limits<double>::quiet_NaN();
      break;
    case 5:
      shard.files[in_.String(8)] = tensor.data;
      break;
    default:
      shard.tensors.push_back(tensor);
      break;
  }
}

void Caller::OpenSession() {
  rpc::SessionRequest request;
  if (in_.OneIn(4)) {
    request.kind = rpc::Kind::BASE;
    request.run = in_.OneIn(2) ? "base" : "b2";
  } else {
    request.run = in_.OneIn(3) ? "r2" : "run";
    request.step = in_.OneIn(8) ? Number() : static_cast<int64_t>(in_.Below(8));
  }
  if (in_.OneIn(16)) request.run = in_.String(140);
  if (in_.OneIn(16)) request.kind = static_cast<rpc::Kind>(in_.Integer<int32_t>());
  if (in_.OneIn(16)) request.rank = static_cast<int32_t>(Number());
  if (in_.OneIn(16)) request.world = static_cast<int32_t>(Number());
  if (in_.OneIn(16)) request.attempt = in_.String(8);
  if (in_.OneIn(8)) request.__set_resumed_from(std::string(Sha256(in_.String(4)).raw()));
  std::string session;
  if (!Try([&] { checkpoint_.open_session(session, request); })) return;
  STOCKPOT_CHECK(!session.empty());
  sessions_.push_back(session);
}

void Caller::PutChunk() {
  const std::string session = Session(), data = ChunkBytes();
  const std::string digest(in_.OneIn(8) ? in_.String(40) : std::string(Sha256(data).raw()));
  const bool accepted = Try([&] { checkpoint_.put_chunk(session, digest, data); });
  if (accepted) STOCKPOT_CHECK(digest == Sha256(data).raw(), "put under another chunk's name");
  std::vector<bool> have;
  const std::vector<std::string> digests = {digest, std::string(Sha256("nowhere").raw())};
  if (Try([&] { checkpoint_.have_chunks(have, session, digests); }) && accepted) {
    STOCKPOT_CHECK(have.size() == 2 && have[0] && !have[1]);
  }
}

void Caller::Commit() {
  if (sessions_.empty() || in_.OneIn(2)) OpenSession();
  const std::string session = Session();
  rpc::Shard shard;
  for (size_t n = in_.Below(5); n > 0; --n) shard.tensors.push_back(MakeTensor(session));
  if (!in_.OneIn(8)) shard.files["config.json"] = MakePart(session, "{\"vocab_size\": 4}");
  if (in_.OneIn(4)) shard.metrics["loss"] = static_cast<double>(in_.Byte()) / 16;
  if (in_.OneIn(4)) Distort(shard);
  rpc::CommitReply reply;
  if (Try([&] { checkpoint_.commit_shard(reply, session, shard); })) CheckCommitted(reply, shard);
}

// Every rank sends its rows of one tensor; the last commit makes the checkpoint.
void Caller::CommitRanks() {
  const auto world = static_cast<int32_t>(2 + in_.Below(2));
  const auto step = static_cast<int64_t>(in_.Below(8));
  const std::string attempt = in_.OneIn(4) ? in_.String(4) : "try";
  for (int32_t rank = 0; rank < world; ++rank) {
    if (in_.OneIn(16)) continue;  // a rank that never shows up
    rpc::SessionRequest request;
    request.run = "run";
    request.step = step;
    request.rank = in_.OneIn(16) ? 0 : rank;
    request.world = world;
    request.attempt = attempt;
    std::string session;
    if (!Try([&] { checkpoint_.open_session(session, request); })) return;
    rpc::Tensor tensor;
    tensor.name = "pieces";
    tensor.dtype = "F32";
    tensor.shape = {2, 3};
    tensor.global_shape = {2 * world, 3};
    tensor.offsets = {2 * rank, in_.OneIn(32) ? 1 : 0};
    if (in_.OneIn(16)) tensor.offsets[0] = Number();
    tensor.data = MakePart(session, std::string(24, static_cast<char>('0' + rank)));
    rpc::Shard shard;
    shard.tensors.push_back(tensor);
    rpc::CommitReply reply;
    if (!Try([&] { checkpoint_.commit_shard(reply, session, shard); }) || !reply.complete) continue;
    if (may_expire_) return;
    std::string text;
    const std::string id = Digest::FromRaw(reply.artifact)->Hex();
    STOCKPOT_CHECK(Try([&] { checkpoint_.fetch_manifest(text, id); }), id);
    const Result<Manifest> manifest = Manifest::FromJson(text);
    STOCKPOT_CHECK(manifest.ok(), manifest.status().ToString());
    const TensorEntry* whole = manifest->Find("pieces");
    STOCKPOT_CHECK(whole != nullptr && whole->shape == tensor.global_shape, text);
    artifacts_.push_back(id);
  }
  rpc::StepState state;
  rpc::StepKey key;
  key.run = "run";
  key.step = step;
  key.world = world;
  key.attempt = attempt;
  Try([&] { checkpoint_.step_state(state, key, static_cast<int32_t>(in_.Below(2))); });
}

void Caller::CheckCommitted(const rpc::CommitReply& reply, const rpc::Shard& shard) {
  const Result<Digest> digest = Digest::FromRaw(reply.artifact);
  STOCKPOT_CHECK(digest.ok());
  if (may_expire_ || !reply.complete) return;
  std::string text;
  const bool fetched = Try([&] { checkpoint_.fetch_manifest(text, digest->Hex()); });
  STOCKPOT_CHECK(fetched, digest->Hex());
  const Result<Manifest> manifest = Manifest::FromJson(text);
  STOCKPOT_CHECK(manifest.ok(), manifest.status().ToString());
  STOCKPOT_CHECK(manifest->digest() == *digest);
  // Groups are artifacts of their own, and pieces of one tensor are one tensor.
  const bool plain = std::none_of(shard.tensors.begin(), shard.tensors.end(), [](const auto& t) {
    return !t.group.empty() || !t.global_shape.empty();
  });
  STOCKPOT_CHECK(!plain || manifest->tensors.size() == shard.tensors.size());
  for (const rpc::Tensor& tensor : shard.tensors) {
    if (!plain) continue;
    const TensorEntry* entry = manifest->Find(tensor.name);
    STOCKPOT_CHECK(entry != nullptr, tensor.name);
    STOCKPOT_CHECK(entry->shape == tensor.shape && DTypeName(entry->dtype) == tensor.dtype);
    STOCKPOT_CHECK(entry->alias_of == tensor.alias_of);
    for (const std::string& chunk : tensor.data.chunks) {
      std::string data;
      const bool whole = Try([&] { checkpoint_.fetch_chunk(data, chunk); });
      STOCKPOT_CHECK(whole && Sha256(data).raw() == chunk, tensor.name);
    }
  }
  rpc::ArtifactInfo info;
  STOCKPOT_CHECK(Try([&] { lineage_.show(info, digest->Hex()); }));
  STOCKPOT_CHECK(info.tensors == static_cast<int64_t>(manifest->tensors.size()));
  if (manifest->kind == ArtifactKind::kCheckpoint) {
    std::vector<rpc::LogEntry> log;
    STOCKPOT_CHECK(Try([&] { lineage_.log(log, manifest->run); }));
    const bool listed = std::any_of(log.begin(), log.end(), [&](const rpc::LogEntry& entry) {
      return entry.step.step == manifest->step && entry.artifact.digest == reply.artifact;
    });
    STOCKPOT_CHECK(listed, manifest->run, manifest->step);
  }
  artifacts_.push_back(digest->Hex());
}

void Caller::CreateRun() {
  static const std::string kPolicies[] = {"every", "merges", "best", "request", "", "x"};
  rpc::RunConfig config;
  config.merge_every = Number();
  config.publish = kPolicies[in_.Below(std::size(kPolicies))];
  config.best_metric = in_.OneIn(4) ? in_.String(8) : "loss";
  config.best_is_lower = in_.OneIn(2);
  if (in_.OneIn(4)) config.merge_energy = static_cast<double>(Number());
  if (in_.OneIn(4)) config.merge_rank = Number();
  config.compress_history = in_.OneIn(4);
  if (in_.OneIn(8)) config.quota_bytes = Number();
  std::map<std::string, std::string> tags;
  if (in_.OneIn(4)) tags[in_.String(8)] = in_.String(8);
  const std::string name = in_.OneIn(8) ? Name() : in_.OneIn(2) ? "r2" : "run";
  const std::string base = in_.OneIn(4) ? Id() : "base";
  const bool keep_config = in_.OneIn(4);
  rpc::Run run;
  if (!Try([&] { checkpoint_.create_run(run, name, base, config, tags, keep_config); })) return;
  STOCKPOT_CHECK(run.name == name);
  std::vector<rpc::Run> runs;
  STOCKPOT_CHECK(Try([&] { lineage_.runs(runs); }));
  STOCKPOT_CHECK(std::any_of(runs.begin(), runs.end(),
                             [&](const rpc::Run& each) { return each.name == name; }));
}

void Caller::Fetch() {
  std::string out;
  switch (in_.Below(5)) {
    case 4: {
      rpc::ResumePoint point, again;
      const std::string key = in_.OneIn(4) ? in_.String(8) : "job",
                        run = in_.OneIn(4) ? "r2" : "run";
      if (!Try([&] { checkpoint_.resume_point(point, run, key); })) break;
      STOCKPOT_CHECK(Try([&] { checkpoint_.resume_point(again, run, key); }));
      STOCKPOT_CHECK(point.artifact == again.artifact && point.step == again.step);
      break;
    }
    case 0:
      if (Try([&] { checkpoint_.fetch_manifest(out, Id()); })) {
        STOCKPOT_CHECK(Manifest::FromJson(out).ok(), out);
      }
      break;
    case 1: {
      const std::string digest =
          in_.OneIn(2) || chunks_.empty() ? in_.String(40) : *chunks_.begin();
      if (Try([&] { checkpoint_.fetch_chunk(out, digest); })) {
        STOCKPOT_CHECK(Sha256(out).raw() == digest);
      }
      break;
    }
    case 2:
      Try([&] {
        checkpoint_.report_eval(Id(), in_.String(8), in_.OneIn(2) ? "loss" : in_.String(8),
                                static_cast<double>(in_.Integer<int16_t>()), in_.String(4));
      });
      break;
    default:
      Try([&] { checkpoint_.abort(Session()); });
      break;
  }
}

void Caller::Lineage() {
  switch (in_.Below(5)) {
    case 0: {
      rpc::AliasMove move;
      move.name = Name();
      if (!in_.OneIn(4)) move.id = Id();
      move.by = in_.String(4);
      if (in_.OneIn(2)) move.__set_expected(in_.OneIn(2) ? "" : Id());
      rpc::Alias alias;
      const bool moved = Try([&] { lineage_.move_alias(alias, move); });
      if (moved && !move.id.empty()) STOCKPOT_CHECK(alias.target.size() == 32, move.name);
      break;
    }
    case 1: {
      std::string hex;
      rpc::ArtifactInfo info;
      if (Try([&] { lineage_.resolve(hex, Id()); }) && !may_expire_) {
        STOCKPOT_CHECK(Try([&] { lineage_.show(info, hex); }), hex);
        STOCKPOT_CHECK(info.digest == Digest::FromHex(hex)->raw(), hex);
      }
      break;
    }
    case 2: {
      std::vector<rpc::LogEntry> log;
      Try([&] { lineage_.log(log, Name()); });
      break;
    }
    case 3: {
      std::vector<rpc::Alias> aliases;
      STOCKPOT_CHECK(Try([&] { lineage_.aliases(aliases); }));
      break;
    }
    default:
      Retention();
      break;
  }
}

void Caller::Retention() {
  switch (in_.Below(6)) {
    case 0: {
      rpc::RetentionPolicy policy, stored;
      policy.keep_last = Number();
      policy.every = in_.OneIn(2) ? Number() : 0;
      policy.grace_ms = in_.OneIn(4) ? Number() : 0;
      if (in_.OneIn(4)) {
        policy.groups.resize(1);
        policy.groups[0].group = in_.OneIn(4) ? in_.String(8) : "optimizer";
        policy.groups[0].keep_last = Number();
        policy.groups[0].every = Number();
      }
      if (in_.OneIn(2)) {
        policy.best.resize(1 + in_.Below(2));
        for (rpc::BestRule& rule : policy.best) {
          rule.metric = in_.OneIn(4) ? in_.String(8) : "loss";
          rule.keep = Number();
        }
      }
      may_expire_ |=
          Try([&] { lineage_.set_retention(stored, in_.OneIn(2) ? "r2" : "run", policy); });
      break;
    }
    case 1: {
      rpc::RetentionReport report;
      Try([&] { lineage_.retention(report, in_.OneIn(2) ? "r2" : "run"); });
      break;
    }
    case 2:
      if (in_.OneIn(2)) {
        Try([&] { lineage_.pin(Id(), in_.String(4), in_.String(4)); });
      } else {
        Try([&] { lineage_.unpin(Id()); });
      }
      break;
    case 3:
      Try([&] {
        lineage_.delete_artifact(Id(), in_.OneIn(4) ? Number() : 0, "me", in_.String(4));
      });
      break;
    case 4:
      Try([&] { lineage_.undelete(Id()); });
      break;
    default: {
      rpc::GcReply reply;
      Try([&] { lineage_.gc(reply, in_.OneIn(4), in_.OneIn(8) ? -1 : 0); });
      break;
    }
  }
}

void Caller::Control() {
  rpc::Job job;
  switch (in_.Below(9)) {
    case 8:
      Try([&] { control_.compress(job, Id()); });
      break;
    case 0:
      Try([&] { control_.publish(job, Id(), in_.OneIn(2) ? "dense" : "bitdelta", Name(), {}); });
      break;
    case 1:
      Try([&] {
        rpc::PublishOptions how;
        if (in_.OneIn(2)) how.planes = Number();
        if (in_.OneIn(2)) how.residual_rank = Number();
        if (in_.OneIn(2)) how.max_bytes = Number();
        if (in_.OneIn(4)) how.max_error = static_cast<double>(Number());
        static const std::string kCodecs[] = {"bitdelta", "auto", "sparse", ""};
        const std::string codec = kCodecs[in_.Below(std::size(kCodecs))];
        control_.publish(job, Id(), in_.OneIn(8) ? in_.String(8) : codec, "", how);
      });
      break;
    case 2: {
      std::vector<std::string> ids;
      for (size_t n = in_.Below(4); n > 0; --n) ids.push_back(Id());
      static const std::string kMethods[] = {"monosoup", "monosoup-spectral", "mean", "model-stock",
                                             "x"};
      rpc::MergeOptions options;
      options.method = kMethods[in_.Below(std::size(kMethods))];
      for (size_t n = in_.Below(4); n > 0; --n) {
        options.weights.push_back(static_cast<double>(Number()));
      }
      if (in_.OneIn(4)) options.spectral = static_cast<double>(Number());
      if (in_.OneIn(4)) options.last = static_cast<int32_t>(Number());
      Try([&] {
        control_.merge(job, ids, in_.OneIn(2) ? "" : "r2", Number(), in_.OneIn(4) ? 2 : 0.5,
                       in_.OneIn(4) ? Number() : 0, in_.OneIn(2), options);
      });
      break;
    }
    case 3: {
      std::vector<rpc::Job> jobs;
      STOCKPOT_CHECK(Try([&] { control_.jobs(jobs); }));
      for (const rpc::Job& each : jobs) STOCKPOT_CHECK(Try([&] { control_.job(job, each.key); }));
      break;
    }
    case 4:
      Try([&] { control_.unpublish(Name()); });
      break;
    case 5: {
      std::vector<rpc::Event> events;
      Try([&] { control_.watch(events, Number(), static_cast<int32_t>(Number()), 100); });
      for (size_t i = 1; i < events.size(); ++i) {
        STOCKPOT_CHECK(events[i].sequence == events[i - 1].sequence + 1);
      }
      break;
    }
    case 6: {
      rpc::DaemonStatus status;
      STOCKPOT_CHECK(Try([&] { control_.status(status); }));
      break;
    }
    default: {
      rpc::BackupReply reply;
      rpc::ScrubReply report;
      if (in_.OneIn(2)) Try([&] { control_.backup(reply, "/x"); });
      Try([&] { control_.scrub(report, in_.OneIn(2) ? "/x" : ""); });
      break;
    }
  }
}

void Caller::CallOnce() {
  switch (in_.Below(8)) {
    case 0:
      return OpenSession();
    case 1:
      return PutChunk();
    case 2:
      return Commit();
    case 3:
      return in_.OneIn(2) ? CommitRanks() : Commit();
    case 4:
      return CreateRun();
    case 5:
      return Fetch();
    case 6:
      return Lineage();
    default:
      return Control();
  }
}

}  // namespace
}  // namespace stockpot::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stockpot::fuzz;
  ServedStore& served = Served();
  served.Restart();
  ByteReader in({data, size});
  Caller(served, in).Run();
  served.CheckWhole();
  return 0;
}
