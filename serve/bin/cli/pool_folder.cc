#include "serve/bin/cli/pool_folder.h"

#include <fstream>
#include <map>
#include <sstream>

#include "serve/bin/cli/json.h"
#include "serve/bin/cli/output.h"
#include "store/names.h"
#include "store/safetensors.h"
#include "thrift/remote_source.h"

namespace stockpot::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndexFile = "pool.json";
constexpr const char* kMembersFolder = "members";
constexpr int kFormat = 1;
constexpr uintmax_t kMaxIndexBytes = uintmax_t{16} << 20;

Json ConfigToJson(const rpc::PoolConfig& config) {
  return {{"budget_bytes", config.budget_bytes},
          {"method", config.method},
          {"projection", config.projection},
          {"scale", config.scale},
          {"threshold", config.__isset.quantile ? Json() : Json(config.threshold)},
          {"quantile", config.__isset.quantile ? Json(config.quantile) : Json()},
          {"quality", config.quality},
          {"rank", config.rank},
          {"evict", config.evict}};
}

rpc::PoolConfig ConfigFromJson(const Json& json) {
  rpc::PoolConfig config;
  config.budget_bytes = json.at("budget_bytes").get<int64_t>();
  config.method = json.at("method").get<std::string>();
  config.projection = json.at("projection").get<double>();
  config.scale = json.at("scale").get<double>();
  if (json.at("threshold").is_null()) {
    config.__set_quantile(json.at("quantile").get<double>());
  } else {
    config.threshold = json.at("threshold").get<double>();
  }
  config.quality = json.at("quality").get<double>();
  config.rank = json.at("rank").get<int64_t>();
  config.evict = json.at("evict").get<bool>();
  return config;
}

}  // namespace

Status WritePoolFolder(Client& client, const rpc::Pool& pool, const fs::path& folder) {
  std::error_code error;
  if (fs::exists(folder, error)) return InvalidArgument(folder.string() + " exists already");
  fs::create_directories(folder / kMembersFolder, error);
  if (error) return InvalidArgument(folder.string() + ": " + error.message());
  Json members = Json::object(), tasks = Json::object();
  for (const rpc::PoolMember& member : pool.members) {
    const std::string name = ShortDigest(member.artifact);
    STOCKPOT_ASSIGN_OR_RETURN(const auto source,
                              OpenRemoteArtifact(client, HexDigest(member.artifact)));
    STOCKPOT_RETURN_IF_ERROR(WriteModelFolder(*source, folder / kMembersFolder / name));
    members[name] = {{"tasks", member.tasks},
                     {"merged", member.merged},
                     {"lambda", member.opcm_lambda},
                     {"norm_sum", member.norm_sum}};
    for (const std::string& task : member.tasks) {
      tasks[task] = std::string(kMembersFolder) + "/" + name;
    }
  }
  const Json index = {{"format", kFormat},
                      {"pool", pool.name},
                      {"base", HexDigest(pool.base)},
                      {"config", ConfigToJson(pool.config)},
                      {"tasks", tasks},
                      {"members", members}};
  const fs::path path = folder / kIndexFile;
  {
    std::ofstream file(path.string() + ".tmp", std::ios::binary);
    file << index.dump(2) << "\n";
    if (!file.flush()) return Internal("cannot write " + path.string());
  }
  fs::rename(path.string() + ".tmp", path, error);
  return error ? Internal(path.string() + ": " + error.message()) : OkStatus();
}

Result<PoolFolder> ReadPoolFolder(const fs::path& folder) {
  const fs::path path = folder / kIndexFile;
  std::error_code error;
  const uintmax_t bytes = fs::file_size(path, error);
  if (error) return NotFound(path.string() + ": " + error.message());
  if (bytes > kMaxIndexBytes) return InvalidArgument(path.string() + " is over 16 MiB");
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  PoolFolder out;
  try {
    const Json index = Json::parse(text.str());
    if (index.at("format").get<int>() != kFormat) {
      return InvalidArgument(path.string() + ": format " + index.at("format").dump() +
                             ", this version reads 1");
    }
    out.name = index.at("pool").get<std::string>();
    out.base = index.at("base").get<std::string>();
    out.config = ConfigFromJson(index.at("config"));
    for (const auto& [name, member] : index.at("members").items()) {
      if (!IsValidFileName(name)) {
        return InvalidArgument(path.string() + ": '" + Printable(name.substr(0, 64)) +
                               "' is no name of a member");
      }
      out.members.push_back({.folder = folder / kMembersFolder / name,
                             .tasks = member.at("tasks").get<std::vector<std::string>>(),
                             .merged = member.at("merged").get<int64_t>(),
                             .lambda = member.at("lambda").get<double>(),
                             .norm_sum = member.at("norm_sum").get<double>()});
      if (out.members.back().tasks.empty()) {
        return InvalidArgument(path.string() + ": member " + name + " has no task");
      }
    }
  } catch (const std::exception& failure) {
    return InvalidArgument(path.string() + ": " + failure.what());
  }
  return out;
}

}  // namespace stockpot::cli
