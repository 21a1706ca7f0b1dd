#include "store/bitdelta_parts.h"

#include <algorithm>

#include "kernels/bitdelta/signs.h"

namespace stockpot {
namespace {

constexpr int64_t kFactorBytes = 2;  // of one BF16

std::string Role(const char* name, int64_t plane) {
  return plane == 0 ? name : name + ("/" + std::to_string(plane));
}

// A part of this role, of exactly this size.
Status CheckSize(const TensorEntry& entry, const std::string& role, int64_t bytes) {
  const auto it = entry.parts.find(role);
  if (it == entry.parts.end()) return InvalidArgument("part '" + role + "' is missing");
  if (it->second.bytes == bytes) return OkStatus();
  return InvalidArgument("part '" + role + "' has " + std::to_string(it->second.bytes) +
                         " bytes, shape and dtype make " + std::to_string(bytes));
}

}  // namespace

std::string SignsRole(int64_t plane) { return Role("signs", plane); }
std::string AlphaRole(int64_t plane) { return Role("alpha", plane); }

int64_t SignPlanes(const TensorEntry& entry) {
  int64_t planes = 0;
  while (planes < kMaxSignPlanes && entry.parts.contains(SignsRole(planes))) ++planes;
  return planes;
}

int64_t ResidualRank(const TensorEntry& entry) {
  const auto a = entry.parts.find(kResidualA);
  if (a == entry.parts.end() || entry.shape.size() != 2 || entry.shape[1] == 0) return 0;
  return a->second.bytes / (kFactorBytes * entry.shape[1]);
}

int64_t BitDeltaBytes(int64_t d_out, int64_t d_in, int64_t planes, int64_t rank) {
  return planes * (SignBytes(d_out, d_in) + 4 * d_out) + rank * kFactorBytes * (d_out + d_in);
}

Status CheckBitDeltaRoles(const TensorEntry& entry) {
  const int64_t d_out = entry.shape[0], d_in = entry.shape[1];
  const int64_t planes = std::max<int64_t>(1, SignPlanes(entry));
  for (int64_t plane = 0; plane < planes; ++plane) {
    STOCKPOT_RETURN_IF_ERROR(CheckSize(entry, SignsRole(plane), SignBytes(d_out, d_in)));
    STOCKPOT_RETURN_IF_ERROR(CheckSize(entry, AlphaRole(plane), 4 * d_out));
  }
  const bool has_residual = entry.parts.contains(kResidualA) || entry.parts.contains(kResidualB);
  if (has_residual) {
    const int64_t rank = ResidualRank(entry);
    if (rank < 1 || rank > kMaxResidualRank || rank > std::min(d_out, d_in)) {
      return InvalidArgument("a residual of rank " + std::to_string(rank) + ": 1.." +
                             std::to_string(kMaxResidualRank) + ", and no side's size more");
    }
    STOCKPOT_RETURN_IF_ERROR(CheckSize(entry, kResidualA, kFactorBytes * rank * d_in));
    STOCKPOT_RETURN_IF_ERROR(CheckSize(entry, kResidualB, kFactorBytes * rank * d_out));
  }
  const auto parts = static_cast<int64_t>(entry.parts.size());
  const int64_t want = 2 * planes + (has_residual ? 2 : 0);
  if (parts == want) return OkStatus();
  return InvalidArgument(std::to_string(parts) + " parts, of which " + std::to_string(want) +
                         " are of codec 'bitdelta'");
}

}  // namespace stockpot
