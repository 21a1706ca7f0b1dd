#include "store/job_arguments.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

namespace stockpot {
namespace {

Result<int64_t> IntegerArgument(const Job& job, const std::string& name) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text, Argument(job, name));
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    return InvalidArgument("job " + job.key + ": argument '" + name + "' is no number");
  }
  return value;
}

Result<double> ParseNumber(const Job& job, const std::string& name, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    return InvalidArgument("job " + job.key + ": argument '" + name + "' is no number");
  }
  return value;
}

Result<double> NumberArgument(const Job& job, const std::string& name) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text, Argument(job, name));
  return ParseNumber(job, name, text);
}

// What stands between the commas.
Result<std::vector<std::string>> ListArgument(const Job& job, const std::string& name) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text, Argument(job, name));
  std::vector<std::string> items;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    items.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return items;
}

Result<std::vector<double>> NumberListArgument(const Job& job, const std::string& name) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<std::string> items, ListArgument(job, name));
  std::vector<double> numbers;
  for (const std::string& item : items) {
    STOCKPOT_ASSIGN_OR_RETURN(numbers.emplace_back(), ParseNumber(job, name, item));
  }
  return numbers;
}

Result<std::vector<Digest>> DigestListArgument(const Job& job, const std::string& name) {
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<std::string> items, ListArgument(job, name));
  std::vector<Digest> digests;
  for (const std::string& item : items) {
    STOCKPOT_ASSIGN_OR_RETURN(digests.emplace_back(), Digest::FromHex(item));
  }
  return digests;
}

}  // namespace

Result<std::string> Argument(const Job& job, const std::string& name) {
  const auto it = job.args.find(name);
  if (it == job.args.end())
    return InvalidArgument("job " + job.key + ": no argument '" + name + "'");
  return it->second;
}

Result<MergeArguments> ParseMergeArguments(const Job& job) {
  MergeArguments args;
  STOCKPOT_ASSIGN_OR_RETURN(args.parents, DigestListArgument(job, "parents"));
  STOCKPOT_ASSIGN_OR_RETURN(args.run, Argument(job, "run"));
  STOCKPOT_ASSIGN_OR_RETURN(args.step, IntegerArgument(job, "step"));
  STOCKPOT_ASSIGN_OR_RETURN(args.options.energy, NumberArgument(job, "energy"));
  STOCKPOT_ASSIGN_OR_RETURN(args.options.rank, IntegerArgument(job, "rank"));
  STOCKPOT_RETURN_IF_ERROR(Argument(job, "force").status());
  args.options.force = job.args.at("force") == "true";
  if (!job.args.contains("method")) return args;  // queued before there were several
  STOCKPOT_ASSIGN_OR_RETURN(const std::string method, Argument(job, "method"));
  STOCKPOT_ASSIGN_OR_RETURN(args.options.method, MergeMethodFromName(method));
  STOCKPOT_ASSIGN_OR_RETURN(args.options.weights, NumberListArgument(job, "weights"));
  STOCKPOT_ASSIGN_OR_RETURN(args.options.spectral, NumberArgument(job, "spectral"));
  return args;
}

Result<PublishArguments> ParsePublishArguments(const Job& job) {
  PublishArguments args;
  STOCKPOT_ASSIGN_OR_RETURN(const std::string hex, Argument(job, "artifact"));
  STOCKPOT_ASSIGN_OR_RETURN(args.artifact, Digest::FromHex(hex));
  STOCKPOT_ASSIGN_OR_RETURN(const std::string codec, Argument(job, "codec"));
  STOCKPOT_ASSIGN_OR_RETURN(args.codec, PublishCodecFromName(codec));
  STOCKPOT_ASSIGN_OR_RETURN(args.name, Argument(job, "name"));
  if (job.args.contains("force")) {
    args.force = job.args.at("force");
    STOCKPOT_ASSIGN_OR_RETURN(args.by, Argument(job, "by"));
  }
  const auto integer = [&](const char* name, int64_t& value) -> Status {
    if (!job.args.contains(name)) return OkStatus();
    STOCKPOT_ASSIGN_OR_RETURN(value, IntegerArgument(job, name));
    return OkStatus();
  };
  const auto number = [&](const char* name, double& value) -> Status {
    if (!job.args.contains(name)) return OkStatus();
    STOCKPOT_ASSIGN_OR_RETURN(value, NumberArgument(job, name));
    return OkStatus();
  };
  if (job.args.contains("alpha")) {
    STOCKPOT_ASSIGN_OR_RETURN(args.options.alpha, AlphaMethodFromName(job.args.at("alpha")));
  }
  STOCKPOT_RETURN_IF_ERROR(integer("planes", args.options.planes));
  STOCKPOT_RETURN_IF_ERROR(integer("residual_rank", args.options.residual_rank));
  STOCKPOT_RETURN_IF_ERROR(integer("max_bytes", args.options.max_bytes));
  STOCKPOT_RETURN_IF_ERROR(number("max_share", args.options.max_share));
  STOCKPOT_RETURN_IF_ERROR(number("max_error", args.options.max_error));
  return args;
}

}  // namespace stockpot
