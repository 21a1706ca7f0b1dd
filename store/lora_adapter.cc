#include "store/lora_adapter.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

namespace stockpot {
namespace {

using nlohmann::json;

// --- limits ---
constexpr int64_t kMaxRank = int64_t{1} << 16;
constexpr size_t kMaxPatterns = 4096;  // of ranks or of alphas, each
constexpr size_t kMaxConfigBytes = size_t{1} << 20;
constexpr int kMaxConfigDepth = 16;

constexpr std::string_view kPrefix = "base_model.model.";
constexpr std::string_view kSuffixA = ".lora_A.weight";
constexpr std::string_view kSuffixB = ".lora_B.weight";

// What is read here, and what says something about training, files or the wrapped modules alone.
const std::set<std::string_view> kKnownFields = {
    "peft_type",       "r",
    "lora_alpha",      "use_rslora",
    "rank_pattern",    "alpha_pattern",
    "bias",            "fan_in_fan_out",
    "init_lora_weights",
    "task_type",       "auto_mapping",
    "peft_version",    "base_model_name_or_path",
    "revision",        "inference_mode",
    "target_modules",  "exclude_modules",
    "lora_dropout",    "layers_to_transform",
    "layers_pattern",  "megatron_core",
    "qalora_group_size", "runtime_config",
    "eva_config",
};

Status Refuse(std::string_view field, const json& value, const std::string& why) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 64) text = text.substr(0, 64) + "...";
  return InvalidArgument(std::string(kAdapterConfigFile) + ": '" +
                         std::string(field.substr(0, 64)) + "' is " + text + why);
}

// Null, false, 0, "", [] or {}: the field asks for nothing.
bool SaysNothing(const json& value) {
  if (value.is_null()) return true;
  if (value.is_boolean()) return !value.get<bool>();
  if (value.is_string()) return value.get_ref<const std::string&>().empty();
  return value.is_structured() && value.empty();
}

// A pattern names modules by their last parts: "q_proj", "layers.0.self_attn.q_proj". PEFT matches
// regular expressions; one that is more than a name is refused.
bool IsPlainPattern(std::string_view key) {
  return !key.empty() && key.size() <= 512 &&
         std::all_of(key.begin(), key.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '_' || c == '.';
         });
}

bool Matches(std::string_view pattern, std::string_view module) {
  if (!module.ends_with(pattern)) return false;
  return module.size() == pattern.size() || module[module.size() - pattern.size() - 1] == '.';
}

using Patterns = std::vector<std::pair<std::string, double>>;

struct Config {
  double rank = 0;
  double alpha = 0;
  bool rs_lora = false;
  Patterns ranks;   // the first that matches counts
  Patterns alphas;
};

// The value for a module. PEFT takes the first match in the order of the file.
double ValueFor(const Patterns& patterns, std::string_view module, double otherwise) {
  for (const auto& [pattern, value] : patterns) {
    if (Matches(pattern, module)) return value;
  }
  return otherwise;
}

class ConfigReader {
 public:
  explicit ConfigReader(const nlohmann::ordered_json& config) : config_(config) {}

  Result<Config> Read() {
    STOCKPOT_RETURN_IF_ERROR(CheckFields());
    Config out;
    STOCKPOT_ASSIGN_OR_RETURN(out.rank, Number("r"));
    STOCKPOT_ASSIGN_OR_RETURN(out.alpha, Number("lora_alpha"));
    STOCKPOT_ASSIGN_OR_RETURN(out.rs_lora, Flag("use_rslora"));
    STOCKPOT_ASSIGN_OR_RETURN(out.ranks, ReadPatterns("rank_pattern"));
    STOCKPOT_ASSIGN_OR_RETURN(out.alphas, ReadPatterns("alpha_pattern"));
    return out;
  }

 private:
  const nlohmann::ordered_json* Find(const char* field) const {
    const auto it = config_.find(field);
    return it == config_.end() || it->is_null() ? nullptr : &*it;
  }

  Status CheckFields() const {
    const auto* type = Find("peft_type");
    if (type == nullptr || !type->is_string() || type->get<std::string>() != "LORA") {
      return Refuse("peft_type", type == nullptr ? json() : json(*type), ", not \"LORA\"");
    }
    for (const auto& [field, value] : config_.items()) {
      if (!kKnownFields.contains(field) && !SaysNothing(value)) {
        return Refuse(field, value, ", which is not supported");
      }
    }
    if (const auto* bias = Find("bias"); bias != nullptr && *bias != "none") {
      return Refuse("bias", *bias, ": trained biases are not supported");
    }
    STOCKPOT_ASSIGN_OR_RETURN(const bool transposed, Flag("fan_in_fan_out"));
    if (transposed) {
      return Refuse("fan_in_fan_out", true, ": weights stored [d_in, d_out] are not supported");
    }
    return CheckInitialisation();
  }

  // Some change the base's weights, and the saved factors are a difference to the changed ones.
  Status CheckInitialisation() const {
    const auto* init = Find("init_lora_weights");
    if (init == nullptr || init->is_boolean()) return OkStatus();
    for (const char* harmless : {"gaussian", "eva", "orthogonal"}) {
      if (*init == harmless) return OkStatus();
    }
    return Refuse("init_lora_weights", *init,
                  ": it may change the base; convert the adapter with PEFT "
                  "(save_pretrained, path_initial_model_for_weight_conversion)");
  }

  Result<double> Number(const char* field) const {
    const auto* value = Find(field);
    if (value == nullptr || !value->is_number() || !std::isfinite(value->get<double>())) {
      return Refuse(field, value == nullptr ? json() : json(*value), ", not a number");
    }
    return value->get<double>();
  }

  Result<bool> Flag(const char* field) const {
    const auto* value = Find(field);
    if (value == nullptr) return false;
    if (!value->is_boolean()) return Refuse(field, *value, ", not true or false");
    return value->get<bool>();
  }

  Result<Patterns> ReadPatterns(const char* field) const {
    Patterns out;
    const auto* value = Find(field);
    if (value == nullptr) return out;
    if (!value->is_object() || value->size() > kMaxPatterns) {
      return Refuse(field, *value, ", not a list of modules with numbers");
    }
    for (const auto& [key, number] : value->items()) {
      if (!IsPlainPattern(key)) {
        return Refuse(field, key, ": patterns beyond a module's name are not supported");
      }
      if (!number.is_number() || !std::isfinite(number.template get<double>())) {
        return Refuse(field, number, " for '" + key + "', not a number");
      }
      out.emplace_back(key, number.template get<double>());
    }
    return out;
  }

  const nlohmann::ordered_json& config_;
};

struct Factors {
  const TensorInfo* a = nullptr;
  const TensorInfo* b = nullptr;
};

// By module: "model.layers.0.self_attn.q_proj".
Result<std::map<std::string, Factors>> PairFactors(const std::vector<TensorInfo>& tensors) {
  std::map<std::string, Factors> modules;
  for (const TensorInfo& tensor : tensors) {
    const std::string_view name = tensor.name;
    const bool is_a = name.ends_with(kSuffixA);
    if (!name.starts_with(kPrefix) || !(is_a || name.ends_with(kSuffixB)) ||
        name.size() <= kPrefix.size() + kSuffixA.size()) {
      return InvalidArgument("tensor '" + tensor.name + "' is no factor of a linear layer (" +
                             std::string(kPrefix) + "LAYER" + std::string(kSuffixA) + ", " +
                             std::string(kSuffixB) + ")");
    }
    if (tensor.shape.size() != 2 || !IsWeightDType(tensor.dtype) || !tensor.alias_of.empty()) {
      return InvalidArgument("tensor '" + tensor.name + "': " +
                             std::string(DTypeName(tensor.dtype)) + ShapeText(tensor.shape) +
                             " is no matrix of F32, F16 or BF16 of its own");
    }
    const std::string_view module =
        name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffixA.size());
    Factors& factors = modules[std::string(module)];
    (is_a ? factors.a : factors.b) = &tensor;
  }
  if (modules.empty()) return InvalidArgument("the adapter has no tensors");
  return modules;
}

Result<LoraModule> MakeModule(const std::string& module, const Factors& factors,
                              const Config& config, const Manifest& base) {
  if (factors.a == nullptr || factors.b == nullptr) {
    const TensorInfo& there = factors.a != nullptr ? *factors.a : *factors.b;
    return InvalidArgument("tensor '" + there.name + "' has no partner: the layer's other factor " +
                           "is missing");
  }
  const std::string weight = module + ".weight";
  const TensorEntry* of_base = base.Find(weight);
  if (of_base == nullptr || !of_base->alias_of.empty()) {
    return InvalidArgument("tensor '" + factors.a->name + "': the base has no weight '" + weight +
                           "' of its own");
  }
  const int64_t rank = factors.a->shape[0];
  if (factors.b->shape[1] != rank ||
      of_base->shape != std::vector<int64_t>{factors.b->shape[0], factors.a->shape[1]}) {
    return InvalidArgument("layer '" + module + "': factors " + ShapeText(factors.a->shape) +
                           " and " + ShapeText(factors.b->shape) + " for a weight of " +
                           ShapeText(of_base->shape));
  }
  const double wanted = ValueFor(config.ranks, module, config.rank);
  if (rank < 1 || rank > kMaxRank || static_cast<double>(rank) != wanted) {
    return InvalidArgument("layer '" + module + "': the factors have rank " +
                           std::to_string(rank) + ", " + std::string(kAdapterConfigFile) +
                           " says " + std::to_string(static_cast<int64_t>(wanted)) +
                           " (1 to " + std::to_string(kMaxRank) + ")");
  }
  const double alpha = ValueFor(config.alphas, module, config.alpha);
  const double divisor = config.rs_lora ? std::sqrt(wanted) : wanted;
  return LoraModule{.weight = weight,
                    .a = factors.a->name,
                    .b = factors.b->name,
                    .rank = rank,
                    .scale = static_cast<float>(alpha / divisor)};
}

}  // namespace

Result<LoraAdapter> ParseLoraAdapter(std::string_view config_json,
                                     const std::vector<TensorInfo>& tensors, const Manifest& base) {
  if (config_json.size() > kMaxConfigBytes) {
    return InvalidArgument(std::string(kAdapterConfigFile) + " is over 1 MiB");
  }
  bool too_deep = false;
  const auto limit_depth = [&too_deep](int depth, nlohmann::ordered_json::parse_event_t,
                                       nlohmann::ordered_json&) {
    too_deep |= depth > kMaxConfigDepth;
    return depth <= kMaxConfigDepth;  // false: not kept, so depth costs no memory
  };
  const auto parsed = nlohmann::ordered_json::parse(config_json, limit_depth, false);
  if (!parsed.is_object() || too_deep) {
    return InvalidArgument(std::string(kAdapterConfigFile) +
                           " is not a JSON object, or nested too deeply");
  }
  STOCKPOT_ASSIGN_OR_RETURN(const Config config, ConfigReader(parsed).Read());
  STOCKPOT_ASSIGN_OR_RETURN(const auto modules, PairFactors(tensors));
  LoraAdapter adapter;
  for (const auto& [module, factors] : modules) {
    STOCKPOT_ASSIGN_OR_RETURN(LoraModule made, MakeModule(module, factors, config, base));
    adapter.modules.push_back(std::move(made));
  }
  return adapter;
}

}  // namespace stockpot
