#include "serve/bin/cli/publish_flags.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace stockpot::cli {
namespace {

// "1000000" or "12%", > 0. False: neither.
bool ParseMaxBytes(const std::string& text, int64_t& bytes, double& share) {
  bytes = 0;
  share = 0;
  if (text.empty()) return false;
  if (text.back() == '%') {
    const std::string number = text.substr(0, text.size() - 1);
    char* end = nullptr;
    share = std::strtod(number.c_str(), &end) / 100;
    return !number.empty() && end == number.c_str() + number.size() && share > 0 && share <= 1;
  }
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, bytes);
  return error == std::errc() && end == last && bytes > 0;
}

}  // namespace

PublishFlags AddPublishFlags(CLI::App& command, const std::string& prefix, const std::string& whose,
                             rpc::PublishOptions& options) {
  PublishFlags flags;
  flags.alpha =
      command
          .add_option("--" + prefix + "alpha", options.alpha,
                      whose + "bitdelta, auto: scales of the rows: mean, or on the run's "
                              "calibration texts closed-form or, in minutes, distilled; auto: "
                              "closed-form for bitdelta where it has such texts, else mean")
          ->check(CLI::IsMember({"mean", "closed-form", "distilled", "auto"}));
  flags.planes = command
                     .add_option("--" + prefix + "planes", options.planes,
                                 whose + "bitdelta: sign planes of a matrix; auto: at most")
                     ->check(CLI::Range(1, 8));
  flags.residual_rank =
      command
          .add_option("--" + prefix + "residual-rank", options.residual_rank,
                      whose + "likewise, rank of what is kept beside the planes; 0: nothing")
          ->check(CLI::Range(0, 1024));
  const auto set_bytes = [&options](const std::string& text) {
    ParseMaxBytes(text, options.max_bytes, options.max_share);
  };
  flags.max_bytes =
      command
          .add_option_function<std::string>(
              "--" + prefix + "max-bytes", set_bytes,
              whose + "auto: size of the variant at most: bytes, or N% of the full model's")
          ->check([](const std::string& text) {
            int64_t bytes = 0;
            double share = 0;
            return ParseMaxBytes(text, bytes, share)
                       ? std::string()
                       : "'" + text + "' is neither a number of bytes nor a share like 12%";
          });
  flags.max_error =
      command
          .add_option("--" + prefix + "max-error", options.max_error,
                      whose + "auto: share of the squared update that may be lost, 0 to 1")
          ->check(CLI::Range(0.0, 1.0));
  return flags;
}

}  // namespace stockpot::cli
