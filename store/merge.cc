#include "store/merge.h"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>

#include "store/artifact_source.h"
#include "store/merge_matrix.h"
#include "store/merge_tensor.h"
#include "store/model_structure.h"
#include "store/policy.h"

namespace stockpot {
namespace {

// Of an average: a raw block, its values, a delta, float64 sums and what is rounded from them.
constexpr int64_t kBlockBytesPerElement = 4 + 4 + 4 + 8 + 8 + 4;
constexpr int64_t kMostBlockBytes = kBlockBytesPerElement * kMergeBlockElements;

std::string Quoted(std::string_view name) { return "tensor '" + std::string(name) + "'"; }

std::string NumberText(double value) { return nlohmann::json(value).dump(); }

// As attributes show it.
double Rounded(double value) { return std::round(value * 1e6) / 1e6; }

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

// Stores a run of bytes that comes in pieces, chunk by chunk.
class PartWriter {
 public:
  // `pending` is memory for less than a chunk.
  PartWriter(CheckpointStore& store, std::vector<std::byte>& pending)
      : store_(store), pending_(pending) {
    pending_.clear();
  }

  Status Append(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const size_t room = static_cast<size_t>(kChunkBytes) - pending_.size();
      const auto taken = bytes.first(std::min(room, bytes.size()));
      bytes = bytes.subspan(taken.size());
      if (taken.size() == static_cast<size_t>(kChunkBytes)) {
        STOCKPOT_RETURN_IF_ERROR(Put(taken));
        continue;
      }
      pending_.insert(pending_.end(), taken.begin(), taken.end());
      if (pending_.size() < static_cast<size_t>(kChunkBytes)) continue;
      STOCKPOT_RETURN_IF_ERROR(Put(pending_));
      pending_.clear();
    }
    return OkStatus();
  }

  Result<Part> Finish() {
    STOCKPOT_RETURN_IF_ERROR(Put(pending_));
    return std::move(part_);
  }

 private:
  Status Put(std::span<const std::byte> bytes) {
    STOCKPOT_ASSIGN_OR_RETURN(const Part put, store_.PutBytes(bytes));
    part_.bytes += put.bytes;
    part_.chunks.insert(part_.chunks.end(), put.chunks.begin(), put.chunks.end());
    return OkStatus();
  }

  CheckpointStore& store_;
  std::vector<std::byte>& pending_;
  Part part_;
};

struct Workspace {
  MergeWorkspace merge;
  std::vector<std::byte> pending;

  int64_t bytes() const { return merge.bytes() + static_cast<int64_t>(pending.capacity()); }
};

// Memory of tensors that are done, for the next ones. Thread promise: any thread.
class WorkspacePool {
 public:
  std::unique_ptr<Workspace> Take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return std::make_unique<Workspace>();
    std::unique_ptr<Workspace> workspace = std::move(idle_.back());
    idle_.pop_back();
    idle_bytes_ -= workspace->bytes();
    return workspace;
  }
  void GiveBack(std::unique_ptr<Workspace> workspace) {
    const int64_t bytes = workspace->bytes();
    const std::lock_guard lock(mutex_);
    if (idle_bytes_ + bytes > kMergeIdleBytes) return;
    idle_bytes_ += bytes;
    idle_.push_back(std::move(workspace));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> idle_;
  int64_t idle_bytes_ = 0;
};

class MergeBuilder {
 public:
  MergeBuilder(CheckpointStore& store, const MergeOptions& options,
               const ProgressFunction& progress)
      : store_(store), options_(options), progress_(progress) {}

  Result<Manifest> Build(std::span<const Digest> parents, const std::string& run, int64_t step) {
    STOCKPOT_RETURN_IF_ERROR(CheckMergeOptions(options_, parents.size()));
    STOCKPOT_RETURN_IF_ERROR(Open(parents));
    STOCKPOT_RETURN_IF_ERROR(CheckSameTensors());
    merged_.run = run;
    merged_.step = step;
    merged_.files = parents_.front().manifest.files;
    const std::vector<TensorEntry>& tensors = parents_.front().manifest.tensors;
    std::vector<Result<Made>> outcomes(tensors.size(), Made{});
    for (size_t begin = 0; begin < tensors.size();) {
      const size_t end = SideBySideEnd(begin);
      STOCKPOT_RETURN_IF_ERROR(MakeTensors(begin, end, outcomes));
      begin = end;
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      Record(tensors[i].name, outcomes[i]->report);
      merged_.tensors.push_back(std::move(outcomes[i]->entry));
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
    std::vector<const TensorSource*> sources;
    for (const Model& parent : parents_) sources.push_back(parent.source.get());
    merger_ =
        std::make_unique<TensorMerger>(*base_.source, std::move(sources), *structure_, options_);
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

  // What came of one tensor.
  struct Made {
    TensorEntry entry;
    MergedTensorReport report;
  };

  // The bytes that merging it takes; an average's blocks are the same for every tensor.
  int64_t WorkBytes(const TensorEntry& entry) const {
    const TensorInfo* info = parents_.front().source->Find(entry.name);
    if (merger_->IsDecomposed(*info)) return merger_->MatrixBytes(*info);
    return std::min(kMostBlockBytes, entry.elements() * kBlockBytesPerElement);
  }

  // Tensors from `begin` on that are merged side by side, each on one thread: an eigendecomposition
  // of 576 x 576 spends its time in barriers when several threads share it. One that takes all the
  // memory has all the threads.
  size_t SideBySideEnd(size_t begin) const {
    const std::vector<TensorEntry>& tensors = parents_.front().manifest.tensors;
    size_t end = begin;
    while (end < tensors.size() && WorkBytes(tensors[end]) <= kMergeBytes) ++end;
    return std::max(end, begin + 1);
  }

  Status MakeTensors(size_t begin, size_t end, std::vector<Result<Made>>& outcomes) {
    const std::vector<TensorEntry>& tensors = parents_.front().manifest.tensors;
    std::mutex mutex;
    std::condition_variable freed;
    int64_t used = 0;
    bool stopped = false;
    Status progress_status;
    RunSideBySide(end - begin, [&](size_t offset) {
      const size_t i = begin + offset;
      const int64_t bytes = WorkBytes(tensors[i]);
      {
        std::unique_lock lock(mutex);
        freed.wait(lock, [&] { return stopped || used == 0 || used + bytes <= kMergeBytes; });
        if (stopped) return;
        if (progress_) progress_status = progress_(Share());
        stopped = !progress_status.ok();
        if (stopped) return freed.notify_all();
        used += bytes;
      }
      outcomes[i] = MakeTensor(tensors[i]);
      {
        const std::lock_guard lock(mutex);
        used -= bytes;
        ++done_;
        stopped = stopped || !outcomes[i].ok();
      }
      freed.notify_all();
    });
    for (size_t i = begin; i < end; ++i) {
      if (!outcomes[i].ok()) return outcomes[i].status().WithContext(Quoted(tensors[i].name));
    }
    return progress_status;
  }

  double Share() const {
    return static_cast<double>(done_) /
           static_cast<double>(parents_.front().manifest.tensors.size());
  }

  // Several threads at once.
  Result<Made> MakeTensor(const TensorEntry& entry) {
    if (!entry.alias_of.empty() && TiedInAll(entry.name, entry.alias_of)) return Made{entry, {}};
    Made made{{.name = entry.name, .dtype = entry.dtype, .shape = entry.shape}, {}};
    const TensorInfo tensor{.name = entry.name, .dtype = entry.dtype, .shape = entry.shape};
    STOCKPOT_ASSIGN_OR_RETURN(const bool all_same, AllSame(entry, merger_->UsesBase(tensor)));
    if (all_same) {
      const TensorEntry& stored = *parents_.front().manifest.Resolve(entry.name);
      made.entry.pieces = stored.pieces;
      made.entry.parts = stored.parts;
      return made;
    }
    std::unique_ptr<Workspace> workspace = workspaces_.Take();
    PartWriter writer(store_, workspace->pending);
    const ByteSink sink = [&](std::span<const std::byte> bytes) { return writer.Append(bytes); };
    STOCKPOT_ASSIGN_OR_RETURN(made.report, merger_->Merge(tensor, sink, workspace->merge));
    STOCKPOT_ASSIGN_OR_RETURN(made.entry.parts["data"], writer.Finish());
    workspaces_.GiveBack(std::move(workspace));
    return made;
  }

  void Record(const std::string& name, const MergedTensorReport& report) {
    nlohmann::json facts;
    for (const auto& [fact, value] : report.facts) facts[fact] = Rounded(value);
    for (const MatrixReport& matrix : report.matrices) {
      facts["rank"].push_back(matrix.rank);
      facts["kept_energy"].push_back(Rounded(matrix.kept_energy));
      kept_energy_min_ = std::min(kept_energy_min_, matrix.kept_energy);
      if (options_.method != MergeMethod::kMonoSoupSpectral) continue;
      facts["low"] = Rounded(matrix.low);
      facts["high"] = Rounded(matrix.high);
    }
    if (facts.is_null()) return;
    merged_.attributes["tensor/" + name] = facts.dump();
    matrices_ += report.matrices.empty() ? 0 : 1;
  }

  void AddAttributes(std::span<const Digest> parents) {
    std::string joined, weights;
    for (const Digest& parent : parents) joined += (joined.empty() ? "" : ",") + parent.Hex();
    for (const double w : options_.weights) weights += (weights.empty() ? "" : ",") + NumberText(w);
    auto& attributes = merged_.attributes;
    attributes["method"] = MergeMethodName(options_.method);
    attributes["parents"] = joined;
    attributes["matrices"] = std::to_string(matrices_);
    if (options_.method == MergeMethod::kMonoSoup) {
      attributes["energy"] = NumberText(options_.energy);
      attributes["rank"] = std::to_string(options_.rank);
      attributes["force"] = options_.force ? "true" : "false";
      attributes["kept_energy_min"] = NumberText(Rounded(kept_energy_min_));
    }
    if (options_.method == MergeMethod::kMonoSoupSpectral) {
      attributes["spectral"] = NumberText(options_.spectral);
    }
    if (!weights.empty()) attributes["weights"] = weights;
  }

  CheckpointStore& store_;
  const MergeOptions& options_;
  const ProgressFunction& progress_;
  Model base_;
  std::vector<Model> parents_;
  std::unique_ptr<ModelStructure> structure_;
  std::unique_ptr<TensorMerger> merger_;
  WorkspacePool workspaces_;
  Manifest merged_;
  size_t done_ = 0;  // tensors
  int64_t matrices_ = 0;
  double kept_energy_min_ = 1;
};

}  // namespace

Result<Manifest> BuildMerge(CheckpointStore& store, std::span<const Digest> parents,
                            const std::string& run, int64_t step, const MergeOptions& options,
                            const ProgressFunction& progress) {
  return MergeBuilder(store, options, progress).Build(parents, run, step);
}

}  // namespace stockpot
