// From a checked request to sequences for the engine: prompts become tokens, absent fields take the
// model's defaults.
#pragma once

#include "serve/http/api_error.h"
#include "serve/http/generation.h"
#include "serve/http/request.h"
#include "serve/http/text_assets.h"

namespace stockpot {

// `max_context`: Engine::max_context(). The plan's head is left to the caller.
ApiResult<GenerationPlan> PlanCompletion(const CompletionRequest& request, const TextAssets& text,
                                         int64_t max_context);
ApiResult<GenerationPlan> PlanChat(const ChatRequest& request, const TextAssets& text,
                                   int64_t max_context);

// The tokens of a text. 400 naming `param`, never "try again": a text that is too long or that the
// pre-tokenizer's regex cannot get through stays so.
ApiResult<std::vector<int32_t>> EncodeText(const TextAssets& text, std::string_view input,
                                           bool add_special_tokens, const char* param);

// The prompt that the model's template makes of chat messages.
ApiResult<std::string> RenderChat(const TextAssets& text, const nlohmann::ordered_json& messages,
                                  bool add_generation_prompt, const nlohmann::ordered_json& extra);

}  // namespace stockpot
