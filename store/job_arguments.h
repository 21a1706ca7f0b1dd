// The arguments of a durable job, read back from its record. Internal to the pipeline.
// Thread promise: pure functions. InvalidArgument names the job and the argument.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "store/digest.h"
#include "store/records.h"

namespace stockpot {

Result<std::string> Argument(const Job& job, const std::string& name);

struct MergeArguments {
  std::vector<Digest> parents;
  std::string run;
  int64_t step = -1;
  MergeOptions options;
};

Result<MergeArguments> ParseMergeArguments(const Job& job);

struct PublishArguments {
  Digest artifact;
  PublishCodec codec = PublishCodec::kBitDelta;
  PublishOptions options;
  std::string name;   // empty: the default names
  std::string force;  // not empty: why the gate's refusal does not count
  std::string by;     // who said so
};

Result<PublishArguments> ParsePublishArguments(const Job& job);

}  // namespace stockpot
