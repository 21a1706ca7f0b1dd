#include <algorithm>
#include <new>
#include <set>

#include "serve/model/weights_internal.h"
#include "store/bitdelta_parts.h"
#include "store/delta_reader.h"
#include "store/raw_tensor_reader.h"
#include "store/sparse_codec.h"

namespace stockpot {
namespace {

Status CheckSameArchitecture(const ModelConfig& base, const ModelConfig& variant) {
  const auto differs = [](const char* field, int64_t want, int64_t have) {
    return InvalidArgument(std::string("config.json: ") + field + " is " + std::to_string(have) +
                           ", the base has " + std::to_string(want));
  };
  if (variant.architecture != base.architecture) {
    return InvalidArgument("config.json: architecture '" + variant.architecture +
                           "', the base has '" + base.architecture + "'");
  }
  struct Field {
    const char* name;
    int64_t base;
    int64_t variant;
  };
  const Field fields[] = {
      {"hidden_size", base.hidden_size, variant.hidden_size},
      {"num_hidden_layers", base.layers, variant.layers},
      {"num_attention_heads", base.heads, variant.heads},
      {"num_key_value_heads", base.kv_heads, variant.kv_heads},
      {"head_dim", base.head_dim, variant.head_dim},
      {"intermediate_size", base.intermediate_size, variant.intermediate_size},
      {"attention_bias", base.attention_bias, variant.attention_bias},
      {"mlp_bias", base.mlp_bias, variant.mlp_bias},
  };
  for (const Field& field : fields) {
    if (field.base != field.variant) return differs(field.name, field.base, field.variant);
  }
  return OkStatus();
}

class VariantLoader {
 public:
  VariantLoader(VariantModel::Tensors& tensors, const CheckpointStore& store, Manifest manifest)
      : tensors_(tensors),
        base_(tensors.base->tensors()),
        store_(store),
        manifest_(std::move(manifest)) {}

  Status Load() {
    STOCKPOT_RETURN_IF_ERROR(CheckKind());
    STOCKPOT_ASSIGN_OR_RETURN(base_manifest_, store_.GetManifest(base_.digest));
    STOCKPOT_RETURN_IF_ERROR(ReadConfig());
    STOCKPOT_RETURN_IF_ERROR(CheckTensors());

    DecoderView& view = tensors_.view;
    view.inv_freq = RopeInverseFrequencies(tensors_.config);
    view.rms_epsilon = tensors_.config.rms_epsilon;
    view.max_positions = tensors_.config.max_positions;
    STOCKPOT_ASSIGN_OR_RETURN(view.embeddings, Embeddings(*manifest_.Resolve(kEmbeddingName)));
    STOCKPOT_ASSIGN_OR_RETURN(view.final_norm,
                              Vector(std::string(kFinalNormName), base_.view.final_norm));
    view.layers.resize(base_.layers.size());
    for (size_t layer = 0; layer < view.layers.size(); ++layer) {
      STOCKPOT_RETURN_IF_ERROR(LoadLayer(layer));
    }
    return LoadHead();
  }

 private:
  Status CheckKind() const {
    if (manifest_.kind != ArtifactKind::kVariant) {
      return InvalidArgument("it is a " + std::string(ArtifactKindName(manifest_.kind)) +
                             ", not a variant or adapter");
    }
    if (!manifest_.base || *manifest_.base != base_.digest) {
      return InvalidArgument("it was made against base " +
                             (manifest_.base ? manifest_.base->ShortHex() : "(none)") + ", not " +
                             base_.digest.ShortHex());
    }
    return OkStatus();
  }

  // A config file of the variant's own, or the base's.
  Result<std::string> File(const char* name, const std::string& of_base) const {
    const auto it = manifest_.files.find(name);
    if (it == manifest_.files.end()) return of_base;
    std::string text(static_cast<size_t>(it->second.bytes), '\0');
    const Status status = store_.ReadPart(it->second, 0, std::as_writable_bytes(std::span(text)));
    if (!status.ok()) return status.WithContext(name);
    return text;
  }

  Status ReadConfig() {
    STOCKPOT_ASSIGN_OR_RETURN(const std::string config, File("config.json", base_.config_json));
    STOCKPOT_ASSIGN_OR_RETURN(const std::string generation,
                              File("generation_config.json", base_.generation_config_json));
    STOCKPOT_ASSIGN_OR_RETURN(tensors_.config, ParseModelConfig(config, generation));
    return CheckSameArchitecture(base_.config, tensors_.config);
  }

  // Coverage, and that every tensor said to be the base's is this base's, byte for byte.
  Status CheckTensors() const {
    std::vector<TensorInfo> infos;
    infos.reserve(manifest_.tensors.size());
    for (const TensorEntry& entry : manifest_.tensors) {
      infos.push_back({entry.name, entry.dtype, entry.shape, entry.alias_of});
    }
    STOCKPOT_RETURN_IF_ERROR(CheckCoverage(tensors_.config, infos));
    for (const TensorEntry& entry : manifest_.tensors) {
      if (!entry.alias_of.empty() || entry.codec != Codec::kBase) continue;
      const TensorEntry* target = base_manifest_.Resolve(entry.name);
      if (target == nullptr) {
        return InvalidArgument("tensor '" + entry.name +
                               "' is said to be the base's, which has none");
      }
      const auto data = target->parts.find("data");
      if (data == target->parts.end() || data->second.digest() != entry.content ||
          target->shape != entry.shape) {
        return InvalidArgument("tensor '" + entry.name +
                               "' is said to be the base's, which differs");
      }
    }
    return OkStatus();
  }

  PartReader CountedParts() {
    return [this](const Part& part, int64_t offset, std::span<std::byte> out) {
      tensors_.read_bytes += static_cast<int64_t>(out.size());
      return store_.ReadPart(part, offset, out);
    };
  }

  WeightStorage::Reader RawReaderOf(const TensorEntry& entry) {
    return [reader = RawTensorReader(entry, CountedParts())](int64_t offset,
                                                             std::span<std::byte> out) {
      return reader.Read(offset, out);
    };
  }

  WeightStorage::Reader ReaderOf(const TensorEntry& entry, const std::string& role) {
    const Part& part = entry.parts.at(role);  // Validate() of the manifest: the role is there
    return [&part, read = CountedParts()](int64_t offset, std::span<std::byte> out) {
      return read(part, offset, out);
    };
  }

  Result<WeightMatrix> RawMatrix(const TensorEntry& entry) {
    Result<WeightMatrix> matrix = tensors_.storage.ReadMatrix(entry.dtype, entry.shape[0],
                                                              entry.shape[1], RawReaderOf(entry));
    if (!matrix.ok()) return matrix.status().WithContext("tensor '" + entry.name + "'");
    return matrix;
  }

  Result<const float*> Vector(const std::string& name, const float* of_base) {
    const TensorEntry& entry = *manifest_.Resolve(name);
    if (entry.codec == Codec::kBase) {
      // An alias may lead to a tensor that the base has under another name only.
      if (entry.name == name) return of_base;
      return InvalidArgument("tensor '" + name + "' is tied to the base's '" + entry.name +
                             "', which is not supported");
    }
    Result<const float*> vector =
        tensors_.storage.ReadVector(entry.dtype, entry.shape[0], RawReaderOf(entry));
    if (!vector.ok()) return vector.status().WithContext("tensor '" + name + "'");
    return vector;
  }

  // The embeddings are read row by row: the base's, perhaps with sign planes beside, or the
  // variant's own, dense.
  Result<WeightMatrix> Embeddings(const TensorEntry& entry) {
    switch (entry.codec) {
      case Codec::kBase:
        if (entry.name == kEmbeddingName) return base_.view.embeddings;
        if (entry.name == kHeadName) return base_.head;
        return InvalidArgument("the embeddings are tied to '" + entry.name + "'");
      case Codec::kRaw:
        return RawMatrix(entry);
      case Codec::kSparse:
        return DecodedMatrix(entry);
      case Codec::kBitDelta:
        break;
    }
    return SignedEmbeddings(entry);
  }

  Result<WeightMatrix> SignedEmbeddings(const TensorEntry& entry) {
    STOCKPOT_RETURN_IF_ERROR(BaseOf(entry).status());
    if (ResidualRank(entry) > 0) {
      return InvalidArgument("tensor '" + entry.name +
                             "': embeddings with a low-rank residual are not supported");
    }
    // A head that is tied to them, over another weight than theirs, has no base to share.
    const bool is_head = entry.name == kHeadName;
    const TensorEntry* head = manifest_.Resolve(kHeadName);
    const bool tied = head == nullptr || head == &entry;
    if (tied && !is_head && base_.head.data != base_.view.embeddings.data) {
      return DecodedMatrix(entry);
    }
    if (!is_head && entry.name != kEmbeddingName) {
      return InvalidArgument("the embeddings are tied to '" + entry.name + "'");
    }
    STOCKPOT_ASSIGN_OR_RETURN(tensors_.view.embedding_signs, Signs(entry));
    return is_head ? base_.head : base_.view.embeddings;
  }

  Result<const PackedSigns*> Signs(const TensorEntry& entry) {
    std::vector<WeightStorage::SignPlane> planes;
    for (int64_t plane = 0; plane < SignPlanes(entry); ++plane) {
      planes.push_back({ReaderOf(entry, SignsRole(plane)), ReaderOf(entry, AlphaRole(plane))});
    }
    Result<const PackedSigns*> signs =
        tensors_.storage.ReadSigns(entry.shape[0], entry.shape[1], planes);
    if (!signs.ok()) return signs.status().WithContext("tensor '" + entry.name + "'");
    return signs;
  }

  // The low-rank rest of a 1-bit tensor, or null.
  Result<const LoraDelta*> Residual(const TensorEntry& entry) {
    const int64_t rank = ResidualRank(entry);
    if (rank == 0) return static_cast<const LoraDelta*>(nullptr);
    WeightStorage factors;  // until they are packed
    const auto read = [&]() -> Result<LoraDelta> {
      STOCKPOT_ASSIGN_OR_RETURN(const WeightMatrix a,
                                factors.ReadMatrix(DType::kBF16, rank, entry.shape[1],
                                                   ReaderOf(entry, kResidualA)));
      STOCKPOT_ASSIGN_OR_RETURN(const WeightMatrix b,
                                factors.ReadMatrix(DType::kBF16, entry.shape[0], rank,
                                                   ReaderOf(entry, kResidualB)));
      return LoraDelta::Pack(a, b, 1.0f);
    };
    Result<LoraDelta> delta = read();
    if (!delta.ok()) return delta.status().WithContext("tensor '" + entry.name + "', its residual");
    return tensors_.storage.Keep(*std::move(delta));
  }

  // The base's matrix with what changed in it, dense.
  Result<WeightMatrix> DecodedMatrix(const TensorEntry& entry) {
    STOCKPOT_ASSIGN_OR_RETURN(const TensorEntry* base, BaseOf(entry));
    const DeltaReader reader(entry, *base, CountedParts(), /*as_f32=*/true);
    Result<WeightMatrix> matrix =
        tensors_.storage.ReadMatrix(reader.dtype(), entry.shape[0], entry.shape[1],
                                    [&](int64_t offset, std::span<std::byte> out) {
                                      return reader.Read(offset, out);
                                    });
    if (!matrix.ok()) return matrix.status().WithContext("tensor '" + entry.name + "'");
    return matrix;
  }

  Result<const TensorEntry*> BaseOf(const TensorEntry& entry) const {
    const TensorEntry* base = base_manifest_.Resolve(entry.name);
    const Status status =
        base == nullptr ? Corruption("the base has no such tensor") : DeltaReader::Check(entry, *base);
    if (!status.ok()) return status.WithContext("tensor '" + entry.name + "'");
    return base;
  }

  // The changed elements beside `of_base`, the resident weight they are over.
  Result<const SparseDelta*> Sparse(const TensorEntry& entry, const WeightMatrix& of_base) {
    STOCKPOT_RETURN_IF_ERROR(BaseOf(entry).status());
    const Part& values_part = entry.parts.at("values");
    const int64_t changed = values_part.bytes / DTypeSize(entry.dtype);
    std::vector<uint32_t> counts(static_cast<size_t>(entry.shape[0]));
    std::vector<std::byte> stored(static_cast<size_t>(entry.parts.at("columns").bytes));
    std::vector<std::byte> values(static_cast<size_t>(values_part.bytes));
    const PartReader read = CountedParts();
    STOCKPOT_RETURN_IF_ERROR(
        read(entry.parts.at("counts"), 0, std::as_writable_bytes(std::span(counts))));
    STOCKPOT_RETURN_IF_ERROR(read(entry.parts.at("columns"), 0, stored));
    STOCKPOT_RETURN_IF_ERROR(read(values_part, 0, values));
    STOCKPOT_ASSIGN_OR_RETURN(const std::vector<int64_t> offsets,
                              SparseOffsets(counts, entry.shape[1], changed));
    STOCKPOT_ASSIGN_OR_RETURN(const std::vector<uint32_t> columns,
                              SparseColumns(offsets, stored, entry.shape[1]));
    SparseElements elements;
    elements.row_offsets.push_back(0);
    for (int64_t row = 0; row < entry.shape[0]; ++row) {
      for (int64_t i = offsets[static_cast<size_t>(row)]; i < offsets[static_cast<size_t>(row) + 1];
           ++i) {
        const uint32_t column = columns[static_cast<size_t>(i)];
        const float delta =
            LoadWeight(values.data(), entry.dtype, i) - of_base.at(row, column);
        if (delta == 0) continue;  // 0 became -0
        elements.columns.push_back(column);
        elements.values.push_back(delta);
      }
      elements.row_offsets.push_back(static_cast<int64_t>(elements.columns.size()));
    }
    Result<SparseDelta> delta =
        SparseDelta::FromElements(entry.shape[0], entry.shape[1], elements);
    if (!delta.ok()) return delta.status();
    return tensors_.storage.Keep(*std::move(delta));
  }

  // A linear weight; `of_base` is what its delta is over.
  Result<LinearView> Linear(const TensorEntry& entry, const WeightMatrix& of_base) {
    LinearView view;
    LayerDelta& delta = view.delta;
    switch (entry.codec) {
      case Codec::kBase:
        break;
      case Codec::kRaw: {
        STOCKPOT_ASSIGN_OR_RETURN(const WeightMatrix matrix, RawMatrix(entry));
        delta.dense = tensors_.storage.Keep(matrix);
        break;
      }
      case Codec::kBitDelta: {
        STOCKPOT_ASSIGN_OR_RETURN(delta.signs, Signs(entry));
        STOCKPOT_ASSIGN_OR_RETURN(view.lora, Residual(entry));
        break;
      }
      case Codec::kSparse: {
        Result<const SparseDelta*> sparse = Sparse(entry, of_base);
        if (!sparse.ok()) return sparse.status().WithContext("tensor '" + entry.name + "'");
        view.sparse = *sparse;
        break;
      }
    }
    return view;
  }

  Status LoadLayer(size_t layer) {
    const int64_t index = static_cast<int64_t>(layer);
    DecoderLayerView& view = tensors_.view.layers[layer];
    const DecoderLayerView& of_base = base_.view.layers[layer];
    STOCKPOT_ASSIGN_OR_RETURN(view.input_norm, Vector(InputNormName(index), of_base.input_norm));
    STOCKPOT_ASSIGN_OR_RETURN(view.post_norm, Vector(PostNormName(index), of_base.post_norm));
    for (size_t p = 0; p < kProjections; ++p) {
      const auto projection = static_cast<Projection>(p);
      const std::string name = ProjectionName(index, projection, "weight");
      const TensorEntry& entry = *manifest_.Resolve(name);
      if (entry.name != name) {
        return InvalidArgument("tensor '" + name + "' is tied to '" + entry.name +
                               "': only the head may be tied");
      }
      STOCKPOT_ASSIGN_OR_RETURN(view.linear[p], Linear(entry, base_.layers[layer].weight[p]));
      if (!ShapeOf(tensors_.config, projection).has_bias) continue;
      const float* const base_bias = base_.layers[layer].bias[p];
      STOCKPOT_ASSIGN_OR_RETURN(const float* bias,
                                Vector(ProjectionName(index, projection, "bias"), base_bias));
      if (bias != base_bias) view.linear[p].delta.bias = bias;
    }
    return OkStatus();
  }

  // The head by the variant's own tie: its embeddings, or a tensor of its own.
  Status LoadHead() {
    const TensorEntry* const embeddings = manifest_.Resolve(kEmbeddingName);
    const TensorEntry* const head = manifest_.Resolve(kHeadName);
    const bool tied = head == nullptr || head == embeddings || SameBytes(*head, *embeddings);
    if (!tied && tensors_.config.tie_embeddings) {
      return InvalidArgument(
          "config.json ties the embeddings, but tensor 'lm_head.weight' differs from "
          "'model.embed_tokens.weight'");
    }
    if (tensors_.config.vocab_size != base_.config.vocab_size) return LoadOwnHead(tied, head);
    if (!tied) {
      STOCKPOT_ASSIGN_OR_RETURN(tensors_.view.head, Linear(*head, base_.head));
      return OkStatus();
    }
    const bool over_embeddings = base_.head.data == base_.view.embeddings.data;
    if (embeddings->codec == Codec::kSparse && over_embeddings) {
      STOCKPOT_ASSIGN_OR_RETURN(tensors_.view.head, Linear(*embeddings, base_.head));
      return OkStatus();
    }
    if (tensors_.view.embedding_signs != nullptr) {
      tensors_.view.head.delta.signs = tensors_.view.embedding_signs;
      return OkStatus();
    }
    const WeightMatrix& own = tensors_.view.embeddings;
    if (own.data != base_.head.data) tensors_.view.head.delta.dense = tensors_.storage.Keep(own);
    return OkStatus();
  }

  // Of a vocabulary of another size: there is no base's product to share, so it is dense.
  Status LoadOwnHead(bool tied, const TensorEntry* head) {
    WeightMatrix own = tensors_.view.embeddings;
    if (!tied) {
      if (head->codec != Codec::kRaw && head->codec != Codec::kSparse) {
        return InvalidArgument("tensor '" + head->name + "': codec " +
                               std::string(CodecName(head->codec)) +
                               " is not supported for a head of another size than the base's");
      }
      STOCKPOT_ASSIGN_OR_RETURN(
          own, head->codec == Codec::kRaw ? RawMatrix(*head) : DecodedMatrix(*head));
    }
    tensors_.view.own_head = tensors_.storage.Keep(own);
    return OkStatus();
  }

  bool SameBytes(const TensorEntry& a, const TensorEntry& b) const {
    if (a.dtype != b.dtype || a.codec != b.codec) return false;
    if (a.codec == Codec::kBase) return a.content == b.content;
    return a.shape == b.shape && SameContent(a, b).value_or(false);
  }

  VariantModel::Tensors& tensors_;
  const BaseModel::Tensors& base_;
  const CheckpointStore& store_;
  const Manifest manifest_;
  Manifest base_manifest_;
};

}  // namespace

VariantModel::VariantModel() : tensors_(std::make_unique<Tensors>()) {}
VariantModel::~VariantModel() = default;

Result<std::shared_ptr<const VariantModel>> VariantModel::Load(
    std::shared_ptr<const BaseModel> base, const CheckpointStore& store, const Digest& variant) {
  Result<Manifest> manifest = store.GetManifest(variant);
  if (!manifest.ok()) {
    return manifest.status().WithContext("while loading variant " + variant.ShortHex());
  }
  return Load(std::move(base), store, *std::move(manifest));
}

Result<std::shared_ptr<const VariantModel>> VariantModel::Load(
    std::shared_ptr<const BaseModel> base, const CheckpointStore& store, Manifest manifest) {
  std::shared_ptr<VariantModel> model(new VariantModel);
  model->tensors_->digest = manifest.digest();
  model->tensors_->base = std::move(base);
  const Status status =
      manifest.kind == ArtifactKind::kAdapter
          ? LoadAdapter(*model->tensors_, store, manifest)
          : VariantLoader(*model->tensors_, store, std::move(manifest)).Load();
  if (!status.ok()) {
    return status.WithContext("while loading variant " + model->tensors_->digest.ShortHex());
  }
  return std::shared_ptr<const VariantModel>(std::move(model));
}

const Digest& VariantModel::digest() const { return tensors_->digest; }
const BaseModel& VariantModel::base() const { return *tensors_->base; }
const ModelConfig& VariantModel::config() const { return tensors_->config; }
int64_t VariantModel::resident_bytes() const { return tensors_->storage.bytes(); }
int64_t VariantModel::read_bytes() const { return tensors_->read_bytes; }

}  // namespace stockpot
