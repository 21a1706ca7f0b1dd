// Pieces that all replies share.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "serve/http/reply.h"

namespace stockpot {

// {"id", "object", "created", "model", "system_fingerprint", "choices": []}
nlohmann::ordered_json HeadJson(const ReplyHead& head, const char* object);
nlohmann::ordered_json UsageJson(const Usage& usage);
nlohmann::ordered_json FinishJson(const char* finish);
// Never throws: what is not UTF-8 becomes U+FFFD.
std::string Dump(const nlohmann::ordered_json& json);

}  // namespace stockpot
