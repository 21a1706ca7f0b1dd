// What programs see: the JSON of --json, described in serve/bin/cli/README.md and stable. Digests
// are 64 hex digits, times Unix milliseconds, sizes bytes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "stockpot_rpc/stockpot_types.h"
#include "thrift/upload.h"

namespace stockpot::cli {

using Json = nlohmann::ordered_json;

Json ToJson(const rpc::Run& run);
Json ToJson(const rpc::LogEntry& entry);
Json ToJson(const rpc::ArtifactInfo& artifact);
Json ToJson(const rpc::Eval& eval);
Json ToJson(const rpc::Job& job);
Json ToJson(const rpc::Event& event);
Json ToJson(const rpc::DaemonStatus& status);
Json ToJson(const rpc::ScrubReply& reply);
Json ToJson(const rpc::RetentionReport& report);
Json ToJson(const rpc::ProbeSet& probe);
Json ToJson(const rpc::Gate& gate);
Json ToJson(const rpc::GcReply& reply);
Json ToJson(const rpc::BackupReply& reply);
Json ToJson(const UploadReport& report);
// An alias or a route: `target` is the name of the digest's field, "artifact" or "variant".
Json ToJson(const rpc::Alias& alias, const char* target);

template <typename T>
Json ToJsonArray(const std::vector<T>& values) {
  Json out = Json::array();
  for (const T& value : values) out.push_back(ToJson(value));
  return out;
}

// One line (compact) or several, to stdout. Bytes that are no UTF-8 are replaced.
void PrintJson(const Json& json, bool compact = false);

const char* KindName(rpc::Kind kind);

}  // namespace stockpot::cli
