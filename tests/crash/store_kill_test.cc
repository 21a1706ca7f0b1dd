// C1, at full length: kill -9 at random moments of saves, merges (MonoSoup), publishes (BitDelta),
// retention and collections of garbage. The test forks its children before it has any thread, so
// that LibTorch is loaded once for all of them; each child first checks what the ones before it
// left behind, then goes on with the run until it is killed.
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
#include <random>
#include <sstream>

#include "store/merge.h"
#include "tests/crash/pipeline_workload.h"

namespace stockpot::crash {
namespace {

constexpr int kCycles = 1000;
constexpr int kCyclesOfAStore = 125;  // then a fresh one: jobs and events of a store add up
constexpr int64_t kMergeEvery = 3;    // steps
constexpr int64_t kRoutesKept = 5;    // steps

using Time = std::chrono::steady_clock::time_point;
Time Now() { return std::chrono::steady_clock::now(); }

// --- the child ---

void Say(int out, const std::string& line) {
  const std::string text = line + "\n";
  if (::write(out, text.data(), text.size()) < 0) ::_exit(3);
}

// Lines: "checked", "purged STEP", "saved STEP DIGEST", "route STEP DIGEST", "gone BEFORE_STEP".
Status LiveUntilKilled(const std::filesystem::path& directory, const StepModels& models,
                       Acknowledged acknowledged, bool check_only, int out) {
  STOCKPOT_ASSIGN_OR_RETURN(
      const auto workload,
      Workload::Open(directory, models, {.merge = BuildMerge, .merge_every = kMergeEvery}));
  const Acknowledged before = acknowledged;
  STOCKPOT_RETURN_IF_ERROR(CheckStore(workload->store(), models, acknowledged, check_only));
  for (const auto& [step, artifact] : before.steps) {
    if (!acknowledged.steps.contains(step)) Say(out, "purged " + std::to_string(step));
  }
  Say(out, "checked");
  if (check_only) return OkStatus();
  STOCKPOT_RETURN_IF_ERROR(workload->Prepare());
  workload->StartPipeline();
  for (int64_t step = workload->NextStep();; ++step) {
    STOCKPOT_ASSIGN_OR_RETURN(const Digest artifact, workload->Save(step));
    Say(out, "saved " + std::to_string(step) + " " + artifact.Hex());
    if (step % 2 == 0) continue;  // the next save comes while the jobs of this one run
    STOCKPOT_RETURN_IF_ERROR(workload->WaitForJobs());
    const std::string name = kRun + ("@" + std::to_string(step));
    const auto route = workload->store().GetRoute(name);
    if (!route) return Internal("no route " + name);
    Say(out, "route " + std::to_string(step) + " " + route->variant.Hex());
    Say(out, "gone " + std::to_string(step - kRoutesKept));  // before they go
    STOCKPOT_RETURN_IF_ERROR(workload->Unpublish(step - kRoutesKept));
  }
}

class Child {
 public:
  Child(const std::filesystem::path& directory, const StepModels& models,
        const Acknowledged& acknowledged, bool check_only) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      const Status status =
          LiveUntilKilled(directory, models, acknowledged, check_only, ends[1]);
      if (!status.ok()) Say(ends[1], "failed " + status.ToString());
      ::_exit(status.ok() ? 0 : 1);
    }
    ::close(ends[1]);
    out_ = ends[0];
  }
  ~Child() {
    if (pid_ > 0) Kill();
    ::close(out_);
  }

  // Until `deadline`, or until it said `saves` saves; false: it ended by itself.
  bool ReadUntil(Time deadline, int saves) {
    while (saves_ < saves) {
      const auto left =
          std::chrono::duration_cast<std::chrono::microseconds>(deadline - Now()).count();
      if (left <= 0) return true;
      pollfd ready{.fd = out_, .events = POLLIN, .revents = 0};
      const timespec wait{.tv_sec = left / 1'000'000, .tv_nsec = left % 1'000'000 * 1000};
      if (::ppoll(&ready, 1, &wait, nullptr) == 1 && !ReadSome()) return false;
    }
    return true;
  }
  // And reads what it had written before.
  void Kill() {
    ::kill(pid_, SIGKILL);
    WaitForEnd();
  }
  // Its wait status.
  int WaitForEnd() {
    while (ReadSome()) {
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  bool ReadSome() {
    char buffer[4096];
    const ssize_t n = ::read(out_, buffer, sizeof buffer);
    if (n <= 0) return false;
    partial_.append(buffer, static_cast<size_t>(n));
    for (size_t end; (end = partial_.find('\n')) != std::string::npos;) {
      lines_.push_back(partial_.substr(0, end));
      saves_ += lines_.back().starts_with("saved ");
      partial_.erase(0, end + 1);
    }
    return true;
  }

  pid_t pid_ = -1;
  int out_ = -1;
  int saves_ = 0;
  std::string partial_;
  std::vector<std::string> lines_;
};

// --- the test ---

class StoreKillTest : public ::testing::Test {
 protected:
  // One life of a child, ended at a random moment.
  void RunAndKill(std::mt19937_64& random) {
    Child child(directory_, models_, acknowledged_, /*check_only=*/false);
    const auto random_us = [&](uint64_t limit) {
      return std::chrono::microseconds(random() % limit);
    };
    bool alive = true;
    if (random() % 4 == 0) {
      alive = child.ReadUntil(Now() + random_us(100'000), INT32_MAX);  // opening and recovery
    } else {
      alive = child.ReadUntil(Now() + std::chrono::seconds(120), 1 + random() % 3);
      if (alive) alive = child.ReadUntil(Now() + random_us(60'000), INT32_MAX);
    }
    child.Kill();
    ASSERT_NO_FATAL_FAILURE(Note(child));
    ASSERT_TRUE(alive) << "the child ended by itself";
  }

  void Note(const Child& child) {
    NoteLines(child);
    acknowledged_.routes.clear();
    for (const auto& [step, variant] : route_steps_) {
      acknowledged_.routes[kRun + ("@" + std::to_string(step))] = variant;
    }
  }
  void NoteLines(const Child& child) {
    for (const std::string& line : child.lines()) {
      std::istringstream words(line);
      std::string what, hex;
      int64_t step = -1;
      words >> what >> step >> hex;
      ASSERT_NE(what, "failed") << line;
      if (what == "checked") ++checked_;
      if (what == "purged") purged_ += static_cast<int64_t>(acknowledged_.steps.erase(step));
      if (what == "gone") {
        std::erase_if(route_steps_, [&](const auto& route) { return route.first < step; });
      }
      if (what == "saved") {
        acknowledged_.steps[step] = *Digest::FromHex(hex);
        ++saved_;
      }
      if (what == "route") {
        route_steps_[step] = *Digest::FromHex(hex);
        ++published_;
      }
    }
  }

  // Every byte, and a scrub.
  void CheckAll() {
    Child child(directory_, models_, acknowledged_, /*check_only=*/true);
    const int status = child.WaitForEnd();
    ASSERT_NO_FATAL_FAILURE(Note(child));
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    whole_ += static_cast<int64_t>(acknowledged_.steps.size());
  }

  const StepModels models_;
  TemporaryFolder folder_;
  std::filesystem::path directory_;
  Acknowledged acknowledged_;  // of the store at hand, and not purged
  std::map<int64_t, Digest> route_steps_;  // its routes
  int64_t saved_ = 0, published_ = 0, purged_ = 0, whole_ = 0, checked_ = 0;
};

TEST_F(StoreKillTest, C01_KilledAtAnyMomentNothingAcknowledgedIsLost) {
  const char* given_seed = std::getenv("STOCKPOT_SEED");
  const char* given_cycles = std::getenv("STOCKPOT_CRASH_CYCLES");
  const uint64_t seed =
      given_seed != nullptr ? std::strtoull(given_seed, nullptr, 10) : std::random_device{}();
  const int cycles = given_cycles != nullptr ? std::atoi(given_cycles) : kCycles;
  std::printf("seed %lu, %d cycles\n", static_cast<unsigned long>(seed), cycles);
  std::mt19937_64 random(seed);
  const Time begin = Now();
  for (int cycle = 0; cycle < cycles; ++cycle) {
    if (cycle % kCyclesOfAStore == 0) {
      if (cycle > 0) CheckAll();
      std::error_code ignored;
      std::filesystem::remove_all(directory_, ignored);
      directory_ = folder_.path() / std::to_string(cycle);
      acknowledged_ = {};
      route_steps_ = {};
    }
    if (!HasFatalFailure()) RunAndKill(random);
    if (HasFatalFailure()) FAIL() << "cycle " << cycle << " of seed " << seed;
  }
  CheckAll();
  EXPECT_GE(checked_, cycles / 2) << "the kills came too early";
  EXPECT_GE(saved_, cycles / 2);
  EXPECT_GT(published_, 0);
  if (cycles >= kCyclesOfAStore) {
    EXPECT_GT(purged_, 0) << "nothing was collected";
  }
  const double seconds = std::chrono::duration<double>(Now() - begin).count();
  std::printf("%d kills in %.0f s: %ld checkpoints acknowledged, %ld purged by the rules, 0 lost; "
              "%ld routes; checked %ld times\n",
              cycles, seconds, static_cast<long>(saved_), static_cast<long>(purged_),
              static_cast<long>(published_), static_cast<long>(checked_));
}

}  // namespace
}  // namespace stockpot::crash
