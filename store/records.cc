#include "store/records.h"

#include <array>

namespace stockpot {
namespace {

// The enumerators of every type here count from 0 without gaps, so a name table is an array.
template <typename Enum, size_t n>
Result<Enum> FromName(const std::array<std::string_view, n>& names, std::string_view name,
                      std::string_view what) {
  for (size_t i = 0; i < n; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  std::string known;
  for (std::string_view k : names) known += (known.empty() ? "" : ", ") + std::string(k);
  return InvalidArgument("unknown " + std::string(what) + " '" + std::string(name.substr(0, 64)) +
                         "' (known: " + known + ")");
}

constexpr std::array<std::string_view, 4> kPublishPolicies = {"every", "merges", "best", "request"};
constexpr std::array<std::string_view, 7> kEdgeTypes = {
    "trained_from", "merged_from",  "compressed_from", "adapter_of",
    "pooled_from",  "resumed_from", "state_of"};
constexpr std::array<std::string_view, 6> kJobKinds = {"merge",    "publish", "expire",
                                                       "compress", "score",   "pool"};
constexpr std::array<std::string_view, 4> kJobStates = {"queued", "running", "done", "failed"};
constexpr std::array<std::string_view, 4> kPublishCodecs = {"bitdelta", "dense", "auto", "sparse"};
constexpr std::array<std::string_view, 4> kMergeMethods = {"monosoup", "monosoup-spectral", "mean",
                                                           "model-stock"};
constexpr std::array<std::string_view, 4> kAlphaMethods = {"mean", "closed-form", "distilled",
                                                           "auto"};

}  // namespace

std::string_view PublishPolicyName(PublishPolicy policy) {
  return kPublishPolicies[static_cast<size_t>(policy)];
}
Result<PublishPolicy> PublishPolicyFromName(std::string_view name) {
  return FromName<PublishPolicy>(kPublishPolicies, name, "publish policy");
}

std::string_view EdgeTypeName(EdgeType type) { return kEdgeTypes[static_cast<size_t>(type)]; }
Result<EdgeType> EdgeTypeFromName(std::string_view name) {
  return FromName<EdgeType>(kEdgeTypes, name, "edge type");
}

std::string_view JobKindName(JobKind kind) { return kJobKinds[static_cast<size_t>(kind)]; }
Result<JobKind> JobKindFromName(std::string_view name) {
  return FromName<JobKind>(kJobKinds, name, "job kind");
}

std::string_view JobStateName(JobState state) { return kJobStates[static_cast<size_t>(state)]; }
Result<JobState> JobStateFromName(std::string_view name) {
  return FromName<JobState>(kJobStates, name, "job state");
}

std::string_view PublishCodecName(PublishCodec codec) {
  return kPublishCodecs[static_cast<size_t>(codec)];
}
Result<PublishCodec> PublishCodecFromName(std::string_view name) {
  return FromName<PublishCodec>(kPublishCodecs, name, "codec");
}

std::string_view MergeMethodName(MergeMethod method) {
  return kMergeMethods[static_cast<size_t>(method)];
}
Result<MergeMethod> MergeMethodFromName(std::string_view name) {
  return FromName<MergeMethod>(kMergeMethods, name, "merge method");
}

std::string_view AlphaMethodName(AlphaMethod method) {
  return kAlphaMethods[static_cast<size_t>(method)];
}
Result<AlphaMethod> AlphaMethodFromName(std::string_view name) {
  return FromName<AlphaMethod>(kAlphaMethods, name, "choice of alpha");
}

Digest ProbeSet::digest() const {
  std::string all;
  for (const Text& text : texts) all += std::to_string(text.text.size()) + ":" + text.text;
  return Sha256(all);
}

std::string ProbeAuthor(const Digest& probe) { return "probe " + probe.ShortHex(); }

}  // namespace stockpot
