// What may be asked of a publish (store/records.h PublishOptions). Thread promise: pure functions.
#pragma once

#include "kernels/base/status.h"
#include "store/records.h"

namespace stockpot {

bool UsesPlanes(PublishCodec codec);  // has sign planes: bitdelta and auto

// InvalidArgument names the option that is out of range, or that the codec does not use.
Status CheckPublishOptions(PublishCodec codec, const PublishOptions& options);

}  // namespace stockpot
