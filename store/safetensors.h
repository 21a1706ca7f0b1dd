// safetensors (github huggingface/safetensors, format 0.4): 8 bytes little-endian header length, a JSON
// header {"name": {"dtype", "shape", "data_offsets": [begin, end)}, "__metadata__": {...}}, the bytes.
// A file from outside is untrusted: lengths are checked against the file before anything is allocated,
// offsets must tile the data exactly without gap or overlap, and every error names the file and tensor.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "store/tensor_source.h"

namespace stockpot {

inline constexpr int64_t kMaxSafetensorsHeaderBytes = int64_t{100} << 20;  // as the reference reader

struct SafetensorsEntry {
  TensorInfo info;
  int64_t begin = 0;  // byte offset within the data section
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;  // by offset
  std::map<std::string, std::string> metadata;
  int64_t data_offset = 0;                // of the data section in the file
};

// `head` is at least the whole header; `file_bytes` the length of the file.
Result<SafetensorsHeader> ParseSafetensorsHeader(std::span<const std::byte> head,
                                                 int64_t file_bytes);

// Opens a Hugging Face folder: config.json, model.safetensors or a sharded set with
// model.safetensors.index.json, tokenizer.json, tokenizer_config.json, generation_config.json,
// special_tokens_map.json, chat_template.jinja (each optional but config.json).
// A tensor that config.json ties (tie_word_embeddings) and the files leave out is no error here.
Result<std::unique_ptr<TensorSource>> OpenModelFolder(const std::filesystem::path& folder);

// Names of the files of a model folder that travel with an artifact, beside the weights.
const std::vector<std::string>& ModelConfigFiles();

// Streams one tensor after another into FOLDER/model.safetensors (or numbered shards of at most
// `shard_bytes` with an index file), beside the config files. Writes into a temporary name and renames:
// a half-written folder is never left under the final file names. Aliases are left out, as
// transformers does. InvalidArgument if the folder holds a model already.
Status WriteModelFolder(const TensorSource& source, const std::filesystem::path& folder,
                        int64_t shard_bytes = int64_t{5} << 30);

}  // namespace stockpot
