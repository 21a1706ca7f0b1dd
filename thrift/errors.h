// Between Status and rpc::Error: code for code. Thread promise: pure functions.
#pragma once

#include "kernels/base/status.h"
#include "stockpot_rpc/stockpot_types.h"

namespace stockpot {

// rpc::ErrorCode has the numbers of StatusCode. REQUIRES: !status.ok().
rpc::Error ToRpcError(const Status& status);

// A code outside the table becomes Internal, also "OK": an error never turns into a success.
Status FromRpcError(const rpc::Error& error);

}  // namespace stockpot
