// The k-th call fails: one open, read, write, sync, allocation, rename or removal of the packs' or
// RocksDB's files, for k = 1, 2, ... until the operation passes without meeting the fault. After
// each: success or an error that says why, the same operation again succeeds in the same process,
// nothing acknowledged is lost, and the store opens and scrubs clean.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <optional>
#include <set>
#include <thread>
#include <tuple>

#include "tests/crash/pipeline_workload.h"
#include "tests/crash/watched_files.h"

namespace stockpot::crash {
namespace {

constexpr int64_t kSteps = 4;        // that the store holds before
constexpr int64_t kMaxCalls = 2000;  // of one operation
constexpr int kMisses = 3;           // in a row: an operation makes no more calls

struct Operation {
  const char* name;
  bool pipeline;  // runs beside it
  std::function<Status(Workload&, Acknowledged&)> run;
};

const Operation kOperations[] = {
    {"save", false,
     [](Workload& workload, Acknowledged& acknowledged) -> Status {
       STOCKPOT_ASSIGN_OR_RETURN(acknowledged.steps[kSteps], workload.Save(kSteps));
       return OkStatus();
     }},
    {"publish", true,
     [](Workload& workload, Acknowledged& acknowledged) -> Status {
       STOCKPOT_ASSIGN_OR_RETURN(acknowledged.routes["named"],
                                 workload.Publish(kSteps - 1, "named"));
       return OkStatus();
     }},
    {"collect", false,
     [](Workload& workload, Acknowledged&) -> Status {
       STOCKPOT_RETURN_IF_ERROR(workload.Unpublish(kSteps - 1));
       STOCKPOT_RETURN_IF_ERROR(workload.store().ApplyRetention(kRun).status());
       return workload.store().CollectGarbage({.live_ratio = 0.9}).status();
     }},
};

class IoFaultTest : public ::testing::TestWithParam<std::tuple<size_t, Fault>> {
 protected:
  void SetUp() override {
    auto workload = Workload::Open(whole(), models_, {});
    ASSERT_TRUE(workload.ok()) << workload.status().ToString();
    ASSERT_TRUE((*workload)->Prepare().ok());
    (*workload)->StartPipeline();
    for (int64_t step = 0; step < kSteps; ++step) {
      acknowledged_.steps[step] = (*workload)->Save(step).value();
    }
    ASSERT_TRUE((*workload)->WaitForJobs().ok());
  }
  std::filesystem::path whole() const { return folder_.path() / "whole"; }
  std::filesystem::path data() const { return folder_.path() / "data"; }

  void Renew() const {
    std::filesystem::remove_all(data());
    std::filesystem::copy(whole(), data(), std::filesystem::copy_options::recursive);
  }

  // False: no call was left to fail.
  bool FailCall(int64_t k, const Operation& operation, Fault fault) {
    Renew();
    WatchedFiles files(data());
    Acknowledged acknowledged = acknowledged_;
    std::optional<std::string> hit;
    {
      auto workload = Workload::Open(data(), models_, {});
      EXPECT_TRUE(workload.ok()) << workload.status().ToString();
      if (!workload.ok()) return false;
      if (operation.pipeline) (*workload)->StartPipeline();
      files.Fail(k, fault);
      Acknowledged told = acknowledged;
      Status status = operation.run(**workload, told);
      hit = files.StopFailing();
      if (hit) hits_.insert(hit->substr(0, hit->find(' ')));
      const std::string what = "call " + std::to_string(k) + " (" + hit.value_or("none") + ")";
      if (!status.ok()) {
        ++errors_;
        WaitOnce(fault, hit.value_or(""));
        EXPECT_TRUE(IsRetryable(status.code())) << what << ": " << status.ToString();
        EXPECT_FALSE(status.message().empty());
        told = acknowledged;
        status = Retry([&] { return operation.run(**workload, told); });
      }
      EXPECT_TRUE(status.ok()) << "again, after " << what << ": " << status.ToString();
      acknowledged = told;
      status = CheckStore((*workload)->store(), models_, acknowledged, false);
      EXPECT_TRUE(status.ok()) << "after " << what << ": " << status.ToString();
    }
    auto again = Workload::Open(data(), models_, {});
    EXPECT_TRUE(again.ok()) << again.status().ToString();
    if (!again.ok()) return false;
    const Status status = CheckStore((*again)->store(), models_, acknowledged, true);
    EXPECT_TRUE(status.ok()) << "opened anew, after call " << k << " (" << hit.value_or("none")
                             << "): " << status.ToString();
    return hit.has_value();
  }

  // RocksDB comes back from a full disk by itself, 5 s later, and then meets the log that failed:
  // once in a sweep the store must still be there after that.
  void WaitOnce(Fault fault, const std::string& hit) {
    if (waited_ || fault != Fault::kNoSpace || hit.find(".log") == std::string::npos) return;
    waited_ = true;
    std::this_thread::sleep_for(std::chrono::seconds(7));
  }

  const StepModels models_;
  TemporaryFolder folder_;
  bool waited_ = false;
  Acknowledged acknowledged_;
  std::set<std::string> hits_;
  int64_t errors_ = 0;
};

TEST_P(IoFaultTest, C15_EachCallFailsOnce) {
  const auto& [index, fault] = GetParam();
  int64_t k = 1;
  int64_t hits = 0;
  // How many calls an operation makes differs from run to run: one with fewer ends nothing.
  int misses = 0;
  for (; k <= kMaxCalls && misses < kMisses && !HasFailure(); ++k) {
    const bool hit = FailCall(k, kOperations[index], fault);
    hits += hit ? 1 : 0;
    misses = hit ? 0 : misses + 1;
  }
  ASSERT_FALSE(HasFailure()) << "call " << k - 1;
  ASSERT_LE(k, kMaxCalls);
  EXPECT_GT(hits, 0) << "no calls: is the folder watched?";
  std::string names;
  for (const std::string& name : hits_) names += " " + name;
  std::printf("%ld calls failed once (%s ), %ld of them showed as an error\n",
              static_cast<long>(hits), names.c_str(), static_cast<long>(errors_));
}

class OpeningFaultTest : public IoFaultTest {};

// Opening is an operation too, and a store that did not open opens the next time.
TEST_P(OpeningFaultTest, MeetsEachFault) {
  const Fault fault = std::get<1>(GetParam());
  int64_t k = 1;
  for (bool hit = true; hit && k <= kMaxCalls; ++k) {
    Renew();
    WatchedFiles files(data());
    files.Fail(k, fault);
    const auto opened = Workload::Open(data(), models_, {});
    const auto what = files.StopFailing();
    hit = what.has_value();
    if (!opened.ok()) {
      EXPECT_TRUE(IsRetryable(opened.status().code())) << *what << opened.status().ToString();
      const auto again = Workload::Open(data(), models_, {});
      ASSERT_TRUE(again.ok()) << *what << ": " << again.status().ToString();
    }
    if (opened.ok()) {
      Acknowledged acknowledged = acknowledged_;
      const Status status = CheckStore((*opened)->store(), models_, acknowledged, true);
      ASSERT_TRUE(status.ok()) << what.value_or("") << ": " << status.ToString();
    }
    ASSERT_FALSE(HasFailure()) << "call " << k;
  }
  std::printf("%ld calls\n", static_cast<long>(k - 2));
}

std::string SweepName(const ::testing::TestParamInfo<std::tuple<size_t, Fault>>& sweep) {
  constexpr std::array kNames = {"IoError", "NoSpace", "ShortWrite"};
  return std::string(kOperations[std::get<0>(sweep.param)].name) +
         kNames[static_cast<size_t>(std::get<1>(sweep.param))];
}

const auto kFaults = ::testing::Values(Fault::kIoError, Fault::kNoSpace, Fault::kShortWrite);

INSTANTIATE_TEST_SUITE_P(Sweep, IoFaultTest,
                         ::testing::Combine(::testing::Values(0, 1, 2), kFaults), SweepName);
INSTANTIATE_TEST_SUITE_P(Sweep, OpeningFaultTest,
                         ::testing::Combine(::testing::Values(0), kFaults), SweepName);

}  // namespace
}  // namespace stockpot::crash
