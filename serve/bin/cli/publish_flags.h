// The flags that say how something is published, of `publish` and of a run's configuration.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "stockpot_rpc/stockpot_types.h"

namespace stockpot::cli {

// What may be said after `--codec`.
inline const std::vector<std::string> kPublishCodecs = {"bitdelta", "auto", "sparse", "dense"};

struct PublishFlags {
  CLI::Option* alpha = nullptr;
  CLI::Option* planes = nullptr;
  CLI::Option* residual_rank = nullptr;
  CLI::Option* max_bytes = nullptr;  // sets max_bytes or, of "12%", max_share
  CLI::Option* max_error = nullptr;
};

// Adds --<prefix>alpha, --<prefix>planes, --<prefix>residual-rank, --<prefix>max-bytes and
// --<prefix>max-error; `options` must live as long as the command. `whose` begins their descriptions.
PublishFlags AddPublishFlags(CLI::App& command, const std::string& prefix, const std::string& whose,
                             rpc::PublishOptions& options);

}  // namespace stockpot::cli
