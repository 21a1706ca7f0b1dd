#include "store/mono_soup.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "store/artifact_source.h"
#include "store/model_structure.h"
#include "store/mono_soup_threads.h"
#include "store/weight_rounding.h"

namespace stockpot {
namespace {

using Bytes = std::vector<std::byte>;

// Small matrices are merged side by side, each on one thread: an eigendecomposition of 576 x 576
// spends its time in barriers when several threads share it. A tensor that fills a batch alone has
// them all.
constexpr int64_t kBatchElements = int64_t{8} << 20;

std::string Quoted(std::string_view name) { return "tensor '" + std::string(name) + "'"; }

std::string NumberText(double value) { return nlohmann::json(value).dump(); }

// One parent or the base: its manifest and its values.
struct Model {
  Manifest manifest;
  std::unique_ptr<TensorSource> source;
};

Result<Model> OpenModel(const CheckpointStore& store, const Digest& digest) {
  Model model;
  STOCKPOT_ASSIGN_OR_RETURN(model.manifest, store.GetManifest(digest));
  STOCKPOT_ASSIGN_OR_RETURN(model.source, OpenArtifact(store, digest));
  return model;
}

Result<Bytes> ReadWeights(const Model& model, const std::string& name) {
  return model.source->ReadAll(name);
}

// Whether both store the tensor raw, with the same dtype and bytes.
Result<bool> SameRaw(const Model& a, const Model& b, const std::string& name) {
  const TensorEntry* of_a = a.manifest.Resolve(name);
  const TensorEntry* of_b = b.manifest.Resolve(name);
  if (of_a == nullptr || of_b == nullptr || of_a->codec != Codec::kRaw ||
      of_b->codec != Codec::kRaw || of_a->dtype != of_b->dtype || of_a->shape != of_b->shape) {
    return false;
  }
  if (const std::optional<bool> same = SameContent(*of_a, *of_b)) return *same;
  return SameBytes(*a.source, name, *b.source, name);
}

class MonoSoupBuilder {
 public:
  MonoSoupBuilder(CheckpointStore& store, const MonoSoupOptions& options,
                  const ProgressFunction& progress)
      : store_(store), options_(options), progress_(progress) {}

  Result<Manifest> Build(std::span<const Digest> parents, const std::string& run, int64_t step) {
    STOCKPOT_RETURN_IF_ERROR(CheckMonoSoupOptions(options_));
    STOCKPOT_RETURN_IF_ERROR(Open(parents));
    STOCKPOT_RETURN_IF_ERROR(CheckSameTensors());
    merged_.run = run;
    merged_.step = step;
    const Manifest& first = parents_.front().manifest;
    merged_.files = first.files;
    for (size_t begin = 0; begin < first.tensors.size();) {
      const size_t end = BatchEnd(begin);
      if (progress_) {
        STOCKPOT_RETURN_IF_ERROR(
            progress_(static_cast<double>(begin) / static_cast<double>(first.tensors.size())));
      }
      STOCKPOT_RETURN_IF_ERROR(AddBatch(begin, end));
      begin = end;
    }
    AddAttributes(parents);
    STOCKPOT_RETURN_IF_ERROR(merged_.Validate());
    return std::move(merged_);
  }

 private:
  Status Open(std::span<const Digest> parents) {
    if (parents.empty()) return InvalidArgument("a merge needs a checkpoint");
    for (const Digest& parent : parents) {
      STOCKPOT_ASSIGN_OR_RETURN(Model model, OpenModel(store_, parent));
      const ArtifactKind kind = model.manifest.kind;
      if (kind != ArtifactKind::kCheckpoint && kind != ArtifactKind::kMerge) {
        return InvalidArgument("artifact " + parent.ShortHex() + " is a " +
                               std::string(ArtifactKindName(kind)) +
                               ": only checkpoints and merges are merged");
      }
      if (!parents_.empty() && model.manifest.base != parents_.front().manifest.base) {
        return InvalidArgument("artifact " + parent.ShortHex() + " has another base than " +
                               parents.front().ShortHex());
      }
      parents_.push_back(std::move(model));
    }
    const Digest base = *parents_.front().manifest.base;
    STOCKPOT_ASSIGN_OR_RETURN(base_, OpenModel(store_, base));
    merged_.kind = ArtifactKind::kMerge;
    merged_.base = base;
    std::string config_text;
    if (Result<std::string> file = parents_.front().source->ReadFile("config.json"); file.ok()) {
      config_text = std::move(*file);
    } else if (file.status().code() != StatusCode::kNotFound) {
      return file.status();
    }
    STOCKPOT_ASSIGN_OR_RETURN(StructureConfig config, ParseStructureConfig(config_text));
    structure_ = std::make_unique<ModelStructure>(std::move(config), base_.source->tensors());
    return OkStatus();
  }

  // Against the first parent, which decides; completeness against the base is the publish gate's.
  Status CheckSameTensors() const {
    const Model& first = parents_.front();
    for (const Model& other : std::span(parents_).subspan(1)) {
      for (const TensorInfo& tensor : other.source->tensors()) {
        if (first.source->Find(tensor.name) == nullptr) {
          return InvalidArgument(Quoted(tensor.name) + " is in one parent and not in the first");
        }
      }
      for (const TensorInfo& tensor : first.source->tensors()) {
        const TensorInfo* found = other.source->Find(tensor.name);
        if (found == nullptr) {
          return InvalidArgument(Quoted(tensor.name) + " is missing in one of the parents");
        }
        if (found->shape != tensor.shape) {
          return InvalidArgument(Quoted(tensor.name) + " has shape " + ShapeText(tensor.shape) +
                                 " in the first parent and " + ShapeText(found->shape) +
                                 " in another");
        }
      }
    }
    return OkStatus();
  }

  bool TiedInAll(const std::string& name, const std::string& target) const {
    return std::all_of(parents_.begin(), parents_.end(), [&](const Model& parent) {
      return parent.source->Find(name)->alias_of == target;
    });
  }

  // The same bytes in all parents; if `and_base`, in the base too.
  Result<bool> AllSame(const TensorEntry& entry, bool and_base) const {
    std::vector<const Model*> models;
    for (const Model& parent : parents_) models.push_back(&parent);
    if (and_base) models.push_back(&base_);
    for (const Model* model : models) {
      STOCKPOT_ASSIGN_OR_RETURN(const bool same, SameRaw(parents_.front(), *model, entry.name));
      if (!same) return false;
    }
    return true;
  }

  size_t BatchEnd(size_t begin) const {
    const std::vector<TensorEntry>& tensors = parents_.front().manifest.tensors;
    int64_t elements = 0;
    size_t end = begin;
    while (end < tensors.size() &&
           (end == begin || elements + tensors[end].elements() <= kBatchElements)) {
      elements += tensors[end++].elements();
    }
    return end;
  }

  // What came of one tensor.
  struct Made {
    TensorEntry entry;
    std::vector<TruncationReport> reports;  // empty: no truncated matrix
  };

  Status AddBatch(size_t begin, size_t end) {
    const std::vector<TensorEntry>& tensors = parents_.front().manifest.tensors;
    std::vector<Result<Made>> outcomes(end - begin, Made{});
    RunSideBySide(outcomes.size(), [&](size_t i) { outcomes[i] = MakeTensor(tensors[begin + i]); });
    for (size_t i = 0; i < outcomes.size(); ++i) {
      const std::string& name = tensors[begin + i].name;
      if (!outcomes[i].ok()) return outcomes[i].status().WithContext(Quoted(name));
      if (!outcomes[i]->reports.empty()) Record(name, outcomes[i]->reports);
      merged_.tensors.push_back(std::move(outcomes[i]->entry));
    }
    return OkStatus();
  }

  // Several threads at once.
  Result<Made> MakeTensor(const TensorEntry& entry) const {
    if (!entry.alias_of.empty() && TiedInAll(entry.name, entry.alias_of)) return Made{entry, {}};
    const TensorInfo* base = base_.source->Find(entry.name);
    const bool matrix = entry.shape.size() == 2 && entry.elements() > 0 &&
                        structure_->RoleOf(entry.name, entry.shape) != TensorRole::kTable;
    Made made{{.name = entry.name, .dtype = entry.dtype, .shape = entry.shape}, {}};
    STOCKPOT_ASSIGN_OR_RETURN(const bool all_same, AllSame(entry, matrix));
    if (all_same) {
      const TensorEntry& stored = *parents_.front().manifest.Resolve(entry.name);
      made.entry.pieces = stored.pieces;
      made.entry.parts = stored.parts;
      return made;
    }
    std::vector<Bytes> weights;
    for (const Model& parent : parents_) {
      const DType dtype = parent.source->Find(entry.name)->dtype;
      if (!IsWeightDType(dtype)) {
        return InvalidArgument("differs between the parents, and " + std::string(DTypeName(dtype)) +
                               " is not F32, F16 or BF16");
      }
      STOCKPOT_ASSIGN_OR_RETURN(weights.emplace_back(), ReadWeights(parent, entry.name));
    }
    if (matrix && base == nullptr) return InvalidArgument("is not in the base");
    STOCKPOT_ASSIGN_OR_RETURN(
        const Bytes merged,
        matrix ? MergeMatrix(entry, *base, weights, made.reports) : Mean(entry, weights));
    STOCKPOT_ASSIGN_OR_RETURN(made.entry.parts["data"], store_.PutBytes(merged));
    return made;
  }

  DType ParentDType(size_t parent, const std::string& name) const {
    return parents_[parent].source->Find(name)->dtype;
  }

  Result<Bytes> Mean(const TensorEntry& entry, const std::vector<Bytes>& weights) const {
    Bytes out(static_cast<size_t>(entry.logical_bytes()));
    std::vector<DType> dtypes;
    for (size_t p = 0; p < weights.size(); ++p) dtypes.push_back(ParentDType(p, entry.name));
    const double count = static_cast<double>(weights.size());
    bool finite = true;
    for (int64_t i = 0; i < entry.elements(); ++i) {
      double sum = LoadWeight(weights[0].data(), dtypes[0], i);  // not 0 + ...: -0 stays -0
      for (size_t p = 1; p < weights.size(); ++p)
        sum += LoadWeight(weights[p].data(), dtypes[p], i);
      finite &= std::isfinite(sum);
      StoreWeight(sum / count, entry.dtype, out.data(), i);
    }
    if (!finite) return InvalidArgument("a value is NaN or infinite");
    return out;
  }

  Result<Bytes> MergeMatrix(const TensorEntry& entry, const TensorInfo& base,
                            const std::vector<Bytes>& weights,
                            std::vector<TruncationReport>& reports) const {
    if (!IsWeightDType(base.dtype)) return InvalidArgument("the base's is not F32, F16 or BF16");
    if (base.shape != entry.shape) {
      return InvalidArgument("shape " + ShapeText(entry.shape) + ", the base's is " +
                             ShapeText(base.shape));
    }
    STOCKPOT_ASSIGN_OR_RETURN(const Bytes base_bytes, ReadWeights(base_, entry.name));
    const int64_t n = entry.elements();
    std::vector<std::vector<float>> deltas;
    std::vector<const float*> pointers;
    for (size_t p = 0; p < weights.size(); ++p) {
      std::vector<float>& delta = deltas.emplace_back(static_cast<size_t>(n));
      const DType dtype = ParentDType(p, entry.name);
      for (int64_t i = 0; i < n; ++i) {
        delta[static_cast<size_t>(i)] =
            LoadWeight(weights[p].data(), dtype, i) - LoadWeight(base_bytes.data(), base.dtype, i);
      }
      pointers.push_back(delta.data());
    }
    std::vector<float> merged(static_cast<size_t>(n));
    STOCKPOT_ASSIGN_OR_RETURN(
        reports, MonoSoupMatrix(entry.shape[0], entry.shape[1], pointers, options_, merged.data()));
    const int64_t full = std::min(entry.shape[0], entry.shape[1]);
    const bool exact = std::all_of(reports.begin(), reports.end(), [&](const auto& report) {
      return report.rank == full || report.rank == 0;  // 0: W_i is the base
    });
    if (exact) return Mean(entry, weights);
    Bytes out(static_cast<size_t>(entry.logical_bytes()));
    for (int64_t i = 0; i < n; ++i) {
      const double weight = LoadWeight(base_bytes.data(), base.dtype, i);
      StoreWeight(weight + merged[static_cast<size_t>(i)], entry.dtype, out.data(), i);
    }
    return out;
  }

  void Record(const std::string& name, const std::vector<TruncationReport>& reports) {
    nlohmann::json facts;
    for (const TruncationReport& report : reports) {
      facts["rank"].push_back(report.rank);
      facts["kept_energy"].push_back(std::round(report.kept_energy * 1e6) / 1e6);
      kept_energy_min_ = std::min(kept_energy_min_, report.kept_energy);
    }
    merged_.attributes["tensor/" + name] = facts.dump();
    ++matrices_;
  }

  void AddAttributes(std::span<const Digest> parents) {
    std::string joined;
    for (const Digest& parent : parents) joined += (joined.empty() ? "" : ",") + parent.Hex();
    merged_.attributes["method"] = "monosoup";
    merged_.attributes["energy"] = NumberText(options_.energy);
    merged_.attributes["rank"] = std::to_string(options_.rank);
    merged_.attributes["force"] = options_.force ? "true" : "false";
    merged_.attributes["parents"] = joined;
    merged_.attributes["matrices"] = std::to_string(matrices_);
    merged_.attributes["kept_energy_min"] = NumberText(std::round(kept_energy_min_ * 1e6) / 1e6);
  }

  CheckpointStore& store_;
  const MonoSoupOptions& options_;
  const ProgressFunction& progress_;
  Model base_;
  std::vector<Model> parents_;
  std::unique_ptr<ModelStructure> structure_;
  Manifest merged_;
  int64_t matrices_ = 0;
  double kept_energy_min_ = 1;
};

}  // namespace

Result<Manifest> BuildMonoSoup(CheckpointStore& store, std::span<const Digest> parents,
                               const std::string& run, int64_t step, const MonoSoupOptions& options,
                               const ProgressFunction& progress) {
  return MonoSoupBuilder(store, options, progress).Build(parents, run, step);
}

}  // namespace stockpot
