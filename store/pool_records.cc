#include "store/pool_records.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <nlohmann/json.hpp>
#include <set>

#include "store/json_integer.h"
#include "store/names.h"

namespace stockpot {
namespace {

using nlohmann::json;

constexpr double kMaxScale = 10;
constexpr size_t kMaxMembers = kMaxPoolTasks;

template <typename T>
T ValueOrThrow(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().message());
  return std::move(result).value();
}

Digest ReadDigest(const json& j, const char* key) {
  return ValueOrThrow(Digest::FromHex(j.at(key).get<std::string>()));
}

int64_t ReadInteger(const json& j, const char* key) { return IntegerOrThrow<int64_t>(j.at(key)); }

std::optional<double> ReadOptional(const json& j, const char* key) {
  const auto it = j.find(key);
  if (it == j.end() || it->is_null()) return std::nullopt;
  return it->get<double>();
}

json OrNull(const std::optional<double>& value) { return value ? json(*value) : json(); }

json ToJson(const PoolConfig& config) {
  return {{"base", config.base.Hex()},
          {"budget_bytes", config.budget_bytes},
          {"method", PoolMethodName(config.method)},
          {"projection", config.projection},
          {"scale", config.scale},
          {"threshold", OrNull(config.threshold)},
          {"quantile", config.quantile},
          {"quality", config.quality},
          {"rank", config.rank},
          {"evict", config.evict}};
}

PoolConfig ConfigFromJson(const json& j) {
  PoolConfig config;
  config.base = ReadDigest(j, "base");
  config.budget_bytes = ReadInteger(j, "budget_bytes");
  config.method = ValueOrThrow(PoolMethodFromName(j.at("method").get<std::string>()));
  config.projection = j.at("projection").get<double>();
  config.scale = j.at("scale").get<double>();
  config.threshold = ReadOptional(j, "threshold");
  config.quantile = j.at("quantile").get<double>();
  config.quality = j.at("quality").get<double>();
  config.rank = ReadInteger(j, "rank");
  config.evict = j.at("evict").get<bool>();
  return config;
}

json ToJson(const PoolMember& member) {
  return {{"artifact", member.artifact.Hex()},
          {"owned", member.owned},
          {"count", member.state.count},
          {"lambda", member.state.lambda},
          {"norm_sum", member.state.norm_sum}};
}

PoolMember MemberFromJson(const json& j) {
  return {.artifact = ReadDigest(j, "artifact"),
          .owned = j.at("owned").get<bool>(),
          .state = {.count = ReadInteger(j, "count"),
                    .lambda = j.at("lambda").get<double>(),
                    .norm_sum = j.at("norm_sum").get<double>()}};
}

json ToJson(const PoolTask& task) {
  json texts = json::array();
  for (const ProbeSet::Text& text : task.texts) {
    texts.push_back({{"name", text.name}, {"text", text.text}});
  }
  return {
      {"name", task.name},         {"member", task.member.Hex()},       {"own", task.own.Hex()},
      {"texts", std::move(texts)}, {"own_loss", OrNull(task.own_loss)}, {"loss", OrNull(task.loss)},
      {"added_ms", task.added_ms}};
}

PoolTask TaskFromJson(const json& j) {
  PoolTask task{.name = j.at("name").get<std::string>(),
                .member = ReadDigest(j, "member"),
                .own = ReadDigest(j, "own"),
                .texts = {},
                .own_loss = ReadOptional(j, "own_loss"),
                .loss = ReadOptional(j, "loss"),
                .added_ms = ReadInteger(j, "added_ms")};
  for (const json& text : j.at("texts")) {
    task.texts.push_back({text.at("name").get<std::string>(), text.at("text").get<std::string>()});
  }
  return task;
}

Status CheckConfig(const PoolConfig& c) {
  const auto in = [](double value, double low, double high) {
    return value >= low && value <= high;
  };
  if (c.budget_bytes < 1) return InvalidArgument("the budget must be at least 1 byte");
  if (!(c.projection >= 0 && c.projection < 1)) return InvalidArgument("projection: [0, 1)");
  if (!(c.scale > 0 && c.scale <= kMaxScale)) return InvalidArgument("scale: (0, 10]");
  if (c.threshold && !in(*c.threshold, -1, 1)) return InvalidArgument("threshold: [-1, 1]");
  if (!in(c.quantile, 0, 1)) return InvalidArgument("quantile: [0, 1]");
  if (!(c.quality > 0 && c.quality <= 1)) return InvalidArgument("quality: (0, 1]");
  if (c.rank < 0) return InvalidArgument("the rank is negative");
  return OkStatus();
}

Status CheckTask(const PoolTask& task) {
  if (!IsValidRunName(task.name)) {
    return InvalidArgument("a task is named like a run ([A-Za-z0-9][A-Za-z0-9._-]*, 128 at most)");
  }
  size_t bytes = 0;
  for (const ProbeSet::Text& text : task.texts) {
    if (!IsPrintableName(text.name, 256) || text.text.empty() || !IsUtf8(text.text)) {
      return InvalidArgument("task '" + task.name +
                             "': a probe text is empty, without a printable " +
                             "name, or not UTF-8");
    }
    bytes += text.name.size() + text.text.size();
  }
  if (bytes <= kMaxPoolProbeBytes) return OkStatus();
  return InvalidArgument("task '" + task.name + "' has " + std::to_string(bytes) +
                         " bytes of probe texts, at most " + std::to_string(kMaxPoolProbeBytes) +
                         " are kept");
}

}  // namespace

const PoolTask* PoolRecord::FindTask(std::string_view task) const {
  const auto it =
      std::find_if(tasks.begin(), tasks.end(), [&](const PoolTask& t) { return t.name == task; });
  return it == tasks.end() ? nullptr : &*it;
}

const PoolMember* PoolRecord::FindMember(const Digest& artifact) const {
  const auto it = std::find_if(members.begin(), members.end(),
                               [&](const PoolMember& m) { return m.artifact == artifact; });
  return it == members.end() ? nullptr : &*it;
}

std::string PoolRoute(std::string_view pool, std::string_view task) {
  return std::string(pool) + "/" + std::string(task);
}

std::optional<std::pair<std::string, std::string>> SplitPoolRoute(std::string_view name) {
  const size_t slash = name.find('/');
  if (slash == std::string_view::npos) return std::nullopt;
  const std::string_view pool = name.substr(0, slash), task = name.substr(slash + 1);
  if (!IsValidRunName(pool) || !IsValidRunName(task)) return std::nullopt;
  return std::pair(std::string(pool), std::string(task));
}

double PoolQuality(double own_loss, double loss) {
  return std::isfinite(own_loss) && std::isfinite(loss) ? std::exp(own_loss - loss) : 0;
}

Status CheckPool(const PoolRecord& pool) {
  if (!IsValidRunName(pool.name)) return InvalidArgument("a pool is named like a run");
  STOCKPOT_RETURN_IF_ERROR(CheckConfig(pool.config));
  if (pool.tasks.size() > kMaxPoolTasks || pool.members.size() > kMaxMembers) {
    return InvalidArgument("a pool has at most " + std::to_string(kMaxPoolTasks) + " tasks");
  }
  if (pool.leaving.size() > kMaxPoolLeaving) {
    return InvalidArgument("too many former members wait for a collection of garbage");
  }
  if (pool.similarities.size() > kMaxPoolSimilarities) {
    return InvalidArgument("over " + std::to_string(kMaxPoolSimilarities) + " similarities");
  }
  std::set<Digest> members, used;
  for (const PoolMember& member : pool.members) {
    const AdapterMergeState& state = member.state;
    if (!members.insert(member.artifact).second) return InvalidArgument("a member is there twice");
    if (state.count < 1 || !(state.lambda > 0 && std::isfinite(state.lambda)) ||
        !(state.norm_sum >= 0 && std::isfinite(state.norm_sum))) {
      return InvalidArgument("member " + member.artifact.ShortHex() + ": its state of merging is " +
                             "out of range");
    }
  }
  for (size_t i = 0; i < pool.tasks.size(); ++i) {
    const PoolTask& task = pool.tasks[i];
    STOCKPOT_RETURN_IF_ERROR(CheckTask(task));
    if (i > 0 && pool.tasks[i - 1].name >= task.name) {
      return InvalidArgument("task '" + task.name + "' is there twice or unsorted");
    }
    if (!members.contains(task.member)) {
      return InvalidArgument("task '" + task.name + "' has no member");
    }
    used.insert(task.member);
  }
  if (used != members) return InvalidArgument("a member has no task");
  for (const PoolLeaving& leaving : pool.leaving) {
    if (members.contains(leaving.artifact) || leaving.bytes < 0) {
      return InvalidArgument("artifact " + leaving.artifact.ShortHex() + " leaves and stays");
    }
  }
  return OkStatus();
}

std::string EncodePool(const PoolRecord& pool) {
  json members = json::array(), tasks = json::array(), leaving = json::array();
  for (const PoolMember& member : pool.members) members.push_back(ToJson(member));
  for (const PoolTask& task : pool.tasks) tasks.push_back(ToJson(task));
  for (const PoolLeaving& gone : pool.leaving) {
    leaving.push_back({{"artifact", gone.artifact.Hex()}, {"bytes", gone.bytes}});
  }
  const json j = {{"name", pool.name},
                  {"config", ToJson(pool.config)},
                  {"version", pool.version},
                  {"members", std::move(members)},
                  {"tasks", std::move(tasks)},
                  {"leaving", std::move(leaving)},
                  {"created_ms", pool.created_ms},
                  {"similarities", pool.similarities}};
  return j.dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<PoolRecord> DecodePool(std::string_view text) {
  PoolRecord pool;
  try {
    const json j = json::parse(text);
    pool.name = j.at("name").get<std::string>();
    pool.config = ConfigFromJson(j.at("config"));
    pool.version = ReadInteger(j, "version");
    for (const json& member : j.at("members")) pool.members.push_back(MemberFromJson(member));
    for (const json& task : j.at("tasks")) pool.tasks.push_back(TaskFromJson(task));
    for (const json& gone : j.at("leaving")) {
      pool.leaving.push_back({ReadDigest(gone, "artifact"), ReadInteger(gone, "bytes")});
    }
    pool.created_ms = ReadInteger(j, "created_ms");
    j.at("similarities").get_to(pool.similarities);
  } catch (const std::exception& error) {
    return Corruption(std::string("pool record: ") + error.what());
  }
  const Status status = CheckPool(pool);
  if (!status.ok()) return Corruption("pool record: " + status.message());
  return pool;
}

}  // namespace stockpot
