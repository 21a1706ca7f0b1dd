// Pools of LoRA adapters under a budget: pool create, add, list, show, remove, evict, delete,
// export, import.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "serve/bin/cli/commands.h"
#include "serve/bin/cli/json.h"
#include "serve/bin/cli/output.h"
#include "serve/bin/cli/pool_folder.h"
#include "store/safetensors.h"
#include "thrift/upload.h"

namespace stockpot::cli {
namespace {

namespace fs = std::filesystem;

struct PoolOptions {
  std::string pool;
  std::string task;
  std::string what;  // an adapter's id or folder
  std::string folder;
  std::string base;
  std::vector<std::string> probes;
  rpc::PoolConfig config;
  double quantile = 0;
  const CLI::Option* quantile_option = nullptr;
  bool no_evict = false;
  bool force = false;
  bool no_wait = false;
};

Result<rpc::ProbeText> ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  rpc::ProbeText text;
  text.name = fs::path(path).filename().string();
  text.text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  if (!file || file.bad()) return NotFound("cannot read '" + path + "'");
  return text;
}

Json ToJson(const rpc::Pool& pool) {
  Json members = Json::array(), tasks = Json::array();
  for (const rpc::PoolMember& member : pool.members) {
    members.push_back({{"artifact", HexDigest(member.artifact)},
                       {"tasks", member.tasks},
                       {"merged", member.merged},
                       {"lambda", member.opcm_lambda},
                       {"bytes", member.bytes},
                       {"owned", member.owned}});
  }
  for (const rpc::PoolTask& task : pool.tasks) {
    const bool measured = task.__isset.own_loss && task.__isset.loss;
    tasks.push_back({{"task", task.task},
                     {"route", pool.name + "/" + task.task},
                     {"member", HexDigest(task.member)},
                     {"own", HexDigest(task.own)},
                     {"probe_texts", task.probe_texts},
                     {"own_loss", measured ? Json(task.own_loss) : Json()},
                     {"loss", measured ? Json(task.loss) : Json()},
                     {"requests", task.requests},
                     {"added_ms", task.added_ms}});
  }
  return {{"pool", pool.name},
          {"base", HexDigest(pool.base)},
          {"budget_bytes", pool.config.budget_bytes},
          {"bytes", pool.bytes},
          {"leaving_bytes", pool.leaving_bytes},
          {"method", pool.config.method},
          {"threshold", pool.__isset.threshold ? Json(pool.threshold) : Json()},
          {"quality", pool.config.quality},
          {"rank", pool.config.rank},
          {"evict", pool.config.evict},
          {"members", members},
          {"tasks", tasks}};
}

void PrintPool(const Globals& globals, const rpc::Pool& pool) {
  if (globals.json) {
    PrintJson(ToJson(pool));
    return;
  }
  std::printf("%s: %s of %s, %s, %zu adapters for %zu tasks\n", Printable(pool.name).c_str(),
              HumanBytes(pool.bytes).c_str(), HumanBytes(pool.config.budget_bytes).c_str(),
              pool.config.method.c_str(), pool.members.size(), pool.tasks.size());
  if (pool.leaving_bytes > 0) {
    std::printf("%s of it belong to former members that no collection has taken yet\n",
                HumanBytes(pool.leaving_bytes).c_str());
  }
  Table table({{"TASK"},
               {"MEMBER"},
               {"SHARED BY", true},
               {"OWN LOSS", true},
               {"LOSS", true},
               {"REQUESTS", true}});
  for (const rpc::PoolTask& task : pool.tasks) {
    int64_t shared = 0;
    for (const rpc::PoolTask& other : pool.tasks) shared += other.member == task.member;
    table.Add({task.task, ShortDigest(task.member), std::to_string(shared),
               task.__isset.own_loss ? HumanNumber(task.own_loss) : "-",
               task.__isset.loss ? HumanNumber(task.loss) : "-", std::to_string(task.requests)});
  }
  table.Print();
}

Status Create(const Globals& globals, const PoolOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  rpc::PoolConfig config = options.config;
  config.evict = !options.no_evict;
  if (options.quantile_option->count() > 0) config.__set_quantile(options.quantile);
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::Pool pool,
                            client->CreatePool(options.pool, options.base, config));
  PrintPool(globals, pool);
  return OkStatus();
}

// Waits for a job of a pool and says what became of it.
Status Finish(Client& client, const Globals& globals, const PoolOptions& options, rpc::Job job) {
  if (options.no_wait) return FinishJob(client, globals, std::move(job), false);
  STOCKPOT_RETURN_IF_ERROR(WaitForJob(client, std::move(job), globals.quiet).status());
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::Pool pool, client.GetPool(options.pool));
  PrintPool(globals, pool);
  return OkStatus();
}

// Sends an adapter for a pool; `existed`: it was there before, for somebody else perhaps.
Result<std::string> Send(Client& client, const Globals& globals, const std::string& route,
                         const std::string& base, const std::string& folder, bool& existed) {
  auto source = OpenAdapterFolder(folder);
  if (!source.ok()) return source.status().WithContext("folder '" + folder + "'");
  rpc::SessionRequest request;
  request.kind = rpc::Kind::ADAPTER;
  request.run = route;
  request.base = base;
  ProgressLine line("sending", globals.quiet);
  UploadOptions upload;
  upload.progress = [&](const UploadProgress& progress) {
    line.Show(progress.total_bytes == 0 ? 1.0
                                        : static_cast<double>(progress.done_bytes) /
                                              static_cast<double>(progress.total_bytes),
              HumanBytes(progress.sent_bytes) + " sent");
  };
  Client* const clients[] = {&client};
  STOCKPOT_ASSIGN_OR_RETURN(const UploadReport report,
                            UploadArtifact(clients, request, **source, {}, upload));
  existed = report.commit.existed;
  return HexDigest(report.commit.artifact);
}

Status Add(const Globals& globals, const PoolOptions& options) {
  rpc::PoolAdd request;
  request.pool = options.pool;
  request.tasks = {options.task};
  for (const std::string& file : options.probes) {
    STOCKPOT_ASSIGN_OR_RETURN(request.probe.emplace_back(), ReadText(file));
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  request.id = options.what;
  std::error_code error;
  if (fs::is_directory(options.what, error)) {
    STOCKPOT_ASSIGN_OR_RETURN(const rpc::Pool pool, client->GetPool(options.pool));
    bool existed = false;
    STOCKPOT_ASSIGN_OR_RETURN(request.id, Send(*client, globals, options.pool + "/" + options.task,
                                               HexDigest(pool.base), options.what, existed));
    request.owned = !existed;
  }
  STOCKPOT_ASSIGN_OR_RETURN(rpc::Job job, client->AddToPool(request));
  return Finish(*client, globals, options, std::move(job));
}

Status List(const Globals& globals, const PoolOptions&) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<rpc::Pool> pools, client->Pools());
  if (globals.json) {
    Json out = Json::array();
    for (const rpc::Pool& pool : pools) out.push_back(ToJson(pool));
    PrintJson(out);
    return OkStatus();
  }
  Table table({{"POOL"}, {"BYTES", true}, {"BUDGET", true}, {"ADAPTERS", true}, {"TASKS", true}});
  for (const rpc::Pool& pool : pools) {
    table.Add({pool.name, HumanBytes(pool.bytes), HumanBytes(pool.config.budget_bytes),
               std::to_string(pool.members.size()), std::to_string(pool.tasks.size())});
  }
  table.Print();
  return OkStatus();
}

Status Show(const Globals& globals, const PoolOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::Pool pool, client->GetPool(options.pool));
  PrintPool(globals, pool);
  return OkStatus();
}

Status Remove(const Globals& globals, const PoolOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(rpc::Job job, client->RemoveFromPool(options.pool, options.task));
  return Finish(*client, globals, options, std::move(job));
}

Status Evict(const Globals& globals, const PoolOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(rpc::Job job, client->EvictFromPool(options.pool));
  return Finish(*client, globals, options, std::move(job));
}

Status Delete(const Globals& globals, const PoolOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(rpc::Job job, client->DeletePool(options.pool, options.force));
  if (options.no_wait) return FinishJob(*client, globals, std::move(job), false);
  STOCKPOT_RETURN_IF_ERROR(WaitForJob(*client, std::move(job), globals.quiet).status());
  if (globals.json) {
    PrintJson({{"pool", options.pool}, {"state", "deleted"}});
  } else {
    std::printf("%s: deleted\n", Printable(options.pool).c_str());
  }
  return OkStatus();
}

Status Export(const Globals& globals, const PoolOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::Pool pool, client->GetPool(options.pool));
  STOCKPOT_RETURN_IF_ERROR(WritePoolFolder(*client, pool, options.folder));
  std::printf("%s is in %s: %zu adapters for %zu tasks\n", Printable(pool.name).c_str(),
              options.folder.c_str(), pool.members.size(), pool.tasks.size());
  return OkStatus();
}

Status Import(const Globals& globals, const PoolOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const PoolFolder folder, ReadPoolFolder(options.folder));
  const std::string name = options.pool.empty() ? folder.name : options.pool;
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  const std::string base = options.base.empty() ? folder.base : options.base;
  STOCKPOT_RETURN_IF_ERROR(client->CreatePool(name, base, folder.config).status());
  for (const PoolFolder::Member& member : folder.members) {
    rpc::PoolAdd request;
    request.pool = name;
    request.tasks = member.tasks;
    request.adopt = true;
    request.merged = member.merged;
    request.opcm_lambda = member.lambda;
    request.norm_sum = member.norm_sum;
    bool existed = false;
    STOCKPOT_ASSIGN_OR_RETURN(request.id, Send(*client, globals, name + "/" + member.tasks[0], base,
                                               member.folder, existed));
    request.owned = !existed;
    STOCKPOT_ASSIGN_OR_RETURN(rpc::Job job, client->AddToPool(request));
    STOCKPOT_RETURN_IF_ERROR(WaitForJob(*client, std::move(job), globals.quiet).status());
  }
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::Pool pool, client->GetPool(name));
  PrintPool(globals, pool);
  return OkStatus();
}

void AddCreateOptions(CLI::App& command, PoolOptions& options) {
  const auto most = std::numeric_limits<int64_t>::max();
  command.add_option("--base", options.base, "The base that its adapters are over")->required();
  command.add_option("--bytes", options.config.budget_bytes, "What it never exceeds")
      ->required()
      ->check(CLI::Range(int64_t{1}, most));
  command.add_option("--method", options.config.method, "opcm, mean or task-arithmetic")
      ->check(CLI::IsMember({"opcm", "mean", "task-arithmetic"}));
  command.add_option("--projection", options.config.projection, "opcm: share of the spectrum")
      ->check(CLI::Range(0.0, 1.0));
  command.add_option("--scale", options.config.scale, "task-arithmetic: of the sum")
      ->check(CLI::Range(0.0, 10.0));
  CLI::Option* threshold =
      command
          .add_option("--threshold", options.config.threshold,
                      "Similarity from which on adapters are merged though there is room (1: none)")
          ->check(CLI::Range(-1.0, 1.0));
  options.quantile_option =
      command
          .add_option("--quantile", options.quantile,
                      "In place of --threshold: that quantile of the pool's own similarities")
          ->check(CLI::Range(0.0, 1.0))
          ->excludes(threshold);
  command
      .add_option("--quality", options.config.quality,
                  "exp(own loss - loss) that every task keeps in a merge (0.75)")
      ->check(CLI::Range(0.0, 1.0));
  command.add_option("--rank", options.config.rank, "Of merged adapters (the larger of the two)")
      ->check(CLI::Range(int64_t{0}, most));
  command.add_flag("--no-evict", options.no_evict, "Refuse rather than put a member out");
}

}  // namespace

void AddPoolCommands(Registry& registry) {
  const auto options = std::make_shared<PoolOptions>();
  CLI::App* pool = registry.app.add_subcommand(
      "pool", "LoRA adapters for many tasks within a budget of bytes, served as POOL/TASK");
  pool->require_subcommand(1);
  pool->fallthrough();
  const auto add = [&](const char* name, const char* what, auto body) {
    CLI::App* command = pool->add_subcommand(name, what);
    command->fallthrough();
    command->callback([&registry, options, body] {
      registry.action = [&registry, options, body] { return body(registry.globals, *options); };
    });
    return command;
  };
  const auto add_named = [&](const char* name, const char* what, auto body) {
    CLI::App* command = add(name, what, body);
    command->add_option("POOL", options->pool, "Name of the pool")->required();
    return command;
  };
  AddCreateOptions(*add_named("create", "Make an empty pool", Create), *options);
  CLI::App* adding = add_named("add", "Take an adapter in: merged, apart, or refused", Add);
  adding->add_option("TASK", options->task, "What it is for")->required();
  adding->add_option("ADAPTER", options->what, "An adapter here, or a folder of PEFT's")
      ->required();
  adding->add_option("--probe", options->probes, "Held-out texts of the task, 64 KiB at most");
  adding->add_flag("--no-wait", options->no_wait, "Only queue the job");
  add("list", "List the pools", List);
  add_named("show", "Its tasks, which adapter answers for each, and how well", Show);
  CLI::App* removing = add_named("remove", "Take a task out", Remove);
  removing->add_option("TASK", options->task, "Name of the task")->required();
  removing->add_flag("--no-wait", options->no_wait, "Only queue the job");
  CLI::App* evicting = add_named("evict", "Put the adapter out that is asked for least", Evict);
  evicting->add_flag("--no-wait", options->no_wait, "Only queue the job");
  CLI::App* deleting =
      add_named("delete", "Delete a pool and the adapters that are its alone, for good", Delete);
  deleting->add_flag("--force", options->force, "Also one that answers for tasks");
  deleting->add_flag("--no-wait", options->no_wait, "Only queue the job");
  add_named("export", "Write its adapters and the map of tasks into a folder", Export)
      ->add_option("DIR", options->folder, "Where; must not exist yet")
      ->required();
  CLI::App* importing = add("import", "Make a pool from such a folder", Import);
  importing->add_option("DIR", options->folder, "What `pool export` wrote")->required();
  importing->add_option("--name", options->pool, "Name of the pool (the folder's)");
  importing->add_option("--base", options->base, "The base (the one of the same digest)");
}

}  // namespace stockpot::cli
