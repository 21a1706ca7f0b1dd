#include "serve/text/stream_decoder.h"

#include <algorithm>
#include <utility>

#include "serve/text/decode_pipeline.h"

namespace stockpot {

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool skip_special)
    : tokenizer_(&tokenizer),
      skip_special_(skip_special),
      state_(std::make_unique<DecodeState>()) {}
StreamDecoder::~StreamDecoder() = default;
StreamDecoder::StreamDecoder(StreamDecoder&&) noexcept = default;
StreamDecoder& StreamDecoder::operator=(StreamDecoder&&) noexcept = default;

std::string StreamDecoder::Push(int32_t id) {
  std::string out;
  const auto token = tokenizer_->IdToToken(id);
  if (token && !(skip_special_ && tokenizer_->IsSpecial(id))) {
    tokenizer_->decode_pipeline().Push(*token, state_.get(), &out);
  }
  return out;
}

std::string StreamDecoder::Finish() {
  std::string out;
  tokenizer_->decode_pipeline().Finish(state_.get(), &out);
  return out;
}

StopMatcher::StopMatcher(std::vector<std::string> stop_strings) : stops_(std::move(stop_strings)) {
  for (const std::string& stop : stops_) {
    std::vector<uint32_t> failure(stop.size() + 1, 0);
    for (size_t i = 1; i < stop.size(); ++i) {
      uint32_t k = failure[i];
      while (k > 0 && stop[i] != stop[k]) k = failure[k];
      failure[i + 1] = stop[i] == stop[k] ? k + 1 : 0;
    }
    failure_.push_back(std::move(failure));
  }
  progress_.assign(stops_.size(), 0);
}

std::string StopMatcher::Push(std::string_view piece) {
  if (stopped()) return "";
  for (size_t i = 0; i < piece.size(); ++i) {
    held_ += piece[i];
    for (size_t s = 0; s < stops_.size(); ++s) {
      const std::string& stop = stops_[s];
      if (stop.empty()) continue;
      uint32_t& k = progress_[s];
      while (k > 0 && stop[k] != piece[i]) k = failure_[s][k];
      if (stop[k] == piece[i]) ++k;
      const bool complete = k == stop.size();
      if (complete && (matched_ < 0 || stop.size() > stops_[matched_].size())) {
        matched_ = static_cast<int>(s);
      }
    }
    if (stopped()) {
      held_.resize(held_.size() - stops_[matched_].size());
      return std::exchange(held_, {});
    }
  }
  const uint32_t keep =
      progress_.empty() ? 0 : *std::max_element(progress_.begin(), progress_.end());
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return out;
}

std::string StopMatcher::Finish() { return stopped() ? "" : std::exchange(held_, {}); }

}  // namespace stockpot
