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
  Status SetCalibration(ProbeSet texts) {
    Commit commit;
    commit.calibrations.push_back(std::move(texts));
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

TEST_F(StoreProbeTest, CalibrationTextsAreASetOfTheirOwn) {
  const ProbeSet probe{.run = "r", .texts = {{"p", "held out"}}, .by = "ann"};
  const ProbeSet calibration{.run = "r", .texts = {{"c", "something\nelse"}}, .by = "bob"};
  EXPECT_FALSE((*store_->GetCalibration("r")).has_value());
  ASSERT_TRUE(Set(probe).ok());
  ASSERT_TRUE(SetCalibration(calibration).ok());
  Reopen();
  EXPECT_EQ((*store_->GetProbe("r"))->texts, probe.texts);
  EXPECT_EQ((*store_->GetCalibration("r"))->texts, calibration.texts);
  ASSERT_TRUE(SetCalibration({.run = "r"}).ok());
  EXPECT_FALSE((*store_->GetCalibration("r")).has_value());
  EXPECT_TRUE((*store_->GetProbe("r")).has_value());
  EXPECT_EQ(SetCalibration({.run = "nowhere", .texts = {{"c", "x"}}}).code(),
            StatusCode::kNotFound);
  EXPECT_EQ(SetCalibration({.run = "r", .texts = {{"c", ""}}}).code(),
            StatusCode::kInvalidArgument);
}

// Half of a text is enough, whatever stands around its lines.
TEST_F(StoreProbeTest, NoTextIsInBothSets) {
  ASSERT_TRUE(Set({.run = "r", .texts = {{"p", "the first line\nthe second line\n"}}}).ok());
  const auto refused = [&](const std::string& text) {
    const Status status = SetCalibration({.run = "r", .texts = {{"other", "x"}, {"c", text}}});
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kInvalidArgument);
    EXPECT_TRUE(status.ok() || status.message().find("'c'") != std::string::npos);
    return !status.ok();
  };
  EXPECT_TRUE(refused("the first line\nthe second line\n"));
  EXPECT_TRUE(refused("  the second line \r\n\n\tthe first line"));
  EXPECT_TRUE(refused("the second line\nshort"));
  EXPECT_FALSE(refused("the third line"));
  // Half of the probe text, in one that is longer.
  EXPECT_THAT(SetCalibration({.run = "r",
                              .texts = {{"c", "the second line\na third one, longer than both"}}})
                  .message(),
              HasSubstr("'p'"));
  ASSERT_TRUE(SetCalibration({.run = "r", .texts = {{"c", "one line of a calibration"}}}).ok());
  const Status status = Set({.run = "r", .texts = {{"q", "one line of a calibration"}}});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("'q'"));
  EXPECT_EQ((*store_->GetProbe("r"))->texts[0].name, "p");
  // Both in one commit: as they will be.
  Commit commit;
  commit.probes.push_back({.run = "r", .texts = {{"q", "one line of a calibration"}}});
  commit.calibrations.push_back({.run = "r", .texts = {{"c", "the first line"}}});
  EXPECT_TRUE(store_->Apply(std::move(commit)).ok());
  Commit same;
  same.probes.push_back({.run = "r", .texts = {{"q", "alike"}}});
  same.calibrations.push_back({.run = "r", .texts = {{"c", "alike"}}});
  EXPECT_EQ(store_->Apply(std::move(same)).status().code(), StatusCode::kInvalidArgument);
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
