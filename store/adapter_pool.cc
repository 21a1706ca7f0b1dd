#include "store/adapter_pool.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "store/job_arguments.h"
#include "store/names.h"

namespace stockpot {
namespace {

constexpr size_t kMinSimilarities = 3;  // for a quantile: three adapters

std::string Joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ",") + name;
  return text;
}

std::string ExactText(double value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, value);
  return {text, end};
}

Result<double> NumberOf(const Job& job, const std::string& name) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text, Argument(job, name));
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return value;
  return InvalidArgument("job " + job.key + ": argument '" + name + "' is no number");
}

Result<const Manifest*> ManifestOf(const CheckpointStore& store, const Digest& artifact,
                                   const std::map<Digest, const Manifest*>& more,
                                   Manifest& storage) {
  if (const auto it = more.find(artifact); it != more.end()) return it->second;
  Result<Manifest> manifest = store.GetManifest(artifact);
  if (!manifest.ok()) return manifest.status().WithContext("member " + artifact.ShortHex());
  storage = *std::move(manifest);
  return &storage;
}

Job MakeJob(const std::string& pool, const std::string& op,
            std::map<std::string, std::string> args) {
  std::string all;
  for (const auto& [name, value] : args) all += name + "=" + value + "\n";
  args["pool"] = pool;
  args["op"] = op;
  return {.key = "pool/" + pool + "/" + op + "/" + Sha256(all).ShortHex(),
          .kind = JobKind::kPool,
          .args = std::move(args)};
}

}  // namespace

int64_t AdapterBytes::total() const {
  int64_t sum = manifest;
  for (const auto& [chunk, bytes] : chunks) sum += bytes;
  return sum;
}

AdapterBytes AdapterBytesOf(const Manifest& manifest) {
  AdapterBytes bytes{.manifest = static_cast<int64_t>(manifest.ToJson().size()) + kPoolMemberBytes,
                     .chunks = {}};
  const auto add = [&](const Part& part) {
    for (size_t i = 0; i < part.chunks.size(); ++i) {
      bytes.chunks[part.chunks[i]] =
          kPoolChunkBytes +
          std::min(kChunkBytes, part.bytes - static_cast<int64_t>(i) * kChunkBytes);
    }
  };
  for (const TensorEntry& tensor : manifest.tensors) {
    for (const auto& [role, part] : tensor.parts) add(part);
  }
  for (const auto& [name, part] : manifest.files) add(part);
  return bytes;
}

Result<int64_t> PoolBytes(const CheckpointStore& store, const PoolRecord& pool,
                          const std::map<Digest, const Manifest*>& more) {
  int64_t bytes = static_cast<int64_t>(pool.name.size() + EncodePool(pool).size()) +
                  kPoolMemberBytes + kPoolTaskBytes * static_cast<int64_t>(pool.tasks.size());
  std::map<Digest, int64_t> chunks;
  for (const PoolMember& member : pool.members) {
    Manifest storage;
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest* const manifest,
                              ManifestOf(store, member.artifact, more, storage));
    AdapterBytes of_member = AdapterBytesOf(*manifest);
    bytes += of_member.manifest;
    chunks.merge(of_member.chunks);
  }
  for (const auto& [chunk, size] : chunks) bytes += size;
  for (const PoolLeaving& leaving : pool.leaving) bytes += leaving.bytes;
  return bytes;
}

Result<int64_t> LargestMember(const CheckpointStore& store, const PoolRecord& pool,
                              const std::map<Digest, const Manifest*>& more) {
  int64_t largest = 0;
  for (const PoolMember& member : pool.members) {
    Manifest storage;
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest* const manifest,
                              ManifestOf(store, member.artifact, more, storage));
    largest = std::max(largest, AdapterBytesOf(*manifest).total());
  }
  return largest;
}

std::optional<double> PoolThreshold(const PoolConfig& config, std::vector<double> similarities) {
  if (config.threshold) return config.threshold;
  if (similarities.size() < kMinSimilarities) return std::nullopt;
  std::sort(similarities.begin(), similarities.end());
  const double place = config.quantile * static_cast<double>(similarities.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, similarities.size() - 1);
  const double share = place - static_cast<double>(below);
  const double quantile = similarities[below] + share * (similarities[above] - similarities[below]);
  return std::max(quantile, kLeastPoolSimilarity);
}

const PoolMember* LeastRequested(const PoolRecord& pool, const RequestCounts& requests) {
  const PoolMember* least = nullptr;
  std::pair<int64_t, int64_t> of_least;
  for (const PoolMember& member : pool.members) {
    std::pair<int64_t, int64_t> rank{0, 0};  // requests, then the newest task's arrival
    for (const PoolTask& task : pool.tasks) {
      if (task.member != member.artifact) continue;
      if (requests) rank.first += requests(PoolRoute(pool.name, task.name));
      rank.second = std::max(rank.second, task.added_ms);
    }
    if (least != nullptr && rank >= of_least) continue;
    least = &member;
    of_least = rank;
  }
  return least;
}

Result<PoolRecord> CreatePool(CheckpointStore& store, const std::string& name,
                              const PoolConfig& config, int64_t now_ms) {
  PoolRecord pool{.name = name, .config = config, .created_ms = now_ms};
  STOCKPOT_RETURN_IF_ERROR(CheckPool(pool));
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest base, store.GetManifest(config.base));
  if (base.kind != ArtifactKind::kBase) return InvalidArgument("the base of a pool is a base");
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t bytes, PoolBytes(store, pool));
  if (bytes > config.budget_bytes) {
    return InvalidArgument("an empty pool takes " + std::to_string(bytes) +
                           " bytes, the budget is " + std::to_string(config.budget_bytes));
  }
  Commit commit;
  commit.pools.push_back({pool, 0});
  commit.events.push_back({.type = "pool",
                           .subject = name,
                           .fields = {{"op", "create"},
                                      {"base", config.base.Hex()},
                                      {"budget_bytes", std::to_string(config.budget_bytes)}}});
  STOCKPOT_RETURN_IF_ERROR(store.Apply(std::move(commit)).status());
  return pool;
}

Job MakePoolAddJob(const PoolAddRequest& request) {
  nlohmann::json texts = nlohmann::json::array();
  for (const ProbeSet::Text& text : request.texts) {
    texts.push_back({{"name", text.name}, {"text", text.text}});
  }
  std::map<std::string, std::string> args = {
      {"artifact", request.artifact.Hex()},
      {"tasks", Joined(request.tasks)},
      {"owned", request.owned ? "true" : "false"},
      {"texts", texts.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)}};
  if (request.adopt) {
    args["count"] = std::to_string(request.adopt->count);
    args["lambda"] = ExactText(request.adopt->lambda);
    args["norm_sum"] = ExactText(request.adopt->norm_sum);
  }
  return MakeJob(request.pool, "add", std::move(args));
}

Job MakePoolRemoveJob(const std::string& pool, const std::string& task) {
  return MakeJob(pool, "remove", {{"tasks", task}});
}

Job MakePoolEvictJob(const std::string& pool) { return MakeJob(pool, "evict", {}); }

Job MakePoolDeleteJob(const std::string& pool, bool force) {
  return MakeJob(pool, "delete", {{"force", force ? "true" : "false"}});
}

Status MayDeletePool(const PoolRecord& pool, bool force) {
  if (force || pool.tasks.empty()) return OkStatus();
  constexpr size_t kNamed = 5;
  std::string names;
  for (size_t i = 0; i < std::min(pool.tasks.size(), kNamed); ++i) {
    names += (i == 0 ? "" : ", ") + pool.tasks[i].name;
  }
  if (pool.tasks.size() > kNamed) names += ", ...";
  return InvalidArgument("pool '" + pool.name + "' answers for " +
                         std::to_string(pool.tasks.size()) + " tasks (" + names +
                         "): --force deletes it with them");
}

Result<PoolAddRequest> ParsePoolAdd(const Job& job) {
  PoolAddRequest request;
  STOCKPOT_ASSIGN_OR_RETURN(request.pool, Argument(job, "pool"));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string hex, Argument(job, "artifact"));
  STOCKPOT_ASSIGN_OR_RETURN(request.artifact, Digest::FromHex(hex));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string tasks, Argument(job, "tasks"));
  for (size_t begin = 0; begin < tasks.size();) {
    const size_t end = std::min(tasks.find(',', begin), tasks.size());
    request.tasks.push_back(tasks.substr(begin, end - begin));
    begin = end + 1;
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::string owned, Argument(job, "owned"));
  request.owned = owned == "true";
  if (const auto it = job.args.find("texts"); it != job.args.end()) {
    const auto texts = nlohmann::json::parse(it->second, nullptr, false);
    if (!texts.is_array()) return InvalidArgument("job " + job.key + ": no probe texts");
    for (const auto& text : texts) {
      const auto read = [&](const char* key) {
        const auto found = text.is_object() ? text.find(key) : text.end();
        return found != text.end() && found->is_string() ? found->get<std::string>() : "";
      };
      request.texts.push_back({read("name"), read("text")});
    }
  }
  if (!job.args.contains("count")) return request;
  request.adopt.emplace();
  STOCKPOT_ASSIGN_OR_RETURN(const double count, NumberOf(job, "count"));
  request.adopt->count = static_cast<int64_t>(std::clamp(count, 0.0, 1e9));
  STOCKPOT_ASSIGN_OR_RETURN(request.adopt->lambda, NumberOf(job, "lambda"));
  STOCKPOT_ASSIGN_OR_RETURN(request.adopt->norm_sum, NumberOf(job, "norm_sum"));
  return request;
}

}  // namespace stockpot
