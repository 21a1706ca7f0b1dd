// What may be asked of a publish (store/records.h PublishOptions). Thread promise: pure functions.
#pragma once

#include "kernels/base/status.h"
#include "store/records.h"

namespace stockpot {

// InvalidArgument names the option that is out of range, or that the codec does not use.
Status CheckPublishOptions(PublishCodec codec, const PublishOptions& options);

}  // namespace stockpot
