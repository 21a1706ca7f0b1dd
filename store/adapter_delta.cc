#include "store/adapter_delta.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>

#include "store/lora_adapter.h"
#include "store/raw_tensor_reader.h"
#include "store/weight_rounding.h"

namespace stockpot {
namespace {

constexpr std::string_view kWeightSuffix = ".weight";

Result<std::vector<double>> ReadFactor(const CheckpointStore& store, const TensorEntry& entry) {
  const RawTensorReader reader(entry,
                               [&](const Part& part, int64_t offset, std::span<std::byte> out) {
                                 return store.ReadPart(part, offset, out);
                               });
  std::vector<std::byte> bytes(static_cast<size_t>(entry.logical_bytes()));
  STOCKPOT_RETURN_IF_ERROR(reader.Read(0, bytes));
  std::vector<double> values(static_cast<size_t>(entry.elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = LoadWeight(bytes.data(), entry.dtype, static_cast<int64_t>(i));
  }
  return values;
}

std::string BaseNameOf(std::string_view config) {
  const auto parsed = nlohmann::json::parse(config, nullptr, false);
  if (!parsed.is_object()) return "";
  const auto it = parsed.find("base_model_name_or_path");
  return it != parsed.end() && it->is_string() ? it->get<std::string>() : "";
}

Part PartOf(std::span<const std::byte> data) {
  Part part{.bytes = static_cast<int64_t>(data.size()), .chunks = {}};
  while (!data.empty()) {
    const auto chunk = data.first(std::min(data.size(), static_cast<size_t>(kChunkBytes)));
    part.chunks.push_back(Sha256(chunk));
    data = data.subspan(chunk.size());
  }
  return part;
}

Status AddFactor(BuiltAdapter& adapter, std::string name, std::vector<int64_t> shape, DType dtype,
                 const std::vector<double>& values) {
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(DTypeSize(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    StoreWeight(values[i], dtype, bytes.data(), static_cast<int64_t>(i));
    if (std::isfinite(LoadWeight(bytes.data(), dtype, static_cast<int64_t>(i)))) continue;
    return InvalidArgument("tensor '" + name + "': a merged value does not fit " +
                           std::string(DTypeName(dtype)));
  }
  TensorEntry entry;
  entry.name = name;
  entry.dtype = dtype;
  entry.shape = std::move(shape);
  entry.parts["data"] = PartOf(bytes);
  adapter.manifest.tensors.push_back(std::move(entry));
  adapter.tensors[std::move(name)] = std::move(bytes);
  return OkStatus();
}

std::string ConfigOf(const AdapterDelta& delta, const std::string& base_name) {
  const int64_t rank = RankOf(delta);
  nlohmann::json modules = nlohmann::json::array();
  nlohmann::json patterns = nlohmann::json::object();
  for (const AdapterLayer& layer : delta.layers) {
    const std::string module = layer.weight.substr(0, layer.weight.size() - kWeightSuffix.size());
    modules.push_back(module);
    if (layer.rank != rank) patterns[module] = layer.rank;
  }
  const nlohmann::json config = {{"peft_type", "LORA"},
                                 {"task_type", "CAUSAL_LM"},
                                 {"base_model_name_or_path", base_name},
                                 {"r", rank},
                                 {"lora_alpha", rank},
                                 {"lora_dropout", 0.0},
                                 {"rank_pattern", patterns},
                                 {"alpha_pattern", patterns},
                                 {"target_modules", modules},
                                 {"bias", "none"},
                                 {"fan_in_fan_out", false},
                                 {"use_rslora", false},
                                 {"init_lora_weights", true},
                                 {"inference_mode", true}};
  return config.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace

Result<LoadedAdapter> LoadAdapterDelta(const CheckpointStore& store, const Manifest& adapter,
                                       const Manifest& base) {
  const auto config = adapter.files.find(std::string(kAdapterConfigFile));
  if (adapter.kind != ArtifactKind::kAdapter || config == adapter.files.end()) {
    return InvalidArgument("artifact " + adapter.digest().ShortHex() + " is no adapter");
  }
  std::string text(static_cast<size_t>(config->second.bytes), '\0');
  STOCKPOT_RETURN_IF_ERROR(
      store.ReadPart(config->second, 0, std::as_writable_bytes(std::span(text))));
  std::vector<TensorInfo> tensors;
  for (const TensorEntry& entry : adapter.tensors) {
    tensors.push_back({entry.name, entry.dtype, entry.shape, entry.alias_of});
  }
  STOCKPOT_ASSIGN_OR_RETURN(const LoraAdapter parsed, ParseLoraAdapter(text, tensors, base));
  LoadedAdapter loaded;
  loaded.base_name = BaseNameOf(text);
  loaded.dtype = adapter.tensors[0].dtype;
  for (const LoraModule& module : parsed.modules) {
    const TensorEntry& a = *adapter.Find(module.a);
    const TensorEntry& b = *adapter.Find(module.b);
    AdapterLayer layer{.weight = module.weight,
                     .d_out = b.shape[0],
                     .d_in = a.shape[1],
                     .rank = module.rank,
                     .b = {},
                     .a = {}};
    STOCKPOT_ASSIGN_OR_RETURN(layer.a, ReadFactor(store, a));
    STOCKPOT_ASSIGN_OR_RETURN(layer.b, ReadFactor(store, b));
    for (double& value : layer.b) value *= module.scale;
    if (a.dtype != loaded.dtype || b.dtype != loaded.dtype) loaded.dtype = DType::kF32;
    loaded.delta.layers.push_back(std::move(layer));
  }
  std::sort(loaded.delta.layers.begin(), loaded.delta.layers.end(),
            [](const AdapterLayer& x, const AdapterLayer& y) { return x.weight < y.weight; });
  return loaded;
}

Result<BuiltAdapter> BuildAdapter(const AdapterDelta& delta, DType dtype, const Digest& base,
                                  const std::string& base_name,
                                  const std::map<std::string, std::string>& attributes) {
  BuiltAdapter adapter;
  adapter.manifest.kind = ArtifactKind::kAdapter;
  adapter.manifest.base = base;
  adapter.manifest.attributes = attributes;
  for (const AdapterLayer& layer : delta.layers) {
    const std::string prefix =
        "base_model.model." + layer.weight.substr(0, layer.weight.size() - kWeightSuffix.size());
    STOCKPOT_RETURN_IF_ERROR(
        AddFactor(adapter, prefix + ".lora_A.weight", {layer.rank, layer.d_in}, dtype, layer.a));
    STOCKPOT_RETURN_IF_ERROR(
        AddFactor(adapter, prefix + ".lora_B.weight", {layer.d_out, layer.rank}, dtype, layer.b));
  }
  std::sort(adapter.manifest.tensors.begin(), adapter.manifest.tensors.end(),
            [](const TensorEntry& x, const TensorEntry& y) { return x.name < y.name; });
  adapter.config = ConfigOf(delta, base_name);
  adapter.manifest.files[std::string(kAdapterConfigFile)] =
      PartOf(std::as_bytes(std::span(adapter.config)));
  STOCKPOT_RETURN_IF_ERROR(adapter.manifest.Validate());
  return adapter;
}

Status PutAdapter(CheckpointStore& store, const BuiltAdapter& adapter) {
  for (const auto& [name, bytes] : adapter.tensors) {
    STOCKPOT_RETURN_IF_ERROR(store.PutBytes(bytes).status().WithContext("tensor '" + name + "'"));
  }
  return store.PutBytes(std::as_bytes(std::span(adapter.config))).status();
}

int64_t RankOf(const AdapterDelta& delta) {
  int64_t rank = 1;
  for (const AdapterLayer& layer : delta.layers) rank = std::max(rank, layer.rank);
  return rank;
}

}  // namespace stockpot
