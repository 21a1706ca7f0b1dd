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

// The commit of an adapter (Ingest::CommitShard).
Result<CommitReply> CommitAdapter(CheckpointStore& store, const SessionRequest& request,
                                  const ShardCommit& shard);

// The commit of a variant that was made elsewhere (Ingest::CommitShard).
Result<CommitReply> CommitVariant(CheckpointStore& store, const SessionRequest& request,
                                  const ShardCommit& shard);

// The digest of a base by its name or digest. NotFound; InvalidArgument: it is no base.
Result<Digest> ResolveBase(const CheckpointStore& store, const std::string& name);

}  // namespace stockpot
