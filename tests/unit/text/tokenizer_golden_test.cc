// Our ids and texts against Hugging Face's, from the files that make_goldens.py wrote.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "serve/text/stream_decoder.h"
#include "serve/text/tokenizer.h"
#include "serve/text/utf8.h"

namespace stockpot {
namespace {

constexpr uint32_t kSeed = 7;
constexpr int kMaxShownFailures = 5;  // of one tokenizer

std::filesystem::path Folder() {
  const char* folder = std::getenv("STOCKPOT_GOLDENS");
  return folder != nullptr ? folder : "";
}

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string FromBase64(const std::string& text) {
  const std::string_view digits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    if (c == '=') break;
    bits = (bits << 6) | static_cast<uint32_t>(digits.find(c));
    count += 6;
    if (count >= 8) {
      count -= 8;
      out += static_cast<char>(bits >> count);
    }
  }
  return out;
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  if (!std::filesystem::is_directory(Folder())) return names;
  const std::string suffix = ".tokenizer.json";
  for (const auto& entry : std::filesystem::directory_iterator(Folder())) {
    const std::string name = entry.path().filename();
    if (name.ends_with(suffix)) names.push_back(name.substr(0, name.size() - suffix.size()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string Shown(std::string text) {
  if (text.size() > 300) text = text.substr(0, 300) + "...";
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

class TokenizerGolden : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<const Tokenizer>> tokenizer =
        Tokenizer::FromJson(ReadFile(Folder() / (GetParam() + ".tokenizer.json")));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().ToString();
    tokenizer_ = *std::move(tokenizer);
    cases_ = nlohmann::json::parse(ReadFile(Folder() / (GetParam() + ".cases.json")));
  }

  // Counts; shows only the first few, so that a broken tokenizer does not print megabytes.
  void Expect(bool equal, const std::string& what, const std::string& input) {
    if (equal) return;
    if (++failures_ <= kMaxShownFailures) ADD_FAILURE() << what << " differs for " << Shown(input);
  }

  std::unique_ptr<const Tokenizer> tokenizer_;
  nlohmann::json cases_;
  int failures_ = 0;
};

TEST_P(TokenizerGolden, EncodesLikeHuggingFace) {
  ASSERT_GT(cases_["encoded"].size(), 300u);
  EXPECT_EQ(tokenizer_->vocab_size(), cases_["vocab_size"].get<int32_t>());
  for (const nlohmann::json& c : cases_["encoded"]) {
    const std::string text = FromBase64(c["bytes"]);
    const auto ids = tokenizer_->Encode(text, false);
    const auto special_ids = tokenizer_->Encode(text, true);
    ASSERT_TRUE(ids.ok() && special_ids.ok()) << ids.status().ToString() << Shown(text);
    Expect(*ids == c["ids"].get<std::vector<int32_t>>(), "ids", text);
    Expect(*special_ids == c["special_ids"].get<std::vector<int32_t>>(), "ids with special", text);
    Expect(tokenizer_->Decode(*ids, false) == c["decoded"], "decoded text", text);
  }
  EXPECT_EQ(failures_, 0);
}

TEST_P(TokenizerGolden, DecodesRandomIdsLikeHuggingFace) {
  for (const nlohmann::json& c : cases_["decoded"]) {
    const auto ids = c["ids"].get<std::vector<int32_t>>();
    Expect(tokenizer_->Decode(ids, false) == c["text"], "text", c["ids"].dump());
    Expect(tokenizer_->Decode(ids, true) == c["text_skip"], "text without special",
           c["ids"].dump());
  }
  EXPECT_EQ(failures_, 0);
  const std::span<const int32_t> special = tokenizer_->special_ids();
  EXPECT_EQ(std::vector<int32_t>(special.begin(), special.end()),
            cases_["special"].get<std::vector<int32_t>>());
}

TEST_P(TokenizerGolden, StreamsWhatDecodeGives) {
  std::vector<std::vector<int32_t>> inputs;
  for (const auto& c : cases_["decoded"]) inputs.push_back(c["ids"]);
  for (const auto& c : cases_["encoded"]) {
    if (c["ids"].size() < 1000) inputs.push_back(c["ids"]);
  }
  for (const auto& ids : inputs) {
    for (const bool skip : {false, true}) {
      StreamDecoder decoder(*tokenizer_, skip);
      std::string joined;
      for (const int32_t id : ids) {
        const std::string piece = decoder.Push(id);
        ASSERT_TRUE(IsValidUtf8(piece)) << nlohmann::json(ids).dump();
        joined += piece;
      }
      joined += decoder.Finish();
      Expect(joined == tokenizer_->Decode(ids, skip), "stream", nlohmann::json(ids).dump());
    }
  }
  EXPECT_EQ(failures_, 0);
}

// Cuts the text where "look after every byte" cuts it.
std::string CutAtStop(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t longest = 0;
    for (const std::string& stop : stops) {
      if (!stop.empty() && text.substr(0, end).ends_with(stop)) {
        longest = std::max(longest, stop.size());
      }
    }
    if (longest > 0) return text.substr(0, end - longest);
  }
  return text;
}

TEST_P(TokenizerGolden, StopsWhereTheWholeTextHasTheStopString) {
  std::mt19937 random(kSeed);
  std::cout << "seed " << kSeed << "\n";
  for (const auto& c : cases_["encoded"]) {
    const std::vector<int32_t> ids = c["ids"];
    if (ids.size() > 200) continue;
    const std::string text = tokenizer_->Decode(ids, false);
    // Stop strings that occur (cut at characters), and one that does not.
    std::vector<std::string> stops = {"", "never there"};
    std::vector<size_t> starts;
    for (size_t i = 0; i < text.size(); i += NextCodePoint(text, i).bytes) starts.push_back(i);
    for (int i = 0; i < 2 && !starts.empty(); ++i) {
      const size_t begin = random() % starts.size();
      const size_t end = std::min(starts.size() - 1, begin + 1 + random() % 5);
      stops.push_back(text.substr(starts[begin], starts[end] - starts[begin]));
    }
    StreamDecoder decoder(*tokenizer_, false);
    StopMatcher matcher(stops);
    std::string joined;
    for (const int32_t id : ids) {
      const std::string piece = matcher.Push(decoder.Push(id));
      ASSERT_TRUE(IsValidUtf8(piece));
      joined += piece;
    }
    joined += matcher.Push(decoder.Finish());
    joined += matcher.Finish();
    const std::string expected = CutAtStop(text, stops);
    Expect(joined == expected, "text before the stop string", text);
    EXPECT_EQ(matcher.stopped(), expected != text);
  }
  EXPECT_EQ(failures_, 0);
}

// The raw bytes of single tokens, joined, are the text, for tokenizers that work on bytes.
TEST_P(TokenizerGolden, TokenBytesJoinToTheText) {
  if (GetParam() != "smollm2" && GetParam() != "llama3" && GetParam() != "gemma") return;
  for (const auto& c : cases_["encoded"]) {
    std::string joined;
    const std::string text = FromBase64(c["bytes"]);
    for (const int32_t id : c["ids"]) joined += tokenizer_->TokenBytes(id);
    // A vocabulary may lack bytes (SmolLM2's does), and "▁" in the text comes back as a space.
    if (IsValidUtf8(text) && c["decoded"] == text) Expect(joined == text, "bytes", text);
  }
  EXPECT_EQ(failures_, 0);
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerGolden, testing::ValuesIn(Names()),
                         [](const auto& test) { return test.param; });

TEST(TokenizerGoldens, AreThere) {
  const std::vector<std::string> names = Names();
  EXPECT_GE(names.size(), 30u) << "run make_goldens.py, which runs this test";
  EXPECT_TRUE(std::count(names.begin(), names.end(), "smollm2"));
}

}  // namespace
}  // namespace stockpot
