// What stays and what goes: retention, pin, unpin, delete, undelete, gc.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "serve/bin/cli/commands.h"
#include "serve/bin/cli/json.h"
#include "serve/bin/cli/output.h"

namespace stockpot::cli {
namespace {

constexpr int64_t kMsPerHour = 3600 * 1000;
constexpr double kMaxGraceHours = 87'600;  // ten years

int64_t HoursToMs(double hours) { return static_cast<int64_t>(hours * kMsPerHour); }

struct RetentionOptions {
  std::string run;
  int64_t keep_last = 0;
  int64_t best = 0;
  std::vector<std::string> metrics;  // "loss", "task/acc:higher"
  int64_t every = 0;
  std::vector<std::string> groups;  // "optimizer:2", "optimizer:2:1000"
  double grace_hours = 7 * 24;
  bool clear = false;
  bool show = false;
  bool set = false;  // any rule was given
};

// "loss" or "loss:lower": less is better. "acc:higher": more is.
rpc::BestRule ParseRule(const std::string& text, int64_t keep) {
  rpc::BestRule rule;
  const size_t colon = text.rfind(':');
  const std::string direction = colon == std::string::npos ? "lower" : text.substr(colon + 1);
  rule.lower = direction != "higher";
  const bool known = direction == "lower" || direction == "higher";
  rule.metric = known && colon != std::string::npos ? text.substr(0, colon) : text;
  rule.keep = keep;
  return rule;
}

// "GROUP:LAST", "GROUP:LAST:EVERY": numbers of at least 0, one of them over it.
Result<rpc::GroupRule> ParseGroupRule(const std::string& text) {
  rpc::GroupRule rule;
  const size_t first = text.find(':');
  rule.group = text.substr(0, first);
  const std::string numbers = first == std::string::npos ? "" : text.substr(first + 1);
  char* end = nullptr;
  rule.keep_last = std::strtoll(numbers.c_str(), &end, 10);
  if (*end == ':') rule.every = std::strtoll(end + 1, &end, 10);
  if (numbers.empty() || *end != '\0') {
    return InvalidArgument("--group " + text + ": wants GROUP:LAST or GROUP:LAST:EVERY");
  }
  return rule;
}

std::string PolicyText(const rpc::RetentionPolicy& policy) {
  std::string text;
  const auto add = [&](const std::string& rule) { text += (text.empty() ? "" : ", ") + rule; };
  if (policy.keep_last > 0) add("last " + std::to_string(policy.keep_last));
  for (const rpc::BestRule& rule : policy.best) {
    add("best " + std::to_string(rule.keep) + " by " + (rule.lower ? "lowest " : "highest ") +
        rule.metric);
  }
  if (policy.every > 0) add("every " + std::to_string(policy.every));
  for (const rpc::GroupRule& rule : policy.groups) {
    std::string what = rule.group + " of";
    if (rule.keep_last > 0) what += " the last " + std::to_string(rule.keep_last);
    if (rule.every > 0) what += " every " + std::to_string(rule.every);
    add(what);
  }
  return text.empty() ? "everything" : text;
}

std::string JoinReasons(const std::vector<std::string>& reasons) {
  std::string text;
  for (const std::string& reason : reasons) text += (text.empty() ? "" : ", ") + reason;
  return text;
}

// Whether a checkpoint or merge stays by the rule (store/retention.h KeepText).
bool KeepsAny(const rpc::RetentionReport& report, const rpc::BestRule& rule) {
  const std::string reason = "best " + std::to_string(rule.keep) + " by " + rule.metric;
  return std::any_of(report.fates.begin(), report.fates.end(), [&](const rpc::Fate& fate) {
    return std::find(fate.reasons.begin(), fate.reasons.end(), reason) != fate.reasons.end();
  });
}

// A sentence for each rule by a metric that nothing of the run has. The metric of an evaluation
// that is still to come is one, and so is a misspelt one.
Result<std::vector<std::string>> RetentionWarnings(Client& client,
                                                   const rpc::RetentionReport& report,
                                                   const std::string& run) {
  std::vector<std::string> warnings;
  if (report.fates.empty()) return warnings;
  std::string known;
  for (const rpc::BestRule& rule : report.policy.best) {
    if (KeepsAny(report, rule)) continue;
    if (known.empty()) {
      std::set<std::string> names;
      STOCKPOT_ASSIGN_OR_RETURN(const std::vector<rpc::LogEntry> log, client.Log(run));
      for (const rpc::LogEntry& entry : log) {
        for (const auto& [name, value] : entry.artifact.metrics) names.insert(name);
        for (const rpc::Eval& eval : entry.artifact.evals) {
          names.insert(eval.task + "/" + eval.metric);
        }
      }
      for (const std::string& name : names) known += (known.empty() ? "" : ", ") + name;
      if (known.empty()) known = "none";
    }
    warnings.push_back("nothing of run '" + run + "' has the metric '" + rule.metric +
                       "', so that 'best " + std::to_string(rule.keep) + " by " + rule.metric +
                       "' keeps nothing until something has; its metrics are: " + known);
  }
  return warnings;
}

void PrintRetention(const rpc::RetentionReport& report) {
  std::printf("keeps %s; deleted ones can be undeleted for %s\n",
              Printable(PolicyText(report.policy)).c_str(),
              HumanDuration(report.policy.grace_ms).c_str());
  Table table({{"STEP", true}, {"KIND"}, {"ARTIFACT"}, {"BYTES", true}, {"STATE"}, {"WHY"}});
  for (const rpc::Fate& fate : report.fates) {
    const char* state = fate.purge_ms > 0 ? "deleted" : fate.reasons.empty() ? "may go" : "stays";
    table.Add({fate.step < 0 ? "-" : std::to_string(fate.step),
               fate.group.empty() ? KindName(fate.kind) : fate.group,
               ShortDigest(fate.artifact), HumanBytes(fate.stored_bytes), state,
               JoinReasons(fate.reasons)});
  }
  table.Print();
}

Status Retention(const Globals& globals, const RetentionOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  if (options.set) {
    rpc::RetentionPolicy policy;
    policy.keep_last = options.keep_last;
    for (const std::string& metric : options.metrics) {
      policy.best.push_back(ParseRule(metric, options.best));
    }
    policy.every = options.every;
    for (const std::string& group : options.groups) {
      STOCKPOT_ASSIGN_OR_RETURN(policy.groups.emplace_back(), ParseGroupRule(group));
    }
    policy.grace_ms = HoursToMs(options.grace_hours);
    STOCKPOT_RETURN_IF_ERROR(client->SetRetention(options.run, policy).status());
  }
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::RetentionReport report, client->Retention(options.run));
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<std::string> warnings,
                            RetentionWarnings(*client, report, options.run));
  if (globals.json) {
    Json json = ToJson(report);
    json["warnings"] = warnings;
    PrintJson(json);
  } else {
    PrintRetention(report);
  }
  for (const std::string& warning : warnings) {
    std::fprintf(stderr, "stockpot: retention: warning: %s\n", Printable(warning).c_str());
  }
  return OkStatus();
}

void AddRetention(Registry& registry) {
  const auto options = std::make_shared<RetentionOptions>();
  CLI::App* command = registry.app.add_subcommand(
      "retention", "Show which checkpoints of a run stay and why, or set the rules");
  const auto count = CLI::Range(int64_t{1}, int64_t{1'000'000});
  command->add_option("RUN", options->run, "Name of the run")->required();
  CLI::Option* last =
      command->add_option("--keep-last", options->keep_last, "Keep the newest N")->check(count);
  CLI::Option* best =
      command->add_option("--best", options->best, "Keep the best K by each --metric")
          ->check(count);
  CLI::Option* metric =
      command->add_option("--metric", options->metrics,
                          "loss, TASK/METRIC of an evaluation; with :higher where more is better");
  CLI::Option* every =
      command->add_option("--every", options->every, "Keep steps that are multiples of M")
          ->check(count);
  CLI::Option* group = command->add_option(
      "--group", options->groups,
      "GROUP:LAST or GROUP:LAST:EVERY: which states of a group stay, e.g. optimizer:2");
  CLI::Option* grace =
      command->add_option("--grace-hours", options->grace_hours, "How long undelete is possible")
          ->check(CLI::Range(0.0, kMaxGraceHours))
          ->capture_default_str();
  CLI::Option* all = command->add_flag("--keep-all", options->clear, "Take the rules off");
  CLI::Option* show =
      command->add_flag("--show", options->show, "Only show (the default without rules)");
  best->needs(metric);
  metric->needs(best);
  for (CLI::Option* rule : {last, best, metric, every, group}) {
    all->excludes(rule);
    show->excludes(rule);
  }
  show->excludes(all);
  command->callback([&registry, options, last, best, every, group, grace, all] {
    const bool rules = last->count() + best->count() + every->count() + group->count() > 0;
    options->set = rules || all->count() > 0;
    if (grace->count() > 0 && !options->set) {
      throw CLI::ValidationError("--grace-hours", "comes with rules, or with --keep-all");
    }
    registry.action = [&registry, options] { return Retention(registry.globals, *options); };
  });
}

struct IdOptions {
  std::string id;
  std::string why;
  double grace_hours = 7 * 24;
};

Status SayDone(const Globals& globals, const std::string& id, const char* state) {
  if (globals.json) {
    PrintJson({{"id", id}, {"state", state}});
  } else {
    std::printf("%s: %s\n", Printable(id).c_str(), state);
  }
  return OkStatus();
}

// A command that changes one artifact and says so.
template <typename Change>
CLI::App* AddChange(Registry& registry, const char* name, const char* what, const char* state,
                    const std::shared_ptr<IdOptions>& options, Change change) {
  CLI::App* command = registry.app.add_subcommand(name, what);
  command->add_option("ID", options->id, "The artifact")->required();
  command->callback([&registry, options, state, change] {
    registry.action = [&registry, options, state, change]() -> Status {
      STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(registry.globals));
      STOCKPOT_RETURN_IF_ERROR(change(*client, *options));
      return SayDone(registry.globals, options->id, state);
    };
  });
  return command;
}

void AddPinsAndDeletion(Registry& registry) {
  const auto pin = std::make_shared<IdOptions>();
  AddChange(registry, "pin", "Keep an artifact whatever the rules say", "pinned", pin,
            [](Client& client, const IdOptions& o) { return client.Pin(o.id, Me(), o.why); })
      ->add_option("--why", pin->why, "For whoever wonders");
  const auto unpin = std::make_shared<IdOptions>();
  AddChange(registry, "unpin", "Take a pin off", "not pinned", unpin,
            [](Client& client, const IdOptions& o) { return client.Unpin(o.id); });
  const auto remove = std::make_shared<IdOptions>();
  CLI::App* command = AddChange(registry, "delete",
                                "Delete an artifact; undelete brings it back until the grace ends",
                                "deleted", remove, [](Client& client, const IdOptions& o) {
                                  return client.Delete(o.id, HoursToMs(o.grace_hours), Me(), o.why);
                                });
  command->add_option("--why", remove->why, "For whoever wonders");
  command->add_option("--grace-hours", remove->grace_hours, "How long undelete is possible; 0: not")
      ->check(CLI::Range(0.0, kMaxGraceHours))
      ->capture_default_str();
  const auto undelete = std::make_shared<IdOptions>();
  AddChange(registry, "undelete", "Bring a deleted artifact back", "undeleted", undelete,
            [](Client& client, const IdOptions& o) { return client.Undelete(o.id); });
}

struct GcOptions {
  bool dry_run = false;
  int64_t bytes_per_second = 0;
};

void PrintGc(const rpc::GcReply& reply, bool dry_run) {
  Table table({{"WHAT"}, {"KIND"}, {"RUN"}, {"STEP", true}, {"ARTIFACT"}, {"BYTES BACK", true}});
  for (const std::string& artifact : reply.undeleted) {
    table.Add({dry_run ? "would undelete" : "undeleted", "", "", "", ShortDigest(artifact), ""});
  }
  if (!dry_run) {  // else they are listed as what would be purged, now or later
    for (const std::string& artifact : reply.deleted) {
      table.Add({"deleted", "", "", "", ShortDigest(artifact), ""});
    }
  }
  int64_t later_bytes = 0;
  for (const rpc::GoneArtifact& gone : reply.purged) {
    if (gone.purge_ms > 0) later_bytes += gone.bytes;
    const char* const would = gone.purge_ms > 0 ? "would delete" : "would purge";
    table.Add({dry_run ? would : "purged",
               gone.group.empty() ? KindName(gone.kind) : gone.group, gone.run,
               gone.step < 0 ? "-" : std::to_string(gone.step), ShortDigest(gone.artifact),
               HumanBytes(gone.bytes)});
  }
  if (!reply.deleted.empty() || !reply.undeleted.empty() || !reply.purged.empty()) table.Print();
  std::printf("%lld chunks of %s %s without an owner", static_cast<long long>(reply.chunks),
              HumanBytes(reply.chunk_bytes).c_str(), dry_run ? "are" : "were");
  if (!dry_run) {
    std::printf("; packs: %s, were %s", HumanBytes(reply.pack_bytes_after).c_str(),
                HumanBytes(reply.pack_bytes_before).c_str());
  }
  if (later_bytes > 0) {
    std::printf("; %s of them only when the grace of what would be deleted ends",
                HumanBytes(later_bytes).c_str());
  }
  std::printf("\n");
}

Status Gc(const Globals& globals, const GcOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::GcReply reply,
                            client->CollectGarbage(options.dry_run, options.bytes_per_second));
  if (globals.json) {
    PrintJson(ToJson(reply));
  } else {
    PrintGc(reply, options.dry_run);
  }
  return OkStatus();
}

}  // namespace

void AddRetentionCommands(Registry& registry) {
  AddRetention(registry);
  AddPinsAndDeletion(registry);
  const auto options = std::make_shared<GcOptions>();
  CLI::App* gc = registry.app.add_subcommand(
      "gc", "Apply the retention of all runs, purge what was deleted, give the bytes back");
  gc->add_flag("--dry-run", options->dry_run, "Only say what would go");
  gc->add_option("--bytes-per-second", options->bytes_per_second,
                 "Of moving what stays: 0 (any) or at least 1000000");  // the daemon checks it
  gc->callback([&registry, options] {
    registry.action = [&registry, options] { return Gc(registry.globals, *options); };
  });
}

}  // namespace stockpot::cli
