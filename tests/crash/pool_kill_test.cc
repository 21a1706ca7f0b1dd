// A pool of adapters under random adds, requests, removals, evictions and deletions, killed at
// random moments and at the named places of commits and collections. Each child first checks what
// the ones before it left: no pool over its budget (by a walk over the manifests), every task with
// its route to an adapter that can be read, no adapter that came for a pool and is in none; and
// after each refused add that the pool is what it was.
//
// STOCKPOT_SEED and STOCKPOT_CRASH_CYCLES change seed and length.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "store/pipeline.h"
#include "tests/unit/pipeline/pool_world.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot::crash {
namespace {

using namespace stockpot::test;

constexpr int kCycles = 150;
constexpr int kCyclesOfAStore = 25;
constexpr int64_t kLongestLifeMs = 700;
constexpr int64_t kIdleMs = 60'000;
const char* const kPlaces[] = {
    "commit.prepared", "commit.synced", "commit.before_write",     "commit.after_write",
    "commit.indexed",  "put.checked",   "put.inline.before_write", "gc.begin",
    "gc.purging",      "gc.purged",     "gc.sweep.before_write",   "gc.sweep.after_write",
    "gc.swept"};

// --- the child ---

class Life {
 public:
  Life(int out, uint64_t seed) : out_(out), random_(seed) {}

  Status Live(const std::filesystem::path& directory, const std::string& failpoint,
              bool to_the_end) {
    StoreOptions options{.directory = directory, .clock = SystemClock(), .free_bytes_reserve = 0};
    if (!failpoint.empty()) {
      STOCKPOT_ASSIGN_OR_RETURN(options.failpoints, Failpoints::FromText(failpoint));
    }
    STOCKPOT_ASSIGN_OR_RETURN(store_, CheckpointStore::Open(std::move(options)));
    STOCKPOT_RETURN_IF_ERROR(CheckPools(*store_));
    STOCKPOT_RETURN_IF_ERROR(Prepare());
    Say("checked");
    Pipeline::Options jobs;
    jobs.merge = [](CheckpointStore&, std::span<const Digest>, const std::string&, int64_t,
                    const MergeOptions&, const ProgressFunction&) -> Result<Manifest> {
      return Internal("no merge here");
    };
    jobs.score = FakeScore(0.12);
    jobs.requests = [](const std::string& route) {
      return static_cast<int64_t>(std::hash<std::string>()(route) % 10);
    };
    jobs.clock = SystemClock();
    const Pipeline pipeline(*store_, std::move(jobs));
    pipeline_ = const_cast<Pipeline*>(&pipeline);
    if (to_the_end) return End();
    // What a life before this one left queued.
    if (!pipeline_->WaitIdle(kIdleMs)) return Internal("a job does not end");
    for (;;) STOCKPOT_RETURN_IF_ERROR(Step());
  }

 private:
  void Say(const std::string& line) {
    const std::string text = line + "\n";
    if (::write(out_, text.data(), text.size()) < 0) ::_exit(3);
  }

  // The base and two pools, unless they are there.
  Status Prepare() {
    if (!store_->GetAlias("tiny")) STOCKPOT_RETURN_IF_ERROR(CommitPoolBase(*store_).status());
    base_ = store_->GetAlias("tiny")->artifact;
    STOCKPOT_ASSIGN_OR_RETURN(const BuiltAdapter one,
                              BuildAdapter(PoolDelta(1, 1, 4, 0), DType::kF32, base_, "", {}));
    const auto size = static_cast<double>(AdapterBytesOf(one.manifest).total());
    for (const auto& [name, room, method] : {std::tuple("tight", 3.2, PoolMethod::kOpcm),
                                             std::tuple("wide", 6.0, PoolMethod::kMean)}) {
      if (store_->GetPool(name).ok()) continue;
      const PoolConfig config{.base = base_,
                              .budget_bytes = 12'000 + static_cast<int64_t>(room * size),
                              .method = method,
                              .threshold = std::nullopt,
                              .quality = 0.93};
      STOCKPOT_RETURN_IF_ERROR(CreatePool(*store_, name, config, 1).status());
    }
    return OkStatus();
  }

  Status Step() {
    STOCKPOT_RETURN_IF_ERROR(Prepare());  // what was deleted comes again
    const std::string name = random_() % 2 == 0 ? "tight" : "wide";
    STOCKPOT_ASSIGN_OR_RETURN(const PoolRecord before, store_->GetPool(name));
    const uint64_t draw = random_() % 10;
    if (random_() % 40 == 0) {
      return Do(MakePoolDeleteJob(name, random_() % 2 == 0 || before.tasks.empty()), before);
    }
    if (draw == 0) return Do(MakePoolEvictJob(name), before);
    if (draw == 1 && !before.tasks.empty()) {
      return Do(MakePoolRemoveJob(name, before.tasks[random_() % before.tasks.size()].name),
                before);
    }
    PoolAddRequest request{.pool = name, .owned = true};
    request.tasks = {"task" + std::to_string(random_() % 12)};
    if (random_() % 3 > 0) request.texts = {{"t", std::string(1 + random_() % 400, 'x')}};
    const AdapterDelta delta =
        PoolDelta(random_() % 3, random_() % 40, 1 + static_cast<int64_t>(random_() % 8), 0.5);
    STOCKPOT_ASSIGN_OR_RETURN(
        request.artifact,
        CommitPoolAdapter(*store_, base_, delta, random_() % 2 ? DType::kF32 : DType::kBF16));
    return Do(MakePoolAddJob(request), before);
  }

  // A job of a pool to its end; what was refused has changed nothing.
  Status Do(Job job, PoolRecord before) {
    const std::string key = job.key;
    STOCKPOT_RETURN_IF_ERROR(pipeline_->Submit(std::move(job)).status());
    if (!pipeline_->WaitIdle(kIdleMs)) return Internal("job " + key + " does not end");
    STOCKPOT_RETURN_IF_ERROR(CheckSoon());
    const std::optional<Job> ended = store_->GetJob(key);
    if (!ended) return Internal("job " + key + " is gone");
    if (ended->state == JobState::kFailed) {
      STOCKPOT_ASSIGN_OR_RETURN(PoolRecord after, store_->GetPool(before.name));
      // What left before may have been collected since.
      before.leaving.clear();
      after.leaving.clear();
      before.version = after.version;
      if (!(after == before)) return Internal("a refused add changed the pool: " + ended->error);
    }
    std::string outcome = JobStateName(ended->state) == "failed" ? "refused" : "";
    if (outcome.empty()) {
      for (const Event& event :
           store_->EventsSince(std::max<int64_t>(store_->LastEvent() - 50, 0), 50)) {
        if (event.type == "pool" && event.fields.contains("outcome")) {
          outcome = event.fields.at("outcome");
        }
      }
    }
    Say("did " + outcome);
    return OkStatus();
  }

  // Collections run beside the check: what it reads may go meanwhile, then it looks again.
  Status CheckSoon() {
    Status status;
    for (int attempt = 0; attempt < 20; ++attempt) {
      status = CheckPools(*store_);
      if (status.code() != StatusCode::kNotFound) return status;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return status;
  }

  // Everything that was left over is cleaned: nothing waits, and what was asked for is a member or
  // gone.
  Status End() {
    if (!pipeline_->WaitIdle(kIdleMs)) return Internal("a job does not end");
    // A job cleans up everything before it.
    for (const char* name : {"tight", "wide"}) {
      STOCKPOT_RETURN_IF_ERROR(pipeline_->Submit(MakePoolRemoveJob(name, "none")).status());
    }
    if (!pipeline_->WaitIdle(kIdleMs)) return Internal("a job does not end");
    STOCKPOT_RETURN_IF_ERROR(CheckSoon());
    std::set<Digest> known;
    for (const PoolRecord& pool : store_->ListPools()) {
      if (!pool.leaving.empty()) return Internal("pool " + pool.name + ": something never left");
      for (const PoolMember& member : pool.members) known.insert(member.artifact);
    }
    for (const Job& job : store_->ListJobs()) {
      if (job.kind != JobKind::kPool || !job.args.contains("artifact")) continue;
      const Digest artifact = *Digest::FromHex(job.args.at("artifact"));
      if (store_->HasArtifact(artifact) && !known.contains(artifact) &&
          !store_->GetTombstone(artifact)) {
        return Internal("adapter " + artifact.ShortHex() + " was forgotten");
      }
    }
    Say("ended");
    return OkStatus();
  }

  const int out_;
  std::mt19937_64 random_;
  std::unique_ptr<CheckpointStore> store_;
  Pipeline* pipeline_ = nullptr;
  Digest base_;
};

// --- the test: forks before it has any thread ---

struct Ended {
  int status = 0;
  std::vector<std::string> lines;
};

Ended RunChild(const std::filesystem::path& directory, uint64_t seed, const std::string& failpoint,
               std::optional<std::chrono::milliseconds> life) {
  int ends[2];
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const Status status = Life(ends[1], seed).Live(directory, failpoint, !life);
    if (!status.ok()) {
      const std::string line = "failed " + status.ToString() + "\n";
      if (::write(ends[1], line.data(), line.size()) < 0) ::_exit(3);
    }
    ::_exit(status.ok() ? 0 : 1);
  }
  ::close(ends[1]);
  const auto end = std::chrono::steady_clock::now() + life.value_or(std::chrono::minutes(2));
  std::string text;
  char buffer[4096];
  for (bool killed = false;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    pollfd ready{.fd = ends[0], .events = POLLIN, .revents = 0};
    if (!killed && ::poll(&ready, 1, std::max<int>(static_cast<int>(left.count()), 0)) == 0) {
      ::kill(pid, SIGKILL);
      killed = true;
    }
    const ssize_t n = ::read(ends[0], buffer, sizeof buffer);
    if (n <= 0) break;
    text.append(buffer, static_cast<size_t>(n));
  }
  ::close(ends[0]);
  Ended ended;
  ::waitpid(pid, &ended.status, 0);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) ended.lines.push_back(line);
  return ended;
}

TEST(PoolKill, AtAnyMomentThePoolKeepsWithinItsBudgetAndEveryTaskResolves) {
  const char* given_seed = std::getenv("STOCKPOT_SEED");
  const char* given_cycles = std::getenv("STOCKPOT_CRASH_CYCLES");
  const uint64_t seed =
      given_seed != nullptr ? std::strtoull(given_seed, nullptr, 10) : std::random_device{}();
  const int cycles = given_cycles != nullptr ? std::atoi(given_cycles) : kCycles;
  std::printf("seed %lu, %d cycles\n", static_cast<unsigned long>(seed), cycles);
  std::mt19937_64 random(seed);
  TemporaryFolder folder;
  std::map<std::string, int> outcomes;
  int checked = 0, by_place = 0;
  for (int cycle = 0; cycle < cycles; ++cycle) {
    const std::filesystem::path directory = folder.path() / std::to_string(cycle / kCyclesOfAStore);
    const bool last = cycle % kCyclesOfAStore == kCyclesOfAStore - 1 || cycle == cycles - 1;
    std::string failpoint;
    if (random() % 2 == 0) {
      failpoint = std::string(kPlaces[random() % std::size(kPlaces)]) + "=kill@" +
                  std::to_string(1 + random() % 12);
    }
    const auto life = std::chrono::milliseconds(30 + random() % kLongestLifeMs);
    const Ended ended = RunChild(directory, random(), last ? "" : failpoint,
                                 last ? std::nullopt : std::optional(life));
    for (const std::string& line : ended.lines) {
      ASSERT_FALSE(line.starts_with("failed"))
          << line << "\ncycle " << cycle << " of seed " << seed;
      checked += line == "checked";
      if (line.starts_with("did ")) ++outcomes[line.substr(4)];
    }
    if (last) {
      ASSERT_TRUE(WIFEXITED(ended.status) && WEXITSTATUS(ended.status) == 0)
          << "cycle " << cycle << " of seed " << seed << ": status " << ended.status;
    } else {
      ASSERT_TRUE(WIFSIGNALED(ended.status) && WTERMSIG(ended.status) == SIGKILL)
          << "cycle " << cycle << " of seed " << seed << ": status " << ended.status;
      by_place += !failpoint.empty();
    }
  }
  for (const auto& [outcome, count] : outcomes) std::printf("%6d %s\n", count, outcome.c_str());
  std::printf("checked %d times, %d kills with a place\n", checked, by_place);
  EXPECT_GE(checked, cycles / 5) << "the kills came too early";  // half of them on a busy machine
  if (cycles < kCycles) return;
  for (const char* outcome : {"apart", "merged", "refused", "removed", "evicted"}) {
    EXPECT_GT(outcomes[outcome], 0) << outcome << " never happened: no test of it";
  }
}

}  // namespace
}  // namespace stockpot::crash
