// The hook's spool: what a daemon that is away leaves on the disk, and how it arrives later.
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/unit/hooks/hook_world.h"
#include "trainer_hooks/cpp/spool.h"

namespace stockpot {
namespace {

using std::filesystem::path;

class HookSpoolTest : public HookTest {
 protected:
  CheckpointHookOptions SpoolOptions() {
    CheckpointHookOptions options = Options();
    options.spool_directory = folder_.path() / "spool";
    return options;
  }
  path RankFolder() const { return folder_.path() / "spool" / "hooked" / "rank-0-of-1"; }
  path Entry(int64_t step) const {
    char name[32];
    std::snprintf(name, sizeof name, "step-%012ld", static_cast<long>(step));
    return RankFolder() / name;
  }
  // Saves steps first..last, each with another first weight, while the daemon is away.
  void SaveWhileAway(CheckpointHook& hook, int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; ++step) {
      model_.weight[0] = static_cast<float>(step);
      EXPECT_TRUE(hook.OnStep(step, model_.Views(), {{"loss", NAN}, {"lr", 0.5}})) << step;
    }
  }
  void WaitUntilSpooled(const CheckpointHook& hook, int64_t entries) {
    const auto start = SteadyClock::now();
    while (hook.Stats().spooled < entries) {
      ASSERT_LT(MillisecondsSince(start), kFlushMs);
      ::usleep(1000);
    }
  }
  float FirstWeight(int64_t step) {
    return Stored("hooked@" + std::to_string(step), "model.layers.0.mlp.up_proj.weight")[0];
  }

  TemporaryFolder folder_;
};

TEST_F(HookSpoolTest, ArrivesInOrderWhenTheDaemonIsBack) {
  world_.Stop();
  CheckpointHookOptions options = SpoolOptions();
  options.staging_bytes = 2 * model_.bytes() + 1000;  // two at a time: the disk takes them
  options.when_full = WhenStagingIsFull::kWait;
  options.wait_ms = kFlushMs;
  const auto hook = MakeHook(std::move(options));
  SaveWhileAway(*hook, 1, 6);
  WaitUntilSpooled(*hook, 6);
  EXPECT_EQ(hook->Stats().staged_bytes, 0) << "memory is free again";
  EXPECT_GE(hook->Stats().spooled_bytes, 6 * model_.bytes());
  EXPECT_EQ(hook->Stats().skipped, 0);

  world_.Start();
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().committed, 6);
  EXPECT_EQ(hook->Stats().spooled, 0);
  for (int64_t step = 1; step <= 6; ++step) {
    EXPECT_EQ(FirstWeight(step), static_cast<float>(step));
    EXPECT_FALSE(std::filesystem::exists(Entry(step)));
  }
  EXPECT_EQ(Stored("hooked@6", "tied"), std::vector<float>(16, 1.0f)) << "an alias is one again";
  const auto client = world_.NewClient();
  const auto log = client->Log("hooked");
  ASSERT_OK(log);
  std::vector<int64_t> committed_ms;
  for (const auto& entry : *log) committed_ms.push_back(entry.step.committed_ms);
  EXPECT_TRUE(std::is_sorted(committed_ms.begin(), committed_ms.end()));
  EXPECT_EQ(log->back().step.metrics, (std::map<std::string, double>{{"lr", 0.5}}));
}

// The upload under way may be held up for as long as a daemon is silent: what waits behind it does
// not stay in the memory that the next checkpoints need.
TEST_F(HookSpoolTest, AFullMemoryIsEmptiedBehindAnUploadThatStands) {
  const SilentServer silent;
  {
    CheckpointHookOptions options = SpoolOptions();
    options.address = silent.address();
    options.staging_bytes = 2 * model_.bytes() + 1000;
    options.when_full = WhenStagingIsFull::kWait;
    options.wait_ms = kFlushMs;
    const auto hook = MakeHook(std::move(options));
    SaveWhileAway(*hook, 1, 3);
    EXPECT_EQ(hook->Stats().retries, 0) << "the first is still under way";
    EXPECT_GE(hook->Stats().spooled, 1);
    SaveWhileAway(*hook, 4, 6);
    EXPECT_EQ(hook->Stats().skipped, 0);
  }
  for (int64_t step = 1; step <= 6; ++step) EXPECT_TRUE(std::filesystem::exists(Entry(step)));
  const auto hook = MakeHook(SpoolOptions());
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().committed, 6);
  for (int64_t step = 1; step <= 6; ++step) EXPECT_EQ(FirstWeight(step), static_cast<float>(step));
}

// C4 and C10 for a process that ends: what it could not send is not lost.
TEST_F(HookSpoolTest, ALaterProcessSendsWhatAnEarlierOneLeft) {
  world_.Stop();
  {
    const auto hook = MakeHook(SpoolOptions());
    SaveWhileAway(*hook, 1, 3);
  }  // close_ms is 0: ends at once, and writes what it has
  EXPECT_TRUE(std::filesystem::exists(Entry(3)));
  world_.Start();
  const auto hook = MakeHook(SpoolOptions());
  model_.weight[0] = 4;
  ASSERT_TRUE(hook->OnStep(4, model_.Views(), {}));
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().committed, 4);
  for (int64_t step = 1; step <= 4; ++step) EXPECT_EQ(FirstWeight(step), static_cast<float>(step));
}

TEST_F(HookSpoolTest, DamageIsNeverSent) {
  world_.Stop();
  {
    const auto hook = MakeHook(SpoolOptions());
    SaveWhileAway(*hook, 1, 5);
  }
  const auto flip = [](const path& file, int64_t offset) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(offset);
    const char byte = static_cast<char>(stream.get() ^ 1);
    stream.seekp(offset);
    stream.put(byte);
  };
  flip(Entry(1) / "tensors.safetensors", 5'000'000);
  std::filesystem::resize_file(Entry(2) / "tensors.safetensors", 1000);
  flip(Entry(3) / "files" / "config.json", 0);
  std::filesystem::remove(Entry(4) / "manifest.json");
  world_.Start();
  const auto hook = MakeHook(SpoolOptions());
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().committed, 1);
  EXPECT_EQ(hook->Stats().failed, 4);
  EXPECT_FALSE(hook->OnStep(6, model_.Views(), {}).background.ok());
  EXPECT_EQ(FirstWeight(5), 5);
  for (int64_t step = 1; step <= 4; ++step) {
    EXPECT_FALSE(world_.NewClient()->Resolve("hooked@" + std::to_string(step)).ok()) << step;
    EXPECT_TRUE(
        std::filesystem::exists(RankFolder() / ("damaged-" + Entry(step).filename().string())))
        << "kept for a person";
  }
}

TEST_F(HookSpoolTest, WhatAKilledWriterLeftIsNoCheckpoint) {
  world_.Stop();
  {
    const auto hook = MakeHook(SpoolOptions());
    SaveWhileAway(*hook, 1, 1);
  }
  // As if killed before the rename, and in the middle of a removal.
  std::filesystem::copy(Entry(1), RankFolder() / ".tmp-step-000000000002",
                        std::filesystem::copy_options::recursive);
  std::filesystem::copy(Entry(1), RankFolder() / ".gone-step-000000000003",
                        std::filesystem::copy_options::recursive);
  std::ofstream(RankFolder() / "step-notes") << "not one either";
  const auto spool = Spool::Open(folder_.path() / "spool", "hooked", 0, 1, 1 << 30);
  ASSERT_OK(spool);
  EXPECT_EQ((*spool)->entries(), 1);
  EXPECT_FALSE(std::filesystem::exists(RankFolder() / ".tmp-step-000000000002"));
  EXPECT_FALSE(std::filesystem::exists(RankFolder() / ".gone-step-000000000003"));
}

TEST_F(HookSpoolTest, HasALimitAndOneOwner) {
  world_.Stop();
  CheckpointHookOptions options = SpoolOptions();
  options.staging_bytes = model_.bytes() + 1000;
  options.spool_bytes = 2 * model_.bytes() + 100'000;
  const auto hook = MakeHook(options);
  EXPECT_EQ(CheckpointHook::Create(options).status().code(), StatusCode::kUnavailable)
      << "another process would send it twice";
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_TRUE(hook->OnStep(step, model_.Views(), {}));
    WaitUntilSpooled(*hook, step);
  }
  EXPECT_TRUE(hook->OnStep(3, model_.Views(), {})) << "in memory";
  EXPECT_FALSE(hook->OnStep(4, model_.Views(), {})) << "nowhere";
  EXPECT_EQ(hook->Stats().spooled, 2);
  EXPECT_EQ(hook->Stats().skipped, 1);
  world_.Start();
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().committed, 3);
}

TEST_F(HookSpoolTest, ARefusedEntryIsKeptAside) {
  const auto hook = MakeHook(SpoolOptions());
  ASSERT_TRUE(hook->OnStep(1, model_.Views(), {}));
  ASSERT_TRUE(hook->Flush(kFlushMs));
  world_.Stop();
  SaveWhileAway(*hook, 1, 1);  // another model under a step that is stored
  WaitUntilSpooled(*hook, 1);
  world_.Start();
  ASSERT_TRUE(hook->Flush(kFlushMs));
  EXPECT_EQ(hook->Stats().failed, 1);
  EXPECT_TRUE(std::filesystem::exists(RankFolder() / ("refused-" + Entry(1).filename().string())));
}

// What is sent later sets the run up as it was asked for: every field, also those to come.
TEST_F(HookSpoolTest, AConfigurationComesBackWhole) {
  RunConfig config;
  auto& [merge_every, publish, metric, lower, energy, rank, compress, quota, method, spectral,
         codec, how] = config;
  merge_every = 7;
  publish = PublishPolicy::kBest;
  metric = "acc";
  lower = false;
  energy = 0.5;
  rank = 3;
  compress = true;
  quota = 123;
  method = MergeMethod::kMonoSoupSpectral;
  spectral = 0.75;
  codec = PublishCodec::kAuto;
  how.max_share = 0.1;
  world_.Stop();
  {
    CheckpointHookOptions options = SpoolOptions();
    options.run_config = config;
    const auto hook = MakeHook(std::move(options));
    SaveWhileAway(*hook, 7, 7);
  }
  const auto left = Spool::Open(folder_.path() / "spool", "hooked", 0, 1, int64_t{1} << 30);
  ASSERT_OK(left);
  const auto entry = (*left)->Read(*(*left)->First());
  ASSERT_OK(entry);
  EXPECT_EQ((*entry)->record().config, config);
}

// The format is shared with the Python hook: what SPOOL.md names is there.
TEST_F(HookSpoolTest, WritesWhatItsFormatSays) {
  world_.Stop();
  {
    const auto hook = MakeHook(SpoolOptions());
    SaveWhileAway(*hook, 7, 7);
  }
  const auto manifest = nlohmann::json::parse(std::ifstream(Entry(7) / "manifest.json"));
  EXPECT_EQ(manifest["format"], "stockpot-spool");
  EXPECT_EQ(manifest["version"], 1);
  EXPECT_EQ(manifest["run"], "hooked");
  EXPECT_EQ(manifest["base"], "tiny");
  EXPECT_EQ(manifest["step"], 7);
  EXPECT_EQ(manifest["rank"], 0);
  EXPECT_EQ(manifest["world"], 1);
  EXPECT_EQ(manifest["config"]["publish"], "request");
  EXPECT_EQ(manifest["metrics"]["loss"], "nan");
  EXPECT_EQ(manifest["metrics"]["lr"], 0.5);
  EXPECT_EQ(manifest["aliases"]["tied"], "model.norm.weight");
  const path tensors = Entry(7) / "tensors.safetensors";
  EXPECT_EQ(manifest["tensors"]["bytes"], std::filesystem::file_size(tensors));
  std::ifstream in(tensors, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  EXPECT_EQ(manifest["tensors"]["sha256"], Sha256(bytes).Hex());
  EXPECT_EQ(manifest["files"]["config.json"]["sha256"], Sha256("{}").Hex());
}

}  // namespace
}  // namespace stockpot
