// Log-probabilities as evaluators read them. lm-evaluation-harness compares a token's value with
// the maximum over its alternatives by ==, so both come from the same float, and no alternative may
// hide another one: ids that read the same get different keys.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "serve/http/reply.h"
#include "serve/text/tokenizer.h"

namespace stockpot {

// The token's own text; "bytes:\xe2\x98" if that is not whole characters, "token_id:N" if the
// tokenizer does not know it.
std::string TokenLabel(const Tokenizer& tokenizer, int32_t token);

// {"text_offset", "token_logprobs", "tokens", "top_logprobs"}: one entry a token. An unscored token
// has null; minus infinity is -9999.0.
nlohmann::ordered_json CompletionLogprobs(const Tokenizer& tokenizer,
                                          std::span<const ReportedToken> tokens);

// {"content": [{"token", "logprob", "bytes", "top_logprobs"}], "refusal": null}
nlohmann::ordered_json ChatLogprobs(const Tokenizer& tokenizer,
                                    std::span<const ReportedToken> tokens);

}  // namespace stockpot
