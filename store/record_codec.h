// The catalogue's records as the JSON that RocksDB holds. Unknown keys are ignored and missing ones
// keep their default, so that a later version may add fields. Thread promise: pure functions.
#pragma once

#include <string>
#include <string_view>

#include "kernels/base/status.h"
#include "store/records.h"

namespace stockpot {

std::string EncodeRun(const Run& run);
Result<Run> DecodeRun(std::string_view json);

std::string EncodeStep(const StepRecord& step);
Result<StepRecord> DecodeStep(std::string_view json);

// The value of an alias or a route; its name is the key's.
std::string EncodeAlias(const Alias& alias);
Result<Alias> DecodeAlias(std::string_view name, std::string_view json);

std::string EncodeEvent(const Event& event);
Result<Event> DecodeEvent(std::string_view json);

std::string EncodeJob(const Job& job);
Result<Job> DecodeJob(std::string_view json);

std::string EncodeEval(const Eval& eval);
Result<Eval> DecodeEval(std::string_view json);

std::string EncodeResume(const ResumeDecision& decision);
Result<ResumeDecision> DecodeResume(std::string_view json);

std::string EncodeRetention(const RetentionPolicy& policy);
Result<RetentionPolicy> DecodeRetention(std::string_view json);

std::string EncodeGate(const GateConfig& gate);
Result<GateConfig> DecodeGate(std::string_view json);

std::string EncodeProbe(const ProbeSet& probe);
Result<ProbeSet> DecodeProbe(std::string_view json);

// The values of pins and tombstones; the artifact is the key's.
std::string EncodePin(const Pin& pin);
Result<Pin> DecodePin(const Digest& artifact, std::string_view json);
std::string EncodeTombstone(const Tombstone& tombstone);
Result<Tombstone> DecodeTombstone(const Digest& artifact, std::string_view json);

}  // namespace stockpot
