#include "store/shard_set.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "store/names.h"
#include "store/tensor_source.h"

namespace stockpot {
namespace {

constexpr size_t kRanksInText = 8;
constexpr int64_t kEntryMemoryBytes = 640;  // of an entry, its box and its part, without chunks

std::string Quoted(std::string_view name) { return "tensor '" + std::string(name) + "'"; }

// What an entry of a shard holds, and the bytes of it. REQUIRES: no alias.
TensorBox BoxOf(const TensorEntry& entry) {
  return entry.pieces.empty() ? WholeBox(entry.shape) : entry.pieces[0];
}
const Part& PartOf(const TensorEntry& entry) { return entry.parts.begin()->second; }

Status CheckEntry(const TensorEntry& entry) {
  STOCKPOT_RETURN_IF_ERROR(CheckTensorShape(entry.dtype, entry.shape));
  if (entry.codec != Codec::kRaw || !entry.content.IsZero()) {
    return InvalidArgument("only raw tensors are taken, not codec " +
                           std::string(CodecName(entry.codec)));
  }
  if (!entry.alias_of.empty()) {
    if (entry.parts.empty() && entry.pieces.empty()) return OkStatus();
    return InvalidArgument("an alias carries no data");
  }
  if (entry.pieces.size() > 1) return InvalidArgument("an entry has one piece");
  if (!entry.pieces.empty()) STOCKPOT_RETURN_IF_ERROR(CheckBox(entry.shape, entry.pieces[0]));
  const std::string role = entry.pieces.empty() ? "data" : PieceRole(0);
  if (entry.parts.size() != 1 || entry.parts.begin()->first != role) {
    return InvalidArgument("its bytes belong into one part '" + role + "'");
  }
  const Part& part = PartOf(entry);
  const int64_t bytes = BoxOf(entry).elements() * DTypeSize(entry.dtype);
  if (part.bytes != bytes) {
    return InvalidArgument("part '" + role + "' has " + std::to_string(part.bytes) +
                           " bytes, shape and dtype make " + std::to_string(bytes));
  }
  if (static_cast<int64_t>(part.chunks.size()) == ChunkCount(bytes)) return OkStatus();
  return InvalidArgument(std::to_string(bytes) + " bytes are " + std::to_string(ChunkCount(bytes)) +
                         " chunks, not " + std::to_string(part.chunks.size()));
}

// One rank's entry of a tensor.
struct Claim {
  const TensorEntry* entry = nullptr;
  int32_t rank = 0;
};

std::string OfRank(const Claim& claim) { return "rank " + std::to_string(claim.rank); }

// dtype, shape and tie: the same in all claims. One rank names a tensor once, unless in pieces:
// also where a second entry would hide, as that of an alias or of an empty tensor does.
// REQUIRES: sorted by rank.
Status CheckAgreement(std::span<const Claim> claims) {
  for (size_t i = 1; i < claims.size(); ++i) {
    const bool in_pieces = !claims[i - 1].entry->pieces.empty() && !claims[i].entry->pieces.empty();
    if (claims[i - 1].rank != claims[i].rank || in_pieces) continue;
    return InvalidArgument(OfRank(claims[i]) + " names it twice, and not in pieces");
  }
  const auto differ = [&](const Claim& other, const std::string& what, const std::string& of_first,
                          const std::string& of_other) {
    return InvalidArgument(what + " is " + of_first + " on " + OfRank(claims[0]) + " and " +
                           of_other + " on " + OfRank(other));
  };
  const auto tie = [](const TensorEntry& entry) {
    return entry.alias_of.empty() ? std::string("none") : "'" + entry.alias_of + "'";
  };
  const TensorEntry& first = *claims[0].entry;
  for (const Claim& claim : claims) {
    const TensorEntry& entry = *claim.entry;
    if (entry.dtype != first.dtype) {
      return differ(claim, "the dtype", std::string(DTypeName(first.dtype)),
                    std::string(DTypeName(entry.dtype)));
    }
    if (entry.shape != first.shape) {
      return differ(claim, "the whole shape", ShapeText(first.shape), ShapeText(entry.shape));
    }
    if (entry.alias_of != first.alias_of) {
      return differ(claim, "the tensor it is tied to", tie(first), tie(entry));
    }
  }
  return OkStatus();
}

// A claim with its box.
struct Held {
  TensorBox box;
  Claim claim;
};

// What is there of a tensor, in the one order of pieces; replicas once, elements without bytes not
// at all.
Result<std::vector<Held>> DistinctPieces(std::span<const Claim> claims) {
  std::vector<Held> pieces;
  for (const Claim& claim : claims) {
    TensorBox box = BoxOf(*claim.entry);
    if (box.elements() > 0) pieces.push_back({std::move(box), claim});
  }
  std::sort(pieces.begin(), pieces.end(), [](const Held& a, const Held& b) {
    return std::tie(a.box, a.claim.rank) < std::tie(b.box, b.claim.rank);
  });
  for (size_t i = 1; i < pieces.size(); ++i) {
    const Held& a = pieces[i - 1];
    const Held& b = pieces[i];
    if (a.box != b.box) continue;
    if (a.claim.rank == b.claim.rank) {
      return InvalidArgument(OfRank(a.claim) + " sent " + BoxText(a.box) + " twice");
    }
    if (PartOf(*a.claim.entry).chunks != PartOf(*b.claim.entry).chunks) {
      return InvalidArgument(OfRank(a.claim) + " and " + OfRank(b.claim) +
                             " hold different bytes of " + BoxText(a.box) +
                             ": replicas must be the same");
    }
  }
  pieces.erase(std::unique(pieces.begin(), pieces.end(),
                           [](const Held& a, const Held& b) { return a.box == b.box; }),
               pieces.end());
  return pieces;
}

std::string FaultText(const TensorEntry& tensor, const CoverFault& fault,
                      std::span<const Held> pieces) {
  const std::string range = BoxText(fault.range) + " of " + ShapeText(tensor.shape);
  if (fault.is_overlap) {
    const auto piece = [&](size_t i) {
      return OfRank(pieces[i].claim) + " in its " + BoxText(pieces[i].box);
    };
    return range + " is held twice: by " + piece(fault.first) + " and by " + piece(fault.second);
  }
  std::set<int32_t> ranks;
  for (const Held& piece : pieces) ranks.insert(piece.claim.rank);
  return "no rank holds " + range + "; its pieces came from " +
         (ranks.empty() ? "nobody" : RanksText({ranks.begin(), ranks.end()}));
}

class Assembler {
 public:
  Result<TensorEntry> Tensor(std::span<const Claim> claims) {
    STOCKPOT_RETURN_IF_ERROR(CheckAgreement(claims));
    const TensorEntry& first = *claims[0].entry;
    if (!first.alias_of.empty()) return first;
    TensorEntry tensor{.name = first.name, .dtype = first.dtype, .shape = first.shape};
    STOCKPOT_ASSIGN_OR_RETURN(const std::vector<Held> held, DistinctPieces(claims));
    if (tensor.elements() == 0) {
      tensor.parts["data"] = {};
      return tensor;
    }
    for (const Held& piece : held) tensor.pieces.push_back(piece.box);
    STOCKPOT_RETURN_IF_ERROR(CountWork(tensor));
    if (const auto fault = FindCoverFault(tensor.shape, tensor.pieces)) {
      return InvalidArgument(FaultText(tensor, *fault, held));
    }
    if (held.size() == 1) {
      tensor.pieces.clear();
      tensor.parts["data"] = PartOf(*held[0].claim.entry);
      return tensor;
    }
    for (size_t i = 0; i < held.size(); ++i) {
      tensor.parts[PieceRole(i)] = PartOf(*held[i].claim.entry);
    }
    return tensor;
  }

 private:
  // The manifest's own limits, before the proof costs anything.
  Status CountWork(const TensorEntry& tensor) {
    const auto pieces = static_cast<int64_t>(tensor.pieces.size());
    pieces_ += pieces;
    corners_ += CoverCorners(tensor.shape, tensor.pieces);
    if (pieces <= kMaxPieces && pieces_ <= kMaxManifestPieces && corners_ <= kMaxCorners) {
      return OkStatus();
    }
    return InvalidArgument(std::to_string(pieces) + " pieces of it, " + std::to_string(pieces_) +
                           " so far: too many, or cut in too many dimensions");
  }

  int64_t pieces_ = 0;
  int64_t corners_ = 0;
};

Status CheckEntries(const std::vector<TensorEntry>& entries) {
  for (size_t i = 0; i < entries.size(); ++i) {
    const TensorEntry& entry = entries[i];
    if (!IsPrintableName(entry.name, kMaxNameBytes)) {
      return InvalidArgument("the name of tensor " + std::to_string(i) +
                             " is empty, over 512 bytes, or not printable UTF-8");
    }
    const Status status = CheckEntry(entry);
    if (!status.ok()) return status.WithContext(Quoted(entry.name));
  }
  return OkStatus();
}

void AddLines(const std::string& kind, const std::vector<TensorEntry>& entries,
              std::vector<std::string>& lines) {
  for (const TensorEntry& entry : entries) {
    std::string line = kind + '\0' + entry.name + '\0' + std::string(DTypeName(entry.dtype)) +
                       ShapeText(entry.shape) + entry.alias_of + '\0';
    if (entry.alias_of.empty()) {
      line += BoxText(BoxOf(entry)) + std::string(PartOf(entry).digest().raw());
    }
    lines.push_back(std::move(line));
  }
}

int64_t MemoryBytes(const std::vector<TensorEntry>& entries) {
  int64_t bytes = 0;
  for (const TensorEntry& entry : entries) {
    bytes += kEntryMemoryBytes + static_cast<int64_t>(entry.name.size() + entry.alias_of.size());
    for (const auto& [role, part] : entry.parts) {
      bytes += static_cast<int64_t>(part.chunks.size() * sizeof(Digest));
    }
  }
  return bytes;
}

// What all ranks say about the tensors of one group, put together.
Result<std::vector<TensorEntry>> AssembleGroup(std::vector<Claim> claims) {
  std::sort(claims.begin(), claims.end(), [](const Claim& a, const Claim& b) {
    return std::tie(a.entry->name, a.rank) < std::tie(b.entry->name, b.rank);
  });
  std::vector<TensorEntry> tensors;
  Assembler assembler;
  for (size_t begin = 0; begin < claims.size();) {
    const std::string& name = claims[begin].entry->name;
    size_t end = begin + 1;
    while (end < claims.size() && claims[end].entry->name == name) ++end;
    Result<TensorEntry> tensor = assembler.Tensor(std::span(claims).subspan(begin, end - begin));
    if (!tensor.ok()) return tensor.status().WithContext(Quoted(name));
    tensors.push_back(*std::move(tensor));
    begin = end;
  }
  return tensors;
}

}  // namespace

Status CheckShard(const ShardCommit& shard) {
  STOCKPOT_RETURN_IF_ERROR(CheckEntries(shard.tensors));
  for (const auto& [group, entries] : shard.states) {
    STOCKPOT_RETURN_IF_ERROR(
        CheckEntries(entries).WithContext("group '" + group.substr(0, 64) + "'"));
  }
  return OkStatus();
}

Digest ShardDigest(const ShardCommit& shard) {
  std::vector<std::string> lines;
  AddLines("tensor", shard.tensors, lines);
  for (const auto& [group, entries] : shard.states) AddLines("state " + group, entries, lines);
  for (const auto& [name, part] : shard.files) {
    lines.push_back("file " + name + '\0' + std::string(part.digest().raw()));
  }
  std::sort(lines.begin(), lines.end());
  Sha256Stream hash;
  for (const std::string& line : lines) {
    const uint64_t size = line.size();
    hash.Update(std::as_bytes(std::span(&size, 1)));
    hash.Update(std::as_bytes(std::span(line)));
  }
  return hash.Finish();
}

ShardSet::ShardSet(int32_t world) : shards_(static_cast<size_t>(world)) {}

const Digest* ShardSet::DigestOf(int32_t rank) const {
  const auto& shard = shards_[static_cast<size_t>(rank)];
  return shard == nullptr ? nullptr : &shard->digest;
}

void ShardSet::Add(int32_t rank, const Digest& digest, ShardCommit shard) {
  int64_t bytes = MemoryBytes(shard.tensors);
  for (const auto& [group, entries] : shard.states) bytes += MemoryBytes(entries);
  for (const auto& [name, part] : shard.files) {
    bytes += kEntryMemoryBytes + static_cast<int64_t>(part.chunks.size() * sizeof(Digest));
  }
  memory_bytes_ += bytes;
  ++committed_;
  shards_[static_cast<size_t>(rank)] =
      std::make_unique<const Shard>(Shard{digest, std::move(shard), bytes});
}

void ShardSet::Remove(int32_t rank) {
  auto& shard = shards_[static_cast<size_t>(rank)];
  if (shard == nullptr) return;
  memory_bytes_ -= shard->memory_bytes;
  --committed_;
  shard.reset();
}

std::vector<int32_t> ShardSet::Missing() const {
  std::vector<int32_t> missing;
  for (int32_t rank = 0; rank < world(); ++rank) {
    if (DigestOf(rank) == nullptr) missing.push_back(rank);
  }
  return missing;
}

Result<ShardCommit> ShardSet::Assemble() const {
  std::vector<Claim> weights;
  std::map<std::string, std::vector<Claim>> states;
  ShardCommit all;
  std::map<std::string, int32_t> file_ranks;
  for (int32_t rank = 0; rank < world(); ++rank) {
    const ShardCommit& shard = shards_[static_cast<size_t>(rank)]->content;
    for (const TensorEntry& entry : shard.tensors) weights.push_back({&entry, rank});
    for (const auto& [group, entries] : shard.states) {
      std::vector<Claim>& claims = states[group];  // also where a rank has none of it
      for (const TensorEntry& entry : entries) claims.push_back({&entry, rank});
    }
    all.metrics.insert(shard.metrics.begin(), shard.metrics.end());  // the lowest rank's stays
    for (const auto& [name, part] : shard.files) {
      const auto [file, is_new] = all.files.emplace(name, part);
      if (is_new) file_ranks[name] = rank;
      if (file->second.chunks == part.chunks && file->second.bytes == part.bytes) continue;
      return InvalidArgument("file " + name + " differs between rank " +
                             std::to_string(file_ranks[name]) + " and rank " +
                             std::to_string(rank));
    }
  }
  STOCKPOT_ASSIGN_OR_RETURN(all.tensors, AssembleGroup(std::move(weights)));
  for (auto& [group, claims] : states) {
    Result<std::vector<TensorEntry>> tensors = AssembleGroup(std::move(claims));
    if (!tensors.ok()) return tensors.status().WithContext("group '" + group + "'");
    all.states[group] = *std::move(tensors);
  }
  return all;
}

std::string RanksText(const std::vector<int32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  const size_t shown = std::min(ranks.size(), kRanksInText);
  for (size_t i = 0; i < shown; ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  if (shown < ranks.size()) text += " and " + std::to_string(ranks.size() - shown) + " more";
  return text;
}

}  // namespace stockpot
