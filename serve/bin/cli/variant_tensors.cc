#include "serve/bin/cli/variant_tensors.h"

#include <algorithm>
#include <string>

#include "serve/bin/cli/json.h"
#include "serve/bin/cli/output.h"

namespace stockpot::cli {
namespace {

double NumberOf(const Json& facts, const char* key) {
  return facts.contains(key) && facts[key].is_number() ? facts[key].get<double>() : 0.0;
}

std::string BytesOf(const Json& facts) {
  return HumanBytes(static_cast<int64_t>(std::clamp(NumberOf(facts, "bytes"), 0.0, 1e18)));
}

// "bitdelta x 2 + rank 8, error 0.12", of what BuildVariant says of a tensor.
std::string FormText(const Json& form) {
  const auto number = [&](const char* key) { return NumberOf(form, key); };
  std::string text =
      form.contains("codec") && form["codec"].is_string() ? form["codec"].get<std::string>() : "?";
  if (number("planes") > 1) text += " x " + HumanNumber(number("planes"));
  if (number("rank") > 0) text += " + rank " + HumanNumber(number("rank"));
  if (form.contains("row_error")) text += ", error " + HumanNumber(number("row_error"));
  return text;
}

}  // namespace

void PrintTensors(const rpc::ArtifactInfo& variant) {
  Table table({{"TENSOR"},
               {"CHANGED", true},
               {"ONE BIT", true},
               {"BYTES", true},
               {"STORED AS"},
               {"NEXT BETTER"}});
  for (const auto& [key, value] : variant.attributes) {
    const Json facts = Json::parse(value, nullptr, false);
    if (key.rfind("tensor/", 0) != 0 || !facts.is_object()) continue;
    std::string next;
    if (facts.contains("next") && facts["next"].is_object()) {
      next = FormText(facts["next"]) + ": " + BytesOf(facts["next"]);
    }
    table.Add({Printable(key.substr(7)), HumanNumber(NumberOf(facts, "changed")),
               HumanNumber(NumberOf(facts, "error")), BytesOf(facts), Printable(FormText(facts)),
               Printable(next)});
  }
  table.Print();
}

}  // namespace stockpot::cli
