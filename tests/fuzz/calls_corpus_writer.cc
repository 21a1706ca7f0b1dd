// Writes the seeds of rpc_wire and rpc_calls: what the generated clients send when they talk to the
// store.
//   fuzz_calls_corpus_writer FOLDER
#include <thrift/protocol/TMultiplexedProtocol.h>

#include <cstdio>
#include <random>
#include <type_traits>

#include "kernels/base/check.h"
#include "stockpot_rpc/CheckpointService.h"
#include "stockpot_rpc/ControlService.h"
#include "stockpot_rpc/LineageService.h"
#include "stockpot_rpc/PoolService.h"
#include "tests/fuzz/corpus.h"
#include "tests/fuzz/served_store.h"
#include "thrift/wire.h"

namespace stockpot::fuzz {
namespace {

// One connection: the calls of `script`, as the generated clients write them.
template <typename Script>
std::string Connection(ServedStore& served, const Script& script) {
  using apache::thrift::protocol::TMultiplexedProtocol;
  served.Restart();
  const auto loop = std::make_shared<LoopTransport>(served);
  const auto channel = [&](const char* name) {
    return std::make_shared<TMultiplexedProtocol>(
        MakeWireProtocol(loop, rpc_limits::kClientMaxStringBytes), name);
  };
  rpc::CheckpointServiceClient checkpoint(channel("checkpoint"));
  rpc::LineageServiceClient lineage(channel("lineage"));
  rpc::ControlServiceClient control(channel("control"));
  try {
    if constexpr (std::is_invocable_v<Script, rpc::CheckpointServiceClient&,
                                      rpc::PoolServiceClient&>) {
      rpc::PoolServiceClient pool(channel("pool"));
      script(checkpoint, pool);
    } else {
      script(checkpoint, lineage, control);
    }
  } catch (const rpc::Error& error) {
    std::fprintf(stderr, "cut short: %s\n", error.message.c_str());
  }
  served.CheckWhole();
  return loop->sent();
}

rpc::Tensor TensorOf(const std::string& name, const std::string& data) {
  rpc::Tensor tensor;
  tensor.name = name;
  tensor.dtype = "F32";
  tensor.shape = {static_cast<int64_t>(data.size() / 4)};
  tensor.data.bytes = static_cast<int64_t>(data.size());
  tensor.data.chunks = {std::string(Sha256(data).raw())};
  return tensor;
}

// Tensors "a" and "b", of the chunk that fill makes, and an alias of "a".
rpc::Shard PutShard(rpc::CheckpointServiceClient& client, const std::string& session, char fill) {
  rpc::Shard shard;
  for (const char* name : {"a", "b"}) {
    const std::string data(24, name[0] == 'a' ? fill : 'b');
    client.put_chunk(session, std::string(Sha256(data).raw()), data);
    shard.tensors.push_back(TensorOf(name, data));
  }
  rpc::Tensor tied;
  tied.name = "c";
  tied.dtype = "F32";
  tied.shape = {6};
  tied.alias_of = "a";
  shard.tensors.push_back(tied);
  const std::string config = "{}";
  client.put_chunk(session, std::string(Sha256(config).raw()), config);
  shard.files["config.json"].bytes = 2;
  shard.files["config.json"].chunks = {std::string(Sha256(config).raw())};
  return shard;
}

// One of two ranks' rows of one tensor.
void CommitPiece(rpc::CheckpointServiceClient& client, int32_t rank) {
  rpc::SessionRequest request;
  request.run = "run";
  request.step = 5;
  request.rank = rank;
  request.world = 2;
  request.attempt = "try";
  std::string session;
  client.open_session(session, request);
  const std::string data(24, static_cast<char>('0' + rank));
  client.put_chunk(session, std::string(Sha256(data).raw()), data);
  rpc::Shard shard;
  shard.tensors.push_back(TensorOf("pieces", data));
  shard.tensors[0].shape = {2, 3};
  shard.tensors[0].global_shape = {4, 3};
  shard.tensors[0].offsets = {2 * rank, 0};
  rpc::CommitReply reply;
  client.commit_shard(reply, session, shard);
}

rpc::StepKey PiecesKey() {
  rpc::StepKey key;
  key.run = "run";
  key.step = 5;
  key.world = 2;
  key.attempt = "try";
  return key;
}

void CommitSteps(rpc::CheckpointServiceClient& client) {
  for (int64_t step = 2; step < 4; ++step) {
    rpc::SessionRequest request;
    request.run = "run";
    request.step = step;
    std::string session;
    client.open_session(session, request);
    rpc::Shard shard = PutShard(client, session, static_cast<char>('0' + step));
    shard.metrics["loss"] = 2.0 / static_cast<double>(step);
    rpc::CommitReply reply;
    client.commit_shard(reply, session, shard);
  }
}

// What is refused is sent all the same.
template <typename Call>
void Try(const Call& call) {
  try {
    call();
  } catch (const rpc::Error&) {
  }
}

std::vector<rpc::ProbeText> Texts(const std::string& text) {
  rpc::ProbeText one;
  one.name = "t";
  one.text = text;
  return {one};
}

// Of the adapter of one layer that a session brings for the pool "p".
rpc::CommitReply SendAdapter(rpc::CheckpointServiceClient& client) {
  rpc::SessionRequest request;
  request.kind = rpc::Kind::ADAPTER;
  request.run = "p/task";
  request.base = "base";
  std::string session;
  client.open_session(session, request);
  rpc::Shard shard;
  for (const char* factor : {"A", "B"}) {
    const std::string data(8, factor[0]);
    client.put_chunk(session, std::string(Sha256(data).raw()), data);
    shard.tensors.push_back(
        TensorOf(std::string("base_model.model.a.lora_") + factor + ".weight", data));
    shard.tensors.back().shape = {1, 2};
  }
  const std::string config = R"({"peft_type":"LORA","r":1,"lora_alpha":1,"target_modules":["a"]})";
  client.put_chunk(session, std::string(Sha256(config).raw()), config);
  shard.files["adapter_config.json"].bytes = static_cast<int64_t>(config.size());
  shard.files["adapter_config.json"].chunks = {std::string(Sha256(config).raw())};
  rpc::CommitReply reply;
  client.commit_shard(reply, session, shard);
  return reply;
}

void AddPoolCalls(const Corpus& corpus, ServedStore& served) {
  const auto calls = [](rpc::CheckpointServiceClient& checkpoint, rpc::PoolServiceClient& pools) {
    rpc::PoolConfig config;
    config.budget_bytes = 100'000;
    rpc::Pool pool;
    pools.create(pool, "p", "base", config);
    config.method = "mean";
    config.__set_threshold(0.25);
    config.evict = false;
    pools.create(pool, "q", "base", config);
    Try([&] { pools.create(pool, "p", "base", config); });
    Try([&] { SendAdapter(checkpoint); });
    rpc::PoolAdd add;
    add.pool = "p";
    add.tasks = {"task"};
    add.id = "base";
    add.probe = Texts("held out");
    add.owned = true;
    rpc::Job job;
    Try([&] { pools.add(job, add); });  // no adapter
    add.tasks = {"one", "two"};
    add.adopt = true;
    add.merged = 2;
    add.opcm_lambda = 1.5;
    add.norm_sum = 3;
    Try([&] { pools.add(job, add); });
    Try([&] { pools.remove(job, "p", "task"); });
    pools.evict(job, "p");
    pools.delete_pool(job, "q", false);
    pools.delete_pool(job, "p", true);
    std::vector<rpc::Pool> all;
    pools.pools(all);
    Try([&] { pools.pool(pool, "p"); });
  };
  corpus.Add("rpc_wire", "pool", Connection(served, calls));
}

void AddCalls(const Corpus& corpus) {
  ServedStore served;
  const auto add = [&](const std::string& name, const auto& script) {
    corpus.Add("rpc_wire", name, Connection(served, script));
  };
  add("base", [](auto& checkpoint, auto& lineage, auto&) {
    rpc::HelloReply hello;
    checkpoint.hello(hello, 1, "");
    rpc::SessionRequest request;
    request.kind = rpc::Kind::BASE;
    request.run = "b2";
    std::string session;
    checkpoint.open_session(session, request);
    rpc::CommitReply reply;
    checkpoint.commit_shard(reply, session, PutShard(checkpoint, session, 'n'));
    rpc::Run run;
    checkpoint.create_run(run, "r2", "b2", {}, {{"owner", "me"}}, false);
    std::vector<rpc::Run> runs;
    lineage.runs(runs);
  });
  add("steps", [](auto& checkpoint, auto& lineage, auto&) {
    CommitSteps(checkpoint);
    std::vector<rpc::LogEntry> log;
    lineage.log(log, "run");
    std::string text;
    checkpoint.fetch_manifest(text, "run@3");
    checkpoint.fetch_chunk(text, std::string(Sha256("{}").raw()));
    checkpoint.report_eval("run@2", "mmlu", "acc", 0.5, "me");
  });
  add("ranks", [](auto& checkpoint, auto&, auto&) {
    for (int32_t rank = 0; rank < 2; ++rank) CommitPiece(checkpoint, rank);
    rpc::StepState state;
    checkpoint.step_state(state, PiecesKey(), 0);
    rpc::ResumePoint point;
    checkpoint.resume_point(point, "run", "job");
  });
  add("groups", [](auto& checkpoint, auto& lineage, auto& control) {
    rpc::SessionRequest request;
    request.run = "run";
    request.step = 4;
    std::string session;
    checkpoint.open_session(session, request);
    rpc::Shard shard = PutShard(checkpoint, session, 'g');
    shard.tensors.push_back(TensorOf("a", std::string(24, 'b')));
    shard.tensors.back().group = "optimizer";
    rpc::CommitReply reply;
    checkpoint.commit_shard(reply, session, shard);
    rpc::ArtifactInfo info;
    lineage.show(info, "run@4.optimizer");
    rpc::Job job;
    control.compress(job, "run");
  });
  add("session", [](auto& checkpoint, auto&, auto&) {
    rpc::SessionRequest request;
    request.run = "run";
    request.step = 9;
    request.__set_resumed_from(std::string(32, 'r'));
    std::string session;
    try {
      checkpoint.open_session(session, request);
    } catch (const rpc::Error&) {  // it resumes from nothing that is known
    }
    request.__isset.resumed_from = false;
    checkpoint.open_session(session, request);
    std::vector<bool> have;
    checkpoint.have_chunks(have, session, {std::string(32, 'x'), std::string(Sha256("{}").raw())});
    checkpoint.abort(session);
  });
  add("lineage", [](auto&, auto& lineage, auto&) {
    rpc::ArtifactInfo info;
    lineage.show(info, "run@1");
    std::vector<rpc::Alias> aliases;
    lineage.aliases(aliases);
    rpc::AliasMove move;
    move.name = "good";
    move.id = "run@1";
    move.by = "me";
    move.__set_expected("");
    rpc::Alias alias;
    lineage.move_alias(alias, move);
    std::string hex;
    lineage.resolve(hex, "good");
    lineage.pin("good", "me", "why");
    lineage.unpin("good");
  });
  add("retention", [](auto& checkpoint, auto& lineage, auto&) {
    CommitSteps(checkpoint);
    rpc::RetentionPolicy policy, stored;
    policy.keep_last = 1;
    policy.every = 100;
    policy.grace_ms = 0;
    policy.best.resize(1);
    policy.best[0].metric = "loss";
    lineage.set_retention(stored, "run", policy);
    rpc::RetentionReport report;
    lineage.retention(report, "run");
    rpc::GcReply reply;
    lineage.gc(reply, true, 0);
    try {
      lineage.delete_artifact("run@2", 1000, "me", "old");
      lineage.undelete("run@2");
    } catch (const rpc::Error&) {  // something keeps it
    }
    lineage.gc(reply, false, 0);
  });
  add("control", [](auto& checkpoint, auto&, auto& control) {
    CommitSteps(checkpoint);
    rpc::Job job;
    control.publish(job, "run@3", "dense", "served", {});
    control.publish(job, "run@3", "bitdelta", "", {});
    control.merge(job, {"run@2", "run@3"}, "run", 3, 0.9, 0, false, rpc::MergeOptions());
    control.job(job, job.key);
    std::vector<rpc::Job> jobs;
    control.jobs(jobs);
    std::vector<rpc::Alias> routes;
    control.routes(routes);
    rpc::DaemonStatus status;
    control.status(status);
    std::vector<rpc::Event> events;
    control.watch(events, 0, 100, 10);
    rpc::BackupReply backup;
    control.backup(backup, "/x");
    rpc::ScrubReply scrub;
    control.scrub(scrub, "");
    control.scrub(scrub, "/x");
  });
  add("texts", [](auto&, auto& lineage, auto& control) {
    rpc::ProbeSet set;
    lineage.set_probe(set, "run", Texts("What its training has not seen."), "me");
    lineage.set_calibration(set, "run", Texts("Something else, to find scales on."), "me");
    lineage.probe(set, "run");
    lineage.calibration(set, "run");
    rpc::Gate gate, stored;
    gate.max_kl = 0.5;
    gate.min_top1 = 0.25;
    lineage.set_gate(stored, "run", gate);
    lineage.gate(stored, "run");
    rpc::Job job;
    rpc::PublishOptions how;
    how.alpha = "closed-form";
    how.planes = 2;
    how.residual_rank = 1;
    control.publish_forced(job, "run@1", "bitdelta", "forced", "because", "me", how);
    Try([&] { control.score(job, "run@1"); });
    Try([&] { control.unpublish("forced"); });
    lineage.set_probe(set, "run", {}, "me");
  });
  AddPoolCalls(corpus, served);
  std::minstd_rand random(7);
  for (int i = 0; i < 4; ++i) {
    std::string bytes(200, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random() >> 8);
    corpus.Add("rpc_calls", "random" + std::to_string(i), bytes);
  }
}

}  // namespace
}  // namespace stockpot::fuzz

int main(int argc, char** argv) {
  using namespace stockpot::fuzz;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  AddCalls(Corpus(argv[1]));
  return 0;
}
