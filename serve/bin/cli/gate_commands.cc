// gate: what a variant of a run must be like before a name leads to it.
#include <cstdio>
#include <vector>

#include "serve/bin/cli/commands.h"
#include "serve/bin/cli/json.h"
#include "serve/bin/cli/output.h"

namespace stockpot::cli {
namespace {

struct GateLimit {
  const char* flag;
  double rpc::Gate::*value;
  const char* what;
};

const std::vector<GateLimit>& Limits() {
  static const std::vector<GateLimit> limits = {
      {"--max-kl", &rpc::Gate::max_kl,
       "KL(checkpoint || variant) on the probe texts, nats a token"},
      {"--min-top1", &rpc::Gate::min_top1,
       "Share of tokens on whose most likely successor the two agree"},
      {"--max-loss-rise", &rpc::Gate::max_loss_rise,
       "Held-out loss of the variant over the checkpoint's, nats a token"},
      {"--max-update", &rpc::Gate::max_update, "||W - W_base|| / ||W_base||"},
      {"--min-update", &rpc::Gate::min_update,
       "Likewise, at least: over 0 refuses an untrained one"},
      {"--max-error", &rpc::Gate::max_error,
       "Share of a matrix's squared update that its one bit may miss"},
  };
  return limits;
}

struct GateOptions {
  std::string run;
  rpc::Gate given;
  std::vector<double rpc::Gate::*> set;  // which of them were given
  bool defaults = false;
};

Status SetOrShow(const Globals& globals, const GateOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(rpc::Gate gate, client->GetGate(options.run));
  if (options.defaults) gate = rpc::Gate();
  for (double rpc::Gate::*const limit : options.set) gate.*limit = options.given.*limit;
  if (options.defaults || !options.set.empty()) {
    STOCKPOT_ASSIGN_OR_RETURN(gate, client->SetGate(options.run, gate));
  }
  if (globals.json) {
    PrintJson(ToJson(gate));
    return OkStatus();
  }
  for (const GateLimit& limit : Limits()) {
    std::printf("%-16s %-8s %s\n", limit.flag + 2, HumanNumber(gate.*limit.value).c_str(),
                limit.what);
  }
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::ProbeSet probe, client->Probe(options.run));
  if (probe.texts.empty()) {
    std::printf("the run has no probe texts: only update and error are measured\n");
  }
  return OkStatus();
}

}  // namespace

void AddGateCommand(Registry& registry) {
  const auto options = std::make_shared<GateOptions>();
  CLI::App* command = registry.app.add_subcommand(
      "gate", "Show or set what a variant of a run must be like before it is served");
  command->add_option("RUN", options->run, "Name of the run")->required();
  std::vector<CLI::Option*> given;
  for (const GateLimit& limit : Limits()) {
    given.push_back(command->add_option(limit.flag, options->given.*limit.value, limit.what));
  }
  command->add_flag("--defaults", options->defaults, "Back to the defaults first");
  command->callback([&registry, options, given] {
    for (size_t i = 0; i < given.size(); ++i) {
      if (given[i]->count() > 0) options->set.push_back(Limits()[i].value);
    }
    registry.action = [&registry, options] { return SetOrShow(registry.globals, *options); };
  });
}

}  // namespace stockpot::cli
