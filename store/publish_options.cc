#include "store/publish_options.h"

#include <cmath>
#include <string>

#include "store/bitdelta_parts.h"

namespace stockpot {

bool UsesPlanes(PublishCodec codec) {
  return codec == PublishCodec::kBitDelta || codec == PublishCodec::kAuto;
}

Status CheckPublishOptions(PublishCodec codec, const PublishOptions& options) {
  const PublishOptions defaults;
  const bool has_planes = UsesPlanes(codec);
  if (options.planes < 0 || options.planes > kMaxSignPlanes) {
    return InvalidArgument("planes must be 1.." + std::to_string(kMaxSignPlanes) +
                           "; 0: the codec's own number");
  }
  if (options.residual_rank < 0 || options.residual_rank > kMaxResidualRank) {
    return InvalidArgument("residual_rank must be 0.." + std::to_string(kMaxResidualRank));
  }
  if (options.max_bytes < 0) return InvalidArgument("max_bytes is negative: 0 sets no limit");
  if (!(options.max_share >= 0 && options.max_share <= 1)) {
    return InvalidArgument("max_share must be in (0, 1]; 0 sets no limit");
  }
  if (!(options.max_error <= 1) || !std::isfinite(options.max_error)) {
    return InvalidArgument("max_error must be in [0, 1]; a negative one sets no limit");
  }
  const bool uses_planes = options.planes != 0 || options.residual_rank != 0 ||
                           options.alpha != defaults.alpha;
  const bool uses_limits = options.max_bytes != 0 || options.max_share != 0 ||
                           options.max_error != defaults.max_error;
  if ((uses_planes && !has_planes) || (uses_limits && codec != PublishCodec::kAuto)) {
    return InvalidArgument(
        std::string(uses_limits ? "max_bytes, max_share and max_error are options of the codec auto"
                                : "alpha, planes and residual_rank are options of bitdelta and "
                                  "auto") +
        ", not of " + std::string(PublishCodecName(codec)));
  }
  return OkStatus();
}

}  // namespace stockpot
