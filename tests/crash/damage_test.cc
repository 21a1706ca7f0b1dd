// C6: 2,000 flipped bits and truncations of everything that a store keeps: packs, RocksDB's tables,
// logs and lists of files, inline chunks, the mark of the last commit. Each is either refused by
// name (by opening, loading, publishing and scrub) or provably harmless: every artifact, name, job
// and event reads back as it was. Wrong bytes never come out.
//
// STOCKPOT_SEED and STOCKPOT_DAMAGES change seed and number.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <random>

#include "store/artifact_source.h"
#include "store/bitdelta_codec.h"
#include "tests/crash/pipeline_workload.h"
#include "tests/crash/watched_files.h"

namespace stockpot::crash {
namespace {

constexpr int kDamages = 2000;
constexpr int64_t kSteps = 3;
constexpr int kPublishEvery = 8;  // damages
constexpr int kReopenEvery = 50;  // likewise
constexpr rlim_t kMoreMemory = rlim_t{1} << 30;

// All that a store says, as one text to compare: bytes as their SHA-256.
struct Contents {
  std::map<std::string, std::string> lines;
  std::vector<Status> errors;  // of what was asked for by name
};

Contents ReadContents(const CheckpointStore& store, const std::vector<Digest>& artifacts) {
  Contents contents;
  auto& lines = contents.lines;
  for (const Digest& artifact : artifacts) {
    const auto source = OpenArtifact(store, artifact);
    if (!source.ok()) {
      contents.errors.push_back(source.status());
      continue;
    }
    for (const TensorInfo& tensor : (*source)->tensors()) {
      const auto bytes = (*source)->ReadAll(tensor.name);
      if (bytes.ok()) {
        lines["tensor " + artifact.Hex() + tensor.name] = Sha256(*bytes).Hex();
      } else {
        contents.errors.push_back(bytes.status());
      }
    }
    for (const std::string& name : (*source)->files()) {
      const auto text = (*source)->ReadFile(name);
      if (text.ok()) lines["file " + artifact.Hex() + name] = *text;
      if (!text.ok()) contents.errors.push_back(text.status());
    }
  }
  for (const Alias& alias : store.ListAliases()) {
    lines["alias " + alias.name] = alias.artifact.Hex();
  }
  for (const Route& route : store.ListRoutes()) lines["route " + route.name] = route.variant.Hex();
  for (const Job& job : store.ListJobs()) lines["job " + job.key] = JobStateName(job.state);
  for (const StepRecord& step : store.ListSteps(kRun)) {
    lines["step " + std::to_string(step.step)] = step.artifact.Hex();
  }
  for (const Event& event : store.EventsSince(0, 1'000'000)) {
    lines["event " + std::to_string(event.sequence)] = event.type + event.subject;
  }
  lines["artifacts"] = std::to_string(store.ListArtifacts().size());
  return contents;
}

class DamageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int life = 0; life < 2; ++life) {  // the second one's start turns the log into tables
      auto workload = Workload::Open(whole(), models_, {});
      ASSERT_TRUE(workload.ok()) << workload.status().ToString();
      ASSERT_TRUE((*workload)->Prepare().ok());
      (*workload)->StartPipeline();
      const int64_t first = (*workload)->NextStep();
      for (int64_t step = first; step < first + kSteps; ++step) {
        ASSERT_TRUE((*workload)->Save(step).ok());
      }
      ASSERT_TRUE((*workload)->WaitForJobs().ok());
      artifacts_ = (*workload)->store().ListArtifacts();
      expected_ = ReadContents((*workload)->store(), artifacts_);
      newest_ = *(*workload)->store().ResolveName("crash@latest");
      ASSERT_TRUE(expected_.errors.empty());
    }
    const char* given_seed = std::getenv("STOCKPOT_SEED");
    const char* given = std::getenv("STOCKPOT_DAMAGES");
    const uint64_t seed =
        given_seed != nullptr ? std::strtoull(given_seed, nullptr, 10) : std::random_device{}();
    damages_ = (given != nullptr ? std::atoi(given) : kDamages) / 2;
    std::printf("seed %lu, %d damages\n", static_cast<unsigned long>(seed), damages_);
    random_.seed(seed);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    rusage used;
    ASSERT_EQ(getrusage(RUSAGE_SELF, &used), 0);
    const rlimit limit = {static_cast<rlim_t>(used.ru_maxrss) * 1024 + kMoreMemory, RLIM_INFINITY};
    ASSERT_EQ(setrlimit(RLIMIT_DATA, &limit), 0);  // a hostile length would end the test here
#endif
  }

  std::filesystem::path whole() const { return folder_.path() / "whole"; }
  std::filesystem::path data() const { return folder_.path() / "data"; }

  static std::vector<std::filesystem::path> FilesIn(const std::filesystem::path& directory) {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      if (entry.is_regular_file() && entry.file_size() > 0) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    return files;
  }

  // Flips a bit, or cuts the file; returns what was done.
  std::string Damage(const std::filesystem::path& file) {
    const auto size = std::filesystem::file_size(file);
    const uint64_t at = random_() % size;
    if (random_() % 8 == 0) {
      std::filesystem::resize_file(file, at);
      return file.filename().string() + " cut at " + std::to_string(at);
    }
    const int bit = static_cast<int>(random_() % 8);
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(at));
    const char flipped = static_cast<char>(stream.get() ^ (1 << bit));
    stream.seekp(static_cast<std::streamoff>(at));
    stream.put(flipped);
    return file.filename().string() + " byte " + std::to_string(at) + " bit " + std::to_string(bit);
  }

  static bool NamesAPlace(const std::string& message) {
    for (const char* place : {"tensor", ".pack", ".sst", ".log", "chunk", "artifact", "catalog",
                              "MANIFEST", "COMMITTED"}) {
      if (message.find(place) != std::string::npos) return true;
    }
    return false;
  }
  static void ExpectNamed(const Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << status.ToString();
    EXPECT_TRUE(NamesAPlace(status.message())) << status.ToString();
  }

  // True: refused somewhere. Otherwise it was shown to be harmless.
  bool CheckDamaged(CheckpointStore& store, bool publish) {
    const Contents contents = ReadContents(store, artifacts_);
    for (const auto& [name, value] : contents.lines) {
      if (name == "artifacts") continue;  // a list leaves out what does not read
      const auto it = expected_.lines.find(name);
      EXPECT_NE(it, expected_.lines.end()) << name << " came from nowhere";
      if (it != expected_.lines.end()) {
        EXPECT_EQ(value, it->second) << name;
      }
    }
    for (const Status& error : contents.errors) ExpectNamed(error);
    const auto scrubbed = store.Scrub(nullptr);
    if (!scrubbed.ok()) ExpectNamed(scrubbed.status());
    if (scrubbed.ok()) {
      for (const ScrubReport::Damage& damage : scrubbed->damaged) {
        EXPECT_TRUE(NamesAPlace(damage.error)) << damage.error;
        EXPECT_FALSE(damage.needed_by.empty()) << damage.error;
      }
    }
    const bool clean = scrubbed.ok() && scrubbed->damaged.empty();
    if (clean) {
      EXPECT_EQ(contents.lines, expected_.lines) << "scrub found nothing";
      EXPECT_TRUE(contents.errors.empty());
    }
    if (publish) {
      ThreadPool threads(1);
      const auto variant =
          BuildVariant(store, newest_, PublishCodec::kBitDelta, threads, nullptr);
      if (!variant.ok()) ExpectNamed(variant.status());
      if (clean) {
        EXPECT_TRUE(variant.ok()) << variant.status().ToString();
      }
    }
    return !clean;
  }

  const StepModels models_;
  TemporaryFolder folder_;
  WatchedFiles unsynced_{folder_.path()};  // spares the real disk
  std::vector<Digest> artifacts_;
  Contents expected_;
  Digest newest_;
  int damages_ = 0;
  std::mt19937_64 random_;
};

TEST_F(DamageTest, C06_DamagedPacksAreRefusedByName) {
  std::filesystem::copy(whole(), data(), std::filesystem::copy_options::recursive);
  const auto files = FilesIn(data() / "packs");
  int refused = 0;
  std::unique_ptr<Workload> workload;
  for (int i = 0; i < damages_; ++i) {
    if (i % kReopenEvery == 0) {
      workload = nullptr;
      auto opened = Workload::Open(data(), models_, {});
      ASSERT_TRUE(opened.ok()) << opened.status().ToString();
      workload = *std::move(opened);
    }
    const auto& file = files[random_() % files.size()];
    unsynced_.TakeRecord();
    const std::string what = Damage(file);
    refused += CheckDamaged(workload->store(), i % kPublishEvery == 0);
    ASSERT_FALSE(HasFailure()) << "damage " << i << ": " << what;
    std::filesystem::copy_file(whole() / "packs" / file.filename(), file,
                               std::filesystem::copy_options::overwrite_existing);
  }
  std::printf("%d refused by name, %d shown to be harmless\n", refused, damages_ - refused);
  EXPECT_GT(refused, damages_ / 2);
}

TEST_F(DamageTest, C06_DamagedCatalogueIsRefusedByName) {
  int refused = 0;
  int not_opened = 0;
  for (int i = 0; i < damages_; ++i) {
    std::filesystem::remove_all(data());
    std::filesystem::create_directories(data());
    std::filesystem::copy(whole() / "catalog", data() / "catalog");
    std::filesystem::copy(whole() / "COMMITTED", data() / "COMMITTED");
    std::filesystem::create_directory_symlink(whole() / "packs", data() / "packs");
    auto files = FilesIn(data() / "catalog");
    files.push_back(data() / "COMMITTED");
    unsynced_.TakeRecord();
    const std::string what = Damage(files[random_() % files.size()]);
    auto workload = Workload::Open(data(), models_, {});
    if (workload.ok()) {
      refused += CheckDamaged((*workload)->store(), i % kPublishEvery == 0);
    } else {
      ExpectNamed(workload.status());
      ++not_opened;
    }
    ASSERT_FALSE(HasFailure()) << "damage " << i << ": " << what;
  }
  std::printf("%d not opened, %d refused by name, %d shown to be harmless\n", not_opened, refused,
              damages_ - refused - not_opened);
  EXPECT_GT(refused + not_opened, damages_ / 4);
}

}  // namespace
}  // namespace stockpot::crash
