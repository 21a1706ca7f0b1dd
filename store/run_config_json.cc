#include "store/run_config_json.h"

#include <exception>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>

#include "store/json_integer.h"

namespace stockpot {
namespace {

template <typename T>
void Read(const nlohmann::json& in, const char* key, T& value) {
  const auto it = in.find(key);
  if (it == in.end()) return;
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    value = IntegerOrThrow<T>(*it);
  } else {
    it->get_to(value);
  }
}

}  // namespace

nlohmann::json ToJson(const RunConfig& config) {
  return {{"merge_every", config.merge_every},
          {"publish", PublishPolicyName(config.publish)},
          {"best_metric", config.best_metric},
          {"best_is_lower", config.best_is_lower},
          {"merge_energy", config.merge_energy},
          {"merge_rank", config.merge_rank},
          {"compress_history", config.compress_history},
          {"quota_bytes", config.quota_bytes},
          {"merge_method", MergeMethodName(config.merge_method)},
          {"merge_spectral", config.merge_spectral},
          {"publish_codec", PublishCodecName(config.publish_codec)},
          {"publish_alpha", AlphaMethodName(config.publish_options.alpha)},
          {"publish_planes", config.publish_options.planes},
          {"publish_residual_rank", config.publish_options.residual_rank},
          {"publish_max_bytes", config.publish_options.max_bytes},
          {"publish_max_share", config.publish_options.max_share},
          {"publish_max_error", config.publish_options.max_error}};
}

Result<RunConfig> RunConfigFromJson(const nlohmann::json& in) {
  RunConfig config;
  try {
    std::string publish(PublishPolicyName(config.publish));
    Read(in, "publish", publish);
    STOCKPOT_ASSIGN_OR_RETURN(config.publish, PublishPolicyFromName(publish));
    Read(in, "merge_every", config.merge_every);
    Read(in, "best_metric", config.best_metric);
    Read(in, "best_is_lower", config.best_is_lower);
    Read(in, "merge_energy", config.merge_energy);
    Read(in, "merge_rank", config.merge_rank);
    Read(in, "compress_history", config.compress_history);
    Read(in, "quota_bytes", config.quota_bytes);
    std::string method(MergeMethodName(config.merge_method));
    Read(in, "merge_method", method);
    STOCKPOT_ASSIGN_OR_RETURN(config.merge_method, MergeMethodFromName(method));
    Read(in, "merge_spectral", config.merge_spectral);
    std::string codec(PublishCodecName(config.publish_codec));
    Read(in, "publish_codec", codec);
    STOCKPOT_ASSIGN_OR_RETURN(config.publish_codec, PublishCodecFromName(codec));
    PublishOptions& options = config.publish_options;
    std::string alpha(AlphaMethodName(options.alpha));
    Read(in, "publish_alpha", alpha);
    STOCKPOT_ASSIGN_OR_RETURN(options.alpha, AlphaMethodFromName(alpha));
    Read(in, "publish_planes", options.planes);
    Read(in, "publish_residual_rank", options.residual_rank);
    Read(in, "publish_max_bytes", options.max_bytes);
    Read(in, "publish_max_share", options.max_share);
    Read(in, "publish_max_error", options.max_error);
  } catch (const std::exception& error) {
    return InvalidArgument(std::string("configuration of a run: ") + error.what());
  }
  return config;
}

}  // namespace stockpot
