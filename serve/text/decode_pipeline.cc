#include "serve/text/decode_pipeline.h"

#include <cctype>

#include "serve/text/pre_tokenizer.h"
#include "serve/text/utf8.h"

namespace stockpot {
namespace {

constexpr int kMaxDepth = 8;
constexpr size_t kMaxStages = 32;
constexpr int64_t kMaxStrip = 1000;          // characters
constexpr size_t kMaxReplacementBytes = 64;  // of one match

// "<0x41>" -> 0x41, or -1.
int ByteToken(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    if (!std::isxdigit(static_cast<unsigned char>(c))) return -1;
    value = value * 16 + (c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
  }
  return value;
}

// Characters of the byte alphabet to bytes; a token with any other character stands for itself.
std::string AlphabetToBytes(std::string_view token) {
  std::string bytes;
  for (size_t i = 0; i < token.size();) {
    const Utf8Step step = NextCodePoint(token, i);
    const int byte = step.valid ? ByteAlphabet::ByteOf(step.code_point) : -1;
    if (byte < 0) return std::string(token);
    bytes += static_cast<char>(byte);
    i += step.bytes;
  }
  return bytes;
}

std::string ReplaceLiteral(std::string_view token, std::string_view literal,
                           std::string_view content) {
  if (literal.empty()) return std::string(token);
  std::string out;
  size_t copied = 0;
  for (size_t at = token.find(literal); at != token.npos; at = token.find(literal, copied)) {
    out += token.substr(copied, at - copied);
    out += content;
    copied = at + literal.size();
  }
  out += token.substr(copied);
  return out;
}

}  // namespace

DecodePipeline::DecodePipeline() : stages_{Stage{.kind = Kind::kJoinBySpace}} {}

Result<DecodePipeline> DecodePipeline::FromJson(const JsonNode& node) {
  DecodePipeline pipeline;
  pipeline.stages_.clear();
  STOCKPOT_RETURN_IF_ERROR(pipeline.Add(node, 0));
  return pipeline;
}

Status DecodePipeline::Add(const JsonNode& node, int depth) {
  if (depth > kMaxDepth) return node.Error("too deeply nested decoders");
  STOCKPOT_ASSIGN_OR_RETURN(const std::string type, node.String("type"));
  if (type != "Sequence") return AddNamed(node, type);
  STOCKPOT_ASSIGN_OR_RETURN(const auto children, node.Array("decoders"));
  for (const JsonNode& child : children) STOCKPOT_RETURN_IF_ERROR(Add(child, depth + 1));
  return OkStatus();
}

Status DecodePipeline::AddNamed(const JsonNode& node, const std::string& type) {
  if (type == "ByteLevel") return AddStage(node, {.kind = Kind::kByteLevel});
  if (type == "ByteFallback") return AddStage(node, {.kind = Kind::kByteFallback});
  if (type == "Fuse") return AddStage(node, {.kind = Kind::kFuse});
  if (type == "Replace") {
    Stage stage{.kind = Kind::kReplace};
    STOCKPOT_ASSIGN_OR_RETURN(const JsonNode pattern, node.Get("pattern"));
    STOCKPOT_ASSIGN_OR_RETURN(stage.pattern, Pattern::FromJson(pattern));
    STOCKPOT_ASSIGN_OR_RETURN(stage.content, node.String("content"));
    if (!stage.pattern.is_literal()) return pattern.Error("a regex is not supported in a decoder");
    if (stage.content.size() > kMaxReplacementBytes) return node.Error("content is too long");
    return AddStage(node, std::move(stage));
  }
  if (type == "Strip") {
    Stage stage{.kind = Kind::kStrip};
    STOCKPOT_ASSIGN_OR_RETURN(const char32_t character, node.Character("content"));
    AppendUtf8(character, &stage.content);
    STOCKPOT_ASSIGN_OR_RETURN(stage.start, node.Integer("start", 0, kMaxStrip));
    STOCKPOT_ASSIGN_OR_RETURN(stage.stop, node.Integer("stop", 0, kMaxStrip));
    return AddStage(node, std::move(stage));
  }
  if (type == "Metaspace") {
    Stage stage{.kind = Kind::kMetaspace};
    STOCKPOT_ASSIGN_OR_RETURN(const char32_t character, node.Character("replacement"));
    AppendUtf8(character, &stage.content);
    STOCKPOT_ASSIGN_OR_RETURN(const bool add_prefix, node.Bool("add_prefix_space", true));
    STOCKPOT_ASSIGN_OR_RETURN(const auto scheme, node.OptionalString("prepend_scheme"));
    stage.drop_first = add_prefix && scheme != "never";
    return AddStage(node, std::move(stage));
  }
  return node.Error("decoder '" + type + "' is not supported");
}

Status DecodePipeline::AddStage(const JsonNode& node, Stage stage) {
  if (stages_.size() >= kMaxStages) return node.Error("too many decoders");
  for (const Stage& before : stages_) {
    if (before.kind == Kind::kFuse || before.kind == Kind::kByteLevel) stage.fragments = true;
  }
  if (stage.fragments && stage.kind != Kind::kStrip && stage.kind != Kind::kFuse) {
    return node.Error("this decoder is not supported behind Fuse or ByteLevel");
  }
  stages_.push_back(std::move(stage));
  return OkStatus();
}

void DecodePipeline::Push(std::string_view token, DecodeState* state, std::string* out) const {
  state->stages_.resize(stages_.size());
  Run(0, std::string(token), state, out);
}

void DecodePipeline::Finish(DecodeState* state, std::string* out) const {
  state->stages_.resize(stages_.size());
  FinishFrom(0, state, out);
}

void DecodePipeline::Run(size_t index, std::string token, DecodeState* state,
                         std::string* out) const {
  if (index == stages_.size()) {
    *out += token;
    return;
  }
  const Stage& stage = stages_[index];
  DecodeState::Stage& own = state->stages_[index];
  const bool first = own.tokens++ == 0;
  switch (stage.kind) {
    case Kind::kJoinBySpace:
      if (!first) token.insert(0, " ");
      break;
    case Kind::kFuse:
      break;
    case Kind::kByteLevel: {
      own.held += AlphabetToBytes(token);
      token.clear();
      DrainUtf8(&own.held, /*last=*/false, &token);
      break;
    }
    case Kind::kByteFallback:
      if (const int byte = ByteToken(token); byte >= 0) {
        own.held += static_cast<char>(byte);
        return;
      }
      FlushByteRun(index, state, out);
      break;
    case Kind::kReplace:
      token = ReplaceLiteral(token, stage.pattern.literal(), stage.content);
      break;
    case Kind::kStrip:
      token =
          stage.fragments ? StripFragment(std::move(token), stage, &own) : StripToken(token, stage);
      break;
    case Kind::kMetaspace:
      token = ReplaceLiteral(token, stage.content, first && stage.drop_first ? "" : " ");
      break;
  }
  Run(index + 1, std::move(token), state, out);
}

void DecodePipeline::FinishFrom(size_t index, DecodeState* state, std::string* out) const {
  if (index == stages_.size()) return;
  DecodeState::Stage& own = state->stages_[index];
  if (stages_[index].kind == Kind::kByteFallback) {
    FlushByteRun(index, state, out);
  } else if (stages_[index].kind == Kind::kByteLevel && !own.held.empty()) {
    std::string rest;
    DrainUtf8(&own.held, /*last=*/true, &rest);
    Run(index + 1, std::move(rest), state, out);
  }  // what Strip holds back is what it strips from the end
  FinishFrom(index + 1, state, out);
}

// A run of byte tokens is the text it encodes, or one U+FFFD a byte when any of it is broken.
void DecodePipeline::FlushByteRun(size_t index, DecodeState* state, std::string* out) const {
  std::string run = std::move(state->stages_[index].held);
  state->stages_[index].held.clear();
  if (run.empty()) return;
  if (IsValidUtf8(run)) {
    Run(index + 1, std::move(run), state, out);
    return;
  }
  for (size_t i = 0; i < run.size(); ++i) {
    Run(index + 1, std::string(kReplacementCharacter), state, out);
  }
}

std::string DecodePipeline::StripToken(std::string_view token, const Stage& stage) {
  for (int64_t i = 0; i < stage.start && token.starts_with(stage.content); ++i) {
    token.remove_prefix(stage.content.size());
  }
  for (int64_t i = 0; i < stage.stop && token.ends_with(stage.content); ++i) {
    token.remove_suffix(stage.content.size());
  }
  return std::string(token);
}

std::string DecodePipeline::StripFragment(std::string fragment, const Stage& stage,
                                          DecodeState::Stage* state) {
  const size_t width = stage.content.size();
  size_t begin = 0;
  while (!state->past_start && begin < fragment.size()) {
    if (state->stripped < stage.start && fragment.compare(begin, width, stage.content) == 0) {
      ++state->stripped;
      begin += width;
    } else {
      state->past_start = true;
    }
  }
  std::string text = std::move(state->held) + fragment.substr(begin);
  size_t end = text.size();
  for (int64_t i = 0; i < stage.stop; ++i) {
    if (end < width || text.compare(end - width, width, stage.content) != 0) break;
    end -= width;
  }
  state->held = text.substr(end);
  text.resize(end);
  return text;
}

std::string DecodePipeline::TokenBytes(std::string_view token) const {
  std::string bytes(token);
  for (const Stage& stage : stages_) {
    switch (stage.kind) {
      case Kind::kByteLevel:
        return AlphabetToBytes(bytes);
      case Kind::kByteFallback:
        if (const int byte = ByteToken(bytes); byte >= 0) {
          return std::string(1, static_cast<char>(byte));
        }
        break;
      case Kind::kReplace:
        bytes = ReplaceLiteral(bytes, stage.pattern.literal(), stage.content);
        break;
      case Kind::kMetaspace:
        bytes = ReplaceLiteral(bytes, stage.content, " ");
        break;
      case Kind::kFuse:
      case Kind::kStrip:
      case Kind::kJoinBySpace:
        break;
    }
  }
  return bytes;
}

}  // namespace stockpot
