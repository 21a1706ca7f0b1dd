#include <cstring>

#include "serve/model/weights_internal.h"

namespace stockpot {
namespace {

class BaseLoader {
 public:
  BaseLoader(BaseModel::Tensors& tensors, const TensorSource& source)
      : tensors_(tensors), source_(source) {}

  Status Load() {
    STOCKPOT_RETURN_IF_ERROR(ReadConfig());
    STOCKPOT_RETURN_IF_ERROR(CheckCoverage(tensors_.config, source_.tensors()));
    DecoderView& view = tensors_.view;
    view.inv_freq = RopeInverseFrequencies(tensors_.config);
    view.rms_epsilon = tensors_.config.rms_epsilon;
    view.max_positions = tensors_.config.max_positions;
    STOCKPOT_ASSIGN_OR_RETURN(view.embeddings, Matrix(std::string(kEmbeddingName)));
    STOCKPOT_ASSIGN_OR_RETURN(view.final_norm, Vector(std::string(kFinalNormName)));
    const size_t layers = static_cast<size_t>(tensors_.config.layers);
    view.layers.resize(layers);
    tensors_.layers.resize(layers);
    for (size_t layer = 0; layer < layers; ++layer) {
      STOCKPOT_RETURN_IF_ERROR(LoadLayer(layer));
    }
    return LoadHead();
  }

 private:
  Status ReadConfig() {
    STOCKPOT_ASSIGN_OR_RETURN(tensors_.config_json, source_.ReadFile("config.json"));
    Result<std::string> generation = source_.ReadFile("generation_config.json");
    if (generation.ok()) {
      tensors_.generation_config_json = *std::move(generation);
    } else if (generation.status().code() != StatusCode::kNotFound) {
      return generation.status();
    }
    STOCKPOT_ASSIGN_OR_RETURN(
        tensors_.config, ParseModelConfig(tensors_.config_json, tensors_.generation_config_json));
    return OkStatus();
  }

  WeightStorage::Reader ReaderOf(const std::string& name) const {
    return [this, name](int64_t offset, std::span<std::byte> out) {
      return source_.Read(name, offset, out);
    };
  }

  Result<WeightMatrix> Matrix(const std::string& name) {
    const TensorInfo& info = *source_.Find(name);
    Result<WeightMatrix> matrix =
        tensors_.storage.ReadMatrix(info.dtype, info.shape[0], info.shape[1], ReaderOf(name));
    if (!matrix.ok()) return matrix.status().WithContext("tensor '" + name + "'");
    return matrix;
  }

  Result<const float*> Vector(const std::string& name) {
    const TensorInfo& info = *source_.Find(name);
    Result<const float*> vector =
        tensors_.storage.ReadVector(info.dtype, info.shape[0], ReaderOf(name));
    if (!vector.ok()) return vector.status().WithContext("tensor '" + name + "'");
    return vector;
  }

  Status LoadLayer(size_t layer) {
    const int64_t index = static_cast<int64_t>(layer);
    DecoderLayerView& view = tensors_.view.layers[layer];
    STOCKPOT_ASSIGN_OR_RETURN(view.input_norm, Vector(InputNormName(index)));
    STOCKPOT_ASSIGN_OR_RETURN(view.post_norm, Vector(PostNormName(index)));
    for (size_t p = 0; p < kProjections; ++p) {
      const auto projection = static_cast<Projection>(p);
      STOCKPOT_ASSIGN_OR_RETURN(tensors_.layers[layer].weight[p],
                                Matrix(ProjectionName(index, projection, "weight")));
      if (!ShapeOf(tensors_.config, projection).has_bias) continue;
      STOCKPOT_ASSIGN_OR_RETURN(tensors_.layers[layer].bias[p],
                                Vector(ProjectionName(index, projection, "bias")));
    }
    return OkStatus();
  }

  // transformers ties by config, whatever the file holds: a file that disagrees would be answered
  // differently here and there, so it is refused.
  Status LoadHead() {
    const TensorInfo* info = source_.Find(kHeadName);
    const WeightMatrix& embeddings = tensors_.view.embeddings;
    if (info == nullptr || info->alias_of == kEmbeddingName) {
      tensors_.head = embeddings;
      return OkStatus();
    }
    if (!tensors_.config.tie_embeddings) {
      STOCKPOT_ASSIGN_OR_RETURN(tensors_.head, Matrix(std::string(kHeadName)));
      return OkStatus();
    }
    WeightStorage temporary;  // compared and dropped
    STOCKPOT_ASSIGN_OR_RETURN(const WeightMatrix head,
                              temporary.ReadMatrix(info->dtype, info->shape[0], info->shape[1],
                                                   ReaderOf(std::string(kHeadName))));
    const size_t bytes = static_cast<size_t>(head.rows * head.stride * DTypeSize(head.dtype));
    if (head.dtype != embeddings.dtype || std::memcmp(head.data, embeddings.data, bytes) != 0) {
      return InvalidArgument(
          "config.json ties the embeddings, but tensor 'lm_head.weight' differs from "
          "'model.embed_tokens.weight'");
    }
    tensors_.head = embeddings;
    return OkStatus();
  }

  BaseModel::Tensors& tensors_;
  const TensorSource& source_;
};

}  // namespace

BaseModel::BaseModel() : tensors_(std::make_unique<Tensors>()) {}
BaseModel::~BaseModel() = default;

Result<std::shared_ptr<const BaseModel>> BaseModel::Load(const Digest& digest,
                                                         const TensorSource& source) {
  std::shared_ptr<BaseModel> model(new BaseModel);
  model->tensors_->digest = digest;
  const Status status = BaseLoader(*model->tensors_, source).Load();
  if (!status.ok()) return status.WithContext("while loading base " + digest.ShortHex());
  return std::shared_ptr<const BaseModel>(std::move(model));
}

const Digest& BaseModel::digest() const { return tensors_->digest; }
const ModelConfig& BaseModel::config() const { return tensors_->config; }
int64_t BaseModel::resident_bytes() const { return tensors_->storage.bytes(); }

}  // namespace stockpot
