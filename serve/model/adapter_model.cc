// An adapter as a variant: the base as it is, with low-rank factors beside its linear layers.
#include <map>
#include <string>
#include <utility>

#include "serve/model/weights_internal.h"
#include "store/lora_adapter.h"
#include "store/raw_tensor_reader.h"

namespace stockpot {
namespace {

class AdapterLoader {
 public:
  AdapterLoader(VariantModel::Tensors& tensors, const CheckpointStore& store,
                const Manifest& manifest)
      : tensors_(tensors),
        base_(tensors.base->tensors()),
        store_(store),
        manifest_(manifest) {}

  Status Load() {
    if (!manifest_.base || *manifest_.base != base_.digest) {
      return InvalidArgument("it was made against another base than " + base_.digest.ShortHex());
    }
    STOCKPOT_ASSIGN_OR_RETURN(const LoraAdapter adapter, Parse());
    tensors_.config = base_.config;
    tensors_.view = base_.view;
    const std::map<std::string, const LoraDelta**> places = Places();
    for (const LoraModule& module : adapter.modules) {
      const auto place = places.find(module.weight);
      if (place == places.end()) {
        return InvalidArgument("tensor '" + module.a + "': adapters of linear layers of blocks " +
                               "and of an untied head are served, not of '" + module.weight + "'");
      }
      STOCKPOT_ASSIGN_OR_RETURN(*place->second, ReadModule(module));
    }
    return OkStatus();
  }

 private:
  Result<LoraAdapter> Parse() const {
    const auto config = manifest_.files.find(std::string(kAdapterConfigFile));
    if (config == manifest_.files.end()) {
      return InvalidArgument("it has no " + std::string(kAdapterConfigFile));
    }
    std::string text(static_cast<size_t>(config->second.bytes), '\0');
    STOCKPOT_RETURN_IF_ERROR(
        store_.ReadPart(config->second, 0, std::as_writable_bytes(std::span(text))));
    std::vector<TensorInfo> infos;
    for (const TensorEntry& entry : manifest_.tensors) {
      infos.push_back({entry.name, entry.dtype, entry.shape, entry.alias_of});
    }
    STOCKPOT_ASSIGN_OR_RETURN(const Manifest base, store_.GetManifest(base_.digest));
    return ParseLoraAdapter(text, infos, base);
  }

  // Where the factors of a weight go, by its name.
  std::map<std::string, const LoraDelta**> Places() {
    std::map<std::string, const LoraDelta**> places;
    for (size_t layer = 0; layer < tensors_.view.layers.size(); ++layer) {
      for (size_t p = 0; p < kProjections; ++p) {
        const std::string name = ProjectionName(static_cast<int64_t>(layer),
                                                static_cast<Projection>(p), "weight");
        places[name] = &tensors_.view.layers[layer].linear[p].lora;
      }
    }
    places[std::string(kHeadName)] = &tensors_.view.head.lora;
    return places;
  }

  Result<WeightMatrix> Read(const std::string& name, WeightStorage& into) {
    const TensorEntry& entry = *manifest_.Find(name);  // named by Parse()
    const RawTensorReader reader(
        entry, [this](const Part& part, int64_t offset, std::span<std::byte> out) {
          tensors_.read_bytes += static_cast<int64_t>(out.size());
          return store_.ReadPart(part, offset, out);
        });
    Result<WeightMatrix> matrix =
        into.ReadMatrix(entry.dtype, entry.shape[0], entry.shape[1],
                        [&](int64_t offset, std::span<std::byte> out) {
                          return reader.Read(offset, out);
                        });
    if (!matrix.ok()) return matrix.status().WithContext("tensor '" + name + "'");
    return matrix;
  }

  Result<const LoraDelta*> ReadModule(const LoraModule& module) {
    WeightStorage factors;  // until they are packed
    STOCKPOT_ASSIGN_OR_RETURN(const WeightMatrix a, Read(module.a, factors));
    STOCKPOT_ASSIGN_OR_RETURN(const WeightMatrix b, Read(module.b, factors));
    Result<LoraDelta> delta = LoraDelta::Pack(a, b, module.scale);
    if (!delta.ok()) return delta.status().WithContext("adapter of '" + module.weight + "'");
    return tensors_.storage.Keep(*std::move(delta));
  }

  VariantModel::Tensors& tensors_;
  const BaseModel::Tensors& base_;
  const CheckpointStore& store_;
  const Manifest& manifest_;
};

}  // namespace

Status LoadAdapter(VariantModel::Tensors& tensors, const CheckpointStore& store,
                   const Manifest& manifest) {
  return AdapterLoader(tensors, store, manifest).Load();
}

}  // namespace stockpot
