#include "serve/http/api_error.h"

#include <nlohmann/json.hpp>

#include "kernels/base/check.h"

namespace stockpot {
namespace {

// Retry advice: the OpenAI client retries 408, 409, 429 and >= 500 unless x-should-retry says no.
struct Mapping {
  StatusCode code;
  int http;
  const char* type;
  const char* should_retry;  // null: the client's own rule
  const char* retry_after;   // seconds; null: none
};

constexpr Mapping kMappings[] = {
    {StatusCode::kInvalidArgument, 400, "invalid_request_error", nullptr, nullptr},
    {StatusCode::kNotFound, 404, "not_found_error", "false", nullptr},
    {StatusCode::kAlreadyExists, 409, "conflict_error", "false", nullptr},
    {StatusCode::kResourceExhausted, 429, "rate_limit_error", nullptr, "1"},
    {StatusCode::kUnavailable, 503, "unavailable_error", nullptr, "1"},
    {StatusCode::kCorruption, 500, "server_error", "false", nullptr},
    {StatusCode::kInternal, 500, "server_error", nullptr, nullptr},
};

const Mapping& Find(StatusCode code) {
  for (const Mapping& mapping : kMappings) {
    if (mapping.code == code) return mapping;
  }
  STOCKPOT_CHECK(false, "no HTTP status for", static_cast<int>(code));
  __builtin_unreachable();
}

nlohmann::json OrNull(const std::string& text) {
  return text.empty() ? nlohmann::json(nullptr) : nlohmann::json(text);
}

std::string Body(const std::string& message, const char* type, const std::string& param,
                 const std::string& code) {
  const nlohmann::ordered_json body = {
      {"error",
       {{"message", message}, {"type", type}, {"param", OrNull(param)}, {"code", OrNull(code)}}}};
  // Messages may quote what a client sent.
  return body.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

int HttpStatusFor(StatusCode code) { return Find(code).http; }

std::string ErrorBody(const ApiError& error) {
  return Body(error.status.message(), Find(error.status.code()).type, error.param, error.code);
}

HttpResponse ErrorResponse(const ApiError& error) {
  const Mapping& mapping = Find(error.status.code());
  HttpResponse response{.status = mapping.http, .body = ErrorBody(error)};
  if (mapping.should_retry) response.headers.emplace_back("x-should-retry", mapping.should_retry);
  if (mapping.retry_after) response.headers.emplace_back("retry-after", mapping.retry_after);
  return response;
}

HttpResponse PlainHttpError(int status, std::string_view message) {
  const char* type = status >= 500 ? "server_error" : "invalid_request_error";
  HttpResponse response{.status = status, .body = Body(std::string(message), type, "", "")};
  if (status == 503) response.headers.emplace_back("retry-after", "1");
  return response;
}

}  // namespace stockpot
