// Random commits, reads and reopens against a model in memory. The store and the model must agree
// on what is accepted, and on everything that is visible, at every step.
#include <cstdlib>
#include <map>
#include <set>

#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

constexpr int kOperations = 600;

class StoreModelTest : public StoreTest {
 protected:
  struct Model {
    std::map<Digest, Manifest> artifacts;
    std::map<std::string, Digest> runs;  // name -> base
    std::map<std::tuple<std::string, int64_t, ArtifactKind>, Digest> steps;
    std::map<std::string, Digest> aliases;
    std::map<std::string, Digest> routes;
    std::map<std::string, JobState> jobs;
    std::vector<std::string> job_order;
    std::set<std::tuple<Digest, EdgeType, Digest>> edges;  // child, type, parent
    std::map<Digest, size_t> evals;
    std::vector<std::string> events;  // subjects
  };

  size_t Below(size_t n) { return static_cast<size_t>(random_() % n); }
  template <typename Map>
  auto Pick(const Map& map) {
    return std::next(map.begin(), static_cast<ptrdiff_t>(Below(map.size())));
  }

  // Bytes out of a small set, so that chunks are shared between artifacts.
  const std::vector<std::byte>& PickBytes() { return pool_[Below(pool_.size())]; }

  Manifest RandomManifest(ArtifactKind kind) {
    Manifest m;
    m.kind = kind;
    const size_t tensors = 1 + Below(3);
    for (size_t i = 0; i < tensors; ++i) {
      m.tensors.push_back(PutTensor(*store_, "t" + std::to_string(i), PickBytes()));
    }
    if (kind == ArtifactKind::kBase) return m;
    const auto run = Pick(model_.runs);
    m.run = run->first;
    m.base = run->second;
    m.step = static_cast<int64_t>(Below(30));
    return m;
  }

  void AddArtifact(Commit& commit, Model& next, bool& valid) {
    const bool base = model_.runs.empty() || Below(6) == 0;
    const ArtifactKind kind = base            ? ArtifactKind::kBase
                              : Below(4) == 0 ? ArtifactKind::kMerge
                                              : ArtifactKind::kCheckpoint;
    const Manifest m = RandomManifest(kind);
    const Digest digest = m.digest();
    commit.artifacts.push_back(m);
    next.artifacts[digest] = m;
    if (base) {
      const std::string run = "run" + std::to_string(Below(4));
      commit.runs.push_back({.name = run, .base = digest});
      const auto [it, inserted] = next.runs.insert({run, digest});
      valid = valid && it->second == digest;
      return;
    }
    commit.steps.push_back({.run = m.run, .step = m.step, .kind = kind, .artifact = digest});
    const auto [it, inserted] = next.steps.insert({{m.run, m.step, kind}, digest});
    valid = valid && it->second == digest;
    commit.edges.push_back({EdgeType::kTrainedFrom, digest, *m.base});
    next.edges.insert({digest, EdgeType::kTrainedFrom, *m.base});
  }

  void AddMove(std::vector<AliasMove>& moves, const std::map<std::string, Digest>& now,
               std::map<std::string, Digest>& next, const Model& model, bool& valid) {
    AliasMove move{.name = "name" + std::to_string(Below(5)), .by = "model"};
    if (Below(4) > 0 && !model.artifacts.empty()) move.to = Pick(model.artifacts)->first;
    const auto it = now.find(move.name);
    const Digest current = it == now.end() ? Digest{} : it->second;
    if (Below(2) == 0) {
      move.expected = Below(4) == 0 ? Sha256("elsewhere") : current;
      valid = valid && *move.expected == current;
    }
    if (move.to.IsZero()) {
      next.erase(move.name);
    } else {
      next[move.name] = move.to;
    }
    moves.push_back(std::move(move));
  }

  void RandomCommit() {
    Commit commit;
    Model next = model_;
    bool valid = true;
    if (Below(3) > 0) AddArtifact(commit, next, valid);
    if (Below(3) == 0) AddMove(commit.aliases, model_.aliases, next.aliases, next, valid);
    if (Below(4) == 0) AddMove(commit.routes, model_.routes, next.routes, next, valid);
    if (Below(3) == 0) {
      Job job{.key = "job" + std::to_string(Below(20))};
      job.state = static_cast<JobState>(Below(4));
      if (!next.jobs.contains(job.key)) next.job_order.push_back(job.key);
      next.jobs[job.key] = job.state;
      commit.jobs.push_back(job);
    }
    if (Below(4) == 0 && !model_.artifacts.empty()) {
      const Digest artifact = Pick(model_.artifacts)->first;
      commit.evals.push_back({artifact, "task", "metric", 1.5, ++eval_time_, "model"});
      ++next.evals[artifact];
    }
    if (Below(10) == 0) {
      commit.edges.push_back({EdgeType::kMergedFrom, Sha256("nobody"), Sha256("nothing")});
      valid = false;
    }
    for (size_t i = Below(3); i > 0; --i) {
      const std::string subject = std::to_string(random_());
      commit.events.push_back({.type = "note", .subject = subject});
      next.events.push_back(subject);
    }
    const Result<int64_t> applied = store_->Apply(commit);
    ASSERT_EQ(applied.ok(), valid) << applied.status().ToString();
    if (!valid) return;
    model_ = std::move(next);
    ASSERT_EQ(*applied, static_cast<int64_t>(model_.events.size()));
  }

  void CompareRecords() {
    ASSERT_EQ(store_->ListArtifacts().size(), model_.artifacts.size());
    for (const auto& [digest, manifest] : model_.artifacts) {
      const Result<Manifest> stored = store_->GetManifest(digest);
      ASSERT_TRUE(stored.ok()) << stored.status().ToString();
      ASSERT_EQ(stored->ToJson(), manifest.ToJson());
      ASSERT_EQ(store_->ListEvals(digest).size(),
                model_.evals.contains(digest) ? model_.evals.at(digest) : 0);
    }
    ASSERT_EQ(store_->ListRuns().size(), model_.runs.size());
    size_t steps = 0;
    for (const auto& [run, base] : model_.runs) {
      ASSERT_EQ(store_->GetRun(run)->base, base);
      std::tuple<int64_t, ArtifactKind> last{-1, ArtifactKind::kBase};
      for (const StepRecord& step : store_->ListSteps(run)) {
        ASSERT_EQ(step.artifact, model_.steps.at({run, step.step, step.kind}));
        ASSERT_LT(last, std::tuple(step.step, step.kind)) << "sorted";
        last = {step.step, step.kind};
        ++steps;
      }
    }
    ASSERT_EQ(steps, model_.steps.size());
    ASSERT_EQ(store_->ListAliases().size(), model_.aliases.size());
    for (const auto& [name, to] : model_.aliases) ASSERT_EQ(store_->GetAlias(name)->artifact, to);
    ASSERT_EQ(store_->ListRoutes().size(), model_.routes.size());
    for (const auto& [name, to] : model_.routes) ASSERT_EQ(store_->GetRoute(name)->variant, to);
    const std::vector<Job> jobs = store_->ListJobs();
    ASSERT_EQ(jobs.size(), model_.job_order.size());
    for (size_t i = 0; i < jobs.size(); ++i) {
      ASSERT_EQ(jobs[i].key, model_.job_order[i]);
      ASSERT_EQ(jobs[i].state, model_.jobs.at(jobs[i].key));
    }
  }

  void CompareLineageAndEvents() {
    size_t up = 0;
    size_t down = 0;
    for (const auto& [digest, manifest] : model_.artifacts) {
      for (const Edge& edge : store_->Parents(digest)) {
        ASSERT_TRUE(model_.edges.contains({edge.child, edge.type, edge.parent}));
        ++up;
      }
      for (const Edge& edge : store_->Children(digest)) {
        ASSERT_TRUE(model_.edges.contains({edge.child, edge.type, edge.parent}));
        ++down;
      }
    }
    ASSERT_EQ(up, model_.edges.size());
    ASSERT_EQ(down, model_.edges.size());
    const std::vector<Event> events = store_->EventsSince(0, 1'000'000);
    ASSERT_EQ(events.size(), model_.events.size());
    for (size_t i = 0; i < events.size(); ++i) {
      ASSERT_EQ(events[i].sequence, static_cast<int64_t>(i) + 1);
      ASSERT_EQ(events[i].subject, model_.events[i]);
    }
  }

  void CompareBytes() {
    for (const auto& [digest, manifest] : model_.artifacts) {
      for (const TensorEntry& tensor : manifest.tensors) {
        const Part& part = tensor.parts.at("data");
        std::vector<std::byte> out(static_cast<size_t>(part.bytes));
        ASSERT_TRUE(store_->ReadPart(part, 0, out).ok());
        ASSERT_TRUE(std::any_of(pool_.begin(), pool_.end(),
                                [&](const auto& bytes) { return bytes == out; }));
        ASSERT_EQ(Sha256(std::span(out).first(std::min<size_t>(out.size(), kChunkBytes))),
                  part.chunks[0]);
      }
    }
  }

  Model model_;
  std::vector<std::vector<std::byte>> pool_;
  int64_t eval_time_ = 0;
};

TEST_F(StoreModelTest, RandomOperationsAgreeWithTheModel) {
  const char* given = std::getenv("STOCKPOT_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  random_.seed(seed);
  pack_bytes_ = 2 << 20;
  Reopen();
  for (const size_t size : {size_t{1}, size_t{100}, size_t{65'535}, size_t{65'536}, size_t{300'000},
                            size_t{1'000'000}, static_cast<size_t>(kChunkBytes) + 5}) {
    pool_.push_back(RandomBytes(random_, size));
    pool_.push_back(RandomBytes(random_, size));
  }
  for (int i = 0; i < kOperations; ++i) {
    const size_t choice = Below(20);
    if (choice == 0) {
      Reopen();
      CompareRecords();
      CompareLineageAndEvents();
    } else if (choice == 1) {
      CompareRecords();
    } else {
      RandomCommit();
    }
    if (HasFatalFailure()) FAIL() << "operation " << i << " of seed " << seed;
  }
  Reopen();
  CompareRecords();
  CompareLineageAndEvents();
  CompareBytes();
  const Result<ScrubReport> report = store_->Scrub(nullptr);
  ASSERT_TRUE(report.ok());
  EXPECT_TRUE(report->damaged.empty());
}

}  // namespace
}  // namespace stockpot::test
