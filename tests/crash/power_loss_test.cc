// Power loss: the workload's changes are recorded, and at random moments of the record the disk is
// found in a random one of the states that POSIX allows (lossy_disk.h): writes that no sync covered
// torn, dropped, reordered; names that no sync of the directory covered lost. Whatever was
// acknowledged before that moment must be there, whole. Then training goes on from one of these
// disks, so that losses hit stores that recovered from losses.
//
// STOCKPOT_SEED and STOCKPOT_POWER_LOSSES change seed and number.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "tests/crash/lossy_disk.h"
#include "tests/crash/pipeline_workload.h"
#include "tests/crash/watched_files.h"

namespace stockpot::crash {
namespace {

constexpr int kLosses = 500;
constexpr int kLossesOfARecord = 25;
constexpr int64_t kStepsOfARecord = 6;

class PowerLossTest : public ::testing::Test {
 protected:
  // Lives on for some steps over `disk()`, all changes in record_; noted_[n] is what was
  // acknowledged up to note n.
  Status Record() {
    record_.clear();
    noted_.clear();
    Acknowledged told = acknowledged_;
    WatchedFiles files(root());
    const auto note = [&] {
      files.Note(static_cast<int64_t>(noted_.size()));
      noted_.push_back(told);
    };
    note();
    {
      STOCKPOT_ASSIGN_OR_RETURN(const auto workload, Workload::Open(root() / "data", models_, {}));
      STOCKPOT_RETURN_IF_ERROR(workload->Prepare());
      workload->StartPipeline();
      const int64_t first = workload->NextStep();
      for (int64_t step = first; step < first + kStepsOfARecord; ++step) {
        STOCKPOT_ASSIGN_OR_RETURN(told.steps[step], workload->Save(step));
        note();
        if (step % 2 == 0) continue;  // saves while jobs run
        STOCKPOT_RETURN_IF_ERROR(workload->WaitForJobs());
        for (const auto& route : workload->store().ListRoutes()) {
          if (!route.name.ends_with("@latest") && !route.name.ends_with("@best")) {
            told.routes[route.name] = route.variant;
          }
        }
        note();
      }
    }
    record_ = files.TakeRecord();
    return OkStatus();
  }

  void CheckLoss(const LossyDisk& disk, int64_t noted, std::mt19937_64& random) {
    disk.LosePower(random, lost());
    const WatchedFiles unsynced(lost());  // spares the real disk
    acknowledged_ = noted < 0 ? Acknowledged{} : noted_[static_cast<size_t>(noted)];
    const auto workload = Workload::Open(lost() / "data", models_, {});
    ASSERT_TRUE(workload.ok()) << workload.status().ToString();
    const Status status = CheckStore((*workload)->store(), models_, acknowledged_, /*deep=*/true);
    ASSERT_TRUE(status.ok()) << status.ToString();
    // It takes the next step.
    ASSERT_TRUE((*workload)->Prepare().ok());
    const int64_t next = (*workload)->NextStep();
    const auto saved = (*workload)->Save(next);
    ASSERT_TRUE(saved.ok()) << saved.status().ToString();
    acknowledged_.steps[next] = *saved;
    acknowledged_checked_ += static_cast<int64_t>(acknowledged_.steps.size());
  }

  std::filesystem::path root() const { return folder_.path() / "disk"; }
  std::filesystem::path lost() const { return folder_.path() / "lost"; }

  const StepModels models_;
  TemporaryFolder folder_;
  std::vector<FileChange> record_;
  std::vector<Acknowledged> noted_;
  Acknowledged acknowledged_;  // of the disk at hand
  int64_t acknowledged_checked_ = 0;
};

TEST_F(PowerLossTest, NothingAcknowledgedIsLostAndNothingHalfIsVisible) {
  const char* given_seed = std::getenv("STOCKPOT_SEED");
  const char* given_losses = std::getenv("STOCKPOT_POWER_LOSSES");
  const uint64_t seed =
      given_seed != nullptr ? std::strtoull(given_seed, nullptr, 10) : std::random_device{}();
  const int losses = given_losses != nullptr ? std::atoi(given_losses) : kLosses;
  std::printf("seed %lu, %d losses\n", static_cast<unsigned long>(seed), losses);
  std::mt19937_64 random(seed);
  std::filesystem::create_directories(root());
  for (int done = 0; done < losses;) {
    LossyDisk disk(root());
    const Status recorded = Record();
    ASSERT_TRUE(recorded.ok()) << recorded.ToString() << ", after loss " << done;
    std::vector<size_t> moments;
    for (int i = 0; i < std::min(kLossesOfARecord, losses - done); ++i) {
      moments.push_back(random() % (record_.size() + 1));
    }
    std::sort(moments.begin(), moments.end());
    size_t followed = 0;
    int64_t noted = -1;
    for (const size_t moment : moments) {
      for (; followed < moment; ++followed) {
        if (record_[followed].kind == FileChange::Kind::kNote) noted = record_[followed].note;
        disk.Follow(record_[followed]);
      }
      CheckLoss(disk, noted, random);
      ++done;
      if (HasFatalFailure()) {
        FAIL() << "loss " << done << " of seed " << seed << ", change " << moment << " of "
               << record_.size();
      }
    }
    // The next life begins on the disk that was lost last; now and then on a new one.
    std::filesystem::remove_all(root());
    if (random() % 4 == 0) {
      std::filesystem::create_directories(root());
      acknowledged_ = {};
    } else {
      std::filesystem::rename(lost(), root());
    }
  }
  std::printf("%d losses of power, %ld acknowledged checkpoints were looked for, 0 lost\n", losses,
              static_cast<long>(acknowledged_checked_));
}

}  // namespace
}  // namespace stockpot::crash
