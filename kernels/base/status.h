// Errors as values. Every fallible function of Stockpot returns a Status or a Result<T>.
//
// A Status is a code from a short closed list and a message for a person. The code decides what a
// caller may do about it (see IsRetryable, and the one table that maps codes to HTTP statuses in
// serve/http and to Thrift codes in thrift/conversions.h). The message grows on the way up:
//
//   Status s = ReadHeader(path);
//   if (!s.ok()) return s.WithContext("while importing base 'smollm2'");
//   // -> "while importing base 'smollm2': model.safetensors: header claims 9 GiB, file has 3 KiB"
//
// Operating errors are values; a broken invariant of our own is a CHECK (check.h).
// Thread promise: values; distinct objects may be used from any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace stockpot {

enum class StatusCode : int {
  kOk = 0,
  kInvalidArgument = 1,    // the request is wrong and stays wrong: fix it
  kNotFound = 2,           // the named thing does not exist
  kAlreadyExists = 3,      // the name is taken by something else, or a compare-and-set lost
  kResourceExhausted = 4,  // a limit was met (bytes, sessions, queue, disk): later or smaller
  kUnavailable = 5,        // not now (loading, shutting down, connection lost): try again
  kCorruption = 6,         // stored or received bytes are not what they claim to be
  kInternal = 7,           // our own fault, or the operating system's
};

// "InvalidArgument", "NotFound", ... ; stable, used in JSON and logs.
std::string_view StatusCodeName(StatusCode code);

// True for the codes where the same request may succeed later without being changed.
constexpr bool IsRetryable(StatusCode code) {
  return code == StatusCode::kUnavailable || code == StatusCode::kResourceExhausted;
}

class [[nodiscard]] Status {
 public:
  Status() = default;  // OK
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // The same code with "context: " put before the message. OK stays OK.
  Status WithContext(std::string_view context) const;

  // "OK", or "Corruption: message".
  std::string ToString() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status OkStatus() { return {}; }
Status InvalidArgument(std::string message);
Status NotFound(std::string message);
Status AlreadyExists(std::string message);
Status ResourceExhausted(std::string message);
Status Unavailable(std::string message);
Status Corruption(std::string message);
Status Internal(std::string message);

// ENOSPC/EDQUOT/ENOMEM ResourceExhausted, ENOENT NotFound, EIO/EAGAIN/... Unavailable, else Internal.
Status ErrnoStatus(int error, std::string_view what);

// Either a T or a Status that is not OK.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}  // NOLINT: implicit on purpose
  Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {  // NOLINT: likewise
    if (std::get<1>(state_).ok()) std::get<1>(state_) = Internal("Result made from an OK status");
  }

  bool ok() const { return state_.index() == 0; }
  Status status() const { return ok() ? Status() : std::get<1>(state_); }

  // REQUIRES: ok(). Terminates with the status otherwise (a programmer error).
  T& value() & { return Checked(); }
  const T& value() const& { return const_cast<Result*>(this)->Checked(); }
  T&& value() && { return std::move(Checked()); }
  T& operator*() & { return Checked(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(Checked()); }
  T* operator->() { return &Checked(); }
  const T* operator->() const { return &value(); }

 private:
  T& Checked();
  std::variant<T, Status> state_;
};

[[noreturn]] void DieOfBadResult(const Status& status);

template <typename T>
T& Result<T>::Checked() {
  if (!ok()) DieOfBadResult(std::get<1>(state_));
  return std::get<0>(state_);
}

// Returns the status of `expr` from the calling function unless it is OK.
#define STOCKPOT_RETURN_IF_ERROR(expr)                       \
  do {                                                       \
    ::stockpot::Status stockpot_status_ = (expr);            \
    if (!stockpot_status_.ok()) return stockpot_status_;     \
  } while (0)

// STOCKPOT_ASSIGN_OR_RETURN(auto x, MakeX()): x takes the value, or the function returns the status.
#define STOCKPOT_ASSIGN_OR_RETURN(lhs, expr) \
  STOCKPOT_ASSIGN_OR_RETURN_(lhs, expr, STOCKPOT_CONCAT_(stockpot_result_, __LINE__))
#define STOCKPOT_ASSIGN_OR_RETURN_(lhs, expr, name) \
  auto name = (expr);                               \
  if (!name.ok()) return name.status();             \
  lhs = std::move(name).value()
#define STOCKPOT_CONCAT_(a, b) STOCKPOT_CONCAT2_(a, b)
#define STOCKPOT_CONCAT2_(a, b) a##b

}  // namespace stockpot
