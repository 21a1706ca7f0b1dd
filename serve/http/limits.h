// Limits of the HTTP side, with their units. Those an operator may change are in HttpServerOptions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stockpot {

// --- transport ---
inline constexpr uint32_t kMaxHeaderBytes = 16 << 10;
inline constexpr uint64_t kMaxBodyBytes = 16 << 20;            // over it: 413
inline constexpr int64_t kMaxBodiesInFlightBytes = 256 << 20;  // of all connections; over it: 503
inline constexpr int64_t kMaxUnsentBytes = 1 << 20;            // of one stream; over it: disconnect
inline constexpr size_t kMaxPipelinedBytes = 64 << 10;         // read ahead while a reply is made
inline constexpr int kRefusedConnections = 64;                 // that may be told 503 at once
inline constexpr int kLingerMs = 2'000;                        // reads on after an early refusal

// --- requests ---
inline constexpr int kMaxJsonDepth = 64;
inline constexpr int64_t kMaxJsonValues = 2'000'000;
// Objects that keep the client's key order are searched one key after another.
inline constexpr int64_t kMaxJsonKeys = 65'536;
inline constexpr int64_t kMaxJsonKeysPerObject = 4'096;
inline constexpr int64_t kMaxSequencesPerRequest = 512;  // prompts x n
inline constexpr int64_t kMaxChoices = 128;              // n
inline constexpr int64_t kMaxLogprobs = 20;
inline constexpr size_t kMaxStopStrings = 64;
inline constexpr size_t kMaxStopBytes = 1024;  // of one stop string
inline constexpr size_t kMaxStopTokens = 1024;
inline constexpr size_t kMaxLogitBias = 2048;
inline constexpr size_t kMaxMessages = 4096;
inline constexpr size_t kMaxModelNameBytes = 512;

static_assert(kMaxBodiesInFlightBytes >= static_cast<int64_t>(kMaxBodyBytes));

}  // namespace stockpot
