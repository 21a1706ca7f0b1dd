// The keys of the catalogue (store/README.md). Text prefixes, raw digests, big-endian numbers, so
// that byte order is the order of listing. Thread promise: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "store/records.h"

namespace stockpot::catalog_keys {

inline constexpr std::string_view kFormat = "meta/format";
inline constexpr std::string_view kNextPack = "meta/next_pack";
inline constexpr std::string_view kLastJob = "meta/last_job";
inline constexpr std::string_view kStoreId = "meta/store";             // of a store and its backups
inline constexpr std::string_view kBackupEvent = "meta/backup_event";  // only in a backup
inline constexpr std::string_view kArtifacts = "artifact/";            // + digest -> kind
inline constexpr std::string_view kRuns = "run/";                      // + name
inline constexpr std::string_view kAliases = "alias/";                 // + name
inline constexpr std::string_view kRoutes = "route/";                  // + name
inline constexpr std::string_view kJobs = "job/";                      // + key
inline constexpr std::string_view kOpenJobs = "open/";                 // + u64 sequence -> job's key
inline constexpr std::string_view kOpenJobsKept = "meta/open_jobs";    // "1": kOpenJobs is whole
inline constexpr std::string_view kDrafts = "draft/";                  // + job's key
inline constexpr std::string_view kRetention = "retention/";           // + run
inline constexpr std::string_view kProbes = "probe/";                  // + run
inline constexpr std::string_view kCalibrations = "calibration/";      // + run
inline constexpr std::string_view kGates = "gate/";                    // + run
inline constexpr std::string_view kPools = "pool/";                    // + name
inline constexpr std::string_view kHistory = "history/";               // + digest -> when
inline constexpr std::string_view kPins = "pin/";                      // + digest
inline constexpr std::string_view kDeleted = "deleted/";               // + digest
inline constexpr std::string_view kPurged = "purged/";                 // + digest -> when

inline constexpr std::string_view kResumes = "resume/";  // + run 0 key

inline std::string BigEndian(uint64_t value) {
  std::string out(8, '\0');
  for (int i = 0; i < 8; ++i)
    out[static_cast<size_t>(i)] = static_cast<char>(value >> (56 - 8 * i));
  return out;
}

// 0 where there is no key of 8 bytes.
inline int64_t ParseBigEndian(const std::optional<std::string>& key) {
  uint64_t value = 0;
  if (!key || key->size() != 8) return 0;
  for (const char c : *key) value = value << 8 | static_cast<uint8_t>(c);
  return static_cast<int64_t>(value);
}

inline std::string Named(std::string_view prefix, std::string_view name) {
  return std::string(prefix) + std::string(name);
}
inline std::string OpenJob(int64_t sequence) {
  return Named(kOpenJobs, BigEndian(static_cast<uint64_t>(sequence)));
}
inline std::string Artifact(const Digest& digest) { return Named(kArtifacts, digest.raw()); }

inline std::string PinOf(const Digest& digest) { return Named(kPins, digest.raw()); }
inline std::string DeletedOf(const Digest& digest) { return Named(kDeleted, digest.raw()); }
inline std::string HistoryOf(const Digest& digest) { return Named(kHistory, digest.raw()); }
inline std::string PurgedOf(const Digest& digest) { return Named(kPurged, digest.raw()); }

// Names hold no zero byte (store/names.h), so it can end them.
inline std::string StepsOf(std::string_view run) { return "step/" + std::string(run) + '\0'; }
inline std::string ResumesOf(std::string_view run) { return Named(kResumes, run) + '\0'; }
inline std::string Resume(std::string_view run, std::string_view key) {
  return ResumesOf(run) + std::string(key);
}
// `group`: of a state; else empty.
inline std::string Step(std::string_view run, int64_t step, ArtifactKind kind,
                        std::string_view group = "") {
  return StepsOf(run) + BigEndian(static_cast<uint64_t>(step)) + static_cast<char>(kind) +
         std::string(group);
}

// Every edge twice: from the child up, from the parent down.
inline std::string ParentsOf(const Digest& child) { return Named("up/", child.raw()); }
inline std::string ChildrenOf(const Digest& parent) { return Named("down/", parent.raw()); }
inline std::string Up(const Edge& e) {
  return ParentsOf(e.child) + static_cast<char>(e.type) + std::string(e.parent.raw());
}
inline std::string Down(const Edge& e) {
  return ChildrenOf(e.parent) + static_cast<char>(e.type) + std::string(e.child.raw());
}

inline std::string EvalsOf(const Digest& artifact) { return Named("eval/", artifact.raw()); }
inline std::string EvalKey(const Eval& e) {
  return EvalsOf(e.artifact) + e.task + '\0' + e.metric + '\0' +
         BigEndian(static_cast<uint64_t>(e.time_ms)) + e.by;
}

}  // namespace stockpot::catalog_keys
