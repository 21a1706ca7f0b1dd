#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>
#include <thread>

#include "serve/bin/cli/commands.h"
#include "serve/bin/cli/json.h"
#include "serve/bin/cli/output.h"
#include "serve/bin/cli/publish_flags.h"

namespace stockpot::cli {

namespace {

constexpr std::chrono::milliseconds kJobPollEvery{150};

}  // namespace

std::string Me() {
  const char* user = std::getenv("USER");
  return user == nullptr || *user == '\0' ? "operator" : user;
}

Result<rpc::Job> WaitForJob(Client& client, rpc::Job job, bool quiet) {
  ProgressLine line(job.kind, quiet);
  while (job.state == "queued" || job.state == "running") {
    line.Show(job.share, job.state);
    std::this_thread::sleep_for(kJobPollEvery);
    STOCKPOT_ASSIGN_OR_RETURN(job, client.GetJob(job.key));
  }
  if (job.state == "failed") return Internal(job.kind + " failed: " + job.error);
  line.Show(1, job.state);
  return job;
}

Status FinishJob(Client& client, const Globals& globals, rpc::Job job, bool wait) {
  if (wait) {
    STOCKPOT_ASSIGN_OR_RETURN(job, WaitForJob(client, std::move(job), globals.quiet));
  }
  if (globals.json) {
    PrintJson(ToJson(job));
  } else if (wait) {
    std::printf("%s %s\n", job.kind.c_str(), job.result.substr(0, 12).c_str());
  } else {
    std::printf("%s %s: `stockpot jobs` shows it\n", job.state.c_str(),
                Printable(Abbreviate(job.key)).c_str());
  }
  return OkStatus();
}

namespace {

struct MergeCommand {
  Client::MergeRequest request;
  std::string spectral;
  bool no_wait = false;
};

// "erank", or the share R. Throws ValidationError.
double ParseSpectral(const std::string& text) {
  if (text.empty() || text == "erank") return 0;
  char* end = nullptr;
  const double share = std::strtod(text.c_str(), &end);
  if (*end == '\0' && share > 0 && share <= 1) return share;
  throw CLI::ValidationError("--spectral", "'" + text + "' is neither erank nor in (0, 1]");
}

// A second merge of a step stands beside the first, which keeps the name.
Status TellNameless(Client& client, const std::string& result) {
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::ArtifactInfo made, client.Show(result));
  const std::string name = made.run + "@" + std::to_string(made.step) + ".merge";
  const Result<Digest> named = client.Resolve(name);
  if (!named.ok() || named->Hex() == result) return OkStatus();
  std::fprintf(stderr,
               "stockpot: %s stays %s: this merge goes by its digest %s alone (--step gives one a "
               "step of its own)\n",
               Printable(name).c_str(), named->ShortHex().c_str(), result.substr(0, 12).c_str());
  return OkStatus();
}

void AddMerge(Registry& registry) {
  const auto options = std::make_shared<MergeCommand>();
  CLI::App* command =
      registry.app.add_subcommand("merge", "Merge checkpoints of one base into a new artifact");
  command
      ->add_option("ID", options->request.ids,
                   "Checkpoints or merges; with --last a run or its last good step")
      ->required();
  rpc::MergeOptions& how = options->request.options;
  command->add_option("--method", how.method, "monosoup, monosoup-spectral, mean or model-stock")
      ->check(CLI::IsMember({"monosoup", "monosoup-spectral", "mean", "model-stock"}));
  command
      ->add_option("--last", how.last,
                   "The newest N checkpoints of the run, up to the step if one is named")
      ->check(CLI::Range(int32_t{1}, int32_t{1024}));
  command->add_option("--weights", how.weights, "mean: one for each ID, in their order")
      ->type_name("W1,W2,...")
      ->delimiter(',')
      ->allow_extra_args(false);
  command->add_option("--spectral", options->spectral,
                      "monosoup-spectral: erank (default), or the kept share R (0.8, say)");
  command->add_option("--energy", options->request.energy, "Kept share of each delta's energy")
      ->check(CLI::Range(1e-9, 1.0));
  command->add_option("--rank", options->request.rank, "Fixed rank instead of the energy floor")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()));
  command->add_flag("--force", options->request.force,
                    "Accept a rank that keeps less than --energy");
  command->add_option("--run", options->request.run, "Run of the result (the first parent's)");
  command->add_option("--step", options->request.step, "Step of the result (the newest parent's)")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()));
  command->add_flag("--no-wait", options->no_wait, "Only queue the job");
  command->callback([&registry, options] {
    options->request.options.spectral = ParseSpectral(options->spectral);
    registry.action = [&registry, options]() -> Status {
      STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(registry.globals));
      STOCKPOT_ASSIGN_OR_RETURN(rpc::Job job, client->Merge(options->request));
      if (!options->no_wait) {
        STOCKPOT_ASSIGN_OR_RETURN(job, WaitForJob(*client, std::move(job), registry.globals.quiet));
        STOCKPOT_RETURN_IF_ERROR(TellNameless(*client, job.result));
      }
      return FinishJob(*client, registry.globals, std::move(job), !options->no_wait);
    };
  });
}

struct PublishOptions {
  std::string id;
  std::string name;
  std::string codec;  // empty: the run's
  rpc::PublishOptions how;
  std::string why;
  bool force = false;
  bool no_wait = false;
};

Status Publish(const Globals& globals, const PublishOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(
      rpc::Job job, options.force
                        ? client->PublishForced(options.id, options.codec, options.name,
                                                options.why, Me(), options.how)
                        : client->Publish(options.id, options.codec, options.name, options.how));
  return FinishJob(*client, globals, std::move(job), !options.no_wait);
}

void AddPublish(Registry& registry) {
  const auto options = std::make_shared<PublishOptions>();
  CLI::App* command = registry.app.add_subcommand(
      "publish", "Compress a checkpoint or merge and let the endpoint answer from it");
  command->add_option("ID", options->id, "Checkpoint or merge")->required();
  command->add_option("--as", options->name, "Route (default: RUN@STEP and what it implies)");
  command
      ->add_option(
          "--codec", options->codec,
          "bitdelta: 1 bit a weight; auto: what is measured to be worth its bytes; sparse: "
          "exactly, the changed elements; dense: as it is (default: the run's)")
      ->check(CLI::IsMember(kPublishCodecs));
  AddPublishFlags(*command, "", "", options->how);
  CLI::Option* force =
      command->add_flag("--force", options->force, "Also over the limits of the run's gate");
  CLI::Option* why =
      command->add_option("--reason", options->why, "Why the gate does not count; is recorded");
  force->needs(why);
  why->needs(force);
  command->add_flag("--no-wait", options->no_wait, "Only queue the job");
  command->callback([&registry, options] {
    registry.action = [&registry, options] { return Publish(registry.globals, *options); };
  });
  const auto name = std::make_shared<std::string>();
  CLI::App* unpublish = registry.app.add_subcommand("unpublish", "Take a route away");
  unpublish->add_option("NAME", *name, "The route")->required();
  unpublish->callback([&registry, name] {
    registry.action = [&registry, name]() -> Status {
      STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(registry.globals));
      STOCKPOT_RETURN_IF_ERROR(client->Unpublish(*name));
      if (registry.globals.json) {
        PrintJson({{"name", *name}, {"variant", ""}});
      } else {
        std::printf("%s answers no more\n", Printable(*name).c_str());
      }
      return OkStatus();
    };
  });
}

struct CompressOptions {
  std::string id;
  bool no_wait = false;
};

Status Compress(const Globals& globals, const CompressOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(rpc::Job job, client->Compress(options.id));
  return FinishJob(*client, globals, std::move(job), !options.no_wait);
}

void AddCompress(Registry& registry) {
  const auto options = std::make_shared<CompressOptions>();
  CLI::App* command = registry.app.add_subcommand(
      "compress", "Store the older steps of a run, or one of them, as differences (lossless)");
  command->add_option("RUN|ID", options->id, "A run, a checkpoint or a state")->required();
  command->add_flag("--no-wait", options->no_wait, "Return once the job is queued");
  command->callback([&registry, options] {
    registry.action = [&registry, options] { return Compress(registry.globals, *options); };
  });
}

Status ListAliases(const Globals& globals) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<rpc::Alias> aliases, client->Aliases());
  if (globals.json) {
    Json out = Json::array();
    for (const rpc::Alias& alias : aliases) out.push_back(ToJson(alias, "artifact"));
    PrintJson(out);
    return OkStatus();
  }
  Table table({{"ALIAS"}, {"ARTIFACT"}, {"MOVED"}, {"BY"}});
  for (const rpc::Alias& alias : aliases) {
    table.Add(
        {alias.name, ShortDigest(alias.target), HumanAgo(alias.moved_ms, NowMs()), alias.moved_by});
  }
  table.Print();
  return OkStatus();
}

struct AliasOptions {
  std::string name;
  std::string id;
  std::string expected;
  bool remove = false;
};

Status MoveAlias(const Globals& globals, const AliasOptions& options) {
  if (options.name.empty()) return ListAliases(globals);
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(
      const rpc::Alias alias,
      client->MoveAlias(options.name, options.id, Me(),
                        options.expected.empty() ? std::nullopt : std::optional(options.expected)));
  if (globals.json) {
    PrintJson(ToJson(alias, "artifact"));
  } else if (options.remove) {
    std::printf("%s is gone\n", Printable(alias.name).c_str());
  } else {
    std::printf("%s -> %s\n", Printable(alias.name).c_str(), ShortDigest(alias.target).c_str());
  }
  return OkStatus();
}

void AddAlias(Registry& registry) {
  const auto options = std::make_shared<AliasOptions>();
  CLI::App* command = registry.app.add_subcommand("alias", "List the aliases, or move one");
  command->add_option("NAME", options->name, "The alias (none: list them)");
  command->add_option("ID", options->id, "Where it is to point");
  command->add_option("--expect", options->expected, "Only if it points there now");
  command->add_flag("--delete", options->remove, "Take the name away");
  command->callback([&registry, options] {
    if (!options->name.empty() && options->id.empty() != options->remove) {
      throw CLI::ValidationError("alias",
                                 "say where '" + options->name + "' is to point, or --delete");
    }
    registry.action = [&registry, options] { return MoveAlias(registry.globals, *options); };
  });
}

struct EvalOptions {
  std::string id;
  std::string task;
  std::string metric;
  double value = 0;
  std::string by = Me();
};

Status PutEval(const Globals& globals, const EvalOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_RETURN_IF_ERROR(
      client->ReportEval(options.id, options.task, options.metric, options.value, options.by));
  if (globals.json) {
    PrintJson({{"id", options.id},
               {"task", options.task},
               {"metric", options.metric},
               {"value", options.value},
               {"by", options.by}});
  } else {
    std::printf("%s: %s %s = %s\n", Printable(options.id).c_str(), Printable(options.task).c_str(),
                Printable(options.metric).c_str(), HumanNumber(options.value).c_str());
  }
  return OkStatus();
}

Status ListEvals(const Globals& globals, const std::string& id) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::ArtifactInfo artifact, client->Show(id));
  if (globals.json) {
    PrintJson(ToJsonArray(artifact.evals));
    return OkStatus();
  }
  Table table({{"TASK"}, {"METRIC"}, {"VALUE", true}, {"WHEN"}, {"BY"}});
  for (const rpc::Eval& eval : artifact.evals) {
    table.Add({eval.task, eval.metric, HumanNumber(eval.value), HumanAgo(eval.time_ms, NowMs()),
               eval.by});
  }
  table.Print();
  return OkStatus();
}

void AddEval(Registry& registry) {
  const auto options = std::make_shared<EvalOptions>();
  CLI::App* command = registry.app.add_subcommand("eval", "Record or list evaluations");
  command->require_subcommand(1);
  command->fallthrough();
  CLI::App* put = command->add_subcommand("put", "Record the outcome of an evaluation");
  put->fallthrough();
  put->add_option("ID", options->id, "The artifact")->required();
  put->add_option("TASK", options->task, "Name of the task")->required();
  put->add_option("METRIC", options->metric, "Name of the metric")->required();
  put->add_option("VALUE", options->value, "Its value")->required();
  put->add_option("--by", options->by, "Who measured it");
  put->callback([&registry, options] {
    registry.action = [&registry, options] { return PutEval(registry.globals, *options); };
  });
  CLI::App* list = command->add_subcommand("list", "List the evaluations of an artifact");
  list->fallthrough();
  list->add_option("ID", options->id, "The artifact")->required();
  list->callback([&registry, options] {
    registry.action = [&registry, options] { return ListEvals(registry.globals, options->id); };
  });
}

}  // namespace

void AddChangeCommands(Registry& registry) {
  AddMerge(registry);
  AddPublish(registry);
  AddCompress(registry);
  AddAlias(registry);
  AddEval(registry);
}

}  // namespace stockpot::cli
