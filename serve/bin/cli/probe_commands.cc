// What a run is judged by: probe set, probe show, probe score.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "serve/bin/cli/commands.h"
#include "serve/bin/cli/json.h"
#include "serve/bin/cli/output.h"

namespace stockpot::cli {
namespace {

struct ProbeOptions {
  std::string run;
  std::string id;
  std::vector<std::string> files;
  bool clear = false;
  bool no_wait = false;
};

Result<rpc::ProbeText> ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  rpc::ProbeText text;
  text.name = std::filesystem::path(path).filename().string();
  text.text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  if (!file || file.bad()) return NotFound("cannot read '" + path + "'");
  return text;
}

void PrintProbe(const Globals& globals, const rpc::ProbeSet& probe) {
  if (globals.json) {
    PrintJson(ToJson(probe));
    return;
  }
  if (probe.texts.empty()) {
    std::printf(
        "%s has no probe texts: its merges are not scored, and what is published is "
        "checked without them\n",
        Printable(probe.run).c_str());
    return;
  }
  std::printf("probe %s, set %s by %s\n", ShortDigest(probe.digest).c_str(),
              HumanAgo(probe.time_ms, NowMs()).c_str(), Printable(probe.by).c_str());
  Table table({{"TEXT"}, {"BYTES", true}});
  for (const rpc::ProbeText& text : probe.texts) {
    table.Add({text.name, HumanBytes(static_cast<int64_t>(text.text.size()))});
  }
  table.Print();
}

Status SetProbe(const Globals& globals, const ProbeOptions& options) {
  std::vector<rpc::ProbeText> texts;
  for (const std::string& file : options.files) {
    STOCKPOT_ASSIGN_OR_RETURN(texts.emplace_back(), ReadText(file));
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::ProbeSet probe, client->SetProbe(options.run, texts, Me()));
  PrintProbe(globals, probe);
  return OkStatus();
}

Status ShowProbe(const Globals& globals, const ProbeOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::ProbeSet probe, client->Probe(options.run));
  PrintProbe(globals, probe);
  return OkStatus();
}

Status Score(const Globals& globals, const ProbeOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(rpc::Job job, client->Score(options.id));
  if (options.no_wait || globals.json) {
    return FinishJob(*client, globals, std::move(job), !options.no_wait);
  }
  STOCKPOT_ASSIGN_OR_RETURN(job, WaitForJob(*client, std::move(job), globals.quiet));
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::ArtifactInfo artifact, client->Show(job.result));
  const rpc::Eval* newest = nullptr;
  for (const rpc::Eval& eval : artifact.evals) {
    if (eval.task != "probe" || eval.metric != "loss") continue;
    if (newest == nullptr || eval.time_ms >= newest->time_ms) newest = &eval;
  }
  if (newest == nullptr) return Internal("the job is done and there is no score");
  std::printf("%s: held-out loss %s (%s)\n", Printable(options.id).c_str(),
              HumanNumber(newest->value).c_str(), Printable(newest->by).c_str());
  return OkStatus();
}

}  // namespace

void AddProbeCommands(Registry& registry) {
  const auto options = std::make_shared<ProbeOptions>();
  CLI::App* probe = registry.app.add_subcommand(
      "probe", "The held-out texts of a run: what its merges and variants are scored on");
  probe->require_subcommand(1);
  probe->fallthrough();
  const auto add = [&](const char* name, const char* what, auto body) {
    CLI::App* command = probe->add_subcommand(name, what);
    command->fallthrough();
    command->callback([&registry, options, body] {
      registry.action = [&registry, options, body] { return body(registry.globals, *options); };
    });
    return command;
  };
  CLI::App* set = add("set", "Give a run the texts of these files in place of its own", SetProbe);
  set->add_option("RUN", options->run, "Name of the run")->required();
  CLI::Option* files =
      set->add_option("FILE", options->files, "UTF-8 texts that training has not seen");
  CLI::Option* clear = set->add_flag("--clear", options->clear, "Take the texts away");
  clear->excludes(files);
  set->callback([&registry, options] {
    if (options->files.empty() && !options->clear) {
      throw CLI::ValidationError("probe set", "name a file, or --clear");
    }
    registry.action = [&registry, options] { return SetProbe(registry.globals, *options); };
  });
  add("show", "List the texts of a run", ShowProbe)
      ->add_option("RUN", options->run, "Name of the run")
      ->required();
  CLI::App* score =
      add("score", "Measure the held-out loss of a checkpoint, merge or variant", Score);
  score->add_option("ID", options->id, "The artifact")->required();
  score->add_flag("--no-wait", options->no_wait, "Only queue the job");
}

}  // namespace stockpot::cli
