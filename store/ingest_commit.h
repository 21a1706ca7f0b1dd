// What the commit of a session makes of it. Private to store/ingest.
#pragma once

#include "store/checkpoint_store.h"
#include "store/ingest.h"

namespace stockpot {

// Builds the artifact out of what all ranks sent (ShardSet::Assemble) and everything that follows
// from it, and applies it as one commit. `request` is one of the ranks'.
// REQUIRES: no other commit of the same run runs at the same time.
Result<CommitReply> CommitSession(CheckpointStore& store, const SessionRequest& request,
                                  const ShardCommit& shard);

}  // namespace stockpot
