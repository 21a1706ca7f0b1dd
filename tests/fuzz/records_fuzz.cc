// The JSON records that RocksDB holds, and the rules of names. The first byte says which.
#include <array>
#include <cstring>
#include <functional>
#include <optional>

#include "kernels/base/check.h"
#include "store/names.h"
#include "store/pool_records.h"
#include "store/record_codec.h"
#include "store/retention.h"
#include "tests/fuzz/json_mutator.h"
#include "tests/fuzz/target.h"

namespace stockpot::fuzz {
namespace {

// What a record is once read and written again; nothing: refused.
using Rewrite = std::function<std::optional<std::string>(std::string_view)>;

template <typename T, typename Decode, typename Encode>
Rewrite RewriteOf(Decode decode, Encode encode) {
  return [=](std::string_view text) -> std::optional<std::string> {
    const Result<T> record = decode(text);
    if (!record.ok()) {
      STOCKPOT_CHECK(record.status().code() == StatusCode::kCorruption, record.status().ToString());
      return std::nullopt;
    }
    return encode(*record);
  };
}

// A policy that was read is judged without a fault, whatever it says.
std::string JudgedRetention(const RetentionPolicy& policy) {
  const bool valid = CheckRetention(policy).ok();
  STOCKPOT_CHECK(!valid || (policy.keep_last >= 0 && policy.every >= 0 && policy.grace_ms >= 0));
  RetentionInputs inputs;
  inputs.runs.push_back({.name = "run", .base = Sha256("base")});
  if (valid) inputs.policies["run"] = policy;
  for (int64_t step = 1; step <= 8; ++step) {
    RetentionArtifact artifact{.digest = Sha256(std::to_string(step)), .run = "run", .step = step};
    artifact.has_step = true;
    artifact.metrics = {{"loss", 1.0 / static_cast<double>(step)}};
    inputs.artifacts.push_back(artifact);
  }
  const std::vector<Fate> fates = DecideRetention(inputs);
  STOCKPOT_CHECK(fates.size() == inputs.artifacts.size());
  STOCKPOT_CHECK(fates.back().stays(), "the last good one may not go");
  return EncodeRetention(policy);
}

const Digest& SomeArtifact() {
  static const Digest digest = Sha256("artifact");
  return digest;
}

const std::array<Rewrite, 10>& Rewrites() {
  static const std::array<Rewrite, 10> rewrites = {
      RewriteOf<Run>(DecodeRun, EncodeRun),
      RewriteOf<StepRecord>(DecodeStep, EncodeStep),
      RewriteOf<Alias>([](std::string_view t) { return DecodeAlias("name", t); }, EncodeAlias),
      RewriteOf<Event>(DecodeEvent, EncodeEvent),
      RewriteOf<Job>(DecodeJob, EncodeJob),
      RewriteOf<Eval>(DecodeEval, EncodeEval),
      RewriteOf<RetentionPolicy>(DecodeRetention, JudgedRetention),
      RewriteOf<Pin>([](std::string_view t) { return DecodePin(SomeArtifact(), t); }, EncodePin),
      RewriteOf<Tombstone>([](std::string_view t) { return DecodeTombstone(SomeArtifact(), t); },
                           EncodeTombstone),
      RewriteOf<PoolRecord>(DecodePool, EncodePool),
  };
  return rewrites;
}

// UTF-8 by the table of RFC 3629, another way than names.cc does it.
bool IsUtf8ByDecoding(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const auto lead = static_cast<uint8_t>(text[at]);
    const size_t length = lead < 0x80           ? 1
                          : (lead >> 5) == 0x06 ? 2
                          : (lead >> 4) == 0x0e ? 3
                          : (lead >> 3) == 0x1e ? 4
                                                : 0;
    if (length == 0 || text.size() - at < length) return false;
    uint32_t point = length == 1 ? lead : lead & ((1u << (7 - length)) - 1);
    for (size_t i = 1; i < length; ++i) {
      const auto byte = static_cast<uint8_t>(text[at + i]);
      if ((byte >> 6) != 2) return false;
      point = point << 6 | (byte & 0x3f);
    }
    constexpr std::array<uint32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};
    if (point < kLeast[length] || point > 0x10ffff) return false;
    if (point >= 0xd800 && point <= 0xdfff) return false;
    at += length;
  }
  return true;
}

void CheckNames(std::string_view text) {
  STOCKPOT_CHECK(IsUtf8(text) == IsUtf8ByDecoding(text));
  const bool clean = text.find_first_of(std::string_view("\0\n\x7f\x1f", 4)) == text.npos;
  if (IsPrintableName(text, 256)) STOCKPOT_CHECK(IsUtf8(text) && clean && text.size() <= 256);
  if (IsValidRouteName(text)) STOCKPOT_CHECK(IsPrintableName(text, 256));
  if (IsValidRunName(text)) {
    STOCKPOT_CHECK(IsValidRouteName(text) && text.find_first_of("/@") == text.npos);
    STOCKPOT_CHECK(text[0] != '.' && text[0] != '-');
  }
  if (IsValidFileName(text)) STOCKPOT_CHECK(text.find('/') == text.npos && text != "..");
}

}  // namespace
}  // namespace stockpot::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stockpot;
  using namespace stockpot::fuzz;
  if (size == 0) return 0;
  const std::string_view text = AsText(data + 1, size - 1);
  const size_t which = data[0] % (Rewrites().size() + 1);
  if (which == Rewrites().size()) {
    CheckNames(text);
    return 0;
  }
  // Written once it is a fixed point: keys of later versions and bytes that are no UTF-8 are gone.
  const std::optional<std::string> once = Rewrites()[which](text);
  if (!once) return 0;
  const std::optional<std::string> twice = Rewrites()[which](*once);
  STOCKPOT_CHECK(twice.has_value(), *once);
  STOCKPOT_CHECK(*twice == *once, *once, *twice);
  return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  using namespace stockpot::fuzz;
  if (size < 2 || max_size < 2 || seed % 16 == 0) return LLVMFuzzerMutate(data, size, max_size);
  return 1 + MutateJson(data + 1, size - 1, max_size - 1, seed);
}
