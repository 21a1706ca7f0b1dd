// The texts of a run: those it is judged by (probe set, show, score), and those that scales of its
// variants are found on (calibration set, show).
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

// One of the two sets of texts that a run may have.
struct TextSet {
  const char* name;     // of the command
  const char* without;  // what it means to have none
  Result<rpc::ProbeSet> (Client::*set)(const std::string&, const std::vector<rpc::ProbeText>&,
                                       const std::string&);
  Result<rpc::ProbeSet> (Client::*get)(const std::string&);
};
constexpr TextSet kProbe = {"probe",
                            "its merges are not scored, and what is published is checked without "
                            "them",
                            &Client::SetProbe, &Client::Probe};
constexpr TextSet kCalibration = {"calibration", "1-bit rows have the scale mean |delta|",
                                  &Client::SetCalibration, &Client::Calibration};

void PrintTexts(const Globals& globals, const TextSet& which, const rpc::ProbeSet& probe) {
  if (globals.json) {
    PrintJson(ToJson(probe));
    return;
  }
  if (probe.texts.empty()) {
    std::printf("%s has no %s texts: %s\n", Printable(probe.run).c_str(), which.name,
                which.without);
    return;
  }
  std::printf("%s %s, set %s by %s\n", which.name, ShortDigest(probe.digest).c_str(),
              HumanAgo(probe.time_ms, NowMs()).c_str(), Printable(probe.by).c_str());
  Table table({{"TEXT"}, {"BYTES", true}});
  for (const rpc::ProbeText& text : probe.texts) {
    table.Add({text.name, HumanBytes(static_cast<int64_t>(text.text.size()))});
  }
  table.Print();
}

Status SetTexts(const Globals& globals, const TextSet& which, const ProbeOptions& options) {
  std::vector<rpc::ProbeText> texts;
  for (const std::string& file : options.files) {
    STOCKPOT_ASSIGN_OR_RETURN(texts.emplace_back(), ReadText(file));
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::ProbeSet set,
                            ((*client).*which.set)(options.run, texts, Me()));
  PrintTexts(globals, which, set);
  return OkStatus();
}

Status ShowTexts(const Globals& globals, const TextSet& which, const ProbeOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::ProbeSet set, ((*client).*which.get)(options.run));
  PrintTexts(globals, which, set);
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

// Commands `set` and `show` of a set of texts; returns the group.
CLI::App* AddTextSet(Registry& registry, const std::shared_ptr<ProbeOptions>& options,
                     const TextSet& which, const char* about, const char* of_a_file) {
  CLI::App* group = registry.app.add_subcommand(which.name, about);
  group->require_subcommand(1);
  group->fallthrough();
  CLI::App* set =
      group->add_subcommand("set", "Give a run the texts of these files in place of its own");
  set->fallthrough();
  set->add_option("RUN", options->run, "Name of the run")->required();
  CLI::Option* files = set->add_option("FILE", options->files, of_a_file);
  CLI::Option* clear = set->add_flag("--clear", options->clear, "Take the texts away");
  clear->excludes(files);
  set->callback([&registry, options, &which] {
    if (options->files.empty() && !options->clear) {
      throw CLI::ValidationError(which.name + std::string(" set"), "name a file, or --clear");
    }
    registry.action = [&registry, options, &which] {
      return SetTexts(registry.globals, which, *options);
    };
  });
  CLI::App* show = group->add_subcommand("show", "List the texts of a run");
  show->fallthrough();
  show->add_option("RUN", options->run, "Name of the run")->required();
  show->callback([&registry, options, &which] {
    registry.action = [&registry, options, &which] {
      return ShowTexts(registry.globals, which, *options);
    };
  });
  return group;
}

}  // namespace

void AddProbeCommands(Registry& registry) {
  const auto options = std::make_shared<ProbeOptions>();
  CLI::App* probe =
      AddTextSet(registry, options, kProbe,
                 "The held-out texts of a run: what its merges and variants are scored on",
                 "UTF-8 texts that training has not seen");
  CLI::App* score = probe->add_subcommand(
      "score", "Measure the held-out loss of a checkpoint, merge or variant");
  score->fallthrough();
  score->add_option("ID", options->id, "The artifact")->required();
  score->add_flag("--no-wait", options->no_wait, "Only queue the job");
  score->callback([&registry, options] {
    registry.action = [&registry, options] { return Score(registry.globals, *options); };
  });
  AddTextSet(registry, options, kCalibration,
             "The texts that scales of 1-bit rows are found on (publish --alpha)",
             "UTF-8 texts, others than those of the probe");
}

}  // namespace stockpot::cli
