// What stands between text and tokens for one artifact: tokenizer, chat template, special tokens
// and sampling defaults, from the files it was stored with (tokenizer.json, tokenizer_config.json,
// chat_template.jinja, generation_config.json, config.json). A file that a variant does not ship is
// its base's; a variant's own chat template, in whichever file, comes before the base's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "serve/text/chat_template.h"
#include "serve/text/tokenizer.h"
#include "store/checkpoint_store.h"

namespace stockpot {

// Of generation_config.json. Absent: the API's own default.
struct GenerationDefaults {
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int64_t> top_k;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::vector<int32_t> eos_tokens;  // with config.json's; empty: none known
};

// Immutable; shared by the requests that use it.
struct TextAssets {
  std::unique_ptr<const Tokenizer> tokenizer;
  std::optional<ChatTemplate> chat_template;
  Status chat_template_status;       // why there is none: NotFound, or what is wrong with it
  std::string chat_template_source;  // empty: none
  std::string bos_token, eos_token, pad_token;  // as text; empty: none
  GenerationDefaults generation;

  // `read` gives a file's contents, NotFound if there is none. InvalidArgument names the file that
  // is missing or wrong. A chat template that can not be used is no reason to refuse completions;
  // its fault is kept in chat_template_status.
  using ReadFile = std::function<Result<std::string>(std::string_view name)>;
  static Result<std::shared_ptr<const TextAssets>> Load(const ReadFile& read);
};

// Text assets of the artifacts of a store. Two artifacts with the same files share one TextAssets,
// because the key is the digest of the files; nothing is keyed by a name.
// Thread promise: any thread. A first Get reads and parses files (a tokenizer takes ~0.1 s);
// callers of other artifacts do not wait for it.
class TextAssetsCache {
 public:
  // `store` must outlive the cache.
  explicit TextAssetsCache(const CheckpointStore& store) : store_(store) {}

  Result<std::shared_ptr<const TextAssets>> Get(const Digest& artifact);
  // Of one that may not be committed; its chunks are put and guarded.
  Result<std::shared_ptr<const TextAssets>> Get(const Manifest& artifact);

 private:
  using Files = std::map<std::string, Part>;
  Result<Files> FilesOf(const Manifest& manifest) const;
  Result<std::string> ReadFile(const Files& files, std::string_view name) const;

  const CheckpointStore& store_;
  std::mutex mutex_;
  // Bounded: emptied when over kMaxArtifacts; what is in use lives on.
  std::unordered_map<Digest, std::shared_ptr<const TextAssets>, DigestHash> by_artifact_;
  std::unordered_map<Digest, std::weak_ptr<const TextAssets>, DigestHash> by_files_;
};

}  // namespace stockpot
