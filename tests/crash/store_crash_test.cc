// kill -9 at random moments of opening, putting and committing: nothing acknowledged is lost,
// nothing half is visible.
//
// STOCKPOT_SEED and STOCKPOT_CRASH_CYCLES change seed and length. The child is
// STOCKPOT_CRASH_CHILD.
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

#include "tests/crash/crash_workload.h"

namespace stockpot::crash {
namespace {

using Time = std::chrono::steady_clock::time_point;
Time Now() { return std::chrono::steady_clock::now(); }

class Child {
 public:
  explicit Child(const std::string& directory) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], STDOUT_FILENO);
      ::execl(STOCKPOT_CRASH_CHILD, "store_crash_child", directory.c_str(), nullptr);
      ::_exit(127);
    }
    ::close(ends[1]);
    out_ = ends[0];
  }
  ~Child() { ::close(out_); }

  // Lines that arrive until `deadline` or until there are `lines` of them; false: it ended by
  // itself.
  bool ReadUntil(Time deadline, size_t lines) {
    while (lines_.size() < lines) {
      const auto left =
          std::chrono::duration_cast<std::chrono::microseconds>(deadline - Now()).count();
      if (left <= 0) return true;
      pollfd ready{.fd = out_, .events = POLLIN, .revents = 0};
      const timespec wait{.tv_sec = left / 1'000'000, .tv_nsec = left % 1'000'000 * 1000};
      if (::ppoll(&ready, 1, &wait, nullptr) == 1 && !ReadSome()) return false;
    }
    return true;
  }

  // Kills it, and reads what it had written before.
  void Kill() {
    ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status)) << "the child ended by itself, status " << status;
    while (ReadSome()) {
    }
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
      partial_.erase(0, end + 1);
    }
    return true;
  }

  pid_t pid_ = -1;
  int out_ = -1;
  std::string partial_;
  std::vector<std::string> lines_;
};

void ExpectStepBytes(const CheckpointStore& store, int64_t step, const Digest& artifact) {
  const Result<Manifest> manifest = store.GetManifest(artifact);
  ASSERT_TRUE(manifest.ok()) << step << ": " << manifest.status().ToString();
  ASSERT_EQ(manifest->step, step);
  ASSERT_EQ(manifest->tensors.size(), 2u);
  for (int i = 0; i < 2; ++i) {
    const std::vector<std::byte> expected = TensorBytes(step, i);
    std::vector<std::byte> bytes(expected.size());
    const Part& part = manifest->tensors[static_cast<size_t>(i)].parts.at("data");
    ASSERT_EQ(part.bytes, static_cast<int64_t>(expected.size()));
    const Status read = store.ReadPart(part, 0, bytes);
    ASSERT_TRUE(read.ok()) << step << ": " << read.ToString();
    ASSERT_EQ(bytes, expected) << step;
  }
}

// What must hold of everything that is visible, acknowledged or not.
void ExpectConsistent(const CheckpointStore& store) {
  const std::vector<StepRecord> steps = store.ListSteps(kRun);
  const std::vector<Event> events = store.EventsSince(0, 1'000'000);
  size_t checkpoints = 0;
  for (size_t i = 0; i < events.size(); ++i) {
    ASSERT_EQ(events[i].sequence, static_cast<int64_t>(i) + 1) << "a gap in the events";
    checkpoints += events[i].type == "checkpoint";
  }
  ASSERT_EQ(checkpoints, steps.size());
  ASSERT_EQ(store.ListJobs().size(), steps.size()) << "one publish each, policy 'every'";
  const StepRecord* best = nullptr;
  for (size_t i = 0; i < steps.size(); ++i) {
    ASSERT_EQ(steps[i].step, static_cast<int64_t>(i)) << "a step is missing";
    ASSERT_TRUE(store.HasArtifact(steps[i].artifact));
    ASSERT_EQ(store.Parents(steps[i].artifact).size(), 1u);
    if (best == nullptr || Loss(steps[i].step) < Loss(best->step)) best = &steps[i];
  }
  if (steps.empty()) return;
  const Result<Digest> latest = store.ResolveName("crash@latest");
  ASSERT_TRUE(latest.ok());
  ASSERT_EQ(*latest, steps.back().artifact);
  ASSERT_EQ(*store.ResolveName("crash@best"), best->artifact);
  ExpectStepBytes(store, steps.back().step, steps.back().artifact);
}

class StoreCrashTest : public ::testing::Test {
 protected:
  StoreCrashTest() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "stockpot_crash_XXXXXX").string();
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  ~StoreCrashTest() override {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  // One life of the child, ended at a random moment; what it acknowledged joins `acknowledged_`.
  void RunAndKill(std::mt19937_64& random) {
    Child child(directory_);
    const auto random_us = [&](uint64_t limit) {
      return std::chrono::microseconds(random() % limit);
    };
    bool alive = true;
    if (random() % 3 == 0) {
      alive = child.ReadUntil(Now() + random_us(200'000), SIZE_MAX);  // opening and recovery too
    } else {
      alive = child.ReadUntil(Now() + std::chrono::seconds(60), 1 + random() % 4);
      if (alive) alive = child.ReadUntil(Now() + random_us(30'000), SIZE_MAX);
    }
    ASSERT_TRUE(alive) << "the child ended by itself";
    child.Kill();
    for (const std::string& line : child.lines()) {
      const size_t space = line.find(' ');
      const Result<Digest> artifact = Digest::FromHex(line.substr(space + 1));
      ASSERT_TRUE(artifact.ok()) << line;
      fresh_[std::stoll(line.substr(0, space))] = *artifact;
    }
  }

  void Verify() {
    auto store = CheckpointStore::Open(WorkloadOptions(directory_.c_str()));
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    ExpectConsistent(**store);
    for (const auto& [step, artifact] : fresh_) {
      ExpectStepBytes(**store, step, artifact);
      acknowledged_[step] = artifact;
    }
    fresh_.clear();
    for (const auto& [step, artifact] : acknowledged_) {
      const Result<Digest> found = (*store)->ResolveName("crash@" + std::to_string(step));
      ASSERT_TRUE(found.ok()) << "acknowledged step " << step << " is lost";
      ASSERT_EQ(*found, artifact);
    }
  }

  std::string directory_;
  std::map<int64_t, Digest> fresh_;  // acknowledged since the last Verify()
  std::map<int64_t, Digest> acknowledged_;
};

TEST_F(StoreCrashTest, NothingAcknowledgedIsLost) {
  const char* given_seed = std::getenv("STOCKPOT_SEED");
  const char* given_cycles = std::getenv("STOCKPOT_CRASH_CYCLES");
  const uint64_t seed =
      given_seed != nullptr ? std::strtoull(given_seed, nullptr, 10) : std::random_device{}();
  const int cycles = given_cycles != nullptr ? std::atoi(given_cycles) : 120;
  std::printf("seed %lu, %d cycles\n", static_cast<unsigned long>(seed), cycles);
  std::mt19937_64 random(seed);
  for (int cycle = 0; cycle < cycles; ++cycle) {
    RunAndKill(random);
    if (!HasFatalFailure()) Verify();
    if (HasFatalFailure()) FAIL() << "cycle " << cycle << " of seed " << seed;
  }
  auto store = CheckpointStore::Open(WorkloadOptions(directory_.c_str()));
  ASSERT_TRUE(store.ok());
  for (const auto& [step, artifact] : acknowledged_) ExpectStepBytes(**store, step, artifact);
  const Result<ScrubReport> report = (*store)->Scrub(nullptr);
  ASSERT_TRUE(report.ok());
  EXPECT_TRUE(report->damaged.empty());
  EXPECT_GE(acknowledged_.size(), static_cast<size_t>(cycles / 2)) << "the kills came too early";
  std::printf("%zu acknowledged checkpoints, %zu visible, all whole\n", acknowledged_.size(),
              (*store)->ListSteps(kRun).size());
}

}  // namespace
}  // namespace stockpot::crash
