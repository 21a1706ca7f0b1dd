#include "examples/train_cpp/model_files.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "store/safetensors.h"
#include "thrift/upload.h"

namespace stockpot::train_cpp {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kEndOfTextName = "<|endoftext|>";

void AppendUtf8(uint32_t code_point, std::string& out) {
  if (code_point < 0x80) {
    out += static_cast<char>(code_point);
  } else {
    out += static_cast<char>(0xC0 | (code_point >> 6));
    out += static_cast<char>(0x80 | (code_point & 0x3F));
  }
}

// GPT-2's printable stand-ins for the 256 bytes: printable ones stand for themselves, the others
// are numbered from 256 on.
std::vector<std::string> ByteNames() {
  std::vector<std::string> names(256);
  uint32_t next = 256;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) ||
                           (byte >= 0xAE && byte <= 0xFF);
    AppendUtf8(printable ? byte : next++, names[byte]);
  }
  return names;
}

std::string TokenizerJson() {
  Json vocabulary = Json::object();
  const std::vector<std::string> names = ByteNames();
  for (size_t byte = 0; byte < names.size(); ++byte) vocabulary[names[byte]] = byte;
  vocabulary[kEndOfTextName] = kEndOfText;
  const Json bytes = {{"type", "ByteLevel"},
                      {"add_prefix_space", false},
                      {"trim_offsets", true},
                      {"use_regex", true}};
  Json tokenizer = {{"version", "1.0"},
                    {"truncation", nullptr},
                    {"padding", nullptr},
                    {"added_tokens", Json::array({{{"id", kEndOfText},
                                                   {"content", kEndOfTextName},
                                                   {"single_word", false},
                                                   {"lstrip", false},
                                                   {"rstrip", false},
                                                   {"normalized", false},
                                                   {"special", true}}})},
                    {"normalizer", nullptr},
                    {"pre_tokenizer", bytes},
                    {"post_processor", nullptr},
                    {"decoder", bytes},
                    {"model",
                     {{"type", "BPE"},
                      {"dropout", nullptr},
                      {"unk_token", nullptr},
                      {"continuing_subword_prefix", nullptr},
                      {"end_of_word_suffix", nullptr},
                      {"fuse_unk", false},
                      {"byte_fallback", false},
                      {"ignore_merges", false},
                      {"vocab", vocabulary},
                      {"merges", Json::array()}}}};
  return tokenizer.dump(2);
}

// Tensors in memory as a model to be written.
class ViewSource : public TensorSource {
 public:
  ViewSource(std::span<const TensorView> views, std::map<std::string, std::string> files)
      : files_(std::move(files)) {
    for (const TensorView& view : views) {
      infos_.push_back({view.name, view.dtype, view.shape, view.alias_of});
      data_[view.name] = static_cast<const std::byte*>(view.data);
    }
    std::sort(infos_.begin(), infos_.end(),
              [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  }
  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  Status Read(std::string_view name, int64_t offset, std::span<std::byte> out) const override {
    const TensorInfo* info = Find(name);
    if (info == nullptr) return NotFound("no tensor '" + std::string(name) + "'");
    if (offset < 0 || offset + static_cast<int64_t>(out.size()) > info->bytes()) {
      return InvalidArgument("a read past the end of '" + info->name + "'");
    }
    std::memcpy(out.data(), data_.at(info->alias_of.empty() ? info->name : info->alias_of) + offset,
                out.size());
    return OkStatus();
  }
  Result<std::string> ReadFile(std::string_view name) const override {
    const auto found = files_.find(std::string(name));
    if (found == files_.end()) return NotFound("no file '" + std::string(name) + "'");
    return found->second;
  }
  std::vector<std::string> files() const override {
    std::vector<std::string> names;
    for (const auto& [name, contents] : files_) names.push_back(name);
    return names;
  }

 private:
  const std::map<std::string, std::string> files_;
  std::vector<TensorInfo> infos_;
  std::map<std::string, const std::byte*> data_;
};

Status AppendFile(const std::filesystem::path& path, int64_t max_bytes, std::string& text) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return NotFound("cannot read '" + path.string() + "'");
  std::ostringstream contents;
  contents << file.rdbuf();
  text += contents.str().substr(0, max_bytes - text.size());
  return OkStatus();
}

}  // namespace

std::map<std::string, std::string> ModelFiles(const ModelShape& shape) {
  const Json config = {{"architectures", {"LlamaForCausalLM"}},
                       {"model_type", "llama"},
                       {"vocab_size", shape.vocabulary},
                       {"hidden_size", shape.hidden},
                       {"intermediate_size", shape.intermediate},
                       {"num_hidden_layers", shape.layers},
                       {"num_attention_heads", shape.heads},
                       {"num_key_value_heads", shape.kv_heads},
                       {"head_dim", shape.head_dim()},
                       {"hidden_act", "silu"},
                       {"max_position_embeddings", shape.context},
                       {"rms_norm_eps", shape.norm_epsilon},
                       {"rope_theta", shape.rope_theta},
                       {"attention_bias", false},
                       {"mlp_bias", false},
                       {"tie_word_embeddings", true},
                       {"bos_token_id", kEndOfText},
                       {"eos_token_id", kEndOfText},
                       {"torch_dtype", "float32"}};
  const Json generation = {{"bos_token_id", kEndOfText}, {"eos_token_id", kEndOfText}};
  const Json tokenizer_config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                 {"bos_token", kEndOfTextName},
                                 {"eos_token", kEndOfTextName},
                                 {"clean_up_tokenization_spaces", false},
                                 {"model_max_length", shape.context}};
  return {{"config.json", config.dump(2)},
          {"generation_config.json", generation.dump(2)},
          {"tokenizer.json", TokenizerJson()},
          {"tokenizer_config.json", tokenizer_config.dump(2)}};
}

Status WriteFolder(std::span<const TensorView> tensors, const ModelShape& shape,
                   const std::filesystem::path& folder) {
  return WriteModelFolder(ViewSource(tensors, ModelFiles(shape)), folder);
}

Status ImportBase(const std::string& address, const std::string& name,
                  const std::filesystem::path& folder) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, Client::Connect(address));
  STOCKPOT_ASSIGN_OR_RETURN(const auto source, OpenModelFolder(folder));
  rpc::SessionRequest request;
  request.kind = rpc::Kind::BASE;
  request.run = name;
  Client* const clients[] = {client.get()};
  return UploadArtifact(clients, request, *source, {}).status();
}

Result<std::string> ReadText(const std::filesystem::path& path, int64_t max_bytes) {
  std::vector<std::filesystem::path> files;
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path, error)) {
      const std::string extension = entry.path().extension().string();
      const bool is_text =
          extension == ".txt" || extension == ".md" || extension == ".rst" || extension == ".py";
      if (is_text && entry.is_regular_file(error)) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
  } else {
    files.push_back(path);
  }
  std::string text;
  for (const std::filesystem::path& file : files) {
    if (static_cast<int64_t>(text.size()) >= max_bytes) break;
    STOCKPOT_RETURN_IF_ERROR(AppendFile(file, max_bytes, text));
  }
  if (text.empty()) return InvalidArgument("'" + path.string() + "' holds no text");
  return text;
}

}  // namespace stockpot::train_cpp
