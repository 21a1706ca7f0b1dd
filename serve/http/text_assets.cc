#include "serve/http/text_assets.h"

#include <array>
#include <nlohmann/json.hpp>
#include <utility>

namespace stockpot {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxArtifacts = 1024;
constexpr std::array kFileNames = {"chat_template.jinja", "chat_template.json",
                                   "config.json",         "generation_config.json",
                                   "tokenizer.json",      "tokenizer_config.json"};

// An object, empty if the file does not exist.
Result<Json> ReadJson(const TextAssets::ReadFile& read, const char* name) {
  const Result<std::string> text = read(name);
  if (!text.ok()) {
    if (text.status().code() == StatusCode::kNotFound) return Json(Json::object());
    return text.status();
  }
  Json json = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return InvalidArgument(std::string(name) + " is not a JSON object");
  return json;
}

// "<s>", or {"content": "<s>", ...}.
std::string TokenText(const Json& config, const char* field) {
  const auto it = config.find(field);
  if (it == config.end()) return "";
  if (it->is_string()) return it->get<std::string>();
  if (it->is_object() && it->contains("content") && (*it)["content"].is_string()) {
    return (*it)["content"].get<std::string>();
  }
  return "";
}

// A string, or a list of {"name", "template"} of which "default" is meant.
std::string TemplateText(const Json& config) {
  const auto it = config.find("chat_template");
  if (it == config.end()) return "";
  if (it->is_string()) return it->get<std::string>();
  if (!it->is_array()) return "";
  for (const Json& entry : *it) {
    if (entry.is_object() && entry.value("name", Json()) == "default" &&
        entry.contains("template") && entry["template"].is_string()) {
      return entry["template"].get<std::string>();
    }
  }
  return "";
}

void AppendIds(const Json& config, const char* field, std::vector<int32_t>* ids) {
  const auto it = config.find(field);
  if (it == config.end()) return;
  const auto add = [&](const Json& id) {
    if (!id.is_number_integer()) return;
    const int64_t value = id.get<int64_t>();
    if (value < 0 || value > TokenizerLimits::kMaxTokenId) return;
    for (int32_t known : *ids) {
      if (known == value) return;
    }
    ids->push_back(static_cast<int32_t>(value));
  };
  if (!it->is_array()) return add(*it);
  for (const Json& id : *it) add(id);
}

void ReadNumber(const Json& config, const char* field, double low, double high,
                std::optional<double>* value) {
  const auto it = config.find(field);
  if (it == config.end() || !it->is_number()) return;
  const double number = it->get<double>();
  if (number >= low && number <= high) *value = number;
}

GenerationDefaults ReadDefaults(const Json& generation, const Json& config) {
  GenerationDefaults defaults;
  ReadNumber(generation, "temperature", 0, 100, &defaults.temperature);
  ReadNumber(generation, "top_p", 1e-6, 1, &defaults.top_p);
  ReadNumber(generation, "min_p", 0, 1, &defaults.min_p);
  ReadNumber(generation, "repetition_penalty", 1e-6, 100, &defaults.repetition_penalty);
  std::optional<double> top_k;
  ReadNumber(generation, "top_k", 0, 1e9, &top_k);
  if (top_k) defaults.top_k = static_cast<int64_t>(*top_k);
  AppendIds(config, "eos_token_id", &defaults.eos_tokens);
  AppendIds(generation, "eos_token_id", &defaults.eos_tokens);
  return defaults;
}

// The text of the token that config.json names by id, where tokenizer_config.json does not say.
std::string TokenOfId(const Tokenizer& tokenizer, const Json& config, const char* field) {
  std::vector<int32_t> ids;
  AppendIds(config, field, &ids);
  if (ids.empty()) return "";
  return std::string(tokenizer.IdToToken(ids[0]).value_or(""));
}

}  // namespace

Result<std::shared_ptr<const TextAssets>> TextAssets::Load(const ReadFile& read) {
  auto assets = std::make_shared<TextAssets>();
  const Result<std::string> tokenizer_json = read("tokenizer.json");
  if (!tokenizer_json.ok()) return tokenizer_json.status().WithContext("tokenizer.json");
  auto tokenizer = Tokenizer::FromJson(*tokenizer_json);
  if (!tokenizer.ok()) return tokenizer.status().WithContext("tokenizer.json");
  assets->tokenizer = std::move(*tokenizer);

  STOCKPOT_ASSIGN_OR_RETURN(const Json config, ReadJson(read, "config.json"));
  STOCKPOT_ASSIGN_OR_RETURN(const Json generation, ReadJson(read, "generation_config.json"));
  STOCKPOT_ASSIGN_OR_RETURN(const Json tokenizer_config, ReadJson(read, "tokenizer_config.json"));
  assets->generation = ReadDefaults(generation, config);
  const auto token = [&](const char* name, const char* id_name) {
    std::string text = TokenText(tokenizer_config, name);
    return text.empty() ? TokenOfId(*assets->tokenizer, config, id_name) : text;
  };
  assets->bos_token = token("bos_token", "bos_token_id");
  assets->eos_token = token("eos_token", "eos_token_id");
  assets->pad_token = token("pad_token", "pad_token_id");

  const Result<std::string> jinja = read("chat_template.jinja");
  if (jinja.ok()) {
    assets->chat_template_source = *jinja;
  } else if (jinja.status().code() != StatusCode::kNotFound) {
    return jinja.status();
  } else {
    assets->chat_template_source = TemplateText(tokenizer_config);
  }
  if (assets->chat_template_source.empty()) {
    STOCKPOT_ASSIGN_OR_RETURN(const Json separate, ReadJson(read, "chat_template.json"));
    assets->chat_template_source = TemplateText(separate);
  }
  if (assets->chat_template_source.empty()) {
    assets->chat_template_status = NotFound("the model has no chat template");
  } else {
    auto parsed =
        ChatTemplate::Parse(assets->chat_template_source, assets->bos_token, assets->eos_token);
    if (parsed.ok()) {
      assets->chat_template = std::move(*parsed);
    } else {
      assets->chat_template_status = parsed.status().WithContext("the model's chat template");
    }
  }
  return std::shared_ptr<const TextAssets>(std::move(assets));
}

Result<std::string> TextAssetsCache::ReadFile(const Files& files, std::string_view name) const {
  const auto it = files.find(std::string(name));
  if (it == files.end()) return NotFound(std::string(name) + ": the artifact has no such file");
  std::string text(static_cast<size_t>(it->second.bytes), '\0');
  STOCKPOT_RETURN_IF_ERROR(store_.ReadPart(it->second, 0, std::as_writable_bytes(std::span(text))));
  return text;
}

Result<TextAssetsCache::Files> TextAssetsCache::FilesOf(const Manifest& manifest) const {
  if (!manifest.base) return manifest.files;
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest base, store_.GetManifest(*manifest.base));
  Files files = base.files;
  for (const auto& [name, part] : manifest.files) files[name] = part;
  // The .jinja file would win over a template in the variant's own tokenizer_config.json.
  if (base.files.contains("chat_template.jinja") &&
      !manifest.files.contains("chat_template.jinja") &&
      manifest.files.contains("tokenizer_config.json")) {
    const auto read = [&](std::string_view name) { return ReadFile(files, name); };
    STOCKPOT_ASSIGN_OR_RETURN(const Json config, ReadJson(read, "tokenizer_config.json"));
    if (!TemplateText(config).empty()) files.erase("chat_template.jinja");
  }
  return files;
}

Result<std::shared_ptr<const TextAssets>> TextAssetsCache::Get(const Digest& artifact) {
  {
    std::lock_guard lock(mutex_);
    const auto it = by_artifact_.find(artifact);
    if (it != by_artifact_.end()) return it->second;
  }
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest manifest, store_.GetManifest(artifact));
  Result<std::shared_ptr<const TextAssets>> assets = Get(manifest);
  if (!assets.ok()) return assets;
  std::lock_guard lock(mutex_);
  by_artifact_[artifact] = *assets;
  return assets;
}

Result<std::shared_ptr<const TextAssets>> TextAssetsCache::Get(const Manifest& artifact) {
  STOCKPOT_ASSIGN_OR_RETURN(const Files files, FilesOf(artifact));
  std::string identity;
  for (const char* name : kFileNames) {
    const auto it = files.find(name);
    if (it != files.end()) identity += std::string(name) + "=" + it->second.digest().Hex() + "\n";
  }
  const Digest key = Sha256(identity);
  std::shared_ptr<const TextAssets> assets;
  {
    std::lock_guard lock(mutex_);
    const auto it = by_files_.find(key);
    if (it != by_files_.end()) assets = it->second.lock();
  }
  if (!assets) {
    const auto read = [&](std::string_view name) { return ReadFile(files, name); };
    Result<std::shared_ptr<const TextAssets>> loaded = TextAssets::Load(read);
    if (!loaded.ok()) {
      return loaded.status().WithContext("while reading the text files of " +
                                         artifact.digest().ShortHex());
    }
    assets = std::move(*loaded);
  }
  std::lock_guard lock(mutex_);
  if (by_artifact_.size() >= kMaxArtifacts) {
    by_artifact_.clear();
    by_files_.clear();
  }
  // Two that loaded the same files at once agree on one.
  std::weak_ptr<const TextAssets>& shared = by_files_[key];
  if (std::shared_ptr<const TextAssets> first = shared.lock()) {
    assets = first;
  } else {
    shared = assets;
  }
  return assets;
}

}  // namespace stockpot
