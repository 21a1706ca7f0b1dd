#include "tests/unit/engine/tiny_model.h"

#include <array>
#include <nlohmann/json.hpp>
#include <vector>

#include "serve/text/utf8.h"

namespace stockpot::test {
namespace {

using Json = nlohmann::ordered_json;

// GPT-2's table: every byte as a printable character.
std::array<std::string, 256> ByteCharacters() {
  std::array<std::string, 256> characters;
  char32_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    AppendUtf8(printable ? static_cast<char32_t>(byte) : next++,
               &characters[static_cast<size_t>(byte)]);
  }
  return characters;
}

Json AddedToken(int32_t id, const std::string& content, bool special) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

}  // namespace

std::string TinyTokenizerJson() {
  const std::array<std::string, 256> bytes = ByteCharacters();
  Json vocab = Json::object();
  vocab["<|endoftext|>"] = kEndOfText;
  vocab["<|im_start|>"] = kImStart;
  vocab["<|im_end|>"] = kImEnd;
  for (int32_t byte = 0; byte < 256; ++byte) {
    vocab[bytes[static_cast<size_t>(byte)]] = kFirstByte + byte;
  }
  const std::string space = bytes[' '];
  const std::vector<std::pair<std::string, std::string>> merges = {
      {space, "t"}, {"h", "e"}, {space + "t", "he"}, {"a", "b"}};
  Json merge_list = Json::array();
  int32_t id = kMergedSpaceT;
  for (const auto& [left, right] : merges) {
    vocab[left + right] = id++;
    merge_list.push_back(Json::array({left, right}));
  }
  Json tokenizer;
  tokenizer["version"] = "1.0";
  tokenizer["truncation"] = nullptr;
  tokenizer["padding"] = nullptr;
  tokenizer["added_tokens"] = Json::array(
      {AddedToken(kEndOfText, "<|endoftext|>", true), AddedToken(kImStart, "<|im_start|>", true),
       AddedToken(kImEnd, "<|im_end|>", true), AddedToken(kAddedSpaceT, " t", false)});
  tokenizer["normalizer"] = nullptr;
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", true},
                           {"use_regex", true}};
  tokenizer["pre_tokenizer"] = byte_level;
  tokenizer["post_processor"] = nullptr;
  tokenizer["decoder"] = byte_level;
  tokenizer["model"] = {{"type", "BPE"},
                        {"dropout", nullptr},
                        {"unk_token", nullptr},
                        {"continuing_subword_prefix", nullptr},
                        {"end_of_word_suffix", nullptr},
                        {"fuse_unk", false},
                        {"byte_fallback", false},
                        {"vocab", std::move(vocab)},
                        {"merges", std::move(merge_list)}};
  return tokenizer.dump();
}

TestModel TinyChatModel(uint64_t seed, int64_t hidden, int64_t layers) {
  std::mt19937_64 random(seed);
  TestModel model = TinyLlama(
      random,
      {.vocab = kTinyVocab, .hidden = hidden, .kv = 8, .intermediate = 52, .layers = layers});
  Json config = Json::parse(model.config_files["config.json"]);
  config["max_position_embeddings"] = kTinyContext;
  config["bos_token_id"] = kImStart;
  config["eos_token_id"] = kImEnd;
  model.config_files["config.json"] = config.dump();
  model.config_files["tokenizer.json"] = TinyTokenizerJson();
  model.config_files["tokenizer_config.json"] = Json({{"bos_token", "<|im_start|>"},
                                                      {"eos_token", {{"content", "<|im_end|>"}}},
                                                      {"pad_token", "<|endoftext|>"},
                                                      {"chat_template", kTinyChatTemplate}})
                                                    .dump();
  return model;
}

}  // namespace stockpot::test
