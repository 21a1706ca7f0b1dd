#include "store/bitdelta_codec.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>

#include "kernels/base/check.h"
#include "store/model_pair.h"
#include "store/publish_forms.h"
#include "store/publish_options.h"
#include "store/tensor_choice.h"
#include "store/tensor_encoder.h"
#include "store/weight_values.h"

namespace stockpot {
namespace {

using Bytes = std::vector<std::byte>;

std::string Quoted(std::string_view name) { return "tensor '" + std::string(name) + "'"; }

// Any tensor as [first dimension, rest].
WeightMatrix AsMatrix(const Bytes& bytes, const TensorEntry& entry) {
  const int64_t rows = entry.shape.empty() ? 1 : entry.shape[0];
  const int64_t cols = rows == 0 ? 0 : entry.elements() / rows;
  return {.data = bytes.data(), .dtype = entry.dtype, .rows = rows, .cols = cols, .stride = cols};
}

class VariantBuilder {
 public:
  // Borrows all of it but the options.
  VariantBuilder(CheckpointStore& store, const ModelPair& pair, const PublishForms& how,
                 ThreadPool& threads, const ProgressFunction& progress, const PublishDraft& draft)
      : store_(store),
        pair_(pair),
        how_(how),
        threads_(threads),
        progress_(progress),
        draft_(draft) {}

  Result<Manifest> Build(const Digest& artifact) {
    ties_ = pair_.ties();
    variant_.kind = ArtifactKind::kVariant;
    variant_.base = source_.base;
    variant_.run = source_.run;
    variant_.step = source_.step;
    for (size_t next = Resume(artifact); next < source_.tensors.size(); ++next) {
      const TensorEntry& entry = source_.tensors[next];
      STOCKPOT_RETURN_IF_ERROR(SaveDraft(artifact, next));
      STOCKPOT_RETURN_IF_ERROR(Advance(entry));
      if (entry.alias_of.empty()) STOCKPOT_RETURN_IF_ERROR(AddTensor(entry));
    }
    STOCKPOT_RETURN_IF_ERROR(AddFiles());
    STOCKPOT_RETURN_IF_ERROR(ChooseAndStore(artifact));
    AddAliases();
    AddTotals(artifact);
    STOCKPOT_RETURN_IF_ERROR(variant_.Validate());
    return std::move(variant_);
  }

 private:
  // Progress of the first pass, and of codec auto's second.
  Status Advance(const TensorEntry& entry) {
    const double passes = how_.codec == PublishCodec::kAuto ? 2 : 1;
    const double all = static_cast<double>(std::max<int64_t>(1, source_.logical_bytes()));
    const double share = static_cast<double>(done_bytes_) / (passes * all);
    done_bytes_ += entry.logical_bytes();
    return progress_ ? progress_(std::min(1.0, share)) : OkStatus();
  }

  // What is made, and how.
  std::string Purpose(const Digest& artifact) const {
    const PublishOptions& options = how_.options;
    return nlohmann::json{artifact.Hex(),    PublishCodecName(how_.codec),
                          options.planes,    options.residual_rank,
                          options.max_bytes, options.max_share,
                          options.max_error}
        .dump();
  }

  Status SaveDraft(const Digest& artifact, size_t next) {
    if (draft_.job.empty() || !may_save_ || done_bytes_ - saved_bytes_ < draft_.save_bytes) {
      return OkStatus();
    }
    saved_bytes_ = done_bytes_;
    PublishState state{.of = Purpose(artifact),
                       .next = next,
                       .made = variant_,
                       .ties = ties_,
                       .measured = measured_,
                       .stored = stored_};
    state.head_untied = head_untied_;
    state.update_square = update_square_;
    state.base_square = base_square_;
    state.left_square = left_square_;
    state.block_elements = block_elements_;
    state.block_compressed = block_compressed_;
    state.block_sparse = block_sparse_;
    state.other_changed = other_changed_;
    return SavePublishState(store_, draft_.job, std::move(state));
  }

  // The first tensor that is not made yet.
  size_t Resume(const Digest& artifact) {
    if (draft_.job.empty()) return 0;
    // A later stage of the job keeps its own work there, which is over the whole variant.
    const std::optional<Manifest> kept = store_.GetDraft(draft_.job);
    may_save_ = !kept || kept->kind == ArtifactKind::kVariant;
    std::optional<PublishState> state = LoadPublishState(store_, draft_.job, Purpose(artifact));
    if (!state || state->next > source_.tensors.size()) return 0;
    variant_ = std::move(state->made);
    ties_ = std::move(state->ties);
    measured_ = std::move(state->measured);
    stored_ = state->stored;
    head_untied_ = state->head_untied;
    update_square_ = state->update_square;
    base_square_ = state->base_square;
    left_square_ = state->left_square;
    block_elements_ = state->block_elements;
    block_compressed_ = state->block_compressed;
    block_sparse_ = state->block_sparse;
    other_changed_ = state->other_changed;
    for (size_t i = 0; i < state->next; ++i) done_bytes_ += source_.tensors[i].logical_bytes();
    for (size_t i = 0; i < stored_; ++i) {
      done_bytes_ += source_.Find(measured_[i].name)->logical_bytes();
    }
    saved_bytes_ = done_bytes_;
    return state->next;
  }

  Status AddTensor(const TensorEntry& entry) {
    const TensorEntry* base = base_.Find(entry.name);
    const bool base_has_own = base != nullptr && base->alias_of.empty();
    if (!base_has_own) return AddUntied(entry);
    STOCKPOT_ASSIGN_OR_RETURN(const bool same, pair_.EqualsBase(entry, *base));
    if (same) {
      AddUnchanged(entry.name, *base);
      return OkStatus();
    }
    if (!IsWeightDType(entry.dtype) || !IsWeightDType(base->dtype)) {
      return InvalidArgument(
          Quoted(entry.name) + " changed, and " + std::string(DTypeName(entry.dtype)) +
          " (the base: " + std::string(DTypeName(base->dtype)) + ") is not F32, F16 or BF16");
    }
    STOCKPOT_ASSIGN_OR_RETURN(const Bytes base_bytes, ReadWeights(pair_.base_reader(), *base));
    STOCKPOT_ASSIGN_OR_RETURN(const Bytes bytes, ReadWeights(pair_.source_reader(), entry));
    if (entry.dtype != base->dtype && entry.shape == base->shape &&
        SameValues(AsMatrix(base_bytes, *base), AsMatrix(bytes, entry))) {
      AddUnchanged(entry.name, *base);
      return OkStatus();
    }
    return AddChanged(entry, *base, AsMatrix(base_bytes, *base), AsMatrix(bytes, entry));
  }

  // A tensor with values of its own where the base's is tied to another: the tie broke, or holds.
  Status AddUntied(const TensorEntry& entry) {
    const TensorEntry* base = base_.Find(entry.name);
    const std::string target = base == nullptr ? pair_.structure().embedding() : base->alias_of;
    const TensorEntry* tied = source_.Resolve(target);
    const bool can_be_tied = tied != nullptr && tied != &entry;
    STOCKPOT_ASSIGN_OR_RETURN(const bool is_tied,
                              can_be_tied ? pair_.EqualsOwn(entry, *tied) : false);
    if (is_tied) {
      ties_.push_back({entry.name, tied->name});
      return OkStatus();
    }
    if (!IsWeightDType(entry.dtype)) {
      return InvalidArgument(Quoted(entry.name) + " is " + std::string(DTypeName(entry.dtype)) +
                             ", not F32, F16 or BF16");
    }
    const TensorEntry* base_target = base_.Resolve(target);
    if (base_target == nullptr ||
        (base_target->shape != entry.shape && !pair_.IsResized(entry, *base_target))) {
      return InvalidArgument(Quoted(entry.name) + " is not in the base");
    }
    STOCKPOT_ASSIGN_OR_RETURN(const Bytes base_bytes,
                              ReadWeights(pair_.base_reader(), *base_target));
    STOCKPOT_ASSIGN_OR_RETURN(const Bytes bytes, ReadWeights(pair_.source_reader(), entry));
    head_untied_ = true;
    return AddChanged(entry, *base_target, AsMatrix(base_bytes, *base_target),
                      AsMatrix(bytes, entry));
  }

  // `base_entry`: of the base, what the delta is over.
  Status AddChanged(const TensorEntry& entry, const TensorEntry& base_entry,
                    const WeightMatrix& base, const WeightMatrix& tuned) {
    const TensorRole role = pair_.structure().RoleOf(entry.name, entry.shape);
    const WaysToEncode ways = WaysOf(how_, entry, role, HasBase(entry), tuned);
    TensorEncoder encoder(store_, threads_);
    const Status status = encoder.Measure({entry.name, base, tuned}, ways);
    if (!status.ok()) return status.WithContext(Quoted(entry.name));
    const DeltaStats& stats = encoder.stats();
    if (!AllFinite(base)) {
      return InvalidArgument(Quoted(entry.name) + ": the base's values are not all finite");
    }
    if (stats.non_finite > 0) {
      const bool finite = AllFinite(encoder.matrix().tuned);
      return InvalidArgument(
          Quoted(entry.name) + ": " + std::to_string(stats.non_finite) + " of " +
          std::to_string(entry.elements()) +
          (finite ? " values are further from the base's than float32 holds"
                  : " values are NaN or infinite, or further from the base's than float32 holds"));
    }
    if (!AllFinite(encoder.rows_behind())) {
      return InvalidArgument(Quoted(entry.name) + ": a row behind the base's last is not finite");
    }
    update_square_ += stats.sum_square;
    base_square_ += SquaredNorm(encoder.matrix().base, threads_);
    MeasuredTensor changed{
        .name = entry.name, .base = base_entry.name, .role = role, .stats = stats, .forms = {}};
    const Candidate raw{.codec = Codec::kRaw, .bytes = entry.logical_bytes(), .left = 0};
    if (how_.codec == PublishCodec::kAuto) {
      changed.forms = encoder.candidates();
      changed.forms.push_back(raw);
      changed.forms = LowerHull(std::move(changed.forms));
      measured_.push_back(std::move(changed));
      return OkStatus();
    }
    changed.forms = {FixedFormOf(role, encoder, raw)};
    return Store(changed, 0, encoder, tuned);
  }

  // By the rows that the base has too: those behind cost the same in every form.
  Candidate FixedFormOf(TensorRole role, const TensorEncoder& encoder, Candidate raw) const {
    const WeightMatrix behind = encoder.rows_behind();
    const int64_t behind_bytes = behind.rows * behind.cols * DTypeSize(behind.dtype);
    std::vector<Candidate> candidates = encoder.candidates();
    for (Candidate& candidate : candidates) candidate.bytes -= behind_bytes;
    raw.bytes -= behind_bytes;
    Candidate form = FixedForm(how_.codec, role, encoder.stats(), candidates, raw);
    form.bytes += behind_bytes;
    return form;
  }

  bool HasBase(const TensorEntry& entry) const { return base_.Resolve(entry.name) != nullptr; }

  // Codec auto: the choice over all tensors, then each of them once more.
  Status ChooseAndStore(const Digest& artifact) {
    if (how_.codec != PublishCodec::kAuto) return OkStatus();
    std::vector<std::vector<Candidate>> hulls;
    for (const MeasuredTensor& tensor : measured_) hulls.push_back(tensor.forms);
    int64_t fixed_bytes = 0;
    for (const auto& [name, part] : variant_.files) fixed_bytes += part.bytes;
    const ChoiceLimits limits =
        LimitsOf(how_.options, source_.logical_bytes(), fixed_bytes, update_square_);
    STOCKPOT_ASSIGN_OR_RETURN(const std::vector<size_t> chosen, ChooseCandidates(hulls, limits));
    for (; stored_ < measured_.size(); ++stored_) {
      STOCKPOT_RETURN_IF_ERROR(SaveDraft(artifact, source_.tensors.size()));
      STOCKPOT_RETURN_IF_ERROR(Advance(*source_.Find(measured_[stored_].name)));
      STOCKPOT_RETURN_IF_ERROR(StoreAgain(measured_[stored_], chosen[stored_]));
    }
    STOCKPOT_CHECK(!limits.bytes || variant_.stored_bytes() <= *limits.bytes,
                   variant_.stored_bytes(), *limits.bytes);
    return OkStatus();
  }

  // Reads and measures the tensor a second time, as far as its form needs.
  Status StoreAgain(const MeasuredTensor& changed, size_t chosen) {
    const TensorEntry& entry = *source_.Find(changed.name);
    const TensorEntry& base_entry = *base_.Find(changed.base);
    const Candidate& form = changed.forms[chosen];
    TensorEncoder encoder(store_, threads_);
    if (form.codec == Codec::kRaw && entry.codec == Codec::kRaw) {
      return Store(changed, chosen, encoder, {});  // its chunks are there
    }
    STOCKPOT_ASSIGN_OR_RETURN(const Bytes base, ReadWeights(pair_.base_reader(), base_entry));
    STOCKPOT_ASSIGN_OR_RETURN(const Bytes bytes, ReadWeights(pair_.source_reader(), entry));
    const WeightMatrix tuned = AsMatrix(bytes, entry);
    WaysToEncode ways = WaysOf(how_, entry, changed.role, HasBase(entry), tuned);
    ways.planes = ways.ranks_from = std::max<int64_t>(1, form.planes);
    if (form.rank == 0) ways.ranks.clear();
    STOCKPOT_RETURN_IF_ERROR(
        encoder.Measure({entry.name, AsMatrix(base, base_entry), tuned}, ways));
    return Store(changed, chosen, encoder, tuned);
  }

  // Puts a form, and what is told about it.
  Status Store(const MeasuredTensor& changed, size_t chosen, TensorEncoder& encoder,
               const WeightMatrix& tuned) {
    const TensorEntry& entry = *source_.Find(changed.name);
    const Candidate& form = changed.forms[chosen];
    TensorEntry stored{.name = entry.name, .dtype = entry.dtype, .shape = entry.shape};
    STOCKPOT_RETURN_IF_ERROR(form.codec == Codec::kRaw ? StoreRaw(entry, tuned, stored)
                                                       : encoder.Put(form, stored));
    const bool block = changed.role == TensorRole::kBlockLinear;
    (block ? block_elements_ : other_changed_) += entry.elements();
    if (block && form.codec == Codec::kSparse) block_sparse_ += entry.elements();
    if (block && form.codec == Codec::kBitDelta) block_compressed_ += entry.elements();
    left_square_ += form.left;
    const Candidate* next =
        chosen + 1 < changed.forms.size() ? &changed.forms[chosen + 1] : nullptr;
    variant_.attributes["tensor/" + entry.name] =
        FactsOf(changed.role, changed.stats, form, next).dump();
    variant_.tensors.push_back(std::move(stored));
    return OkStatus();
  }

  void AddUnchanged(const std::string& name, const TensorEntry& base) {
    variant_.tensors.push_back({.name = name,
                                .dtype = base.dtype,
                                .shape = base.shape,
                                .codec = Codec::kBase,
                                .content = ContentOf(base)});
  }

  // After all others: an alias has its target's final dtype.
  void AddAliases() {
    std::vector<TensorEntry> aliases;
    for (const Tie& tie : ties_) {
      const auto target =
          std::find_if(variant_.tensors.begin(), variant_.tensors.end(),
                       [&](const TensorEntry& entry) { return entry.name == tie.target; });
      STOCKPOT_CHECK(target != variant_.tensors.end(), tie.name, tie.target);
      aliases.push_back({.name = tie.name,
                         .dtype = target->dtype,
                         .shape = target->shape,
                         .alias_of = tie.target});
    }
    for (TensorEntry& alias : aliases) variant_.tensors.push_back(std::move(alias));
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
    if (!head_untied_ || !pair_.structure().config().ties_embeddings.value_or(true))
      return OkStatus();
    // The head differs from the embedding: a reader that believed the config would tie them again.
    nlohmann::ordered_json config =
        nlohmann::ordered_json::parse(pair_.config_text(), nullptr, false);
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
    variant_.attributes["codec"] = PublishCodecName(how_.codec);
    variant_.attributes["bytes"] = std::to_string(variant_.stored_bytes());
    variant_.attributes["bytes_full"] = std::to_string(source_.logical_bytes());
    variant_.attributes["coverage"] = coverage.dump();
    variant_.attributes["update_error"] =
        nlohmann::json(update_square_ == 0 ? 0 : SixDigits(left_square_ / update_square_)).dump();
    variant_.attributes["update"] = nlohmann::json(RelativeUpdate()).dump();
  }

  // Of a base that is zero wherever it changed: so large that any limit refuses it.
  double RelativeUpdate() const {
    if (update_square_ == 0) return 0;
    if (base_square_ == 0) return kGateNoLimit;
    return SixDigits(std::sqrt(update_square_ / base_square_));
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

  CheckpointStore& store_;
  const ModelPair& pair_;
  const Manifest& source_ = pair_.source();
  const Manifest& base_ = pair_.base();
  const PublishForms how_;
  ThreadPool& threads_;
  const ProgressFunction& progress_;
  const PublishDraft& draft_;

  Manifest variant_;
  std::vector<Tie> ties_;
  bool head_untied_ = false;
  std::vector<MeasuredTensor> measured_;  // of codec auto, and how many of them are stored
  size_t stored_ = 0;
  int64_t done_bytes_ = 0;
  int64_t saved_bytes_ = 0;   // of them, those that the draft has
  bool may_save_ = true;      // the draft is this stage's
  double update_square_ = 0;  // of the tensors that changed: sum of delta^2,
  double base_square_ = 0;    // of the base's values, and of what
  double left_square_ = 0;    // is lost
  int64_t block_elements_ = 0;
  int64_t block_compressed_ = 0;
  int64_t block_sparse_ = 0;
  int64_t other_changed_ = 0;
};

}  // namespace

Result<Manifest> BuildVariant(CheckpointStore& store, const Digest& artifact, PublishCodec codec,
                              ThreadPool& threads, const ProgressFunction& progress,
                              const PublishOptions& options, const PublishDraft& draft) {
  STOCKPOT_RETURN_IF_ERROR(CheckPublishOptions(codec, options));
  STOCKPOT_ASSIGN_OR_RETURN(const std::unique_ptr<ModelPair> pair,
                            ModelPair::Open(store, artifact));
  return VariantBuilder(store, *pair, {codec, options}, threads, progress, draft).Build(artifact);
}

}  // namespace stockpot
