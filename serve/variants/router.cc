#include "serve/variants/router.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>

#include "serve/variants/request_window.h"

namespace stockpot {
namespace {

constexpr int64_t kWaitMs = 500;  // how often the follower looks whether it is to stop
constexpr size_t kNamesInMessage = 5;

}  // namespace

struct Router::State : std::enable_shared_from_this<State> {
  // A name and where it leads.
  struct Name {
    Digest serving;
    Digest target;              // what the store says; differs from `serving` while it loads
    int64_t pending_since = 0;  // the first event that is not followed yet because of it; 0: none
    int64_t moved_ms = 0;
    std::string error;     // of loading `target`
    bool foreign = false;  // a variant of another base
  };

  // --- constant ---
  std::string base_name;
  std::shared_ptr<const BaseModel> base;
  const CheckpointStore* store = nullptr;
  VariantCache* cache = nullptr;
  Clock clock = SystemClock();
  mutable RequestWindow requests;  // synchronises itself
  std::thread follower;

  // --- guarded by mutex ---
  mutable std::mutex mutex;
  std::condition_variable stopped;
  std::map<std::string, Name, std::less<>> names;
  int64_t seen = 0;  // events read
  double last_flip_seconds = 0;
  bool stopping = false;

  // --- the constructor's, then the follower's alone ---
  std::map<Digest, bool> is_foreign;  // variants of the current routes: made for another base?

  void LearnBases(const std::vector<Route>& routes);
  void Reconcile(int64_t sequence);
  void Add(const Route& route);
  bool Move(const Route& route, Name& name);
  std::vector<Digest> Unnamed(std::set<Digest> candidates) const;
  void Load(const Digest& digest);
  void Loaded(const Digest& digest, const Status& status);
  void Follow();
  bool ReadIsForeign(const Digest& variant) const;
  std::string NamesForMessage() const;
  double SecondsSince(int64_t time_ms) const {
    return static_cast<double>(clock() - time_ms) / 1000.0;
  }
};

// A manifest that cannot be read is no reason to hide the name: requests get the store's error.
bool Router::State::ReadIsForeign(const Digest& variant) const {
  const Result<Manifest> manifest = store->GetManifest(variant);
  return manifest.ok() && manifest->base.has_value() && *manifest->base != base->digest();
}

// Reads the manifests of variants that are new here, without the mutex: it takes milliseconds.
void Router::State::LearnBases(const std::vector<Route>& routes) {
  std::map<Digest, bool> known;
  for (const Route& route : routes) {
    const auto it = is_foreign.find(route.variant);
    known[route.variant] = it != is_foreign.end() ? it->second : ReadIsForeign(route.variant);
  }
  is_foreign = std::move(known);
}

// A new name serves at once. REQUIRES: the mutex is held.
void Router::State::Add(const Route& route) {
  names[route.name] = {.serving = route.variant,
                       .target = route.variant,
                       .moved_ms = route.moved_ms,
                       .foreign = is_foreign.at(route.variant)};
}

// Notes where the store's route leads now; true if it has to be loaded. REQUIRES: the mutex is
// held.
bool Router::State::Move(const Route& route, Name& name) {
  if (name.target == route.variant) return false;
  const bool was_foreign = name.foreign;
  name.target = route.variant;
  name.moved_ms = route.moved_ms;
  name.error.clear();
  name.foreign = is_foreign.at(route.variant);
  if (name.foreign || was_foreign || name.target == name.serving) {
    name.serving = name.target;
    name.pending_since = 0;
    return was_foreign && !name.foreign;
  }
  if (name.pending_since == 0) name.pending_since = seen + 1;
  return true;
}

// Those of `candidates` that no name leads to. REQUIRES: the mutex is held.
std::vector<Digest> Router::State::Unnamed(std::set<Digest> candidates) const {
  for (const auto& [text, name] : names) {
    candidates.erase(name.serving);
    candidates.erase(name.target);
  }
  return {candidates.begin(), candidates.end()};
}

// Makes the names those of the store, which has at least the events up to `sequence`.
void Router::State::Reconcile(int64_t sequence) {
  const std::vector<Route> routes = store->ListRoutes();
  LearnBases(routes);
  std::set<Digest> to_load;
  std::vector<Digest> unnamed;
  {
    std::lock_guard lock(mutex);
    std::set<Digest> left_behind;
    std::set<std::string_view> present;
    for (const Route& route : routes) {
      present.insert(route.name);
      const auto it = names.find(route.name);
      if (it == names.end()) {
        Add(route);
        if (is_foreign.at(route.variant)) continue;
        to_load.insert(route.variant);
        last_flip_seconds = SecondsSince(route.moved_ms);
        continue;
      }
      left_behind.insert(it->second.serving);
      left_behind.insert(it->second.target);
      if (Move(route, it->second)) to_load.insert(route.variant);
    }
    for (auto it = names.begin(); it != names.end();) {
      if (present.contains(it->first)) {
        ++it;
        continue;
      }
      left_behind.insert(it->second.serving);
      left_behind.insert(it->second.target);
      it = names.erase(it);
    }
    unnamed = Unnamed(left_behind);
    seen = std::max(seen, sequence);
  }
  for (const Digest& digest : unnamed) cache->Retire(digest);
  for (const Digest& digest : to_load) Load(digest);
}

void Router::State::Load(const Digest& digest) {
  cache->Prefetch(digest, [weak = weak_from_this(), digest](const Result<VariantLease>& loaded) {
    if (const std::shared_ptr<State> state = weak.lock()) state->Loaded(digest, loaded.status());
  });
}

// Flips the names that waited for `digest`.
void Router::State::Loaded(const Digest& digest, const Status& status) {
  std::vector<Digest> unnamed;
  {
    std::lock_guard lock(mutex);
    if (stopping) return;
    std::set<Digest> left_behind;
    for (auto& [text, name] : names) {
      if (name.target != digest) continue;
      name.error = status.ok() ? "" : status.ToString();
      if (name.pending_since == 0) continue;
      name.pending_since = 0;
      if (!status.ok() && !IsRetryable(status.code())) continue;
      left_behind.insert(name.serving);
      name.serving = digest;
      last_flip_seconds = SecondsSince(name.moved_ms);
    }
    unnamed = Unnamed(left_behind);
  }
  for (const Digest& gone : unnamed) cache->Retire(gone);
}

void Router::State::Follow() {
  for (;;) {
    int64_t since = 0;
    {
      std::lock_guard lock(mutex);
      if (stopping) return;
      since = seen;
    }
    if (store->WaitForEvents(since, kWaitMs)) {
      Reconcile(store->LastEvent());
      continue;
    }
    // After the store's shutdown WaitForEvents returns at once: do not spin.
    std::unique_lock lock(mutex);
    stopped.wait_for(lock, std::chrono::milliseconds(kWaitMs / 10), [&] { return stopping; });
  }
}

// REQUIRES: the mutex is held.
std::string Router::State::NamesForMessage() const {
  std::string list = base_name;
  size_t listed = 1;
  for (const auto& [text, name] : names) {
    if (name.foreign) continue;
    if (listed++ == kNamesInMessage) return list + ", ...";
    list += ", " + text;
  }
  return list;
}

Router::Router(std::string base_name, std::shared_ptr<const BaseModel> base,
               const CheckpointStore& store, VariantCache& cache)
    : state_(std::make_shared<State>()) {
  state_->base_name = std::move(base_name);
  state_->base = std::move(base);
  state_->store = &store;
  state_->cache = &cache;
  state_->seen = store.LastEvent();  // before the routes are read: what comes later is seen again
  const std::vector<Route> routes = store.ListRoutes();
  state_->LearnBases(routes);
  {
    std::lock_guard lock(state_->mutex);
    for (const Route& route : routes) state_->Add(route);
  }
  state_->follower = std::thread([state = state_.get()] { state->Follow(); });
}

Router::~Router() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->stopped.notify_all();
  }
  state_->follower.join();
}

Result<Resolved> Router::Resolve(std::string_view name) const {
  const State& s = *state_;
  if (name == s.base_name) return Resolved{.digest = s.base->digest(), .is_base = true};
  std::optional<Resolved> resolved;
  bool foreign = false;
  {
    std::lock_guard lock(s.mutex);
    if (const auto it = s.names.find(name); it != s.names.end()) {
      resolved = Resolved{.digest = it->second.serving};
      foreign = it->second.foreign;
    }
  }
  if (!resolved && IsValidRouteName(name)) {
    // Perhaps committed a moment ago and not followed yet: whoever published it may ask at once.
    if (const std::optional<Route> route = s.store->GetRoute(name)) {
      resolved = Resolved{.digest = route->variant};
      foreign = s.ReadIsForeign(route->variant);
    }
  }
  if (!resolved) {
    std::lock_guard lock(s.mutex);
    return NotFound("the model '" + std::string(name) + "' does not exist (there are " +
                    s.NamesForMessage() + ")");
  }
  if (foreign) {
    return NotFound("the model '" + std::string(name) + "' is a variant of another base than '" +
                    s.base_name + "', which is served here");
  }
  return *resolved;
}

void Router::CountRequest(std::string_view name) const {
  state_->requests.Count(name, state_->clock());
}

int64_t Router::Requests(std::string_view name) const {
  return state_->requests.Requests(name, state_->clock());
}

std::vector<ServedModel> Router::Models() const {
  const State& s = *state_;
  std::unordered_map<Digest, VariantCache::Entry, DigestHash> resident;
  for (VariantCache::Entry& entry : s.cache->entries()) resident.emplace(entry.digest, entry);
  std::vector<ServedModel> models;
  models.push_back({.name = s.base_name,
                    .digest = s.base->digest(),
                    .is_base = true,
                    .state = "ready",
                    .resident_bytes = s.base->resident_bytes()});
  std::lock_guard lock(s.mutex);
  for (const auto& [text, name] : s.names) {
    if (name.foreign) continue;
    ServedModel model{.name = text,
                      .digest = name.serving,
                      .state = "stored",
                      .moved_ms = name.moved_ms,
                      .error = name.error};
    const auto it = resident.find(name.serving);
    if (it != resident.end()) {
      model.state = it->second.state == "resident" ? "ready" : "loading";
      model.resident_bytes = it->second.bytes;
      if (name.serving == name.target && model.state == "ready") model.error.clear();
    }
    models.push_back(std::move(model));
  }
  return models;
}

int64_t Router::followed_sequence() const {
  std::lock_guard lock(state_->mutex);
  int64_t followed = state_->seen;
  for (const auto& [text, name] : state_->names) {
    if (name.pending_since > 0) followed = std::min(followed, name.pending_since - 1);
  }
  return followed;
}

double Router::last_flip_seconds() const {
  std::lock_guard lock(state_->mutex);
  return state_->last_flip_seconds;
}

}  // namespace stockpot
