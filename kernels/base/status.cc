#include "kernels/base/status.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/base/check.h"

namespace stockpot {

std::string_view StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "OK";
    case StatusCode::kInvalidArgument:
      return "InvalidArgument";
    case StatusCode::kNotFound:
      return "NotFound";
    case StatusCode::kAlreadyExists:
      return "AlreadyExists";
    case StatusCode::kResourceExhausted:
      return "ResourceExhausted";
    case StatusCode::kUnavailable:
      return "Unavailable";
    case StatusCode::kCorruption:
      return "Corruption";
    case StatusCode::kInternal:
      return "Internal";
  }
  return "Internal";
}

Status Status::WithContext(std::string_view context) const {
  if (ok()) return *this;
  return Status(code_, std::string(context) + ": " + message_);
}

std::string Status::ToString() const {
  if (ok()) return "OK";
  return std::string(StatusCodeName(code_)) + ": " + message_;
}

Status InvalidArgument(std::string m) { return {StatusCode::kInvalidArgument, std::move(m)}; }
Status NotFound(std::string m) { return {StatusCode::kNotFound, std::move(m)}; }
Status AlreadyExists(std::string m) { return {StatusCode::kAlreadyExists, std::move(m)}; }
Status ResourceExhausted(std::string m) { return {StatusCode::kResourceExhausted, std::move(m)}; }
Status Unavailable(std::string m) { return {StatusCode::kUnavailable, std::move(m)}; }
Status Corruption(std::string m) { return {StatusCode::kCorruption, std::move(m)}; }
Status Internal(std::string m) { return {StatusCode::kInternal, std::move(m)}; }

Status ErrnoStatus(int error, std::string_view what) {
  StatusCode code = StatusCode::kInternal;
  if (error == ENOSPC || error == EDQUOT || error == ENOMEM) code = StatusCode::kResourceExhausted;
  if (error == ENOENT) code = StatusCode::kNotFound;
  if (error == EIO || error == EAGAIN || error == EINTR || error == ETIMEDOUT || error == EMFILE ||
      error == ENFILE) {
    code = StatusCode::kUnavailable;
  }
  return {code, std::string(what) + ": " + std::strerror(error)};
}

void DieOfBadResult(const Status& status) {
  std::fprintf(stderr, "value() of a failed Result: %s\n", status.ToString().c_str());
  std::abort();
}

void DieOfFailedCheck(const char* file, int line, const char* condition,
                      const std::string& values) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s  [ %s]\n", file, line, condition, values.c_str());
  std::abort();
}

}  // namespace stockpot
