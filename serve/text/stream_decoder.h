// Text out of token ids that arrive one at a time.
//
//   StreamDecoder decoder(tokenizer, /*skip_special=*/true);
//   StopMatcher stop({"\nUser:"});
//   for each id:  text = stop.Push(decoder.Push(id));  send(text);  if (stop.stopped()) break;
//   at the end:   send(stop.Push(decoder.Finish()));  send(stop.Finish());
//
// Invariant: the pieces of Push, joined, and then Finish are exactly Tokenizer::Decode of all ids;
// a piece never ends within a UTF-8 character (it is held back until the character is whole).
// Joined pieces of a StopMatcher are exactly the text before the first stop string.
//
// What is held back: with ByteLevel at most 3 bytes; with ByteFallback the current run of byte
// tokens (<0x..>), because Hugging Face's decoder judges the run as a whole.
//
// Thread promise: one thread at a time uses an object.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "serve/text/tokenizer.h"

namespace stockpot {

class DecodeState;  // serve/text/decode_pipeline.h

class StreamDecoder {
 public:
  // REQUIRES: the tokenizer outlives the decoder.
  StreamDecoder(const Tokenizer& tokenizer, bool skip_special);
  ~StreamDecoder();
  StreamDecoder(StreamDecoder&&) noexcept;
  StreamDecoder& operator=(StreamDecoder&&) noexcept;

  // The text that became certain with this token; often empty.
  std::string Push(int32_t id);

  // What was held back. REQUIRES: called at most once, and no Push after it.
  std::string Finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::unique_ptr<DecodeState> state_;
};

// Cuts a stream of text before the first occurrence of any of some strings, wherever the pieces are
// cut. "First" is the one that ends first; of those that end together, the longest, which is what
// one sees when one looks after every byte.
class StopMatcher {
 public:
  // Empty stop strings are ignored.
  explicit StopMatcher(std::vector<std::string> stop_strings);

  // The part of the text so far that can not belong to a stop string. Empty after a stop. Never
  // ends within a UTF-8 character when the pieces pushed never do.
  std::string Push(std::string_view piece);

  // What was held back, unless stopped: the text ended before a stop string was complete.
  std::string Finish();

  bool stopped() const { return matched_ >= 0; }
  // The index (into the constructor's list) of the string that was met, or -1.
  int matched() const { return matched_; }

 private:
  std::vector<std::string> stops_;
  std::vector<std::vector<uint32_t>> failure_;  // KMP failure function of each stop string
  std::vector<uint32_t> progress_;              // how many bytes of each stop string match now
  std::string held_;                            // received, not yet certain
  int matched_ = -1;
};

}  // namespace stockpot
