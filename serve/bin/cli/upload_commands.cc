#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>

#include "serve/bin/cli/commands.h"
#include "serve/bin/cli/json.h"
#include "serve/bin/cli/output.h"
#include "serve/bin/cli/publish_flags.h"
#include "serve/bin/cli/states.h"
#include "store/safetensors.h"
#include "thrift/upload.h"

namespace stockpot::cli {
namespace {

struct PushOptions {
  std::string run;
  int64_t step = -1;
  std::string folder;
  std::string base;
  std::vector<std::string> metrics;  // "name=value"
  rpc::RunConfig config;
  rpc::PublishOptions publish;
  // Of each field: whether it was given, and what takes it over.
  struct Field {
    const CLI::Option* option;
    std::function<void(const rpc::RunConfig& from, rpc::RunConfig& to)> copy;
  };
  std::vector<Field> fields;
  int connections = 2;
};

// "NAME=NUMBER" taken apart. InvalidArgument quotes it.
Result<std::pair<std::string, double>> ParseMetric(const std::string& text) {
  const size_t equals = text.find('=');
  const std::string number = equals == std::string::npos ? "" : text.substr(equals + 1);
  char* end = nullptr;
  const double value = std::strtod(number.c_str(), &end);
  if (equals == 0 || number.empty() || end != number.c_str() + number.size() ||
      !std::isfinite(value)) {
    return InvalidArgument("'" + text + "' is not NAME=NUMBER");
  }
  return std::pair(text.substr(0, equals), value);
}

// What a folder holds, as a session of that kind takes it.
Result<std::unique_ptr<TensorSource>> OpenFolder(rpc::Kind kind, const std::string& folder,
                                                 TensorPlacements& placements) {
  if (kind == rpc::Kind::ADAPTER) return OpenAdapterFolder(folder);
  if (kind == rpc::Kind::BASE) return OpenModelFolder(folder);
  STOCKPOT_ASSIGN_OR_RETURN(std::unique_ptr<FolderWithStates> whole,
                            FolderWithStates::Open(folder));
  placements = whole->placements();
  return std::unique_ptr<TensorSource>(std::move(whole));
}

// Sends a model's or an adapter's folder over `connections` connections; `client` is the first.
Result<UploadReport> SendFolder(Client& client, const Globals& globals, int connections,
                                const std::string& folder, const rpc::SessionRequest& request,
                                const std::map<std::string, double>& metrics) {
  TensorPlacements placements;
  Result<std::unique_ptr<TensorSource>> source = OpenFolder(request.kind, folder, placements);
  if (!source.ok()) return source.status().WithContext("folder '" + folder + "'");
  std::vector<std::unique_ptr<Client>> extra;
  std::vector<Client*> clients = {&client};
  for (int i = 1; i < connections; ++i) {
    STOCKPOT_ASSIGN_OR_RETURN(auto another, ConnectTo(globals));
    extra.push_back(std::move(another));
    clients.push_back(extra.back().get());
  }
  ProgressLine line("sending", globals.quiet);
  UploadOptions options;
  options.placements = &placements;
  options.progress = [&](const UploadProgress& progress) {
    line.Show(progress.total_bytes == 0 ? 1.0
                                        : static_cast<double>(progress.done_bytes) /
                                              static_cast<double>(progress.total_bytes),
              HumanBytes(progress.done_bytes) + " of " + HumanBytes(progress.total_bytes) + ", " +
                  HumanBytes(progress.sent_bytes) + " sent");
  };
  return UploadArtifact(clients, request, **source, metrics, options);
}

void PrintReport(const Globals& globals, const std::string& what, const UploadReport& report) {
  if (globals.json) {
    PrintJson(ToJson(report));
    return;
  }
  std::printf("%s %s %s: %s, of which %s travelled\n", what.c_str(),
              report.commit.existed ? "was there already:" : "is",
              ShortDigest(report.commit.artifact).c_str(),
              HumanBytes(report.bytes.total_bytes).c_str(),
              HumanBytes(report.bytes.sent_bytes).c_str());
}

Status ImportBase(const Globals& globals, const std::string& name, const std::string& folder,
                  int connections) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  rpc::SessionRequest request;
  request.kind = rpc::Kind::BASE;
  request.run = name;
  STOCKPOT_ASSIGN_OR_RETURN(const UploadReport report,
                            SendFolder(*client, globals, connections, folder, request, {}));
  PrintReport(globals, "base " + name, report);
  return OkStatus();
}

Status ImportAdapter(const Globals& globals, const std::string& name, const std::string& folder,
                     const std::string& base) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  rpc::SessionRequest request;
  request.kind = rpc::Kind::ADAPTER;
  request.run = name;
  request.base = base;
  STOCKPOT_ASSIGN_OR_RETURN(const UploadReport report,
                            SendFolder(*client, globals, 1, folder, request, {}));
  PrintReport(globals, "adapter " + name, report);
  return OkStatus();
}

// Makes the run if it is new. An existing one must have this base; of its configuration what was
// given changes and the rest stays.
Status EnsureRun(Client& client, const PushOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<rpc::Run> runs, client.Runs());
  const auto found = std::find_if(runs.begin(), runs.end(),
                                  [&](const rpc::Run& run) { return run.name == options.run; });
  rpc::RunConfig config = found == runs.end() ? rpc::RunConfig() : found->config;
  for (const PushOptions::Field& field : options.fields) {
    if (field.option->count() > 0) field.copy(options.config, config);
  }
  if (found == runs.end()) {
    if (options.base.empty()) {
      return NotFound("there is no run '" + options.run + "': create it with --base NAME");
    }
    return client.CreateRun(options.run, options.base, config, {}).status();
  }
  if (!options.base.empty()) {
    STOCKPOT_ASSIGN_OR_RETURN(const Digest base, client.Resolve(options.base));
    if (base.raw() != found->base) {
      return AlreadyExists("run '" + options.run + "' has another base (" +
                           ShortDigest(found->base) + "): choose another name for the run");
    }
  }
  if (config == found->config) return OkStatus();
  STOCKPOT_ASSIGN_OR_RETURN(const Digest base, Digest::FromRaw(found->base));
  return client.CreateRun(options.run, base.Hex(), config, {}).status();  // no tags: they stay
}

Status Push(const Globals& globals, const PushOptions& options) {
  std::map<std::string, double> metrics;
  for (const std::string& text : options.metrics) {
    STOCKPOT_ASSIGN_OR_RETURN(const auto metric, ParseMetric(text));
    metrics.insert(metric);
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_RETURN_IF_ERROR(EnsureRun(*client, options));
  rpc::SessionRequest request;
  request.kind = rpc::Kind::CHECKPOINT;
  request.run = options.run;
  request.step = options.step;
  STOCKPOT_ASSIGN_OR_RETURN(
      const UploadReport report,
      SendFolder(*client, globals, options.connections, options.folder, request, metrics));
  PrintReport(globals, options.run + "@" + std::to_string(options.step), report);
  return OkStatus();
}

void AddImportBase(Registry& registry) {
  const auto options = std::make_shared<PushOptions>();
  CLI::App* command = registry.app.add_subcommand(
      "import-base", "Store a Hugging Face folder as the base that runs fine-tune");
  command->add_option("NAME", options->base, "Name of the base")->required();
  command->add_option("DIR", options->folder, "config.json, *.safetensors, tokenizer.json")
      ->required();
  command->add_option("--connections", options->connections, "Connections to send over")
      ->check(CLI::Range(1, 8));
  command->callback([&registry, options] {
    registry.action = [&registry, options] {
      return ImportBase(registry.globals, options->base, options->folder, options->connections);
    };
  });
}

void AddImportAdapter(Registry& registry) {
  const auto options = std::make_shared<PushOptions>();
  CLI::App* command = registry.app.add_subcommand(
      "import-adapter", "Store a LoRA adapter as PEFT saves it, and serve it under a name");
  command->add_option("NAME", options->run, "Name it is served under")->required();
  command->add_option("DIR", options->folder, "adapter_config.json, adapter_model.safetensors")
      ->required();
  command->add_option("--base", options->base, "The base it was trained over")->required();
  command->callback([&registry, options] {
    registry.action = [&registry, options] {
      return ImportAdapter(registry.globals, options->run, options->folder, options->base);
    };
  });
}

// The run's configuration: of a new run, or what changes of an old one's.
void AddRunOptions(CLI::App& command, PushOptions& options) {
  rpc::RunConfig& config = options.config;
  const auto sets = [&options](const CLI::Option* option, auto rpc::RunConfig::*field) {
    options.fields.push_back({option, [field](const rpc::RunConfig& from, rpc::RunConfig& to) {
                                to.*field = from.*field;
                              }});
  };
  const auto count = CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max());
  sets(command
           .add_option("--merge-every", config.merge_every,
                       "Of the run: merge every so many steps, 0 = never")
           ->check(count),
       &rpc::RunConfig::merge_every);
  sets(command.add_option("--publish", config.publish, "Of the run: what is served by itself")
           ->check(CLI::IsMember({"every", "merges", "best", "request"})),
       &rpc::RunConfig::publish);
  sets(command.add_option("--best-metric", config.best_metric, "Of the run: what @best goes by"),
       &rpc::RunConfig::best_metric);
  sets(command.add_flag("!--best-is-higher", config.best_is_lower,
                        "Of the run: more of --best-metric is better"),
       &rpc::RunConfig::best_is_lower);
  sets(command.add_flag("--compress-history", config.compress_history,
                        "Of the run: older steps are stored as differences, in the background"),
       &rpc::RunConfig::compress_history);
  sets(command
           .add_option("--quota-bytes", config.quota_bytes,
                       "Of the run: of all its steps together; 0: none")
           ->check(count),
       &rpc::RunConfig::quota_bytes);
  sets(command.add_option("--publish-codec", config.publish_codec,
                          "Of the run: how that is stored, see `publish --codec`")
           ->check(CLI::IsMember(kPublishCodecs)),
       &rpc::RunConfig::publish_codec);
  const PublishFlags flags =
      AddPublishFlags(command, "publish-", "Of the run, ", options.publish);
  const auto takes = [&options](const CLI::Option* option, auto rpc::PublishOptions::*from,
                                auto rpc::RunConfig::*field) {
    options.fields.push_back(
        {option, [&options, from, field](const rpc::RunConfig&, rpc::RunConfig& to) {
           to.*field = options.publish.*from;
         }});
  };
  takes(flags.alpha, &rpc::PublishOptions::alpha, &rpc::RunConfig::publish_alpha);
  takes(flags.planes, &rpc::PublishOptions::planes, &rpc::RunConfig::publish_planes);
  takes(flags.residual_rank, &rpc::PublishOptions::residual_rank,
        &rpc::RunConfig::publish_residual_rank);
  takes(flags.max_bytes, &rpc::PublishOptions::max_bytes, &rpc::RunConfig::publish_max_bytes);
  takes(flags.max_bytes, &rpc::PublishOptions::max_share, &rpc::RunConfig::publish_max_share);
  takes(flags.max_error, &rpc::PublishOptions::max_error, &rpc::RunConfig::publish_max_error);
}

void AddPush(Registry& registry) {
  const auto options = std::make_shared<PushOptions>();
  CLI::App* command =
      registry.app.add_subcommand("push", "Store a Hugging Face folder as a checkpoint of a run");
  command->add_option("RUN", options->run, "Name of the run")->required();
  command->add_option("STEP", options->step, "Training step")
      ->required()
      ->check([](const std::string& text) {  // before the conversion, which would clamp silently
        int64_t step = -1;
        const char* end = text.data() + text.size();
        const auto [stop, error] = std::from_chars(text.data(), end, step);
        const bool fits = error == std::errc() && stop == end && step >= 0;
        return fits ? std::string() : "'" + text + "' is not a step: 0 to 9223372036854775807";
      });
  command
      ->add_option("DIR", options->folder,
                   "config.json, *.safetensors, tokenizer.json; states/GROUP: its states")
      ->required();
  command->add_option("--base", options->base, "Base of the run; creates the run if it is new");
  command->add_option("--metric", options->metrics, "NAME=NUMBER of this step, repeatable")
      ->check([](const std::string& text) {
        const Status status = ParseMetric(text).status();
        return status.ok() ? std::string() : status.message();
      });
  AddRunOptions(*command, *options);
  command->add_option("--connections", options->connections, "Connections to send over")
      ->check(CLI::Range(1, 8));
  command->callback([&registry, options] {
    registry.action = [&registry, options] { return Push(registry.globals, *options); };
  });
}

}  // namespace

void AddUploadCommands(Registry& registry) {
  AddImportBase(registry);
  AddImportAdapter(registry);
  AddPush(registry);
}

}  // namespace stockpot::cli
