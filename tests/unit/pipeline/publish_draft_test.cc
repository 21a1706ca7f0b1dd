// A publish that is killed goes on behind the last tensor that it kept: nothing is compressed
// twice, the outcome has the same bits, and what was kept outlives a collection of garbage.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "store/bitdelta_codec.h"
#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

class PublishDraftTest : public ::testing::Test {
 protected:
  PublishDraftTest() {
    std::mt19937_64 random(TestSeed());
    TestModel base = TinyLlama(random, {.tied = false});
    const auto store = OpenStore(folder_);
    const Digest base_digest = StoreModel(*store, base, ArtifactKind::kBase);
    base.PerturbAll(random, 0.01);
    base.Tie("lm_head.weight", "model.embed_tokens.weight");
    checkpoint_ = StoreModel(*store, base, ArtifactKind::kCheckpoint, base_digest, "run", 1);
    tensors_ = static_cast<int>(base.tensors().size());
  }

  struct Outcome {
    std::string manifest;
    int tensors = 0;  // looked at
    double first_share = -1;
  };
  // `kill_at`: at the progress before that tensor; -1: never.
  Outcome Publish(const PublishDraft& draft, int kill_at = -1,
                  PublishCodec codec = PublishCodec::kBitDelta) {
    const auto store = OpenStore(folder_);
    const ChunkGuard guard = store->GuardChunks();
    ThreadPool threads(1);
    Outcome outcome;
    const auto made = BuildVariant(
        *store, checkpoint_, codec, threads,
        [&](double share) {
          if (outcome.tensors == 0) outcome.first_share = share;
          if (outcome.tensors++ == kill_at) ::raise(SIGKILL);
          return OkStatus();
        },
        {}, draft);
    EXPECT_OK(made);
    if (made.ok()) outcome.manifest = made->ToJson();
    return outcome;
  }

  void PublishInAChildThatIsKilled(const PublishDraft& draft, int at,
                                   PublishCodec codec = PublishCodec::kBitDelta) {
    const pid_t child = ::fork();
    if (child == 0) {
      Publish(draft, at, codec);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  }

  TemporaryFolder temporary_;
  const std::filesystem::path folder_ = temporary_.path() / "store";
  Digest checkpoint_;
  int tensors_ = 0;
};

// Codec auto looks at the changed tensors twice: it measures all of them first.
TEST_F(PublishDraftTest, NoTensorIsLookedAtTwiceAfterAKill) {
  for (const PublishCodec codec : {PublishCodec::kBitDelta, PublishCodec::kAuto}) {
    SCOPED_TRACE(PublishCodecName(codec));
    const Outcome whole = Publish({}, -1, codec);
    if (codec == PublishCodec::kAuto) {
      ASSERT_GT(whole.tensors, tensors_ + 6);
    } else {
      ASSERT_EQ(whole.tensors, tensors_);
    }
    EXPECT_EQ(whole.first_share, 0);
    for (int at = 0; at < whole.tensors; at += 3) {
      const PublishDraft draft{
          .job = "publish/" + std::string(PublishCodecName(codec)) + std::to_string(at),
          .save_bytes = 1};
      PublishInAChildThatIsKilled(draft, at, codec);
      {
        const auto store = OpenStore(folder_);
        ASSERT_OK(store->CollectGarbage({}));
      }
      const Outcome rest = Publish(draft, -1, codec);
      EXPECT_EQ(rest.tensors, whole.tensors - at) << "of the others none is looked at again";
      EXPECT_EQ(rest.first_share > 0, at > 0) << "progress goes on where it was";
      EXPECT_EQ(rest.manifest, whole.manifest) << at;
    }
  }
}

TEST_F(PublishDraftTest, KilledAgainAndAgainItComesToItsEnd) {
  const Outcome whole = Publish({});
  const PublishDraft draft{.job = "publish/often", .save_bytes = 4000};
  int looked_at = 0;
  for (int round = 0; round < 3; ++round) {
    PublishInAChildThatIsKilled(draft, 4);
    looked_at += 4;
  }
  const Outcome rest = Publish(draft);
  EXPECT_EQ(rest.manifest, whole.manifest);
  EXPECT_LT(rest.tensors, tensors_);
  // What lies between two drafts is done twice: at most the 4 of each round.
  EXPECT_LE(looked_at + rest.tensors, tensors_ + 12);
}

// A later stage of the job keeps its work under the same key: it is not overwritten.
TEST_F(PublishDraftTest, ALaterStagesDraftStays) {
  const PublishDraft draft{.job = "publish/stage", .save_bytes = 1};
  Manifest later{.kind = ArtifactKind::kState, .run = "run", .step = 1, .group = "scales"};
  {
    const auto store = OpenStore(folder_);
    later.base = store->GetManifest(checkpoint_)->base;
    later.attributes["step"] = "7";
    Commit commit;
    commit.drafts.push_back({draft.job, later});
    ASSERT_OK(store->Apply(std::move(commit)));
  }
  EXPECT_EQ(Publish(draft).tensors, tensors_);
  EXPECT_EQ(OpenStore(folder_)->GetDraft(draft.job)->ToJson(), later.ToJson());
}

TEST_F(PublishDraftTest, ADraftOfSomethingElseIsNotUsed) {
  const PublishDraft draft{.job = "publish/x", .save_bytes = 1};
  const Outcome dense = Publish({}, -1, PublishCodec::kDense);
  PublishInAChildThatIsKilled(draft, 5);
  const Outcome other = Publish(draft, -1, PublishCodec::kDense);
  EXPECT_EQ(other.tensors, tensors_);
  EXPECT_EQ(other.manifest, dense.manifest);
}

}  // namespace
}  // namespace stockpot
