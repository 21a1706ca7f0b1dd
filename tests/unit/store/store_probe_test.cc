// Probe texts and limits of the gate: what is kept, what is refused, what a damaged record does.
#include <gmock/gmock.h>

#include "store/record_codec.h"
#include "tests/unit/store/store_fixture.h"

namespace stockpot::test {
namespace {

using ::testing::HasSubstr;

class StoreProbeTest : public StoreTest {
 protected:
  void SetUp() override {
    const Digest base = CommitBase("base", 1000);
    Commit commit;
    commit.runs.push_back({.name = "r", .base = base});
    ASSERT_TRUE(store_->Apply(std::move(commit)).ok());
  }
  Status Set(ProbeSet probe) {
    Commit commit;
    commit.probes.push_back(std::move(probe));
    return store_->Apply(std::move(commit)).status();
  }
  Status Set(const std::string& run, const GateConfig& gate) {
    Commit commit;
    commit.gates.push_back({run, gate});
    return store_->Apply(std::move(commit)).status();
  }
};

TEST_F(StoreProbeTest, TextsAndLimitsAreThereAfterARestart) {
  EXPECT_FALSE((*store_->GetProbe("r")).has_value());
  EXPECT_EQ(*store_->GetGate("r"), GateConfig{});
  const ProbeSet probe{.run = "r",
                       .texts = {{"a.txt", "Grüße\n\"quoted\"\t\\"}, {"b", std::string("x\0y", 3)}},
                       .by = "ann"};
  const GateConfig gate{.max_kl = 1.0 / 3, .min_top1 = 0.1, .max_loss_rise = -0.25};
  ASSERT_TRUE(Set(probe).ok());
  ASSERT_TRUE(Set("r", gate).ok());
  Reopen();
  const auto stored = store_->GetProbe("r");
  ASSERT_TRUE(stored.ok() && stored->has_value());
  EXPECT_EQ((*stored)->texts, probe.texts);
  EXPECT_EQ((*stored)->digest(), probe.digest());
  EXPECT_EQ((*stored)->by, "ann");
  EXPECT_GT((*stored)->time_ms, 0);
  EXPECT_EQ(*store_->GetGate("r"), gate);

  ASSERT_TRUE(Set({.run = "r", .by = "ann"}).ok());
  EXPECT_FALSE((*store_->GetProbe("r")).has_value());
}

TEST_F(StoreProbeTest, TheDigestIsOfTheTextsAlone) {
  const auto digest = [](std::vector<ProbeSet::Text> texts) {
    return ProbeSet{.run = "r", .texts = std::move(texts)}.digest();
  };
  EXPECT_EQ(digest({{"a", "x"}, {"b", "y"}}), digest({{"c", "x"}, {"d", "y"}}));
  EXPECT_NE(digest({{"a", "x"}, {"b", "y"}}), digest({{"b", "y"}, {"a", "x"}}));
  EXPECT_NE(digest({{"a", "xy"}}), digest({{"a", "x"}, {"b", "y"}}));
}

TEST_F(StoreProbeTest, RefusesWhatItCannotKeep) {
  const auto refused = [&](const ProbeSet& probe, StatusCode code) {
    const Status status = Set(probe);
    EXPECT_EQ(status.code(), code) << status.ToString();
    return status.message();
  };
  constexpr auto kInvalid = StatusCode::kInvalidArgument;
  refused({.run = "nowhere", .texts = {{"a", "x"}}}, StatusCode::kNotFound);
  EXPECT_EQ(Set("nowhere", {}).code(), StatusCode::kNotFound);
  EXPECT_THAT(refused({.run = "r", .texts = {{"a", "\xff"}}}, kInvalid), HasSubstr("UTF-8"));
  refused({.run = "r", .texts = {{"a", ""}}}, kInvalid);
  refused({.run = "r", .texts = {{"", "x"}}}, kInvalid);
  const std::string half(static_cast<size_t>(kMaxProbeBytes / 2), 'x');
  EXPECT_TRUE(Set({.run = "r", .texts = {{"a", half}, {"b", half}}}).ok());
  EXPECT_THAT(refused({.run = "r", .texts = {{"a", half}, {"b", half + "x"}}}, kInvalid),
              HasSubstr(std::to_string(kMaxProbeBytes)));
  const std::vector<ProbeSet::Text> many(static_cast<size_t>(kMaxProbeTexts) + 1, {"a", "x"});
  refused({.run = "r", .texts = many}, kInvalid);
  EXPECT_EQ(Set("r", {.min_top1 = 2}).code(), kInvalid);
  EXPECT_EQ((*store_->GetProbe("r"))->texts.size(), 2u) << "refusals change nothing";
}

TEST(ProbeRecordTest, ALimitThatIsMissingIsDamageNotADefault) {
  const std::string text = EncodeGate({.max_kl = 0.01});
  EXPECT_EQ(DecodeGate(text)->max_kl, 0.01);
  for (const char* key :
       {"max_kl", "min_top1", "max_loss_rise", "max_update", "min_update", "max_error"}) {
    std::string damaged = text;
    damaged.replace(damaged.find(key), 1, "_");
    EXPECT_EQ(DecodeGate(damaged).status().code(), StatusCode::kCorruption) << key;
  }
  EXPECT_EQ(DecodeProbe("{\"run\":\"r\"}").status().code(), StatusCode::kCorruption);
}

}  // namespace
}  // namespace stockpot::test
