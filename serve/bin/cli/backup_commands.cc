// What looks after the bytes: scrub, backup.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "serve/bin/cli/commands.h"
#include "serve/bin/cli/json.h"
#include "serve/bin/cli/output.h"

namespace stockpot::cli {
namespace {

void PrintScrub(const rpc::ScrubReply& reply) {
  std::printf("read %lld chunks, %s: %zu damaged\n", static_cast<long long>(reply.chunks),
              HumanBytes(reply.bytes).c_str(), reply.damaged.size());
  for (const rpc::Damage& damage : reply.damaged) {
    std::printf("%s  %s%s\n", ShortDigest(damage.chunk).c_str(),
                damage.repaired ? "repaired: " : "", Printable(damage.error).c_str());
    for (const std::string& who : damage.needed_by) {
      std::printf("  needed by %s\n", Printable(who).c_str());
    }
  }
}

Status Scrub(const Globals& globals, const std::string& repair_from) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  const std::string folder =
      repair_from.empty() ? "" : std::filesystem::absolute(repair_from).string();
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::ScrubReply reply, client->Scrub(folder));
  if (globals.json) {
    PrintJson(ToJson(reply));
  } else {
    PrintScrub(reply);
  }
  const auto left = std::count_if(reply.damaged.begin(), reply.damaged.end(),
                                  [](const rpc::Damage& damage) { return !damage.repaired; });
  if (left == 0) return OkStatus();
  return Corruption(std::to_string(left) +
                    " chunks are damaged: push the checkpoints that need them again, or repair "
                    "them from a backup (--repair-from DIR)");
}

Status Backup(const Globals& globals, const std::string& directory) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::BackupReply reply,
                            client->Backup(std::filesystem::absolute(directory).string()));
  if (globals.json) {
    PrintJson(ToJson(reply));
  } else {
    std::printf("%lld artifacts, %lld chunks; %lld were new, %s; up to event %lld\n",
                static_cast<long long>(reply.artifacts), static_cast<long long>(reply.total_chunks),
                static_cast<long long>(reply.copied_chunks), HumanBytes(reply.copied_bytes).c_str(),
                static_cast<long long>(reply.event));
  }
  return OkStatus();
}

}  // namespace

void AddBackupCommands(Registry& registry) {
  const auto repair_from = std::make_shared<std::string>();
  CLI::App* scrub = registry.app.add_subcommand("scrub", "Read every stored byte and check it");
  scrub->add_option("--repair-from", *repair_from,
                    "Backup on the daemon's machine to take what is damaged from");
  scrub->callback([&registry, repair_from] {
    registry.action = [&registry, repair_from] { return Scrub(registry.globals, *repair_from); };
  });
  const auto directory = std::make_shared<std::string>();
  CLI::App* backup = registry.app.add_subcommand(
      "backup", "Copy what is new into a folder of the daemon's machine, while it goes on");
  backup->add_option("DIR", *directory, "The folder: new, or an earlier backup of this store")
      ->required();
  backup->callback([&registry, directory] {
    registry.action = [&registry, directory] { return Backup(registry.globals, *directory); };
  });
}

}  // namespace stockpot::cli
