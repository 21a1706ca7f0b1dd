#include "store/bitdelta_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>

#include "kernels/base/check.h"
#include "kernels/bitdelta/compress.h"
#include "kernels/bitdelta/signs.h"
#include "store/artifact_source.h"
#include "store/model_structure.h"
#include "store/publish_options.h"
#include "store/sparse_codec.h"

namespace stockpot {
namespace {

using Bytes = std::vector<std::byte>;

constexpr int64_t kNormElements = 1 << 16;  // of a thread's piece of work
// Relative squared error of one bit over which a larger, exact form is taken: a tenth of the
// elements changed gives about 0.93, a dense update 0.36 to 0.5.
constexpr double kOneBitMaxError = 0.9;

std::string Quoted(std::string_view name) { return "tensor '" + std::string(name) + "'"; }

// Six digits are what a person reads; fewer bytes in the manifest than all seventeen.
double Rounded(double value) {
  if (value == 0 || !std::isfinite(value)) return 0;
  const double scale = std::pow(10.0, 5 - std::floor(std::log10(std::fabs(value))));
  return std::round(value * scale) / scale;
}

// Any tensor as [first dimension, rest].
WeightMatrix AsMatrix(const Bytes& bytes, const TensorEntry& entry) {
  const int64_t rows = entry.shape.empty() ? 1 : entry.shape[0];
  const int64_t cols = rows == 0 ? 0 : entry.elements() / rows;
  return {.data = bytes.data(), .dtype = entry.dtype, .rows = rows, .cols = cols, .stride = cols};
}

// Same shape, perhaps another dtype: same numbers bit for bit (-0 is not 0)?
bool SameValues(const WeightMatrix& a, const WeightMatrix& b) {
  for (int64_t i = 0; i < a.rows * a.cols; ++i) {
    if (std::bit_cast<uint32_t>(LoadWeight(a.data, a.dtype, i)) !=
        std::bit_cast<uint32_t>(LoadWeight(b.data, b.dtype, i))) {
      return false;
    }
  }
  return true;
}

bool AllFinite(const WeightMatrix& w) {
  bool finite = true;
  for (int64_t i = 0; i < w.rows * w.cols; ++i) {
    finite &= std::isfinite(LoadWeight(w.data, w.dtype, i));
  }
  return finite;
}

// Sum of squares, in float64 and in an order that does not depend on the threads.
double SquaredNorm(const WeightMatrix& w, ThreadPool& threads) {
  std::vector<double> rows(static_cast<size_t>(w.rows));
  const int64_t grain = std::max<int64_t>(1, kNormElements / std::max<int64_t>(1, w.cols));
  threads.ParallelFor(w.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      std::array<double, 8> sums{};
      const void* row = w.row(r);
      for (int64_t c = 0; c < w.cols; ++c) {
        const double value = LoadWeight(row, w.dtype, c);
        sums[static_cast<size_t>(c % 8)] += value * value;
      }
      rows[static_cast<size_t>(r)] = std::accumulate(sums.begin(), sums.end(), 0.0);
    }
  });
  return std::accumulate(rows.begin(), rows.end(), 0.0);
}

// What alpha * sign misses of the squared delta, with alpha = mean |delta| of its row.
double RowError(const DeltaStats& stats, std::span<const float> alpha, int64_t cols) {
  if (stats.sum_square == 0) return 0;
  double kept = 0;
  for (const float a : alpha) kept += static_cast<double>(a) * a * static_cast<double>(cols);
  return std::max(0.0, 1 - kept / stats.sum_square);
}

class VariantBuilder {
 public:
  VariantBuilder(CheckpointStore& store, PublishCodec codec, ThreadPool& threads,
                 const ProgressFunction& progress)
      : store_(store), codec_(codec), threads_(threads), progress_(progress) {}

  Result<Manifest> Build(const Digest& artifact) {
    STOCKPOT_RETURN_IF_ERROR(Open(artifact));
    STOCKPOT_RETURN_IF_ERROR(CheckComplete());
    int64_t done_bytes = 0;
    const double all_bytes = static_cast<double>(std::max<int64_t>(1, source_.logical_bytes()));
    for (const TensorEntry& entry : source_.tensors) {
      if (progress_) {
        STOCKPOT_RETURN_IF_ERROR(progress_(static_cast<double>(done_bytes) / all_bytes));
      }
      done_bytes += entry.logical_bytes();
      if (entry.alias_of.empty()) STOCKPOT_RETURN_IF_ERROR(AddTensor(entry));
    }
    AddAliases();
    STOCKPOT_RETURN_IF_ERROR(AddFiles());
    AddTotals(artifact);
    STOCKPOT_RETURN_IF_ERROR(variant_.Validate());
    return std::move(variant_);
  }

 private:
  struct AliasEntry {
    std::string name;
    std::string target;
  };

  Status Open(const Digest& artifact) {
    STOCKPOT_ASSIGN_OR_RETURN(source_, store_.GetManifest(artifact));
    if (source_.kind != ArtifactKind::kCheckpoint && source_.kind != ArtifactKind::kMerge) {
      return InvalidArgument("artifact " + artifact.ShortHex() + " is a " +
                             std::string(ArtifactKindName(source_.kind)) +
                             ": only checkpoints and merges are published");
    }
    STOCKPOT_ASSIGN_OR_RETURN(base_, store_.GetManifest(*source_.base));
    for (const TensorEntry& entry : source_.tensors) {
      if (entry.codec == Codec::kBitDelta || entry.codec == Codec::kSparse) {
        return InvalidArgument(Quoted(entry.name) + " is compressed already");
      }
    }
    DirectTies();
    STOCKPOT_ASSIGN_OR_RETURN(source_reader_, OpenArtifact(store_, artifact));
    STOCKPOT_ASSIGN_OR_RETURN(base_reader_, OpenArtifact(store_, *source_.base));
    Result<std::string> config_text = source_reader_->ReadFile("config.json");
    if (!config_text.ok() && config_text.status().code() != StatusCode::kNotFound) {
      return config_text.status();
    }
    config_text_ = config_text.ok() ? std::move(*config_text) : std::string();
    STOCKPOT_ASSIGN_OR_RETURN(StructureConfig config, ParseStructureConfig(config_text_));
    structure_.emplace(std::move(config), base_reader_->tensors());
    variant_.kind = ArtifactKind::kVariant;
    variant_.base = source_.base;
    variant_.run = source_.run;
    variant_.step = source_.step;
    return OkStatus();
  }

  // Which of two tied tensors holds the bytes is the writer's whim. Where the base's choice is the
  // other one, follow the base, so that like is compared with like.
  void DirectTies() {
    for (TensorEntry& alias : source_.tensors) {
      if (alias.alias_of.empty()) continue;
      const TensorEntry* base_alias = base_.Find(alias.name);
      const TensorEntry* base_target = base_.Find(alias.alias_of);
      const bool base_holds_alias = base_alias != nullptr && base_alias->alias_of.empty();
      const bool base_holds_target = base_target != nullptr && base_target->alias_of.empty();
      if (!base_holds_alias || base_holds_target) continue;
      const std::string old_name = alias.alias_of;
      TensorEntry& target = const_cast<TensorEntry&>(*source_.Find(old_name));
      std::swap(target.name, alias.name);
      std::swap(target, alias);
      for (TensorEntry& entry : source_.tensors) {
        if (entry.alias_of == old_name) entry.alias_of = alias.name;
      }
    }
  }

  // Names and shapes; tensors that the checkpoint ties by leaving them out become aliases.
  Status CheckComplete() {
    for (const TensorEntry& base : base_.tensors) {
      const TensorEntry* entry = source_.Find(base.name);
      if (entry == nullptr) {
        STOCKPOT_RETURN_IF_ERROR(TieMissing(base));
      } else if (entry->shape != base.shape) {
        return WrongShape(*entry, base);
      }
    }
    for (const TensorEntry& entry : source_.tensors) {
      if (!entry.alias_of.empty()) {
        aliases_.push_back({entry.name, entry.alias_of});
      } else if (base_.Find(entry.name) == nullptr && !IsUntiedHead(entry)) {
        return InvalidArgument(Quoted(entry.name) + " is not in the base");
      }
    }
    return OkStatus();
  }

  Status TieMissing(const TensorEntry& base) {
    std::string target = base.alias_of;
    if (target.empty() && ModelStructure::IsHeadName(base.name) &&
        structure_->config().ties_embeddings.value_or(false)) {
      target = structure_->embedding();
    }
    const TensorEntry* tied = source_.Find(target);
    if (tied == nullptr || tied->shape != base.shape) {
      return InvalidArgument(Quoted(base.name) + " of the base is missing");
    }
    aliases_.push_back({base.name, tied->alias_of.empty() ? target : tied->alias_of});
    return OkStatus();
  }

  Status WrongShape(const TensorEntry& entry, const TensorEntry& base) const {
    const bool table = structure_->RoleOf(base.name, base.shape) == TensorRole::kTable;
    const bool resized = table && entry.shape.size() == 2 && entry.shape[1] == base.shape[1];
    return InvalidArgument(
        Quoted(entry.name) + " has shape " + ShapeText(entry.shape) + ", the base's is " +
        ShapeText(base.shape) +
        (resized ? ": a vocabulary of another size than the base's cannot be published" : ""));
  }

  // A head of its own where the base ties it by leaving it out.
  bool IsUntiedHead(const TensorEntry& entry) const {
    const TensorEntry* embedding = base_.Find(structure_->embedding());
    return embedding != nullptr && ModelStructure::IsHeadName(entry.name) &&
           entry.shape == embedding->shape;
  }

  Status AddTensor(const TensorEntry& entry) {
    const TensorEntry* base = base_.Find(entry.name);
    const bool base_has_own = base != nullptr && base->alias_of.empty();
    if (!base_has_own) return AddUntied(entry);
    STOCKPOT_ASSIGN_OR_RETURN(const bool same, SameTensor(entry, *base_reader_, *base));
    if (same) {
      AddUnchanged(entry.name, *base);
      return OkStatus();
    }
    if (!IsWeightDType(entry.dtype) || !IsWeightDType(base->dtype)) {
      return InvalidArgument(
          Quoted(entry.name) + " changed, and " + std::string(DTypeName(entry.dtype)) +
          " (the base: " + std::string(DTypeName(base->dtype)) + ") is not F32, F16 or BF16");
    }
    STOCKPOT_ASSIGN_OR_RETURN(const Bytes base_bytes, ReadWeights(*base_reader_, *base));
    STOCKPOT_ASSIGN_OR_RETURN(const Bytes bytes, ReadWeights(*source_reader_, entry));
    if (entry.dtype != base->dtype &&
        SameValues(AsMatrix(base_bytes, *base), AsMatrix(bytes, entry))) {
      AddUnchanged(entry.name, *base);
      return OkStatus();
    }
    return AddChanged(entry, AsMatrix(base_bytes, *base), AsMatrix(bytes, entry));
  }

  // A tensor with values of its own where the base's is tied to another: the tie broke, or holds.
  Status AddUntied(const TensorEntry& entry) {
    const TensorEntry* base = base_.Find(entry.name);
    const std::string target = base == nullptr ? structure_->embedding() : base->alias_of;
    const TensorEntry* tied = source_.Resolve(target);
    const bool can_be_tied = tied != nullptr && tied != &entry;
    STOCKPOT_ASSIGN_OR_RETURN(const bool is_tied,
                              can_be_tied ? SameTensor(entry, *source_reader_, *tied) : false);
    if (is_tied) {
      aliases_.push_back({entry.name, tied->name});
      return OkStatus();
    }
    if (!IsWeightDType(entry.dtype)) {
      return InvalidArgument(Quoted(entry.name) + " is " + std::string(DTypeName(entry.dtype)) +
                             ", not F32, F16 or BF16");
    }
    const TensorEntry* base_target = base_.Resolve(target);
    if (base_target == nullptr || base_target->shape != entry.shape) {
      return InvalidArgument(Quoted(entry.name) + " is not in the base");
    }
    STOCKPOT_ASSIGN_OR_RETURN(const Bytes base_bytes, ReadWeights(*base_reader_, *base_target));
    STOCKPOT_ASSIGN_OR_RETURN(const Bytes bytes, ReadWeights(*source_reader_, entry));
    head_untied_ = true;
    return AddChanged(entry, AsMatrix(base_bytes, *base_target), AsMatrix(bytes, entry));
  }

  Status AddChanged(const TensorEntry& entry, const WeightMatrix& base, const WeightMatrix& tuned) {
    std::vector<uint8_t> signs(static_cast<size_t>(SignBytes(base.rows, base.cols)));
    std::vector<float> alpha(static_cast<size_t>(base.rows));
    const CompressArgs args{.base = base, .fine_tuned = tuned, .signs = signs, .alpha = alpha};
    const Result<DeltaStats> stats = BitDeltaCompressCpu(args, threads_);
    if (!stats.ok()) return stats.status().WithContext(Quoted(entry.name));
    if (stats->non_finite > 0) {
      return InvalidArgument(Quoted(entry.name) + ": " + std::to_string(stats->non_finite) +
                             " of " + std::to_string(entry.elements()) +
                             " values are NaN or infinite");
    }
    if (!AllFinite(base)) {
      return InvalidArgument(Quoted(entry.name) + ": the base's values are not all finite");
    }
    const TensorRole role = structure_->RoleOf(entry.name, entry.shape);
    TensorEntry stored{.name = entry.name, .dtype = entry.dtype, .shape = entry.shape};
    stored.codec = ChooseCodec(entry, role, base, tuned, *stats);
    switch (stored.codec) {
      case Codec::kSparse:
        STOCKPOT_RETURN_IF_ERROR(StoreSparse(base, tuned, stored));
        if (role == TensorRole::kBlockLinear) block_sparse_ += entry.elements();
        break;
      case Codec::kBitDelta:
        STOCKPOT_RETURN_IF_ERROR(StoreSigns(signs, alpha, stored));
        block_compressed_ += entry.elements();
        break;
      default:
        STOCKPOT_RETURN_IF_ERROR(StoreRaw(entry, tuned, stored));
    }
    (role == TensorRole::kBlockLinear ? block_elements_ : other_changed_) += entry.elements();
    const double changed = static_cast<double>(stats->changed) /
                           static_cast<double>(std::max<int64_t>(1, stats->elements));
    nlohmann::json facts = {{"role", TensorRoleName(role)},
                            {"codec", CodecName(stored.codec)},
                            {"bytes", stored.stored_bytes()},
                            {"changed", Rounded(changed)},
                            {"delta", Rounded(std::sqrt(stats->sum_square))},
                            {"error", Rounded(stats->OneBitError())}};
    if (stored.codec == Codec::kBitDelta) {
      facts["row_error"] = Rounded(RowError(*stats, alpha, base.cols));
    }
    update_square_ += stats->sum_square;
    base_square_ += SquaredNorm(base, threads_);
    variant_.attributes["tensor/" + entry.name] = facts.dump();
    variant_.tensors.push_back(std::move(stored));
    return OkStatus();
  }

  // The smallest that is exact enough; the rules are in the header.
  Codec ChooseCodec(const TensorEntry& entry, TensorRole role, const WeightMatrix& base,
                    const WeightMatrix& tuned, const DeltaStats& stats) const {
    if (codec_ == PublishCodec::kDense || entry.shape.size() != 2) return Codec::kRaw;
    const bool block = role == TensorRole::kBlockLinear;
    const bool one_bit_fits = block && stats.OneBitError() <= kOneBitMaxError;
    const int64_t exact_limit = one_bit_fits ? SignBytes(base.rows, base.cols) + 4 * base.rows
                                             : entry.logical_bytes() / 2;
    const TensorEntry* of_base = base_.Resolve(entry.name);
    if (of_base != nullptr && base.dtype == tuned.dtype) {
      const SparseShape shape = SparseShapeOf(base);
      const int64_t changed = CountChanged(BytesOf(base), BytesOf(tuned), shape);
      if (SparseBytes(shape.d_out, shape.d_in, shape.element_bytes, changed) <= exact_limit) {
        return Codec::kSparse;
      }
    }
    return block ? Codec::kBitDelta : Codec::kRaw;
  }

  static SparseShape SparseShapeOf(const WeightMatrix& w) {
    return {.d_out = w.rows, .d_in = w.cols, .element_bytes = DTypeSize(w.dtype)};
  }
  static const std::byte* BytesOf(const WeightMatrix& w) {
    return static_cast<const std::byte*>(w.data);
  }

  Status StoreSigns(const std::vector<uint8_t>& signs, const std::vector<float>& alpha,
                    TensorEntry& stored) {
    STOCKPOT_ASSIGN_OR_RETURN(stored.parts["signs"], Put(signs));
    STOCKPOT_ASSIGN_OR_RETURN(stored.parts["alpha"], Put(alpha));
    return OkStatus();
  }

  Status StoreSparse(const WeightMatrix& base, const WeightMatrix& tuned, TensorEntry& stored) {
    const SparseParts parts = EncodeSparse(BytesOf(base), BytesOf(tuned), SparseShapeOf(base));
    STOCKPOT_ASSIGN_OR_RETURN(stored.parts["counts"], Put(parts.counts));
    STOCKPOT_ASSIGN_OR_RETURN(stored.parts["columns"], Put(parts.columns));
    STOCKPOT_ASSIGN_OR_RETURN(stored.parts["values"], Put(parts.values));
    return OkStatus();
  }

  void AddUnchanged(const std::string& name, const TensorEntry& base) {
    variant_.tensors.push_back({.name = name,
                                .dtype = base.dtype,
                                .shape = base.shape,
                                .codec = Codec::kBase,
                                .content = Content(base)});
  }

  // After all others: an alias has its target's final dtype.
  void AddAliases() {
    for (const AliasEntry& alias : aliases_) {
      const auto target =
          std::find_if(variant_.tensors.begin(), variant_.tensors.end(),
                       [&](const TensorEntry& entry) { return entry.name == alias.target; });
      STOCKPOT_CHECK(target != variant_.tensors.end(), alias.name, alias.target);
      ties_.push_back({.name = alias.name,
                       .dtype = target->dtype,
                       .shape = target->shape,
                       .alias_of = alias.target});
    }
    for (TensorEntry& tie : ties_) variant_.tensors.push_back(std::move(tie));
    std::sort(variant_.tensors.begin(), variant_.tensors.end(),
              [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  }

  Status AddFiles() {
    for (const auto& [name, part] : source_.files) {
      const auto of_base = base_.files.find(name);
      if (of_base == base_.files.end() || of_base->second.digest() != part.digest()) {
        variant_.files[name] = part;
      }
    }
    if (!head_untied_ || !structure_->config().ties_embeddings.value_or(true)) return OkStatus();
    // The head differs from the embedding: a reader that believed the config would tie them again.
    nlohmann::ordered_json config = nlohmann::ordered_json::parse(config_text_, nullptr, false);
    if (!config.is_object()) return OkStatus();  // no config at all
    config["tie_word_embeddings"] = false;
    const std::string text = config.dump(2);
    STOCKPOT_ASSIGN_OR_RETURN(variant_.files["config.json"],
                              store_.PutBytes(std::as_bytes(std::span(text))));
    return OkStatus();
  }

  void AddTotals(const Digest& artifact) {
    const nlohmann::json coverage = {{"block_elements", block_elements_},
                                     {"block_compressed", block_compressed_},
                                     {"block_sparse", block_sparse_},
                                     {"other_changed", other_changed_}};
    variant_.attributes["source"] = artifact.Hex();
    variant_.attributes["codec"] = PublishCodecName(codec_);
    variant_.attributes["bytes"] = std::to_string(variant_.stored_bytes());
    variant_.attributes["bytes_full"] = std::to_string(source_.logical_bytes());
    variant_.attributes["coverage"] = coverage.dump();
    variant_.attributes["update"] = nlohmann::json(RelativeUpdate()).dump();
  }

  // Of a base that is zero wherever it changed: so large that any limit refuses it.
  double RelativeUpdate() const {
    if (update_square_ == 0) return 0;
    if (base_square_ == 0) return kGateNoLimit;
    return Rounded(std::sqrt(update_square_ / base_square_));
  }

  // Of a tensor that is not in pieces.
  static Digest Content(const TensorEntry& entry) {
    return entry.codec == Codec::kBase ? entry.content : entry.parts.at("data").digest();
  }

  // Whether a tensor of the artifact has the bytes of `other`, which `reader` reads: by the digests
  // where they tell, by reading both where one of them is in pieces.
  Result<bool> SameTensor(const TensorEntry& entry, const TensorSource& reader,
                          const TensorEntry& other) const {
    if (entry.dtype != other.dtype || entry.shape != other.shape) return false;
    if (entry.pieces.empty() && other.pieces.empty()) return Content(entry) == Content(other);
    if (const std::optional<bool> same = SameContent(entry, other)) return *same;
    return SameBytes(*source_reader_, entry.name, reader, other.name);
  }

  // The chunks of the artifact itself, where it has them: no new bytes.
  Status StoreRaw(const TensorEntry& entry, const WeightMatrix& values, TensorEntry& stored) {
    if (entry.codec == Codec::kRaw) {
      stored.pieces = entry.pieces;
      stored.parts = entry.parts;
      return OkStatus();
    }
    STOCKPOT_ASSIGN_OR_RETURN(stored.parts["data"],
                              store_.PutBytes({static_cast<const std::byte*>(values.data),
                                               static_cast<size_t>(entry.logical_bytes())}));
    return OkStatus();
  }

  static Result<Bytes> ReadWeights(const TensorSource& source, const TensorEntry& entry) {
    Bytes bytes(static_cast<size_t>(entry.logical_bytes()));
    STOCKPOT_RETURN_IF_ERROR(source.Read(entry.name, 0, bytes));
    return bytes;
  }

  template <typename T>
  Result<Part> Put(const std::vector<T>& values) {
    return store_.PutBytes(std::as_bytes(std::span(values)));
  }

  CheckpointStore& store_;
  const PublishCodec codec_;
  ThreadPool& threads_;
  const ProgressFunction& progress_;

  Manifest source_;
  Manifest base_;
  std::unique_ptr<TensorSource> source_reader_;
  std::unique_ptr<TensorSource> base_reader_;
  std::string config_text_;
  std::optional<ModelStructure> structure_;

  Manifest variant_;
  std::vector<AliasEntry> aliases_;
  std::vector<TensorEntry> ties_;
  bool head_untied_ = false;
  double update_square_ = 0;  // of the tensors that changed: sum of delta^2,
  double base_square_ = 0;    // and of the base's values
  int64_t block_elements_ = 0;
  int64_t block_compressed_ = 0;
  int64_t block_sparse_ = 0;
  int64_t other_changed_ = 0;
};

}  // namespace

Result<Manifest> BuildVariant(CheckpointStore& store, const Digest& artifact, PublishCodec codec,
                              ThreadPool& threads, const ProgressFunction& progress,
                              const PublishOptions& options) {
  STOCKPOT_RETURN_IF_ERROR(CheckPublishOptions(codec, options));
  if (codec == PublishCodec::kAuto || codec == PublishCodec::kSparse || options.planes > 1 ||
      options.residual_rank > 0) {
    return InvalidArgument("codec " + std::string(PublishCodecName(codec)) +
                           " with these options is not built yet");
  }
  return VariantBuilder(store, codec, threads, progress).Build(artifact);
}

}  // namespace stockpot
