#include "tests/unit/model/run_model.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace stockpot::test {

std::vector<float> PromptLogits(Transformer& transformer, KvPool& pool, const VariantModel* variant,
                                std::span<const int32_t> tokens,
                                std::optional<int64_t> prompt_rows) {
  KvSequence kv = pool.NewSequence();
  const int64_t count = static_cast<int64_t>(tokens.size());
  EXPECT_TRUE(kv.Reserve(count).ok());
  const BatchSegment segment{.kv = &kv,
                             .tokens = tokens,
                             .variant = variant,
                             .logits_from = 0,
                             .prompt_rows = prompt_rows.value_or(count)};
  std::vector<float> all;
  const Status status =
      transformer.Forward({&segment, 1}, [&](int64_t, int64_t, std::span<const float> logits) {
        all.insert(all.end(), logits.begin(), logits.end());
      });
  EXPECT_TRUE(status.ok()) << status.ToString();
  return all;
}

std::vector<int32_t> Greedy(Transformer& transformer, KvPool& pool, const VariantModel* variant,
                            std::span<const int32_t> prompt, int64_t chunk, int64_t count) {
  KvSequence kv = pool.NewSequence();
  std::vector<int32_t> tokens;
  int32_t next = -1;
  const auto sink = [&](int64_t, int64_t, std::span<const float> logits) {
    next = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  };
  const auto feed = [&](std::span<const int32_t> some, bool of_prompt) {
    EXPECT_TRUE(kv.Reserve(static_cast<int64_t>(some.size())).ok());
    const BatchSegment segment{.kv = &kv,
                               .tokens = some,
                               .variant = variant,
                               .logits_from = static_cast<int64_t>(some.size()) - 1,
                               .prompt_rows = of_prompt ? static_cast<int64_t>(some.size()) : 0};
    const Status status = transformer.Forward({&segment, 1}, sink);
    EXPECT_TRUE(status.ok()) << status.ToString();
  };
  for (size_t i = 0; i < prompt.size(); i += static_cast<size_t>(chunk)) {
    feed(prompt.subspan(i, std::min(static_cast<size_t>(chunk), prompt.size() - i)), true);
  }
  while (static_cast<int64_t>(tokens.size()) < count) {
    tokens.push_back(next);
    if (static_cast<int64_t>(tokens.size()) < count) feed({&tokens.back(), 1}, false);
  }
  return tokens;
}

}  // namespace stockpot::test
