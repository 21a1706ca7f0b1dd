// Who runs next: fairness across variants, the cap on distinct ones, bounded waits, KV pages.
#include "serve/engine/admission.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>
#include <set>

#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

constexpr int64_t kPlenty = 1 << 20;

// Admission compares variants by address and never looks inside, so any addresses will do.
class Variants {
 public:
  VariantLease lease(int i) const {
    if (i == 0) return nullptr;  // the base
    return {std::shared_ptr<void>(), reinterpret_cast<const VariantModel*>(&places_[i])};
  }

 private:
  std::array<int, 32> places_{};
};

class Admission : public ::testing::Test {
 protected:
  std::unique_ptr<Sequence> Make(int variant, int64_t prompt = 4) {
    auto sequence = std::make_unique<Sequence>();
    sequence->id = next_id_++;
    sequence->request.variant = variants_.lease(variant);
    sequence->request.prompt.assign(static_cast<size_t>(prompt), 1);
    sequence->tokens = sequence->request.prompt;
    return sequence;
  }
  void Push(AdmissionQueue& queue, int variant, int64_t prompt = 4) {
    queue.Push(Make(variant, prompt));
  }
  // The id of the next one, which runs from now on; 0: none.
  uint64_t Admit(AdmissionQueue& queue, int64_t free_pages = kPlenty) {
    std::unique_ptr<Sequence> sequence = queue.Next(running_, free_pages);
    if (!sequence) return 0;
    running_.Add(sequence->variant());
    const uint64_t id = sequence->id;
    admitted_[id] = std::move(sequence);
    return id;
  }
  void Finish(uint64_t id) {
    running_.Remove(admitted_.at(id)->variant());
    admitted_.erase(id);
  }

  Variants variants_;
  RunningVariants running_;
  std::map<uint64_t, std::unique_ptr<Sequence>> admitted_;
  uint64_t next_id_ = 1;
};

TEST_F(Admission, OneVariantIsFirstComeFirstServed) {
  AdmissionQueue queue(4);
  for (int i = 0; i < 5; ++i) Push(queue, 1);
  for (uint64_t id = 1; id <= 5; ++id) EXPECT_EQ(Admit(queue), id);
  EXPECT_EQ(Admit(queue), 0u);
  EXPECT_EQ(queue.size(), 0);
}

TEST_F(Admission, AFloodDoesNotShutOutOthers) {
  AdmissionQueue queue(4);
  for (int i = 0; i < 100; ++i) Push(queue, 1);
  EXPECT_EQ(Admit(queue), 1u);
  Push(queue, 2);  // id 101
  Push(queue, 0);  // id 102
  EXPECT_EQ(Admit(queue), 101u);
  EXPECT_EQ(Admit(queue), 102u);
  EXPECT_EQ(Admit(queue), 2u);
}

// serving.md S6: the base counts as one of the distinct variants.
TEST_F(Admission, TheCapOnDistinctVariantsCountsTheBase) {
  AdmissionQueue queue(2);
  Push(queue, 0);
  Push(queue, 1);
  Push(queue, 2);
  Push(queue, 1);
  EXPECT_EQ(Admit(queue), 1u);
  EXPECT_EQ(Admit(queue), 2u);
  EXPECT_EQ(Admit(queue), 4u);  // the third variant waits, those behind it run
  EXPECT_EQ(Admit(queue), 0u);
  EXPECT_EQ(running_.distinct(), 2);
  Finish(1);
  EXPECT_EQ(Admit(queue), 3u);
}

// serving.md S7: one place, A, B, A, A, A, ...: B's wait is bounded, those behind it run meanwhile.
TEST_F(Admission, AVariantThatNeedsAPlaceWaitsBoundedly) {
  AdmissionQueue queue(1);
  Push(queue, 1);
  uint64_t running = Admit(queue);
  Push(queue, 2);
  const uint64_t b = 2;
  int passed = 0;
  while (!admitted_.contains(b)) {
    ASSERT_LE(passed, kMaxOvertakes) << "B starves";
    Push(queue, 1);
    const uint64_t next = Admit(queue);  // A is always running, so A goes first ...
    if (next != 0) {
      ++passed;
      Finish(running);
      running = next;
      continue;
    }
    Finish(running);  // ... until B is overdue and A takes no new ones
    ASSERT_EQ(Admit(queue), b);
  }
  EXPECT_EQ(passed, kMaxOvertakes);
}

TEST_F(Admission, OnlyOneVariantStopsForAnOverdueOne) {
  AdmissionQueue queue(2);
  Push(queue, 1);
  Push(queue, 1);
  Push(queue, 3);
  EXPECT_EQ(Admit(queue), 1u);
  EXPECT_EQ(Admit(queue), 3u);
  EXPECT_EQ(Admit(queue), 2u);  // now variant 1 runs twice, variant 3 once
  auto overdue = Make(2);
  overdue->overtaken = kMaxOvertakes;
  queue.Push(std::move(overdue));  // id 4
  Push(queue, 3);                  // id 5: its variant has the fewest, so it is the one that stops
  Push(queue, 1);                  // id 6
  EXPECT_EQ(Admit(queue), 6u);
  EXPECT_EQ(Admit(queue), 0u);
  Finish(3);
  EXPECT_EQ(Admit(queue), 4u);
}

TEST_F(Admission, NobodyPassesOneThatWaitsForPages) {
  AdmissionQueue queue(4);
  Push(queue, 1, 100);  // 7 pages with the next token
  Push(queue, 1, 4);
  Push(queue, 2, 4);
  EXPECT_EQ(Admit(queue, 6), 0u);
  EXPECT_EQ(Admit(queue, 7), 1u);
}

TEST_F(Admission, APreemptedSequenceComesFirst) {
  AdmissionQueue queue(4);
  Push(queue, 1);
  Push(queue, 1);
  auto preempted = Make(2);  // id 3, younger than those that wait
  queue.PushPreempted(std::move(preempted));
  EXPECT_EQ(Admit(queue), 3u);
}

TEST_F(Admission, RemoveTakesOneOut) {
  AdmissionQueue queue(4);
  for (int i = 0; i < 3; ++i) Push(queue, 1);
  EXPECT_EQ(queue.Remove(2)->id, 2u);
  EXPECT_EQ(queue.Remove(2), nullptr);
  EXPECT_EQ(queue.Remove(77), nullptr);
  EXPECT_EQ(queue.size(), 2);
  EXPECT_EQ(Admit(queue), 1u);
  EXPECT_EQ(Admit(queue), 3u);
}

// Random arrivals and ends: the cap holds, nobody is lost, and nobody is passed without end.
TEST_F(Admission, RandomTraffic) {
  std::mt19937_64 random(TestSeed());
  constexpr int64_t kSlots = 6, kCap = 3;
  constexpr int kVariants = 9;
  AdmissionQueue queue(kCap);
  std::map<uint64_t, int64_t> passed_by;  // waiting -> later arrivals admitted since
  std::set<uint64_t> seen;
  for (int step = 0; step < 20'000; ++step) {
    if (queue.size() < 50 && random() % 3 != 0) {
      // Half of the traffic is for one variant.
      const int variant = random() % 2 ? 1 : static_cast<int>(random() % kVariants);
      passed_by[next_id_] = 0;
      Push(queue, variant, 1 + static_cast<int64_t>(random() % 40));
    }
    if (!admitted_.empty() && random() % 2) {
      auto it = admitted_.begin();
      std::advance(it, static_cast<int64_t>(random() % admitted_.size()));
      Finish(it->first);
    }
    while (static_cast<int64_t>(admitted_.size()) < kSlots) {
      const uint64_t id = Admit(queue);
      if (id == 0) break;
      ASSERT_TRUE(seen.insert(id).second);
      ASSERT_LE(running_.distinct(), kCap);
      passed_by.erase(id);
      for (auto it = passed_by.begin(); it != passed_by.end() && it->first < id; ++it) ++it->second;
    }
    for (const auto& [id, passed] : passed_by) {
      // Its own variant's queue before it, then its own bounded turn: far below this.
      ASSERT_LT(passed, 60 * kMaxOvertakes) << "sequence " << id << " at step " << step;
    }
  }
  for (auto& [id, sequence] : admitted_) running_.Remove(sequence->variant());
  admitted_.clear();
  while (queue.size() > 0) {
    const uint64_t id = Admit(queue);
    ASSERT_NE(id, 0u);
    seen.insert(id);
    Finish(id);
  }
  EXPECT_EQ(seen.size(), next_id_ - 1);
}

}  // namespace
}  // namespace stockpot
