// A pool as a folder, for a device: FOLDER/members/<12 hex digits> is each adapter as PEFT reads
// it, FOLDER/pool.json says which task has which:
//
//   {"format": 1, "pool": "phone", "base": "<hex>", "config": {...},
//    "tasks": {"mail": "members/0123456789ab"},
//    "members": {"0123456789ab": {"tasks": ["mail"], "merged": 1, "lambda": 1, "norm_sum": 2.5}}}
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "kernels/base/status.h"
#include "thrift/client.h"

namespace stockpot::cli {

struct PoolFolder {
  struct Member {
    std::filesystem::path folder;
    std::vector<std::string> tasks;
    int64_t merged = 1;
    double lambda = 1;
    double norm_sum = 0;
  };
  std::string name;
  std::string base;  // hex digest
  rpc::PoolConfig config;
  std::vector<Member> members;
};

// pool.json comes last: a folder that has one is complete. InvalidArgument: the folder exists.
Status WritePoolFolder(Client& client, const rpc::Pool& pool, const std::filesystem::path& folder);

// InvalidArgument names what is wrong with pool.json; a member never lies outside the folder.
Result<PoolFolder> ReadPoolFolder(const std::filesystem::path& folder);

}  // namespace stockpot::cli
