// The part of PoolWork that decides what becomes of an adapter (the order is adapter_pool.h's).
#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>

#include "store/pool_work.h"

namespace stockpot {
namespace {

std::string Text(double value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, value);
  return {text, end};
}

void Note(std::string& path, const std::string& what) { path += (path.empty() ? "" : "; ") + what; }

// The tasks of the adapter, answered by `member`.
void AddTasks(PoolRecord& pool, const PoolAddRequest& request, const Digest& member,
              const std::optional<double>& own_loss, int64_t now_ms) {
  for (const std::string& task : request.tasks) {
    pool.tasks.push_back({.name = task,
                          .member = member,
                          .own = request.artifact,
                          .texts = request.texts,
                          .own_loss = own_loss,
                          .loss = own_loss,
                          .added_ms = now_ms});
  }
  std::sort(pool.tasks.begin(), pool.tasks.end(),
            [](const PoolTask& a, const PoolTask& b) { return a.name < b.name; });
}

void AddMember(PoolRecord& pool, PoolMember member) {
  std::erase_if(pool.leaving,
                [&](const PoolLeaving& gone) { return gone.artifact == member.artifact; });
  pool.members.push_back(std::move(member));
}

// The greatest rank of [1, high] for which `fits`, which no smaller rank fails; 0: none.
Result<int64_t> GreatestRank(int64_t high, const std::function<Result<bool>(int64_t)>& fits) {
  int64_t low = 0;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    STOCKPOT_ASSIGN_OR_RETURN(const bool fit, fits(middle));
    if (fit) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace

void LeaveMember(const CheckpointStore& store, PoolRecord& pool, const PoolMember& member) {
  const PoolMember gone = member;  // it may be an element of what changes
  std::erase_if(pool.members, [&](const PoolMember& m) { return m.artifact == gone.artifact; });
  if (!gone.owned) return;
  const Result<Manifest> manifest = store.GetManifest(gone.artifact);
  pool.leaving.push_back(
      {gone.artifact, manifest.ok() ? AdapterBytesOf(*manifest).total() : int64_t{0}});
}

Result<int64_t> PoolWork::BytesOf(const Change& change) const {
  std::map<Digest, const Manifest*> more;
  if (change.made) more[change.member] = &change.made->manifest;
  return PoolBytes(parts_.store, change.pool, more);
}

Result<bool> PoolWork::FitsApart(const Change& change) const {
  std::map<Digest, const Manifest*> more;
  if (change.made) more[change.member] = &change.made->manifest;
  STOCKPOT_ASSIGN_OR_RETURN(int64_t bytes, PoolBytes(parts_.store, change.pool, more));
  if (change.pool.members.size() > 1) {
    STOCKPOT_ASSIGN_OR_RETURN(const int64_t largest,
                              LargestMember(parts_.store, change.pool, more));
    bytes += largest + kPoolSwapBytes;
  }
  return bytes <= change.pool.config.budget_bytes;
}

Result<double> PoolWork::Loss(const std::vector<ProbeSet::Text>& texts, const Manifest& model,
                              const ProgressFunction& progress) const {
  ScoreRequest request{.base = *model.base, .texts = {}, .models = {&model}};
  for (const ProbeSet::Text& text : texts) request.texts.push_back(text.text);
  STOCKPOT_ASSIGN_OR_RETURN(const ProbeScores scores, parts_.score(request, progress));
  return scores.models[0].loss;
}

Status PoolWork::FindNearest(Incoming& incoming) const {
  std::vector<double>& known = incoming.pool.similarities;
  for (const PoolMember& member : incoming.pool.members) {
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, parts_.store.GetManifest(member.artifact));
    STOCKPOT_ASSIGN_OR_RETURN(const LoadedAdapter loaded,
                              LoadAdapterDelta(parts_.store, manifest, incoming.base));
    STOCKPOT_ASSIGN_OR_RETURN(const double similarity,
                              AdapterSimilarity(loaded.delta, incoming.loaded.delta));
    known.push_back(similarity);
    if (incoming.nearest != nullptr && similarity <= incoming.similarity) continue;
    incoming.nearest = &member;
    incoming.similarity = similarity;
  }
  if (known.size() > kMaxPoolSimilarities) {
    known.erase(known.begin(), known.end() - static_cast<ptrdiff_t>(kMaxPoolSimilarities));
  }
  incoming.threshold = PoolThreshold(incoming.pool.config, known);
  return OkStatus();
}

// Of all tasks of the member that is to come, which is put already. Sets their losses.
Result<bool> PoolWork::KeepsQuality(const Incoming& incoming, Change& change, Fields& fields,
                                    const ProgressFunction& progress) {
  std::string lines, unmeasured;
  bool keeps = true;
  for (PoolTask& task : change.pool.tasks) {
    if (task.member != change.member) continue;
    if (task.texts.empty() || !task.own_loss) {
      unmeasured += (unmeasured.empty() ? "" : ",") + task.name;
      task.loss.reset();
      continue;
    }
    STOCKPOT_ASSIGN_OR_RETURN(const double loss, Loss(task.texts, change.made->manifest, progress));
    const double before = task.loss ? PoolQuality(*task.own_loss, *task.loss) : 1;
    const double quality = PoolQuality(*task.own_loss, loss);
    lines += (lines.empty() ? "" : "\n") + task.name + " " + Text(before) + " " + Text(quality);
    task.loss = std::isfinite(loss) ? std::optional(loss) : std::nullopt;
    keeps = keeps && quality >= incoming.pool.config.quality;
  }
  if (!lines.empty()) fields["quality"] = lines;
  if (!unmeasured.empty()) fields["unmeasured"] = unmeasured;
  return keeps;
}

bool PoolWork::IsMeasured(const Incoming& incoming) {
  const PoolMember& nearest = *incoming.nearest;
  return incoming.own_loss.has_value() &&
         std::all_of(incoming.pool.tasks.begin(), incoming.pool.tasks.end(),
                     [&](const PoolTask& task) {
                       return task.member != nearest.artifact || task.own_loss.has_value();
                     });
}

PoolWork::Tried PoolWork::Merge(Incoming& incoming, Fields& fields,
                                const ProgressFunction& progress) {
  const PoolRecord& pool = incoming.pool;
  const PoolMember& member = *incoming.nearest;
  const std::string name = "merge with " + member.artifact.ShortHex();
  const bool similar = incoming.threshold && incoming.similarity >= *incoming.threshold;
  if (!similar && !IsMeasured(incoming)) {
    Note(incoming.path, name + ": not similar, and a task of it is not measured");
    return std::optional<Change>();
  }
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, parts_.store.GetManifest(member.artifact));
  STOCKPOT_ASSIGN_OR_RETURN(const LoadedAdapter loaded,
                            LoadAdapterDelta(parts_.store, manifest, incoming.base));
  const int64_t cap = pool.config.rank > 0
                          ? pool.config.rank
                          : std::max(RankOf(loaded.delta), RankOf(incoming.loaded.delta));
  STOCKPOT_ASSIGN_OR_RETURN(const AdapterMerge whole,
                            MergeAdapter(loaded.delta, member.state, incoming.loaded.delta,
                                         {.method = pool.config.method,
                                          .projection = pool.config.projection,
                                          .scale = pool.config.scale}));
  const DType dtype = loaded.dtype == incoming.loaded.dtype ? loaded.dtype : DType::kF32;
  AdapterMerge cut;
  const auto make = [&](int64_t rank) -> Result<Change> {
    STOCKPOT_ASSIGN_OR_RETURN(cut, WeightedSum({&whole.merged}, {1}, rank));
    Change change{.pool = pool, .made = {}, .parents = {}, .member = {}, .outcome = "merged"};
    STOCKPOT_ASSIGN_OR_RETURN(
        change.made, BuildAdapter(cut.merged, dtype, pool.config.base, incoming.loaded.base_name,
                                  {{"method", std::string(PoolMethodName(pool.config.method))},
                                   {"adapters", std::to_string(whole.state.count)},
                                   {"kept_energy", Text(cut.kept_energy)},
                                   {"kept_energy_min", Text(cut.kept_energy_min)}}));
    change.member = change.made->manifest.digest();
    for (PoolTask& task : change.pool.tasks) {
      if (task.member == member.artifact) task.member = change.member;
    }
    LeaveMember(parts_.store, change.pool, member);
    AddMember(change.pool, {change.member, true, whole.state});
    AddTasks(change.pool, incoming.request, change.member, incoming.own_loss, parts_.clock());
    change.parents = {member.artifact, incoming.request.artifact};
    return change;
  };
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t rank, GreatestRank(cap, [&](int64_t r) -> Result<bool> {
                              STOCKPOT_ASSIGN_OR_RETURN(const Change change, make(r));
                              STOCKPOT_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(change));
                              return bytes <= pool.config.budget_bytes;
                            }));
  if (rank == 0) {
    Note(incoming.path, name + ": no room for it beside its parts");
    return std::optional<Change>();
  }
  STOCKPOT_ASSIGN_OR_RETURN(Change change, make(rank));
  leftovers_ = true;
  STOCKPOT_RETURN_IF_ERROR(PutAdapter(parts_.store, *change.made));
  Fields measures;
  STOCKPOT_ASSIGN_OR_RETURN(const bool keeps, KeepsQuality(incoming, change, measures, progress));
  if (!keeps) {
    std::string qualities = measures["quality"];
    std::replace(qualities.begin(), qualities.end(), '\n', ',');
    Note(incoming.path, name + " at rank " + std::to_string(rank) + ": a task is worse than " +
                            Text(pool.config.quality) +
                            " of its own adapter (task, before, after: " + qualities + ")");
    return std::optional<Change>();
  }
  for (const auto& [key, value] : measures) fields[key] = value;
  fields["rank"] = std::to_string(rank);
  fields["kept_energy"] = Text(cut.kept_energy);
  fields["kept_energy_min"] = Text(cut.kept_energy_min);
  fields["was"] = member.artifact.Hex();
  return std::optional(std::move(change));
}

PoolWork::Tried PoolWork::Shrink(Incoming& incoming, Fields& fields,
                                 const ProgressFunction& progress) {
  const PoolRecord& pool = incoming.pool;
  AdapterMerge cut;
  const auto make = [&](int64_t rank) -> Result<Change> {
    STOCKPOT_ASSIGN_OR_RETURN(cut, WeightedSum({&incoming.loaded.delta}, {1}, rank));
    Change change{.pool = pool, .made = {}, .parents = {}, .member = {}, .outcome = "shrunk"};
    STOCKPOT_ASSIGN_OR_RETURN(
        change.made,
        BuildAdapter(cut.merged, incoming.loaded.dtype, pool.config.base, incoming.loaded.base_name,
                     {{"method", "shrink"}, {"kept_energy", Text(cut.kept_energy)}}));
    change.member = change.made->manifest.digest();
    AddMember(change.pool, {change.member, true, incoming.state});
    AddTasks(change.pool, incoming.request, change.member, incoming.own_loss, parts_.clock());
    change.parents = {incoming.request.artifact};
    return change;
  };
  STOCKPOT_ASSIGN_OR_RETURN(
      const int64_t rank,
      GreatestRank(RankOf(incoming.loaded.delta) - 1, [&](int64_t r) -> Result<bool> {
        STOCKPOT_ASSIGN_OR_RETURN(const Change change, make(r));
        return FitsApart(change);
      }));
  if (rank == 0) {
    Note(incoming.path, "apart: no room at any rank");
    return std::optional<Change>();
  }
  STOCKPOT_ASSIGN_OR_RETURN(Change change, make(rank));
  if (pool.FindMember(change.member) != nullptr) return std::optional<Change>();
  leftovers_ = true;
  STOCKPOT_RETURN_IF_ERROR(PutAdapter(parts_.store, *change.made));
  Fields measures;
  STOCKPOT_ASSIGN_OR_RETURN(bool keeps, KeepsQuality(incoming, change, measures, progress));
  if (!incoming.own_loss) keeps = cut.kept_energy >= pool.config.quality;
  if (!keeps) {
    Note(incoming.path, "apart at rank " + std::to_string(rank) + ": " + Text(cut.kept_energy) +
                            " of its energy, worse than " + Text(pool.config.quality));
    return std::optional<Change>();
  }
  for (const auto& [key, value] : measures) fields[key] = value;
  fields["rank"] = std::to_string(rank);
  fields["kept_energy"] = Text(cut.kept_energy);
  return std::optional(std::move(change));
}

// The new member comes with the commit in which the old one leaves, so both must have room.
PoolWork::Tried PoolWork::Evict(Incoming& incoming, Fields& fields) const {
  const PoolMember* const victim = LeastRequested(incoming.pool, parts_.requests);
  if (victim == nullptr || !incoming.pool.config.evict) return std::optional<Change>();
  Change change{.pool = incoming.pool,
                .made = {},
                .parents = {},
                .member = incoming.request.artifact,
                .outcome = "apart, another one evicted"};
  std::string tasks;
  std::erase_if(change.pool.tasks, [&](const PoolTask& task) {
    if (task.member != victim->artifact) return false;
    tasks += (tasks.empty() ? "" : ",") + task.name;
    return true;
  });
  LeaveMember(parts_.store, change.pool, *victim);
  AddMember(change.pool, {change.member, incoming.request.owned, incoming.state});
  AddTasks(change.pool, incoming.request, change.member, incoming.own_loss, parts_.clock());
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(change));
  Change later = change;  // once the old one is collected
  std::erase_if(later.pool.leaving,
                [&](const PoolLeaving& gone) { return gone.artifact == victim->artifact; });
  STOCKPOT_ASSIGN_OR_RETURN(const bool fits, FitsApart(later));
  if (!fits || bytes > change.pool.config.budget_bytes) {
    Note(incoming.path, "in place of " + victim->artifact.ShortHex() + ": no room for it " +
                            (fits ? "beside the old one" : "and the largest member once more"));
    return std::optional<Change>();
  }
  fields["was"] = victim->artifact.Hex();
  fields["evicted"] = tasks;
  return std::optional(std::move(change));
}

PoolWork::Tried PoolWork::Decide(Incoming& incoming, Fields& fields,
                                 const ProgressFunction& progress) {
  const PoolAddRequest& request = incoming.request;
  Change apart{.pool = incoming.pool,
               .made = {},
               .parents = {},
               .member = request.artifact,
               .outcome = "apart"};
  AddTasks(apart.pool, request, apart.member, incoming.own_loss, parts_.clock());
  if (incoming.pool.FindMember(request.artifact) != nullptr) {
    apart.outcome = "joined";
    STOCKPOT_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(apart));
    if (bytes <= apart.pool.config.budget_bytes) return std::optional(std::move(apart));
    Note(incoming.path, "joining its member: no room for the record");
    return std::optional<Change>();
  }
  AddMember(apart.pool, {apart.member, request.owned, incoming.state});
  if (request.adopt) {
    STOCKPOT_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(apart));
    if (bytes <= apart.pool.config.budget_bytes) return std::optional(std::move(apart));
    Note(incoming.path, "as it is: " + std::to_string(bytes) + " bytes");
    return std::optional<Change>();
  }
  STOCKPOT_RETURN_IF_ERROR(FindNearest(incoming));
  apart.pool.similarities = incoming.pool.similarities;
  if (incoming.nearest != nullptr) {
    fields["nearest"] = incoming.nearest->artifact.Hex();
    fields["similarity"] = Text(incoming.similarity);
  }
  if (incoming.threshold) fields["threshold"] = Text(*incoming.threshold);
  const bool similar = incoming.nearest != nullptr && incoming.threshold &&
                       incoming.similarity >= *incoming.threshold;
  STOCKPOT_ASSIGN_OR_RETURN(const bool fits, FitsApart(apart));
  // While there is room nothing is risked that cannot be measured.
  if (similar && (!fits || IsMeasured(incoming))) {
    STOCKPOT_ASSIGN_OR_RETURN(auto merged, Merge(incoming, fields, progress));
    if (merged) return merged;
  }
  if (fits) return std::optional(std::move(apart));
  STOCKPOT_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(apart));
  Note(incoming.path, "apart: " + std::to_string(bytes) + " bytes" +
                          (incoming.nearest != nullptr ? " and the largest member once more" : ""));
  if (!similar && incoming.nearest != nullptr) {
    STOCKPOT_ASSIGN_OR_RETURN(auto merged, Merge(incoming, fields, progress));
    if (merged) return merged;
  }
  STOCKPOT_ASSIGN_OR_RETURN(auto shrunk, Shrink(incoming, fields, progress));
  if (shrunk) return shrunk;
  return Evict(incoming, fields);
}

}  // namespace stockpot
