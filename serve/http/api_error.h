// What goes wrong, as clients of the OpenAI API expect it:
//   {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
// The table in api_error.cc is the only place that maps a Status to an HTTP status.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "kernels/base/status.h"
#include "serve/http/exchange.h"

namespace stockpot {

// A Status with what HTTP adds to it.
struct ApiError {
  Status status;
  std::string param;  // the field that is wrong; empty: null
  std::string code;   // "model_not_found"; empty: null

  ApiError(Status s, std::string p = "", std::string c = "")  // NOLINT: a Status is an ApiError
      : status(std::move(s)), param(std::move(p)), code(std::move(c)) {}
};

// Either a T or an ApiError.
template <typename T>
class [[nodiscard]] ApiResult {
 public:
  ApiResult(T value) : state_(std::in_place_index<0>, std::move(value)) {}         // NOLINT
  ApiResult(ApiError error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT
  ApiResult(Status status) : ApiResult(ApiError(std::move(status))) {}             // NOLINT

  bool ok() const { return state_.index() == 0; }
  const ApiError& error() const { return std::get<1>(state_); }  // REQUIRES: !ok()
  T& operator*() { return std::get<0>(state_); }                 // REQUIRES: ok()
  T* operator->() { return &std::get<0>(state_); }

 private:
  std::variant<T, ApiError> state_;
};

// The same with an error or nothing.
using ApiStatus = std::optional<ApiError>;

int HttpStatusFor(StatusCode code);
// The JSON body alone, for an error inside a stream.
std::string ErrorBody(const ApiError& error);
HttpResponse ErrorResponse(const ApiError& error);
// For what only HTTP knows: 405, 413, 431 and the like.
HttpResponse PlainHttpError(int status, std::string_view message);

}  // namespace stockpot
