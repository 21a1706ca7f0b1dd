// An artifact of a daemon as a TensorSource: what `stockpot export` reads.
#pragma once

#include <memory>
#include <string>

#include "store/tensor_source.h"
#include "thrift/client.h"

namespace stockpot {

// The tensors of `id` by their LOGICAL values, as OpenArtifact (store/artifact_source.h) gives them
// on the other side: codec raw as stored, codec base from the base, codec bitdelta decoded (base +
// alpha * sign in float32, rounded once to the tensor's dtype). Every chunk is checked against its
// digest. Files that the artifact lacks come from its base. `client` must outlive the source.
// Thread promise: one thread at a time. Memory: the bytes asked for and a few chunks.
Result<std::unique_ptr<TensorSource>> OpenRemoteArtifact(Client& client, const std::string& id);

}  // namespace stockpot
