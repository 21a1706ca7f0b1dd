// safetensors (github huggingface/safetensors, format 0.4): 8 bytes little-endian header length, a
// JSON header {"name": {"dtype", "shape", "data_offsets": [begin, end)}, "__metadata__": {...}},
// the bytes. A file from outside is untrusted: lengths are checked against the file before anything
// is allocated, offsets must tile the data exactly without gap or overlap, and every error names
// the file and tensor.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "store/tensor_source.h"

namespace stockpot {

inline constexpr int64_t kMaxSafetensorsHeaderBytes = int64_t{100}
                                                      << 20;  // as the reference reader

struct SafetensorsEntry {
  TensorInfo info;
  int64_t begin = 0;  // byte offset within the data section
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;  // by offset
  std::map<std::string, std::string> metadata;
  int64_t data_offset = 0;  // of the data section in the file
};

// Bytes of the length field and the header together, from the first 8 bytes of a file of
// `file_bytes`. Corruption: longer than the file or the limit. Check this before reading the
// header.
Result<int64_t> SafetensorsHeaderBytes(std::span<const std::byte> first, int64_t file_bytes);

// `head` is at least the whole header; `file_bytes` the length of the file. Corruption: the bytes
// contradict themselves; InvalidArgument: an element type this version does not know.
Result<SafetensorsHeader> ParseSafetensorsHeader(std::span<const std::byte> head,
                                                 int64_t file_bytes);

// What stands before the data: the length field and the header of tensors that are written one after
// another in this order, padded so that the data begins on 8 bytes. `metadata`: beside the "format"
// that transformers asks for.
std::string SafetensorsHead(std::span<const TensorInfo* const> tensors,
                            const std::map<std::string, std::string>& metadata = {});

// Opens a Hugging Face folder: config.json, model.safetensors or a sharded set with
// model.safetensors.index.json, tokenizer.json, tokenizer_config.json, generation_config.json,
// special_tokens_map.json, chat_template.jinja (each optional but config.json).
// A tensor that config.json ties (tie_word_embeddings) and the files leave out is no error here.
// The source keeps the weight files open and reads them with pread: a file that is cut off later is
// an error of Read, never a signal. An index may name files of the folder only, every tensor must
// be in the file it says, and no file may hold a tensor the index does not name.
Result<std::unique_ptr<TensorSource>> OpenModelFolder(const std::filesystem::path& folder);

// Opens a folder as PEFT writes it: adapter_config.json and adapter_model.safetensors. What else is
// in it (a tokenizer, a README) stays there: an adapter speaks its base's language.
Result<std::unique_ptr<TensorSource>> OpenAdapterFolder(const std::filesystem::path& folder);

// True for a name that stays inside the folder it is looked up in.
bool IsPlainFileName(std::string_view name);

// Names of the files of a model folder that travel with an artifact, beside the weights.
const std::vector<std::string>& ModelConfigFiles();

// Streams one tensor after another into FOLDER/model.safetensors (or numbered shards of at most
// `shard_bytes` with an index file), beside the config files. Writes under temporary names, syncs,
// and renames with config.json last: a folder with a config.json is complete. After an error the
// temporary files are gone. An alias is left out where config.json says "tie_word_embeddings":
// true, as transformers does; elsewhere its bytes are written again, because nothing else would
// tell a reader. An adapter (its files hold adapter_config.json) becomes a PEFT folder likewise:
// adapter_model.safetensors, then adapter_config.json. InvalidArgument if the folder holds a model
// already.
Status WriteModelFolder(const TensorSource& source, const std::filesystem::path& folder,
                        int64_t shard_bytes = int64_t{5} << 30);

}  // namespace stockpot
