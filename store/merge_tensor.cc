#include "store/merge_tensor.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/base/aligned_buffer.h"
#include "store/weight_rounding.h"

namespace stockpot {
namespace {

// Values that are taken through several steps while they are in the L1 cache.
constexpr int64_t kPieceElements = 1024;

// Numbers [begin, begin + n) of a tensor.
struct Block {
  int64_t begin = 0;
  int64_t n = 0;
};

// Calls body(block) over all elements, in order, until one fails.
template <typename Body>
Status ForEachBlock(int64_t elements, Body body) {
  for (int64_t begin = 0; begin < elements; begin += kMergeBlockElements) {
    STOCKPOT_RETURN_IF_ERROR(body(Block{begin, std::min(kMergeBlockElements, elements - begin)}));
  }
  return OkStatus();
}

template <DType kType>
void Widen(const std::byte* bytes, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = LoadWeight(bytes, kType, i);
}

void Widen(DType dtype, const std::byte* bytes, int64_t n, float* out) {
  if (dtype == DType::kF32) Widen<DType::kF32>(bytes, n, out);
  if (dtype == DType::kF16) Widen<DType::kF16>(bytes, n, out);
  if (dtype == DType::kBF16) Widen<DType::kBF16>(bytes, n, out);
}

// Reads blocks of tensors as float32.
class BlockReader {
 public:
  explicit BlockReader(MergeWorkspace& workspace)
      : bytes_(workspace.read_bytes), values_(workspace.read_values) {}

  // Good until the next call.
  Result<const float*> Read(const TensorSource& source, const std::string& name, Block block) {
    const DType dtype = source.Find(name)->dtype;
    const int64_t size = DTypeSize(dtype);
    const std::span bytes(bytes_.Reserve(block.n * size), static_cast<size_t>(block.n * size));
    STOCKPOT_RETURN_IF_ERROR(source.Read(name, block.begin * size, bytes));
    float* values = values_.Reserve(block.n);
    Widen(dtype, bytes.data(), block.n, values);
    return static_cast<const float*>(values);
  }

 private:
  AlignedBuffer<std::byte>& bytes_;
  AlignedBuffer<float>& values_;
};

// The bits that are all set in NaN and infinity; added to the lowest of them they carry into the
// sign.
constexpr uint64_t kExponentOfDouble = uint64_t{0x7ff} << 52;
constexpr uint64_t kLastExponentBit = uint64_t{1} << 52;

template <DType kType>
void Round(const double* values, int64_t n, std::byte* out) {
  for (int64_t i = 0; i < n; ++i) StoreWeight(values[i], kType, out, i);
}

// Rounds blocks of float64 once and hands them to the sink.
class BlockWriter {
 public:
  BlockWriter(DType dtype, const ByteSink& sink, MergeWorkspace& workspace)
      : dtype_(dtype), sink_(sink), values_(workspace.made_values), bytes_(workspace.made_bytes) {}

  double* values(int64_t n) { return values_.Reserve(n); }  // for the next Write

  // InvalidArgument: one of values() is not finite.
  Status Write(int64_t n) {
    bytes_.Reserve(n * DTypeSize(dtype_));
    STOCKPOT_RETURN_IF_ERROR(RoundPiece(0, n));
    return Send(n);
  }

  // The same in pieces that stay in the cache: room for a block of n, values() of each piece, which
  // goes to `first`, then all at once.
  void Begin(int64_t n) { bytes_.Reserve(n * DTypeSize(dtype_)); }
  Status RoundPiece(int64_t first, int64_t n) {
    const double* values = values_.data();
    uint64_t not_finite = 0;
    for (int64_t i = 0; i < n; ++i) {
      not_finite |= (std::bit_cast<uint64_t>(values[i]) & kExponentOfDouble) + kLastExponentBit;
    }
    if (not_finite >> 63) return InvalidArgument("a value is NaN or infinite");
    std::byte* bytes = bytes_.data() + first * DTypeSize(dtype_);
    if (dtype_ == DType::kF32) Round<DType::kF32>(values, n, bytes);
    if (dtype_ == DType::kF16) Round<DType::kF16>(values, n, bytes);
    if (dtype_ == DType::kBF16) Round<DType::kBF16>(values, n, bytes);
    return OkStatus();
  }
  Status Send(int64_t n) {
    return sink_({bytes_.data(), static_cast<size_t>(n * DTypeSize(dtype_))});
  }

 private:
  const DType dtype_;
  const ByteSink& sink_;
  AlignedBuffer<double>& values_;
  AlignedBuffer<std::byte>& bytes_;
};

// sum of weight * W_i over the sum of the weights, in float64. The sum does not begin with 0, so
// that -0 stays -0.
Status MeanOf(const std::vector<const TensorSource*>& parents, std::span<const double> weights,
              const std::string& name, Block block, BlockReader& reader, double* out) {
  double total = 0;
  for (size_t p = 0; p < parents.size(); ++p) {
    const double weight = weights.empty() ? 1 : weights[p];
    total += weight;
    STOCKPOT_ASSIGN_OR_RETURN(const float* values, reader.Read(*parents[p], name, block));
    if (p == 0) {
      for (int64_t i = 0; i < block.n; ++i) out[i] = weight * values[i];
    } else {
      for (int64_t i = 0; i < block.n; ++i) out[i] += weight * values[i];
    }
  }
  for (int64_t i = 0; i < block.n; ++i) out[i] /= total;
  return OkStatus();
}

// W - W_base in float32, of one block.
Status DeltaOf(const TensorSource& parent, const TensorSource& base, const std::string& name,
               Block block, BlockReader& reader, float* out) {
  STOCKPOT_ASSIGN_OR_RETURN(const float* values, reader.Read(parent, name, block));
  std::copy_n(values, block.n, out);
  STOCKPOT_ASSIGN_OR_RETURN(const float* origin, reader.Read(base, name, block));
  for (int64_t i = 0; i < block.n; ++i) out[i] -= origin[i];
  return OkStatus();
}

// A whole tensor as it is stored.
Result<const std::byte*> ReadStored(const TensorSource& source, const TensorInfo& tensor,
                                    AlignedBuffer<std::byte>& buffer) {
  const int64_t size = DTypeSize(tensor.dtype);
  std::byte* bytes = buffer.Reserve(tensor.elements() * size);
  STOCKPOT_RETURN_IF_ERROR(ForEachBlock(tensor.elements(), [&](Block block) {
    return source.Read(tensor.name, block.begin * size,
                       {bytes + block.begin * size, static_cast<size_t>(block.n * size)});
  }));
  return static_cast<const std::byte*>(bytes);
}

// Calls body(first, n, origin) for pieces of n values from number `first` on that stay in the
// cache: `origin` has them as float32.
template <typename Body>
Status ForEachPiece(DType dtype, const std::byte* stored, int64_t elements, Body body) {
  float origin[kPieceElements];
  for (int64_t first = 0; first < elements; first += kPieceElements) {
    const int64_t n = std::min(kPieceElements, elements - first);
    Widen(dtype, stored + first * DTypeSize(dtype), n, origin);
    STOCKPOT_RETURN_IF_ERROR(body(first, n, origin));
  }
  return OkStatus();
}

// W - W_base in float32, `base` as it is stored.
Status DeltaTo(const TensorSource& parent, const TensorInfo& base, const std::byte* base_bytes,
               MergeWorkspace& workspace, float* out) {
  const DType dtype = parent.Find(base.name)->dtype;
  const int64_t size = DTypeSize(dtype);
  return ForEachBlock(base.elements(), [&](Block block) -> Status {
    std::byte* bytes = workspace.read_bytes.Reserve(block.n * size);
    STOCKPOT_RETURN_IF_ERROR(
        parent.Read(base.name, block.begin * size, {bytes, static_cast<size_t>(block.n * size)}));
    return ForEachPiece(base.dtype, base_bytes + block.begin * DTypeSize(base.dtype), block.n,
                        [&](int64_t first, int64_t n, const float* origin) {
                          float* values = out + block.begin + first;
                          Widen(dtype, bytes + first * size, n, values);
                          for (int64_t i = 0; i < n; ++i) values[i] -= origin[i];
                          return OkStatus();
                        });
  });
}

// Writes W_base + delta.
Status WriteMoved(const TensorInfo& base, const std::byte* base_bytes, DType dtype,
                  const float* delta, const ByteSink& sink, MergeWorkspace& workspace) {
  BlockWriter writer(dtype, sink, workspace);
  return ForEachBlock(base.elements(), [&](Block block) -> Status {
    writer.Begin(block.n);
    STOCKPOT_RETURN_IF_ERROR(ForEachPiece(base.dtype,
                                          base_bytes + block.begin * DTypeSize(base.dtype), block.n,
                                          [&](int64_t first, int64_t n, const float* origin) {
                                            const float* moved = delta + block.begin + first;
                                            double* out = writer.values(n);
                                            for (int64_t i = 0; i < n; ++i) {
                                              out[i] = static_cast<double>(origin[i]) + moved[i];
                                            }
                                            return writer.RoundPiece(first, n);
                                          }));
    return writer.Send(block.n);
  });
}

// A tensor of two dimensions or more as a matrix [first dimension, rest].
int64_t Rows(const TensorInfo& tensor) { return tensor.shape[0]; }
int64_t Cols(const TensorInfo& tensor) { return tensor.elements() / tensor.shape[0]; }

}  // namespace

int64_t MergeWorkspace::bytes() const {
  return 4 * (sum.capacity() + delta.capacity() + other_delta.capacity() + read_values.capacity()) +
         base.capacity() + read_bytes.capacity() + 8 * made_values.capacity() +
         made_bytes.capacity() + matrix.bytes();
}

TensorMerger::TensorMerger(const TensorSource& base, std::vector<const TensorSource*> parents,
                           const ModelStructure& structure, const MergeOptions& options)
    : base_(base), parents_(std::move(parents)), structure_(structure), options_(options) {}

bool TensorMerger::UsesBase(const TensorInfo& tensor) const {
  const size_t dimensions = tensor.shape.size();
  if (dimensions < 2 || tensor.elements() == 0) return false;
  switch (options_.method) {
    case MergeMethod::kMean:
      return false;
    case MergeMethod::kModelStock:
      return true;
    case MergeMethod::kMonoSoup:
    case MergeMethod::kMonoSoupSpectral:
      break;
  }
  return (dimensions == 2 || options_.method == MergeMethod::kMonoSoupSpectral) &&
         structure_.RoleOf(tensor.name, tensor.shape) != TensorRole::kTable;
}

bool TensorMerger::IsDecomposed(const TensorInfo& tensor) const {
  return options_.method != MergeMethod::kModelStock && UsesBase(tensor);
}

// Two deltas, three of more than two parents, and the base; a float64 copy of one and its
// projection; the Gram matrix, its vectors and LAPACK's workspace.
int64_t TensorMerger::MatrixBytes(const TensorInfo& tensor) const {
  const int64_t side = std::min(Rows(tensor), Cols(tensor));
  const int64_t deltas = parents_.size() > 2 ? 3 : 2;
  return (deltas * 4 + 4 + 2 * 8) * tensor.elements() + 4 * 8 * side * side;
}

Status TensorMerger::CheckTypes(const TensorInfo& tensor) const {
  for (const TensorSource* parent : parents_) {
    const DType dtype = parent->Find(tensor.name)->dtype;
    if (IsWeightDType(dtype)) continue;
    return InvalidArgument("differs between the parents, and " + std::string(DTypeName(dtype)) +
                           " is not F32, F16 or BF16");
  }
  if (!UsesBase(tensor)) return OkStatus();
  const TensorInfo* base = base_.Find(tensor.name);
  if (base == nullptr) return InvalidArgument("is not in the base");
  if (!IsWeightDType(base->dtype)) return InvalidArgument("the base's is not F32, F16 or BF16");
  if (base->shape != tensor.shape) {
    return InvalidArgument("shape " + ShapeText(tensor.shape) + ", the base's is " +
                           ShapeText(base->shape));
  }
  return OkStatus();
}

Result<MergedTensorReport> TensorMerger::Merge(const TensorInfo& tensor, const ByteSink& sink,
                                               MergeWorkspace& workspace) const {
  STOCKPOT_RETURN_IF_ERROR(CheckTypes(tensor));
  if (UsesBase(tensor)) {
    if (options_.method == MergeMethod::kMonoSoup) return MergeDeltas(tensor, sink, workspace);
    if (options_.method == MergeMethod::kMonoSoupSpectral)
      return MergeSpectrally(tensor, sink, workspace);
    return ModelStock(tensor, sink, workspace);
  }
  STOCKPOT_RETURN_IF_ERROR(Mean(tensor, sink, workspace));
  return MergedTensorReport{};
}

Status TensorMerger::Mean(const TensorInfo& tensor, const ByteSink& sink,
                          MergeWorkspace& workspace) const {
  BlockReader reader(workspace);
  BlockWriter writer(tensor.dtype, sink, workspace);
  return ForEachBlock(tensor.elements(), [&](Block block) -> Status {
    STOCKPOT_RETURN_IF_ERROR(
        MeanOf(parents_, options_.weights, tensor.name, block, reader, writer.values(block.n)));
    return writer.Write(block.n);
  });
}

Result<MergedTensorReport> TensorMerger::MergeDeltas(const TensorInfo& tensor, const ByteSink& sink,
                                                     MergeWorkspace& workspace) const {
  const int64_t n = tensor.elements();
  const TensorInfo& base = *base_.Find(tensor.name);
  STOCKPOT_ASSIGN_OR_RETURN(const std::byte* base_bytes, ReadStored(base_, base, workspace.base));
  float* sum = workspace.sum.Reserve(n);
  MergedTensorReport report;
  bool unchanged = true;
  for (size_t p = 0; p < parents_.size(); p += 2) {
    std::vector<float*> deltas = {p == 0 ? sum : workspace.other_delta.Reserve(n)};
    if (p + 1 < parents_.size()) deltas.push_back(workspace.delta.Reserve(n));
    for (size_t i = 0; i < deltas.size(); ++i) {
      STOCKPOT_RETURN_IF_ERROR(DeltaTo(*parents_[p + i], base, base_bytes, workspace, deltas[i]));
    }
    STOCKPOT_ASSIGN_OR_RETURN(
        const std::vector<MatrixReport> reports,
        TruncateDeltas(Rows(tensor), Cols(tensor), options_, deltas, workspace.matrix));
    for (size_t i = 0; i < deltas.size(); ++i) {
      report.matrices.push_back(reports[i]);
      unchanged = unchanged && reports[i].unchanged;
      if (deltas[i] == sum) continue;
      for (int64_t e = 0; e < n; ++e) sum[e] += deltas[i][e];
    }
  }
  // The mean of the W_i, exact in float64: one checkpoint comes back bit for bit.
  if (unchanged) {
    STOCKPOT_RETURN_IF_ERROR(Mean(tensor, sink, workspace));
    return report;
  }
  const auto count = static_cast<float>(parents_.size());
  for (int64_t i = 0; i < n; ++i) sum[i] /= count;
  STOCKPOT_RETURN_IF_ERROR(WriteMoved(base, base_bytes, tensor.dtype, sum, sink, workspace));
  return report;
}

Result<MergedTensorReport> TensorMerger::MergeSpectrally(const TensorInfo& tensor,
                                                         const ByteSink& sink,
                                                         MergeWorkspace& workspace) const {
  const int64_t n = tensor.elements();
  const TensorInfo& base = *base_.Find(tensor.name);
  STOCKPOT_ASSIGN_OR_RETURN(const std::byte* base_bytes, ReadStored(base_, base, workspace.base));
  BlockReader reader(workspace);
  float* delta = workspace.delta.Reserve(n);
  double base_energy = 0;
  const Status read = ForEachBlock(n, [&](Block block) -> Status {
    double* mean = workspace.made_values.Reserve(block.n);
    STOCKPOT_RETURN_IF_ERROR(MeanOf(parents_, {}, tensor.name, block, reader, mean));
    return ForEachPiece(base.dtype, base_bytes + block.begin * DTypeSize(base.dtype), block.n,
                        [&](int64_t first, int64_t count, const float* origin) {
                          for (int64_t i = 0; i < count; ++i) {
                            delta[block.begin + first + i] =
                                static_cast<float>(mean[first + i] - origin[i]);
                            base_energy += static_cast<double>(origin[i]) * origin[i];
                          }
                          return OkStatus();
                        });
  });
  STOCKPOT_RETURN_IF_ERROR(read);
  MergedTensorReport report;
  STOCKPOT_ASSIGN_OR_RETURN(
      report.matrices.emplace_back(),
      ReweightDelta(Rows(tensor), Cols(tensor), options_.spectral, std::sqrt(base_energy), delta));
  STOCKPOT_RETURN_IF_ERROR(report.matrices[0].unchanged ? Mean(tensor, sink, workspace)
                                                        : WriteMoved(base, base_bytes, tensor.dtype,
                                                                     delta, sink, workspace));
  return report;
}

// ||W_i - W_base||_F^2 of each parent.
Result<std::vector<double>> TensorMerger::DeltaEnergies(const TensorInfo& tensor,
                                                        MergeWorkspace& workspace) const {
  std::vector<double> energies(parents_.size());
  BlockReader reader(workspace);
  const Status read = ForEachBlock(tensor.elements(), [&](Block block) -> Status {
    float* delta = workspace.delta.Reserve(block.n);
    for (size_t p = 0; p < parents_.size(); ++p) {
      STOCKPOT_RETURN_IF_ERROR(DeltaOf(*parents_[p], base_, tensor.name, block, reader, delta));
      for (int64_t i = 0; i < block.n; ++i) energies[p] += static_cast<double>(delta[i]) * delta[i];
    }
    return OkStatus();
  });
  STOCKPOT_RETURN_IF_ERROR(read);
  return energies;
}

// From the sum of the unit deltas u_i: ||sum u_i||^2 is the number of deltas that are not zero plus
// twice the sum of the pairs' cosines.
Result<double> TensorMerger::MeanCosine(const TensorInfo& tensor, MergeWorkspace& workspace) const {
  if (parents_.size() == 1) return 1.0;
  STOCKPOT_ASSIGN_OR_RETURN(const std::vector<double> energies, DeltaEnergies(tensor, workspace));
  BlockReader reader(workspace);
  double energy = 0;
  const Status read = ForEachBlock(tensor.elements(), [&](Block block) -> Status {
    float* delta = workspace.delta.Reserve(block.n);
    double* sum = workspace.made_values.Reserve(block.n);
    std::fill_n(sum, block.n, 0.0);
    for (size_t p = 0; p < parents_.size(); ++p) {
      if (energies[p] == 0) continue;
      STOCKPOT_RETURN_IF_ERROR(DeltaOf(*parents_[p], base_, tensor.name, block, reader, delta));
      const double scale = 1 / std::sqrt(energies[p]);
      for (int64_t i = 0; i < block.n; ++i) sum[i] += scale * delta[i];
    }
    for (int64_t i = 0; i < block.n; ++i) energy += sum[i] * sum[i];
    return OkStatus();
  });
  STOCKPOT_RETURN_IF_ERROR(read);
  const auto moved =
      std::count_if(energies.begin(), energies.end(), [](double e) { return e != 0; });
  const auto k = static_cast<double>(parents_.size());
  return (energy - static_cast<double>(moved)) / (k * (k - 1));
}

Result<MergedTensorReport> TensorMerger::ModelStock(const TensorInfo& tensor, const ByteSink& sink,
                                                    MergeWorkspace& workspace) const {
  STOCKPOT_ASSIGN_OR_RETURN(const double cosine, MeanCosine(tensor, workspace));
  const auto k = static_cast<double>(parents_.size());
  const double t = cosine <= 0 ? 0 : std::min(1.0, k * cosine / (1 + (k - 1) * cosine));
  BlockReader reader(workspace);
  BlockWriter writer(tensor.dtype, sink, workspace);
  const Status written = ForEachBlock(tensor.elements(), [&](Block block) -> Status {
    double* out = writer.values(block.n);
    STOCKPOT_RETURN_IF_ERROR(MeanOf(parents_, {}, tensor.name, block, reader, out));
    STOCKPOT_ASSIGN_OR_RETURN(const float* origin, reader.Read(base_, tensor.name, block));
    if (t < 1) {
      for (int64_t i = 0; i < block.n; ++i) out[i] = t * out[i] + (1 - t) * origin[i];
    }
    return writer.Write(block.n);
  });
  STOCKPOT_RETURN_IF_ERROR(written);
  return MergedTensorReport{.matrices = {}, .facts = {{"cosine", cosine}, {"t", t}}};
}

}  // namespace stockpot
