#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>

#include "serve/bin/cli/commands.h"
#include "serve/bin/cli/json.h"
#include "serve/bin/cli/output.h"
#include "serve/bin/cli/variant_tensors.h"

namespace stockpot::cli {
namespace {

constexpr int32_t kEventsPerCall = 1000;
constexpr int32_t kFollowWaitMs = 10'000;

std::string JoinNames(const std::vector<rpc::Alias>& aliases) {
  std::string out;
  for (const rpc::Alias& alias : aliases) out += (out.empty() ? "" : ", ") + alias.name;
  return Printable(out);
}

std::string JoinMetrics(const std::map<std::string, double>& metrics) {
  std::string out;
  for (const auto& [name, value] : metrics) {
    out += (out.empty() ? "" : "  ") + name + " " + HumanNumber(value);
  }
  return Printable(out);
}

// Digest -> the name a person knows it by.
Result<std::map<std::string, std::string>> AliasNames(Client& client) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<rpc::Alias> aliases, client.Aliases());
  std::map<std::string, std::string> names;
  for (const rpc::Alias& alias : aliases) {
    std::string& name = names[alias.target];
    if (name.empty() || name.find('@') != std::string::npos) name = alias.name;
  }
  return names;
}

std::string NameOf(const std::map<std::string, std::string>& names, const std::string& digest) {
  const auto found = names.find(digest);
  return found == names.end() ? ShortDigest(digest) : found->second;
}

Status Runs(const Globals& globals) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<rpc::Run> runs, client->Runs());
  if (globals.json) {
    PrintJson(ToJsonArray(runs));
    return OkStatus();
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto names, AliasNames(*client));
  Table table({{"RUN"}, {"BASE"}, {"MERGE EVERY", true}, {"PUBLISH"}, {"BEST BY"}, {"CREATED"}});
  for (const rpc::Run& run : runs) {
    table.Add({run.name, NameOf(names, run.base),
               run.config.merge_every == 0 ? "never" : std::to_string(run.config.merge_every),
               run.config.publish,
               (run.config.best_is_lower ? "lowest " : "highest ") + run.config.best_metric,
               HumanAgo(run.created_ms, NowMs())});
  }
  table.Print();
  return OkStatus();
}

// "state  optimizer  77aa...  1.1 GB"
std::string StateText(const rpc::ArtifactInfo& state) {
  return "state  " + Printable(state.group) + "  " + ShortDigest(state.digest) + "  " +
         HumanBytes(state.stored_bytes) + (state.purge_ms > 0 ? "  (deleted)" : "") +
         (state.pinned ? "  (pinned)" : "") + (state.compressed ? "  (compressed)" : "");
}

// The newest of each metric that the engine measured: "probe/loss 2.31  gate/kl 0.012".
std::string JoinScores(const std::vector<rpc::Eval>& evals) {
  std::map<std::string, const rpc::Eval*> newest;
  for (const rpc::Eval& eval : evals) {
    if (eval.task != "probe" && eval.task != "gate" && eval.task != "merge") continue;
    const rpc::Eval*& known = newest[eval.task + "/" + eval.metric];
    if (known == nullptr || known->time_ms <= eval.time_ms) known = &eval;
  }
  std::string out;
  for (const auto& [name, eval] : newest) {
    out += (out.empty() ? "" : "  ") + name + " " + HumanNumber(eval->value);
  }
  return out;
}

// "├─ 40        checkpoint  1b9f...  loss 2.31  3 min ago   [demo@latest]"
void PrintLogEntry(const rpc::LogEntry& entry, bool last, int64_t now_ms) {
  const char* branch = last ? "└─" : "├─";
  const char* stem = last ? "  " : "│ ";
  const std::string step =
      std::to_string(entry.step.step) + (entry.step.kind == rpc::Kind::MERGE ? ".merge" : "");
  std::string line = std::string(branch) + " " + step;
  line.resize(std::max<size_t>(line.size(), 20), ' ');
  line += std::string(KindName(entry.step.kind)) + "  " + ShortDigest(entry.artifact.digest) +
          "  " + HumanBytes(entry.artifact.stored_bytes) + "  " +
          HumanAgo(entry.step.committed_ms, now_ms);
  if (!entry.step.metrics.empty()) line += "  " + JoinMetrics(entry.step.metrics);
  const std::string scores = JoinScores(entry.artifact.evals);
  if (!scores.empty()) line += "  " + Printable(scores);
  if (entry.artifact.purge_ms > 0) line += "  (deleted)";
  if (entry.artifact.pinned) line += "  (pinned)";
  if (entry.artifact.compressed) line += "  (compressed)";
  if (!entry.artifact.aliases.empty()) line += "  [" + JoinNames(entry.artifact.aliases) + "]";
  std::printf("%s\n", line.c_str());
  std::string parents;
  for (const rpc::Edge& edge : entry.artifact.parents) {
    if (edge.type != "trained_from") parents += "  " + edge.type + " " + ShortDigest(edge.parent);
  }
  if (!parents.empty()) std::printf("%s %s\n", stem, Printable(parents).c_str());
  for (const rpc::Refusal& refusal : entry.artifact.refusals) {
    std::printf("%s   !! %s not published: %s\n", stem, Printable(refusal.codec).c_str(),
                Printable(refusal.reason).c_str());
  }
  for (const rpc::ArtifactInfo& state : entry.states) {
    std::printf("%s   %s %s\n", stem, &state == &entry.states.back() && entry.variants.empty()
                                         ? "└─" : "├─", StateText(state).c_str());
  }
  for (const rpc::ArtifactInfo& variant : entry.variants) {
    const bool last_variant = &variant == &entry.variants.back();
    const double share = variant.logical_bytes > 0
                             ? 100.0 * static_cast<double>(variant.stored_bytes) /
                                   static_cast<double>(variant.logical_bytes)
                             : 0;
    const auto codec = variant.attributes.find("codec");
    std::printf("%s   %s variant  %s  %s  %s (%s %% of full)  %s\n", stem,
                last_variant ? "└─" : "├─",
                codec == variant.attributes.end() ? "" : Printable(codec->second).c_str(),
                ShortDigest(variant.digest).c_str(), HumanBytes(variant.stored_bytes).c_str(),
                HumanNumber(std::round(share * 10) / 10).c_str(),
                variant.routes.empty() ? "no route" : ("-> " + JoinNames(variant.routes)).c_str());
    const std::string variant_scores = JoinScores(variant.evals);
    if (!variant_scores.empty()) {
      std::printf("%s   %s   %s\n", stem, last_variant ? "  " : "│ ",
                  Printable(variant_scores).c_str());
    }
  }
}

Status Log(const Globals& globals, const std::string& run_name) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<rpc::LogEntry> entries, client->Log(run_name));
  if (globals.json) {
    PrintJson(ToJsonArray(entries));
    return OkStatus();
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto names, AliasNames(*client));
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<rpc::Run> runs, client->Runs());
  for (const rpc::Run& run : runs) {
    if (run.name != run_name) continue;
    std::printf("%s  trained from base %s %s\n", run.name.c_str(), NameOf(names, run.base).c_str(),
                ShortDigest(run.base).c_str());
  }
  for (const rpc::LogEntry& entry : entries) {
    PrintLogEntry(entry, &entry == &entries.back(), NowMs());
  }
  if (entries.empty()) std::printf("└─ no checkpoint yet\n");
  return OkStatus();
}

void PrintEdges(const char* title, const std::vector<rpc::Edge>& edges, bool parents,
                const std::map<std::string, std::string>& names) {
  for (const rpc::Edge& edge : edges) {
    const std::string& other = parents ? edge.parent : edge.child;
    std::printf("%-12s%s %s  %s\n", title, edge.type.c_str(), ShortDigest(other).c_str(),
                Printable(NameOf(names, other)).c_str());
    title = "";
  }
}

void PrintArtifact(const rpc::ArtifactInfo& artifact,
                   const std::map<std::string, std::string>& names) {
  const auto line = [](const char* title, const std::string& value) {
    if (!value.empty()) std::printf("%-12s%s\n", title, Printable(value).c_str());
  };
  line("digest", HexDigest(artifact.digest));
  line("kind", KindName(artifact.kind));
  line("run", artifact.run);
  line("group", artifact.group);
  if (artifact.step >= 0) line("step", std::to_string(artifact.step));
  line("tensors", std::to_string(artifact.tensors));
  line("model", HumanBytes(artifact.logical_bytes));
  line("stored", HumanBytes(artifact.stored_bytes));
  line("metrics", JoinMetrics(artifact.metrics));
  line("aliases", JoinNames(artifact.aliases));
  line("routes", JoinNames(artifact.routes));
  if (artifact.pinned) line("pinned", "yes");
  if (artifact.compressed) line("history", "compressed");
  if (artifact.purge_ms > 0) {
    const int64_t left_ms = artifact.purge_ms - NowMs();
    line("deleted", left_ms > 0 ? "can be undeleted for " + HumanDuration(left_ms) + " more"
                                : "gone with the next garbage collection");
  }
  PrintEdges("parents", artifact.parents, true, names);
  PrintEdges("children", artifact.children, false, names);
  for (const rpc::Eval& eval : artifact.evals) {
    line("eval", eval.task + "  " + eval.metric + " " + HumanNumber(eval.value) + "  by " +
                     eval.by + ", " + HumanAgo(eval.time_ms, NowMs()));
  }
  for (const rpc::Refusal& refusal : artifact.refusals) {
    line("refused", refusal.codec + (refusal.name.empty() ? "" : " as " + refusal.name) + ", " +
                        HumanAgo(refusal.time_ms, NowMs()) + ": " + refusal.reason);
  }
  size_t of_tensors = 0;
  for (const auto& [key, value] : artifact.attributes) {
    if (key.rfind("tensor/", 0) == 0) {
      ++of_tensors;
    } else {
      line("attribute", key + " = " + value);
    }
  }
  if (of_tensors > 0) {
    line("attribute",
         "tensor/... of " + std::to_string(of_tensors) + " tensors (--tensors, --json)");
  }
}

Status Show(const Globals& globals, const std::string& id, bool tensors) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::ArtifactInfo artifact, client->Show(id));
  if (globals.json) {
    PrintJson(ToJson(artifact));
    return OkStatus();
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto names, AliasNames(*client));
  PrintArtifact(artifact, names);
  if (tensors) PrintTensors(artifact);
  return OkStatus();
}

Status Routes(const Globals& globals) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<rpc::Alias> routes, client->Routes());
  if (globals.json) {
    Json out = Json::array();
    for (const rpc::Alias& route : routes) out.push_back(ToJson(route, "variant"));
    PrintJson(out);
    return OkStatus();
  }
  Table table({{"MODEL"}, {"VARIANT"}, {"MOVED"}, {"BY"}});
  for (const rpc::Alias& route : routes) {
    table.Add(
        {route.name, ShortDigest(route.target), HumanAgo(route.moved_ms, NowMs()), route.moved_by});
  }
  table.Print();
  return OkStatus();
}

void PrintJobs(const std::vector<rpc::Job>& jobs) {
  Table table({{"JOB"}, {"STATE"}, {"DONE", true}, {"TRIES", true}, {"CREATED"}, {"RESULT"}});
  for (const rpc::Job& job : jobs) {
    table.Add({Abbreviate(job.key), job.state,
               std::to_string(static_cast<int>(job.share * 100)) + " %",
               std::to_string(job.attempts), HumanAgo(job.created_ms, NowMs()),
               job.state == "failed" ? job.error : job.result.substr(0, 12)});
  }
  table.Print();
}

Status Jobs(const Globals& globals) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<rpc::Job> jobs, client->Jobs());
  if (globals.json) {
    PrintJson(ToJsonArray(jobs));
  } else {
    PrintJobs(jobs);
  }
  return OkStatus();
}

std::string GatheringText(const rpc::Gathering& gathering) {
  std::string missing;
  for (const int32_t rank : gathering.missing) {
    missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  }
  return gathering.key.run + "@" + std::to_string(gathering.key.step) + ": " +
         std::to_string(gathering.key.world - gathering.missing.size()) + " of " +
         std::to_string(gathering.key.world) + " ranks, missing " + missing + "  (attempt " +
         gathering.key.attempt + ", opened " + HumanAgo(gathering.opened_ms, NowMs()) + ")";
}

Status ShowStatus(const Globals& globals) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::DaemonStatus status, client->GetStatus());
  if (globals.json) {
    PrintJson(ToJson(status));
    return OkStatus();
  }
  const auto line = [](const char* title, const std::string& value) {
    if (!value.empty()) std::printf("%-10s%s\n", title, Printable(value).c_str());
  };
  line("daemon", "stockpotd " + status.version + ", up " + HumanDuration(status.uptime_ms));
  line("http", status.http_address);
  line("thrift", status.thrift_address);
  line("devices", status.devices);
  line("base", status.base + (status.base_state.empty() ? "" : "  (" + status.base_state + ")"));
  line("store", std::to_string(status.runs) + " runs, " + std::to_string(status.artifacts) +
                    " artifacts, " + std::to_string(status.chunks) + " chunks of " +
                    HumanBytes(status.chunk_bytes) +
                    (status.stored_chunk_bytes < status.chunk_bytes
                         ? " in " + HumanBytes(status.stored_chunk_bytes)
                         : "") +
                    ", packs of " + HumanBytes(status.pack_bytes) +
                    (status.quota_bytes > 0 ? " of " + HumanBytes(status.quota_bytes) : ""));
  line("sessions", std::to_string(status.open_sessions) + " open");
  for (const rpc::Gathering& gathering : status.gatherings) {
    line("gathering", GatheringText(gathering));
  }
  if (!status.served.empty()) {
    std::printf("\n");
    Table table({{"MODEL"}, {"VARIANT"}, {"STATE"}, {"RESIDENT", true}});
    for (const rpc::ServedModel& model : status.served) {
      table.Add(
          {model.name, model.digest.substr(0, 12), model.state, HumanBytes(model.resident_bytes)});
    }
    table.Print();
  }
  if (!status.jobs.empty()) {
    std::printf("\n");
    PrintJobs(status.jobs);
  }
  return OkStatus();
}

void PrintEvent(const rpc::Event& event, bool json) {
  if (json) {
    PrintJson(ToJson(event), /*compact=*/true);
    return;
  }
  std::string fields;
  for (const auto& [key, value] : event.fields) {
    if (!value.empty()) fields += "  " + key + "=" + Abbreviate(value);
  }
  const std::string subject = Abbreviate(event.subject);
  std::printf("%6lld  %-14s %-16s %s%s\n", static_cast<long long>(event.sequence),
              HumanAgo(event.time_ms, NowMs()).c_str(), Printable(event.type).c_str(),
              Printable(subject).c_str(), Printable(fields).c_str());
  std::fflush(stdout);
}

struct EventOptions {
  int64_t since = 0;
  bool follow = false;
};

Status Events(const Globals& globals, const EventOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  int64_t since = options.since;
  while (true) {
    STOCKPOT_ASSIGN_OR_RETURN(
        const std::vector<rpc::Event> events,
        client->Watch(since, kEventsPerCall, options.follow ? kFollowWaitMs : 0));
    for (const rpc::Event& event : events) PrintEvent(event, globals.json);
    if (!events.empty()) since = events.back().sequence;
    if (events.empty() && !options.follow) return OkStatus();
  }
}

}  // namespace

void AddReadCommands(Registry& registry) {
  const auto add = [&registry](const char* name, const char* what, auto body) {
    CLI::App* command = registry.app.add_subcommand(name, what);
    command->callback([&registry, body] {
      registry.action = [&registry, body] { return body(registry.globals); };
    });
    return command;
  };
  add("runs", "List the training runs", Runs);
  add("routes", "List the names the endpoint answers to", Routes);
  add("jobs", "List merge and publish jobs", Jobs);
  add("status", "Show what the daemon holds, serves and does", ShowStatus);

  const auto run = std::make_shared<std::string>();
  add("log", "Draw the lineage of a run",
      [run](const Globals& globals) { return Log(globals, *run); })
      ->add_option("RUN", *run, "Name of the run")
      ->required();

  const auto id = std::make_shared<std::string>();
  const auto tensors = std::make_shared<bool>(false);
  CLI::App* show =
      add("show", "Show an artifact: RUN@STEP, RUN@latest, a route, an alias or a digest",
          [id, tensors](const Globals& globals) { return Show(globals, *id, *tensors); });
  show->add_option("ID", *id, "The artifact")->required();
  show->add_flag("--tensors", *tensors, "Of a variant: how each tensor is stored, and why");

  const auto options = std::make_shared<EventOptions>();
  CLI::App* events = add("events", "Print the event log (with --json: one object a line)",
                         [options](const Globals& globals) { return Events(globals, *options); });
  events->add_option("--since", options->since, "Only events after this number")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()));
  events->add_flag("--follow", options->follow, "Go on with new ones as they happen");
}

}  // namespace stockpot::cli
