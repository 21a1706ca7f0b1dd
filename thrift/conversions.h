// Between the generated structs and the store's records. Everything that comes from the wire is
// checked on its way in. Thread promise: pure functions.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "stockpot_rpc/stockpot_types.h"
#include "store/ingest.h"
#include "store/records.h"

namespace stockpot {

inline std::string RawBytes(const Digest& digest) { return std::string(digest.raw()); }

// --- from the wire: InvalidArgument names the field ---
Result<ArtifactKind> KindFromRpc(rpc::Kind kind);
Result<RunConfig> RunConfigFromRpc(const rpc::RunConfig& config);
// The parents' number is the store's to judge.
Result<MergeOptions> MergeOptionsFromRpc(const rpc::MergeOptions& options);
// Of the run where `codec` is empty. The codec judges the rest (CheckPublishOptions).
struct PublishHow {
  PublishCodec codec = PublishCodec::kBitDelta;
  PublishOptions options;
};
Result<PublishHow> PublishHowFromRpc(const std::string& codec, const rpc::PublishOptions& options,
                                     const RunConfig& of_run);
Result<SessionRequest> SessionRequestFromRpc(const rpc::SessionRequest& request);
Result<Part> PartFromRpc(const rpc::Part& part, const std::string& what);
Result<StepKey> StepKeyFromRpc(const rpc::StepKey& key);
Result<ShardCommit> ShardFromRpc(const rpc::Shard& shard);
Result<std::vector<Digest>> DigestsFromRpc(const std::vector<std::string>& raw);

Result<RetentionPolicy> RetentionPolicyFromRpc(const rpc::RetentionPolicy& policy);

// --- onto the wire ---
rpc::Kind ToRpc(ArtifactKind kind);
rpc::RunConfig ToRpc(const RunConfig& config);
rpc::Run ToRpc(const Run& run);
rpc::Part ToRpc(const Part& part);
rpc::Step ToRpc(const StepRecord& step);
rpc::Edge ToRpc(const Edge& edge);
rpc::Alias ToRpc(const Alias& alias);
rpc::Alias ToRpc(const Route& route);
rpc::Eval ToRpc(const Eval& eval);
rpc::Job ToRpc(const Job& job);  // share: 1 when done, else 0
rpc::Event ToRpc(const Event& event);
rpc::ScrubReply ToRpc(const ScrubReport& report);
rpc::CommitReply ToRpc(const CommitReply& reply);
rpc::StepState ToRpc(const StepState& state);
rpc::Gathering ToRpc(const OpenGathering& gathering);
rpc::ResumePoint ToRpc(const ResumeDecision& decision);
rpc::RetentionPolicy ToRpc(const RetentionPolicy& policy);
rpc::ProbeSet ToRpc(const ProbeSet& probe);
GateConfig GateFromRpc(const rpc::Gate& gate);  // the store checks the values
rpc::Gate ToRpc(const GateConfig& gate);
rpc::GcReply ToRpc(const RetentionChanges& changes, const GarbageReport& report);

}  // namespace stockpot
