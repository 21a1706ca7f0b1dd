// One rank of a training job in C++, for tests of other languages that share a spool with it.
//
//   hook_rank ADDRESS SPOOL_DIRECTORY RANK WORLD [STEP...]
//
// Saves each STEP of run "r" over base "tiny" and ends at once, so that what could not be sent is
// in the spool. Without steps: sends what waits in the spool, and fails unless all of it arrived.
// The values of step S: element i of "rows" [7, 3], cut by rows, is 1000 S + i; of
// "optimizer/rows/exp_avg", likewise, -1000 S - i; "whole" [2] of rank 0 is {S, -S}, "tied" is tied
// to it; "loader/rank-R" [1] of group "loader" is R.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "trainer_hooks/cpp/checkpoint_hook.h"

namespace stockpot {
namespace {

constexpr int64_t kRows = 7;
constexpr int64_t kColumns = 3;
constexpr int64_t kFlushMs = 120'000;

void Save(CheckpointHook& hook, int64_t step, int64_t rank, int64_t world) {
  const int64_t first = rank * kRows / world;
  const int64_t rows = (rank + 1) * kRows / world - first;
  std::vector<float> values;
  std::vector<float> moments;
  for (int64_t i = first * kColumns; i < (first + rows) * kColumns; ++i) {
    values.push_back(static_cast<float>(1000 * step + i));
    moments.push_back(-values.back());
  }
  const float whole[] = {static_cast<float>(step), -static_cast<float>(step)};
  std::vector<TensorView> views = {{.name = "rows",
                                    .dtype = DType::kF32,
                                    .shape = {rows, kColumns},
                                    .data = values.data(),
                                    .global_shape = {kRows, kColumns},
                                    .offsets = {first, 0}},
                                   {.name = "optimizer/rows/exp_avg",
                                    .dtype = DType::kF32,
                                    .shape = {rows, kColumns},
                                    .data = moments.data(),
                                    .group = "optimizer",
                                    .global_shape = {kRows, kColumns},
                                    .offsets = {first, 0}},
                                   {.name = "loader/rank-" + std::to_string(rank),
                                    .dtype = DType::kI64,
                                    .shape = {1},
                                    .data = &rank,
                                    .group = "loader"}};
  if (rank == 0) {
    views.push_back({.name = "whole", .dtype = DType::kF32, .shape = {2}, .data = whole});
    views.push_back({.name = "tied", .dtype = DType::kF32, .shape = {2}, .alias_of = "whole"});
  }
  if (!hook.OnStep(step, views, {{"loss", 1.0 / static_cast<double>(step)}})) {
    std::fprintf(stderr, "step %ld was not staged\n", static_cast<long>(step));
    std::exit(1);
  }
}

int Main(int argc, char** argv) {
  if (argc < 5) return 2;
  CheckpointHookOptions options;
  options.address = argv[1];
  options.run = "r";
  options.base = "tiny";
  options.run_config = {.publish = PublishPolicy::kOnRequest};
  options.files = {{"config.json", "{}"}};
  options.spool_directory = argv[2];
  options.rank = std::atoi(argv[3]);
  options.world = std::atoi(argv[4]);
  options.attempt = "cpp";
  options.close_ms = 0;
  const auto hook = CheckpointHook::Create(options);
  if (!hook.ok()) {
    std::fprintf(stderr, "%s\n", hook.status().ToString().c_str());
    return 1;
  }
  for (int i = 5; i < argc; ++i) Save(**hook, std::atoll(argv[i]), options.rank, options.world);
  if (argc > 5) return 0;
  const bool flushed = (*hook)->Flush(kFlushMs);
  const CheckpointHookStats stats = (*hook)->Stats();
  std::fprintf(stderr, "%ld committed, %ld failed: %s\n", static_cast<long>(stats.committed),
               static_cast<long>(stats.failed), stats.last_error.ToString().c_str());
  return flushed && stats.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace stockpot

int main(int argc, char** argv) { return stockpot::Main(argc, argv); }
