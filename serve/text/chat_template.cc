#include "serve/text/chat_template.h"

#include "serve/text/chat_ast.h"
#include "serve/text/chat_parser.h"
#include "serve/text/chat_renderer.h"

namespace stockpot {

Result<ChatTemplate> ChatTemplate::Parse(std::string_view source, std::string bos, std::string eos,
                                         Clock clock) {
  STOCKPOT_ASSIGN_OR_RETURN(chat::Block body, chat::Parse(source));
  ChatTemplate out;
  out.parsed_ = std::make_shared<const Parsed>(Parsed{std::move(body)});
  out.bos_ = std::move(bos);
  out.eos_ = std::move(eos);
  out.clock_ = std::move(clock);
  return out;
}

Result<std::string> ChatTemplate::Render(const nlohmann::ordered_json& messages,
                                         bool add_generation_prompt,
                                         const nlohmann::ordered_json& extra) const {
  if (!messages.is_array()) return InvalidArgument("messages: expected an array");
  if (!extra.is_object() && !extra.is_null()) {
    return InvalidArgument("template arguments: expected an object");
  }
  chat::Budget budget;
  chat::Dict globals;
  STOCKPOT_ASSIGN_OR_RETURN(chat::Value list, chat::Value::FromJson(messages, &budget));
  globals.Set("messages", std::move(list));
  globals.Set("add_generation_prompt", chat::Value::Bool(add_generation_prompt));
  globals.Set("bos_token", chat::Value::String(bos_));
  globals.Set("eos_token", chat::Value::String(eos_));
  // transformers passes these always, so `tools is defined` holds.
  globals.Set("tools", chat::Value::None());
  globals.Set("documents", chat::Value::None());
  for (const auto& [name, json] : extra.items()) {
    STOCKPOT_ASSIGN_OR_RETURN(chat::Value value, chat::Value::FromJson(json, &budget));
    globals.Set(name, std::move(value));
  }
  return chat::Renderer(parsed_->body, std::move(globals), clock_, &budget).Run();
}

}  // namespace stockpot
