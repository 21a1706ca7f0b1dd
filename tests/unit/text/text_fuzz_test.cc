// Mutated tokenizer.json files, templates and texts: anything may be refused, nothing may crash.
// Deterministic: the seed is printed and can be set (STOCKPOT_SEED). Run it under a sanitizer.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "serve/text/chat_template.h"
#include "serve/text/stream_decoder.h"
#include "serve/text/tokenizer.h"
#include "serve/text/utf8.h"
#include "tests/unit/text/tiny_tokenizer.h"

namespace stockpot {
namespace {

constexpr int kTokenizerRounds = 6000;
constexpr int kTemplateRounds = 12000;

uint32_t Seed() {
  const char* given = std::getenv("STOCKPOT_SEED");
  return given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10)) : 1;
}

class Mutator {
 public:
  Mutator() : random_(Seed()) { std::cout << "seed " << Seed() << "\n"; }

  size_t Below(size_t limit) { return limit == 0 ? 0 : random_() % limit; }

  // Bytes changed, parts cut out, doubled, swapped with parts of `donors`, words of `dictionary`.
  std::string Mutate(std::string text, const std::vector<std::string>& donors,
                     const std::vector<std::string>& dictionary) {
    for (size_t n = 1 + Below(8) / 7; n > 0; --n) {
      const size_t at = Below(text.size() + 1),
                   length = Below(std::min<size_t>(40, text.size() - at) + 1);
      switch (Below(5)) {
        case 0:
          if (at < text.size()) text[at] = static_cast<char>(random_());
          break;
        case 1:
          text.erase(at, length);
          break;
        case 2:
          text.insert(at, text.substr(at, length));
          break;
        case 3: {
          const std::string& donor = donors[Below(donors.size())];
          text.replace(at, length, donor.substr(Below(donor.size()), Below(60)));
          break;
        }
        default:
          text.insert(at, dictionary[Below(dictionary.size())]);
          break;
      }
    }
    return text;
  }

  // A value of the document replaced by another kind of value, or by another of its values.
  void MutateJson(nlohmann::json* document) {
    nlohmann::json flat = document->flatten();
    if (flat.empty()) return;
    const auto pick = [&] {
      auto it = flat.begin();
      std::advance(it, static_cast<std::ptrdiff_t>(Below(flat.size())));
      return it;
    };
    static const std::vector<nlohmann::json> kValues = {nullptr,
                                                        true,
                                                        -1,
                                                        0,
                                                        1,
                                                        3,
                                                        2097151,
                                                        2097152,
                                                        4294967296,
                                                        1e300,
                                                        "",
                                                        "a",
                                                        "ab",
                                                        "Sequence",
                                                        "ByteLevel",
                                                        "BPE",
                                                        "Fuse",
                                                        "Strip",
                                                        "Metaspace",
                                                        "Isolated",
                                                        "MergedWithNext",
                                                        "NFKC",
                                                        nlohmann::json::array(),
                                                        nlohmann::json::object(),
                                                        nlohmann::json::array({"a", "b"})};
    const nlohmann::json::json_pointer where(pick().key());
    nlohmann::json value = Below(3) == 0 ? pick().value() : kValues[Below(kValues.size())];
    try {
      // One level up now and then: a whole component.
      (*document)[Below(4) == 0 && !where.empty() ? where.parent_pointer() : where] =
          std::move(value);
    } catch (const nlohmann::json::exception&) {  // the place does not exist any more
    }
  }

 private:
  std::mt19937 random_;
};

void Use(const Tokenizer& tokenizer, const std::string& text) {
  const auto ids = tokenizer.Encode(text, true);
  if (!ids.ok()) return;
  std::vector<int32_t> wild = *ids;
  for (int32_t id = -1; id <= std::min(tokenizer.vocab_size(), 12); ++id) wild.push_back(id);
  for (const bool skip : {false, true}) {
    StreamDecoder decoder(tokenizer, skip);
    StopMatcher matcher({"ab", "</s>", "\xEF\xBF\xBD"});
    std::string joined, unstopped;
    for (const int32_t id : wild) {
      const std::string piece = decoder.Push(id);
      ASSERT_TRUE(IsValidUtf8(piece));
      joined += piece;
      unstopped += matcher.Push(piece);
      tokenizer.TokenBytes(id);
    }
    joined += decoder.Finish();
    ASSERT_EQ(joined, tokenizer.Decode(wild, skip));
    ASSERT_TRUE(joined.starts_with(unstopped));
  }
}

TEST(Fuzz, TokenizerJson) {
  Mutator mutator;
  nlohmann::json sentencepiece = TinyTokenizer();
  sentencepiece["normalizer"] = nlohmann::json::parse(
      R"({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
          {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": "▁"}]})");
  sentencepiece["pre_tokenizer"] = nlohmann::json::parse(
      R"json({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "(?i:'s|'t)|\\p{L}+(?!\\S)|[^\\s\\p{L}]{1,3}|."},
         "behavior": "Isolated", "invert": false},
        {"type": "Digits", "individual_digits": true}, {"type": "Punctuation"},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true}]})json");
  sentencepiece["decoder"] = nlohmann::json::parse(
      R"({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 1}]})");
  sentencepiece["model"]["byte_fallback"] = true;
  sentencepiece["model"]["vocab"].update({{"<0x41>", 6}, {"<0xE2>", 7}, {"▁", 8}});
  sentencepiece["added_tokens"][0]["id"] = 9;
  sentencepiece["added_tokens"][1]["id"] = 10;
  const std::vector<nlohmann::json> documents = {TinyTokenizer(), sentencepiece};
  const std::vector<std::string> donors = {documents[0].dump(), documents[1].dump()};
  const std::vector<std::string> dictionary = {
      "null",   "{}",      "[]",      "-1",    "1e99",
      "\"",     "\\u0000", "\\ud800", "\\\\s", "(",
      ")*",     "[^",      "+",       "{3}",   "99999999999999999999",
      "\"a\":", ",",       "\xff",    "▁",     "Ġ"};
  const std::vector<std::string> texts = {"ab cab <s> <x> 12 'S ▁A\xE2", "\xff\xfe a\nb", "",
                                          "好 ab"};
  int accepted = 0;
  for (int round = 0; round < kTokenizerRounds; ++round) {
    nlohmann::json document = documents[mutator.Below(2)];
    std::string text;
    if (round % 2 == 0) {
      for (size_t n = 1 + mutator.Below(2); n > 0; --n) mutator.MutateJson(&document);
      text = document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    } else {
      text = mutator.Mutate(document.dump(), donors, dictionary);
    }
    const auto tokenizer = Tokenizer::FromJson(text);
    if (!tokenizer.ok()) {
      ASSERT_EQ(tokenizer.status().code(), StatusCode::kInvalidArgument) << text;
      continue;
    }
    ++accepted;
    Use(**tokenizer, mutator.Mutate(texts[mutator.Below(texts.size())], texts, dictionary));
    if (HasFatalFailure()) FAIL() << text;
  }
  std::cout << accepted << " of " << kTokenizerRounds << " accepted\n";
  EXPECT_GT(accepted, kTokenizerRounds / 20) << "the mutations are too wild to test anything";
}

TEST(Fuzz, ChatTemplates) {
  Mutator mutator;
  const std::vector<std::string> sources = {
      "{% for m in messages %}{{ '<|' + m['role'] + '|>' ~ m.content | trim }}{% if not loop.last "
      "%}"
      "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'A:' }}{% endif %}",
      "{%- set ns = namespace(i=0, l=[1, 2.5, 'x']) -%}{% for k, v in d.items() if k != 'z' %}"
      "{% set ns.i = ns.i + loop.index0 * 2 ** 3 // 2 %}{{ v | tojson(indent=2) }}{% else %}none"
      "{% endfor %}{{ ns.l[::-1] }}{{ ns.i is odd and ns.l | length > 2 or not d }}",
      "{% macro f(a, b='q') %}{{ a[1:3] if a is string else b | upper }}{% endmacro %}{# c #}"
      "{{ f('hello').split('l')[-1].replace('o', '0') }}{% set x %}block{{ f(1) }}{% endset %}{{ x "
      "}}"
      "{% raw %}{{ raw }}{% endraw %}{{ d | dictsort | map('first') | join(', ') }}",
  };
  const std::vector<std::string> dictionary = {"{{",
                                               "}}",
                                               "{%",
                                               "%}",
                                               "{#",
                                               "#}",
                                               "-",
                                               "+",
                                               " if ",
                                               " else ",
                                               "endfor",
                                               "not ",
                                               " in ",
                                               "is ",
                                               "(",
                                               ")",
                                               "[",
                                               "]",
                                               "{",
                                               "}",
                                               "|",
                                               ".",
                                               "'",
                                               "\"",
                                               "\\",
                                               "\n",
                                               "loop",
                                               "ns.i",
                                               "range(9)",
                                               "* 99999999",
                                               "9223372036854775807",
                                               "%",
                                               "//",
                                               "| sort",
                                               "| list",
                                               "| tojson",
                                               "| map",
                                               "selectattr",
                                               "d",
                                               "\xff",
                                               "{% set ",
                                               "{% break %}",
                                               "{% for i in d %}",
                                               "{% endfor %}",
                                               "none",
                                               "true",
                                               "~",
                                               ":",
                                               ",",
                                               "| indent",
                                               ".items()",
                                               ".split()",
                                               "| int",
                                               "| float",
                                               "is divisibleby 0",
                                               "raise_exception('x')",
                                               "好"};
  const auto messages = nlohmann::ordered_json::parse(
      R"([{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "好"}])");
  const auto extra = nlohmann::ordered_json::parse(
      R"({"d": {"a": [1, {"b": null}], "z": 1, "s": "héllo", "f": 1.5, "n": -3}})");
  int parsed_count = 0, rendered = 0;
  for (int round = 0; round < kTemplateRounds; ++round) {
    const std::string source =
        mutator.Mutate(sources[mutator.Below(sources.size())], sources, dictionary);
    const auto parsed = ChatTemplate::Parse(source, "<s>", "</s>");
    if (!parsed.ok()) {
      ASSERT_EQ(parsed.status().code(), StatusCode::kInvalidArgument) << source;
      continue;
    }
    ++parsed_count;
    const auto text = parsed->Render(messages, true, extra);
    if (text.ok()) {
      ++rendered;
      ASSERT_TRUE(IsValidUtf8(*text)) << source;
    } else {
      ASSERT_NE(text.status().code(), StatusCode::kInternal) << source;
    }
  }
  std::cout << parsed_count << " parsed, " << rendered << " rendered of " << kTemplateRounds
            << "\n";
  EXPECT_GT(rendered, kTemplateRounds / 50) << "the mutations are too wild to test anything";
}

}  // namespace
}  // namespace stockpot
