// What stands beside the weights in a model folder, for a byte-level Llama: config.json,
// tokenizer.json and so on. No Torch here.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "kernels/base/status.h"
#include "trainer_hooks/cpp/checkpoint_hook.h"

namespace stockpot::train_cpp {

// A token is a byte; one more ends a text.
inline constexpr int64_t kEndOfText = 256;

struct ModelShape {
  int64_t vocabulary = 257;
  int64_t hidden = 128;
  int64_t intermediate = 352;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t context = 512;  // longest text the model is meant for
  double rope_theta = 10'000;
  double norm_epsilon = 1e-5;
  int64_t head_dim() const { return hidden / heads; }
};

// config.json, generation_config.json, tokenizer.json, tokenizer_config.json. The tokenizer is
// byte-level BPE without merges: the id of a token is the value of its byte.
std::map<std::string, std::string> ModelFiles(const ModelShape& shape);

// Writes the tensors and ModelFiles as a Hugging Face folder.
Status WriteFolder(std::span<const TensorView> tensors, const ModelShape& shape,
                   const std::filesystem::path& folder);

// Stores a folder as the base `name` of the daemon.
Status ImportBase(const std::string& address, const std::string& name,
                  const std::filesystem::path& folder);

// All text of a file, or of the .txt, .md, .rst and .py files of a folder, at most `max_bytes`.
Result<std::string> ReadText(const std::filesystem::path& path, int64_t max_bytes);

}  // namespace stockpot::train_cpp
