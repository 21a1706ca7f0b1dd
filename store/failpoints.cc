#include "store/failpoints.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <csignal>

#include "kernels/base/check.h"

namespace stockpot {
namespace {

// In the order of a life: opening, putting, committing, removing, compacting, backing up.
constexpr std::array kNames = std::to_array<std::string_view>({
    "open.directory",
    "open.locked",
    "open.catalog",
    "open.surveyed",
    "put.checked",
    "put.inline.before_write",
    "put.inline.after_write",
    "pack.create",
    "pack.created",
    "pack.append",
    "pack.append.header",
    "pack.append.data",
    "pack.write",
    "pack.written",
    "pack.finish",
    "pack.finish.synced",
    "pack.sync",
    "pack.sync.data",
    "pack.sync.directory",
    "commit.prepared",
    "commit.leading",
    "commit.synced",
    "commit.checked",
    "commit.before_write",
    "commit.after_write",
    "commit.indexed",
    "retention.decided",
    "retention.applied",
    "gc.begin",
    "gc.decided",
    "gc.purging",
    "gc.purged",
    "gc.marked",
    "gc.rebase",
    "gc.rebased",
    "gc.listed",
    "gc.sweep",
    "gc.sweep.before_write",
    "gc.sweep.after_write",
    "gc.swept",
    "compact.roll",
    "compact.rolled",
    "compact.pack",
    "compact.read",
    "compact.appended",
    "compact.before_flip",
    "compact.flipped",
    "compact.before_unlink",
    "compact.unlinked",
    "compact.directory",
    "history.begin",
    "history.decided",
    "history.chunk",
    "history.read",
    "history.encoded",
    "history.appended",
    "history.whole",
    "history.before_flip",
    "history.flipped",
    "history.noted",
    "backup.begin",
    "backup.listed",
    "backup.chunk",
    "backup.chunks",
    "backup.before_records",
    "backup.records",
    "repair.chunk",
    "repair.done",
});

}  // namespace

Result<std::shared_ptr<Failpoints>> Failpoints::FromText(std::string_view text) {
  auto failpoints = std::make_shared<Failpoints>();
  while (!text.empty()) {
    const std::string_view entry = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), entry.size() + 1));
    const size_t equals = entry.find('=');
    const std::string name(entry.substr(0, equals));
    if (std::find(kNames.begin(), kNames.end(), name) == kNames.end()) {
      return InvalidArgument("there is no failpoint '" + name + "'");
    }
    std::string_view action = equals == std::string_view::npos ? "" : entry.substr(equals + 1);
    Action parsed;
    if (const size_t at = action.find('@'); at != std::string_view::npos) {
      const std::string_view digits = action.substr(at + 1);
      const auto [end, error] =
          std::from_chars(digits.data(), digits.data() + digits.size(), parsed.at);
      if (error != std::errc() || end != digits.data() + digits.size() || parsed.at < 1) {
        return InvalidArgument("failpoint '" + name + "': '@' wants a count of at least 1");
      }
      action = action.substr(0, at);
    }
    parsed.kill = action == "kill";
    if (!parsed.kill && action != "error") {
      return InvalidArgument("failpoint '" + name + "' wants kill or error");
    }
    failpoints->actions_[name] = parsed;
  }
  return failpoints;
}

std::span<const std::string_view> Failpoints::Names() { return kNames; }

Status Failpoints::Reach(std::string_view name) {
  const std::lock_guard lock(mutex_);
  STOCKPOT_CHECK(std::find(kNames.begin(), kNames.end(), name) != kNames.end(), name);
  const auto reached = reached_.try_emplace(std::string(name), 0).first;
  ++reached->second;
  const auto action = actions_.find(name);
  if (action == actions_.end() || action->second.at != reached->second) return OkStatus();
  if (action->second.kill) std::raise(SIGKILL);
  return Unavailable("failpoint " + std::string(name));
}

int64_t Failpoints::Reached(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  const auto it = reached_.find(name);
  return it == reached_.end() ? 0 : it->second;
}

}  // namespace stockpot
