// kill -9 at every failpoint of opening, saving, merging, publishing, deleting, collecting garbage,
// backing up and repairing, and an error at each: nothing acknowledged is lost, nothing half is
// visible, every name resolves. Kills at random moments: store_kill_test.cc. The child is
// STOCKPOT_CRASH_CHILD.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "tests/crash/crash_workload.h"

namespace stockpot::crash {
namespace {

class Child {
 public:
  // `failpoints`: for STOCKPOT_FAILPOINTS; empty: none.
  Child(const std::string& directory, const char* mode, const std::string& failpoints = "") {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], STDOUT_FILENO);
      if (!failpoints.empty()) ::setenv("STOCKPOT_FAILPOINTS", failpoints.c_str(), 1);
      ::execl(STOCKPOT_CRASH_CHILD, "store_crash_child", directory.c_str(), mode, nullptr);
      ::_exit(127);
    }
    ::close(ends[1]);
    out_ = ends[0];
  }
  ~Child() { ::close(out_); }

  // Reads to its end; returns its wait status.
  int WaitForEnd() {
    while (ReadSome()) {
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);
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

// Whether the workload's policy may have deleted this step once `newest` was there.
bool MayBeGone(int64_t step, int64_t newest) {
  int64_t best = 0;
  for (int64_t other = 0; other <= newest; ++other) {
    if (Loss(other) < Loss(best)) best = other;
  }
  const RetentionPolicy policy = WorkloadPolicy();
  return step + policy.keep_last <= newest && step % policy.every != 0 && step != best;
}

// What must hold of everything that is visible, acknowledged or not.
void ExpectConsistent(const CheckpointStore& store) {
  const std::vector<StepRecord> steps = store.ListSteps(kRun);
  const std::vector<Event> events = store.EventsSince(0, 1'000'000);
  for (size_t i = 0; i < events.size(); ++i) {
    ASSERT_EQ(events[i].sequence, static_cast<int64_t>(i) + 1) << "a gap in the events";
  }
  for (const StepRecord& step : steps) {
    const Result<Manifest> manifest = store.GetManifest(step.artifact);
    ASSERT_TRUE(manifest.ok()) << step.step << ": " << manifest.status().ToString();
    ASSERT_EQ(store.Parents(step.artifact).size(), 1u);
  }
  for (const Alias& alias : store.ListAliases()) {
    ASSERT_TRUE(store.GetManifest(alias.artifact).ok()) << alias.name;
    ASSERT_FALSE(store.GetTombstone(alias.artifact)) << alias.name;
  }
  for (const Route& route : store.ListRoutes()) {
    const Result<Manifest> variant = store.GetManifest(route.variant);
    ASSERT_TRUE(variant.ok()) << route.name;
    std::vector<std::byte> bytes(static_cast<size_t>(variant->tensors[0].parts.at("data").bytes));
    ASSERT_TRUE(store.ReadPart(variant->tensors[0].parts.at("data"), 0, bytes).ok());
    ASSERT_EQ(bytes, TensorBytes(variant->step, 3));
  }
  const StepRecord* newest = nullptr;
  for (const StepRecord& step : steps) {
    if (step.kind == ArtifactKind::kCheckpoint) newest = &step;
  }
  if (newest == nullptr) return;
  ASSERT_EQ(*store.ResolveName("crash@latest"), newest->artifact);
  int64_t best = 0;
  for (int64_t step = 0; step <= newest->step; ++step) {
    if (Loss(step) < Loss(best)) best = step;
    if (MayBeGone(step, newest->step)) continue;
    ASSERT_TRUE(store.ResolveName("crash@" + std::to_string(step)).ok()) << step << " is missing";
  }
  ASSERT_EQ(*store.ResolveName("crash@best"), *store.ResolveName("crash@" + std::to_string(best)));
  ExpectStepBytes(store, newest->step, newest->artifact);
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
    std::filesystem::remove_all(directory_ + ".backup", ignored);
  }

  void NoteAcknowledged(const Child& child) {
    for (const std::string& line : child.lines()) {
      const size_t space = line.find(' ');
      const Result<Digest> artifact = Digest::FromHex(line.substr(space + 1));
      ASSERT_TRUE(artifact.ok()) << line;
      acknowledged_[std::stoll(line.substr(0, space))] = *artifact;
    }
  }

  // `deep`: every acknowledged byte, not only the newest, and a scrub.
  void Verify(bool deep = false) {
    auto store = CheckpointStore::Open(WorkloadOptions(directory_.c_str()));
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    ExpectConsistent(**store);
    int64_t newest = -1;
    for (const StepRecord& step : (*store)->ListSteps(kRun)) newest = std::max(newest, step.step);
    for (auto it = acknowledged_.begin(); it != acknowledged_.end();) {
      const auto& [step, artifact] = *it;
      const Result<Digest> found = (*store)->ResolveName("crash@" + std::to_string(step));
      if (!found.ok() && (*store)->WasPurged(artifact) && MayBeGone(step, newest)) {
        it = acknowledged_.erase(it);
        ++purged_;
        continue;
      }
      ASSERT_TRUE(found.ok()) << "acknowledged step " << step << " is lost";
      ASSERT_EQ(*found, artifact);
      ++it;
    }
    for (const auto& [step, artifact] : acknowledged_) {
      if (step + 8 >= newest || deep) ExpectStepBytes(**store, step, artifact);
    }
    if (!deep) return;
    const Result<ScrubReport> report = (*store)->Scrub(nullptr);
    ASSERT_TRUE(report.ok());
    ASSERT_TRUE(report->damaged.empty()) << report->damaged[0].error;
  }

  std::string directory_;
  std::map<int64_t, Digest> acknowledged_;  // and not purged
  int64_t purged_ = 0;
};

// Every failpoint once as a kill and once as an error. After a kill the next life finishes the
// round; an error is tried again within the same life.
TEST_F(StoreCrashTest, EveryFailpointKillsAndFailsOnce) {
  const std::string root = directory_;
  ASSERT_GE(Failpoints::Names().size(), 40u);
  for (const std::string_view name : Failpoints::Names()) {
    for (const bool kill : {true, false}) {
      const std::string what = std::string(name) + (kill ? "=kill" : "=error");
      directory_ = root + "/" + what;
      acknowledged_.clear();
      {
        Child child(directory_, "once", what);
        const int status = child.WaitForEnd();
        NoteAcknowledged(child);
        if (kill) {
          ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
              << what << ": not reached, status " << status;
          // The child had damaged a chunk on purpose before it came there.
          if (!name.starts_with("repair.")) Verify();
          ASSERT_FALSE(HasFatalFailure()) << what;
        } else {
          ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << what << " " << status;
        }
      }
      if (kill) {
        Child child(directory_, "once");
        const int status = child.WaitForEnd();
        NoteAcknowledged(child);
        ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "after " << what;
      }
      Verify(/*deep=*/true);
      ASSERT_FALSE(HasFatalFailure()) << what;
      std::error_code ignored;
      std::filesystem::remove_all(directory_, ignored);
      std::filesystem::remove_all(directory_ + ".backup", ignored);
    }
  }
  directory_ = root;
}

}  // namespace
}  // namespace stockpot::crash
