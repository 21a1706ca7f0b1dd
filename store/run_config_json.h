// A run's configuration as JSON: in the catalogue's records and in a hook's spool. The one list of
// its fields.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "kernels/base/status.h"
#include "store/records.h"

namespace stockpot {

nlohmann::json ToJson(const RunConfig& config);

// A field that is missing has its default, keys that are no field are passed over. InvalidArgument:
// a value of another type, or an unknown policy.
Result<RunConfig> RunConfigFromJson(const nlohmann::json& in);

}  // namespace stockpot
