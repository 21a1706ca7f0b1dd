// Every limit of the remote interface, in one place, with its unit.
#pragma once

#include <cstdint>

#include "store/digest.h"
#include "store/manifest.h"

namespace stockpot::rpc_limits {

// Both sides.
inline constexpr uint32_t kBufferBytes = uint32_t{64} << 10;  // of a connection, each direction
inline constexpr uint32_t kUnusedBufferBytes = 16;            // of a direction that is not used
inline constexpr int32_t kStringPieceBytes = 256 << 10;  // a long string grows by it as it arrives
inline constexpr int32_t kMaxMessageBytes = 512 << 20;   // of one call or one reply
inline constexpr int32_t kMaxContainerElements = 262'144;  // of one list or map
inline constexpr int32_t kRecursionDepth = 16;             // nested structs

// What the server takes. The only long string of a call is a chunk.
inline constexpr int32_t kServerMaxStringBytes = int32_t{kChunkBytes};
inline constexpr int64_t kMaxConnections = 256;        // at once, each listener
inline constexpr int64_t kConnectionsOfARank = 3;      // that a hook opens if it is not told
inline constexpr int kMessageTimeoutMs = 30'000;       // a call that has begun, a first call
inline constexpr int64_t kMinBytesPerMs = 256;         // a call that lasts longer than that time
inline constexpr int kIdleTimeoutMs = 15 * 60 * 1000;  // between two calls of a connection
inline constexpr int kServerSendTimeoutMs = 30'000;    // a client that does not read
inline constexpr int32_t kMaxWatchMs = 30'000;         // ControlService.watch
inline constexpr int32_t kMaxWatchEvents = 10'000;
inline constexpr int64_t kMaxRequestStringBytes = 4096;  // names, ids, tags of a call
inline constexpr int64_t kMaxMergeParents = 64;

// Memory of calls that are not answered yet. Each connection may hold kFreeCallBytes; what a call
// takes beyond it (a large commit, or a list that is announced long) comes out of one account of
// the server. So hostile clients cost at most kMaxConnections * kFreeCallBytes + kAllCallsBytes.
inline constexpr int64_t kFreeCallBytes = int64_t{6} << 20;
inline constexpr int64_t kAllCallsBytes = int64_t{256} << 20;
// What Thrift allocates for an announced element before it arrives, at most.
inline constexpr int64_t kStructElementBytes = 512;
inline constexpr int64_t kStringElementBytes = 64;
inline constexpr int64_t kOtherElementBytes = 24;

// Who may call.
inline constexpr int32_t kStrangerStringBytes = 4096;  // before the token was right
inline constexpr int32_t kStrangerElements = 64;
inline constexpr int64_t kMinTokenBytes = 16;
inline constexpr int64_t kMaxTokenBytes = 4096;
static_assert(kMaxTokenBytes <= kStrangerStringBytes);

// What the client takes. The longest reply is a manifest.
inline constexpr int32_t kClientMaxStringBytes = int32_t{kMaxManifestBytes};
inline constexpr int64_t kMaxChunksInFlight = 16;  // put_chunk or fetch_chunk
inline constexpr int64_t kMaxUploadConnections = 8;

static_assert(kServerMaxStringBytes + 2 * kStringPieceBytes < kFreeCallBytes, "a chunk is free");
static_assert(kServerMaxStringBytes < kMaxMessageBytes);
static_assert(kClientMaxStringBytes < kMaxMessageBytes);
static_assert(kMaxTensors <= kMaxContainerElements);
static_assert(kMaxTensorBytes / kChunkBytes > kMaxContainerElements,
              "a tensor over 1 TiB would need a longer list than the wire allows: it is refused");

}  // namespace stockpot::rpc_limits
