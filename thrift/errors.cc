#include "thrift/errors.h"

#include "kernels/base/check.h"

namespace stockpot {
namespace {

constexpr bool Same(rpc::ErrorCode code, StatusCode status) {
  return static_cast<int>(code) == static_cast<int>(status);
}
static_assert(Same(rpc::ErrorCode::INVALID_ARGUMENT, StatusCode::kInvalidArgument));
static_assert(Same(rpc::ErrorCode::NOT_FOUND, StatusCode::kNotFound));
static_assert(Same(rpc::ErrorCode::ALREADY_EXISTS, StatusCode::kAlreadyExists));
static_assert(Same(rpc::ErrorCode::RESOURCE_EXHAUSTED, StatusCode::kResourceExhausted));
static_assert(Same(rpc::ErrorCode::UNAVAILABLE, StatusCode::kUnavailable));
static_assert(Same(rpc::ErrorCode::CORRUPTION, StatusCode::kCorruption));
static_assert(Same(rpc::ErrorCode::INTERNAL, StatusCode::kInternal));

}  // namespace

rpc::Error ToRpcError(const Status& status) {
  STOCKPOT_CHECK(!status.ok(), status.ToString());
  rpc::Error error;
  error.code = static_cast<rpc::ErrorCode>(static_cast<int>(status.code()));
  error.message = status.message();
  error.retryable = IsRetryable(status.code());
  return error;
}

Status FromRpcError(const rpc::Error& error) {
  const int code = static_cast<int>(error.code);
  if (code < static_cast<int>(StatusCode::kInvalidArgument) ||
      code > static_cast<int>(StatusCode::kInternal)) {
    return Internal("unknown error code " + std::to_string(code) + ": " + error.message);
  }
  return Status(static_cast<StatusCode>(code), error.message);
}

}  // namespace stockpot
