// Our prompts against transformers' apply_chat_template, from the file that make_goldens.py wrote.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "serve/text/chat_template.h"

namespace stockpot {
namespace {

using Json = nlohmann::ordered_json;

Json Cases() {
  const char* folder = std::getenv("STOCKPOT_GOLDENS");
  std::ifstream file(std::string(folder != nullptr ? folder : "") + "/templates.json");
  return file ? Json::parse(file) : Json::array();
}

Result<std::string> RenderCase(const Json& c) {
  Result<ChatTemplate> parsed =
      ChatTemplate::Parse(c["template"].get<std::string>(), "<s>", "</s>");
  if (!parsed.ok()) return parsed.status();
  return parsed->Render(c["messages"], c["add_generation_prompt"].get<bool>(), c["extra"]);
}

TEST(ChatTemplateGolden, RendersLikeTransformers) {
  const Json cases = Cases();
  ASSERT_GT(cases.size(), 700u) << "run make_goldens.py, which runs this test";
  int same = 0, both_refuse = 0, we_refuse = 0;
  for (const Json& c : cases) {
    const std::string name = c["name"];
    const Result<std::string> ours = RenderCase(c);
    if (c["expected"].is_null()) {
      EXPECT_FALSE(ours.ok()) << name << "\nHugging Face raises, we give: " << *ours;
      both_refuse += !ours.ok();
    } else if (c["refused"].get<bool>()) {
      EXPECT_FALSE(ours.ok()) << name << ": no longer refused";
      we_refuse += !ours.ok();
    } else if (ours.ok()) {
      EXPECT_EQ(*ours, c["expected"].get<std::string>()) << name;
      same += *ours == c["expected"];
    } else {
      ADD_FAILURE() << name << "\n" << ours.status().ToString();
    }
    if (!ours.ok()) {
      EXPECT_NE(ours.status().code(), StatusCode::kInternal) << ours.status().ToString();
    }
  }
  std::cout << same << " identical, " << both_refuse << " refused by both, " << we_refuse
            << " refused by us alone\n";
}

}  // namespace
}  // namespace stockpot
