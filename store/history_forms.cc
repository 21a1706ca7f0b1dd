// One chunk and its forms: restoring it from a chain of differences, and giving it another form.
#include <cstring>

#include "store/checkpoint_store_impl.h"
#include "store/crc32c.h"
#include "store/history.h"
#include "store/history_codec.h"

namespace stockpot {
namespace {

// Chains are kept shorter (kMaxHistoryDepth); more is damage, a circle perhaps.
constexpr int kMaxChainReads = 4 * kMaxHistoryDepth;
constexpr double kMinGain = 0.05;  // share of a chunk

}  // namespace

Status CheckpointStore::Impl::ReadForm(const Digest& digest, ChunkLocation& location,
                                       std::vector<std::byte>& stored) const {
  for (;;) {
    stored.resize(location.is_whole() ? 0 : location.stored_length());
    if (location.is_whole()) return OkStatus();
    Status status = writer->WaitUntilReadable(digest);
    if (status.ok()) status = reader->ReadStored(digest, location, stored);
    if (status.ok()) return status;
    // Its pack may have been compacted, or its form changed, between the look-up and the read.
    STOCKPOT_ASSIGN_OR_RETURN(const auto now, FindChunk(digest));
    if (!now || now->pack == location.pack) return status;
    location = *now;
  }
}

// XOR does not mind the order: the links are taken from the chunk to the whole one at the end of
// its chain. Other threads may give a link another form meanwhile; its bytes stay the same.
Status CheckpointStore::Impl::RestoreChunk(const Digest& digest, const ChunkLocation& location,
                                           std::span<std::byte> out) const {
  std::memset(out.data(), 0, out.size());
  const auto fail = [&](const Status& status, int depth) {
    if (depth == 0) return status;
    return status.WithContext("chunk " + digest.Hex() + ", a difference to it");
  };
  std::vector<std::byte> stored;
  Digest link = digest;
  ChunkLocation at = location;
  for (int depth = 0;; ++depth) {
    if (depth == kMaxChainReads) {
      return Corruption("chunk " + digest.Hex() + " is a difference to a difference, " +
                        std::to_string(depth) + " times over");
    }
    if (at.length != out.size()) {
      return fail(Corruption(DescribeChunk(link, at) + " has another length"), depth);
    }
    STOCKPOT_RETURN_IF_ERROR(fail(ReadForm(link, at, stored), depth));
    if (at.is_whole()) {
      stored.resize(out.size());
      STOCKPOT_RETURN_IF_ERROR(fail(ReadChunkInto(link, at, stored, false), depth));
      XorInto(stored, out);
      break;
    }
    const Status decoded = DecodeHistory(stored, at.parent, out);
    if (!decoded.ok()) return fail(decoded.WithContext(DescribeChunk(link, at)), depth);
    if (at.form == ChunkForm::kPlanes) break;
    link = at.parent;
    STOCKPOT_ASSIGN_OR_RETURN(const auto parent, FindChunk(link));
    if (!parent) {
      return Corruption(DescribeChunk(digest, location) + ": chunk " + link.Hex() +
                        ", which it is a difference to, is not stored");
    }
    at = *parent;
  }
  if (Sha256(out) == digest) return OkStatus();
  return Corruption(DescribeChunk(digest, location) + ": SHA-256 does not match");
}

Result<ChunkLocation> CheckpointStore::Impl::AppendHistory(const Digest& digest,
                                                           const ChunkLocation& location,
                                                           const Digest& parent,
                                                           int element_bytes) {
  std::vector<std::byte> chunk(location.length);
  STOCKPOT_RETURN_IF_ERROR(ReadChunkInto(digest, location, chunk, false));
  std::vector<std::byte> before;
  if (!parent.IsZero()) {
    STOCKPOT_ASSIGN_OR_RETURN(const auto found, FindChunk(parent));
    if (found && found->length == location.length) {
      before.resize(found->length);
      STOCKPOT_RETURN_IF_ERROR(ReadChunkInto(parent, *found, before, false));
      if (!DeltaPays(chunk, before, element_bytes)) before.clear();
    }
  }
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(options.failpoints, "history.read"));
  std::vector<std::byte> stored =
      EncodeHistory(chunk, before, before.empty() ? Digest{} : parent, element_bytes);
  ChunkLocation form{.length = location.length};
  const double most = (1 - kMinGain) * static_cast<double>(chunk.size());
  if (static_cast<double>(stored.size()) > most) {
    stored = std::move(chunk);
  } else {
    form.form = before.empty() ? ChunkForm::kPlanes : ChunkForm::kDelta;
    form.form_bytes = static_cast<uint32_t>(stored.size());
    if (!before.empty()) form.parent = parent;
  }
  if (form.is_whole() && location.is_whole()) return location;  // as it is already
  // What replaces good bytes has been read back before.
  if (!form.is_whole()) {
    std::vector<std::byte> back = before.empty() ? std::vector<std::byte>(chunk.size()) : before;
    STOCKPOT_RETURN_IF_ERROR(DecodeHistory(stored, form.parent, back));
    if (back != chunk) return Internal("chunk " + digest.Hex() + " does not survive compression");
  }
  form.crc = Crc32c(stored);
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(options.failpoints, "history.encoded"));
  STOCKPOT_RETURN_IF_ERROR(CheckReserve(stored.size()));
  STOCKPOT_RETURN_IF_ERROR(writer->AppendForm(digest, stored, form));
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(options.failpoints, "history.appended"));
  return form;
}

Status CheckpointStore::Impl::AppendWhole(const Digest& digest, const ChunkLocation& location) {
  std::vector<std::byte> chunk(location.length);
  STOCKPOT_RETURN_IF_ERROR(ReadChunkInto(digest, location, chunk, false));
  STOCKPOT_RETURN_IF_ERROR(CheckReserve(chunk.size()));
  STOCKPOT_RETURN_IF_ERROR(ReachFailpoint(options.failpoints, "history.whole"));
  return writer->Append(digest, chunk, Crc32c(chunk));
}

}  // namespace stockpot
