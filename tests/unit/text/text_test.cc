// Accept and reject tables, limits and stop strings of serve/text. What Hugging Face can be asked
// is in the golden tests; here is what it can not be asked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <nlohmann/json.hpp>
#include <thread>

#include "serve/text/chat_template.h"
#include "serve/text/regex.h"
#include "serve/text/stream_decoder.h"
#include "serve/text/tokenizer.h"
#include "tests/unit/text/tiny_tokenizer.h"

namespace stockpot {
namespace {

using testing::HasSubstr;
using Json = nlohmann::json;

// What one hostile input may cost, with a sanitizer; processor time, so a busy machine is no
// failure.
constexpr double kMaxCpuSeconds = 60;

double CpuSecondsSince(std::clock_t start) {
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

std::unique_ptr<const Tokenizer> Load(const Json& document) {
  auto tokenizer = Tokenizer::FromJson(document.dump());
  if (!tokenizer.ok()) ADD_FAILURE() << tokenizer.status().ToString();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

// A change to TinyTokenizer() and what the complaint must say.
struct Reject {
  std::string pointer;  // where
  Json value;           // the new value
  std::string message;
};

TEST(TokenizerJson, RefusesWhatIsWrongAndNamesThePlace) {
  const Json regex = {{"type", "Split"}, {"behavior", "Isolated"}, {"invert", false}};
  const auto split = [&](std::string pattern) {
    Json out = regex;
    out["pattern"]["Regex"] = std::move(pattern);
    return out;
  };
  const std::vector<Reject> table = {
      {"", Json::array(), "not a JSON object"},
      {"", nullptr, "not a JSON object"},
      {"/model", nullptr, "'model' is missing"},
      {"/model", 5, "model: expected an object"},
      {"/model/type", "Unigram", "model 'Unigram' is not supported"},
      {"/model/type", 3, "model.type: expected a string, found 3"},
      {"/model/vocab", Json::array({"a"}), "model.vocab: expected an object"},
      {"/model/vocab/a", -1, "the id of 'a' is no integer"},
      {"/model/vocab/a", 1.5, "the id of 'a' is no integer"},
      {"/model/vocab/a", "0", "the id of 'a' is no integer"},
      {"/model/vocab/a", 4000000000u, "the id of 'a' is no integer"},
      {"/model/vocab/a", 1, "id 1 is given twice"},
      {"/model/merges", "a b", "model.merges: expected an array"},
      {"/model/merges/0", "ab", "[0] is not two tokens"},
      {"/model/merges/0", "a b c", "[0] is not two tokens"},
      {"/model/merges/0", Json::array({"a"}), "[0] is neither"},
      {"/model/merges/0", Json::array({"a", 5}), "[0] is neither"},
      {"/model/merges/0", 7, "[0] is neither"},
      {"/model/merges/0", "a q", "'q', which is not in the vocabulary"},
      {"/model/merges/0", "b a", "gives 'ba', which is not in the vocabulary"},
      {"/model/dropout", 0.1, "dropout is not supported"},
      {"/model/unk_token", "[X]", "unk_token '[X]' is not in the vocabulary"},
      {"/model/byte_fallback", "yes", "model.byte_fallback: expected a boolean"},
      {"/model/continuing_subword_prefix", "##", "lacks the prefix '##'"},
      {"/normalizer", {{"type", "Lowercase"}}, "normalizer 'Lowercase' is not supported"},
      {"/normalizer", {{"type", "Precompiled"}}, "normalizer 'Precompiled' is not supported"},
      {"/normalizer", {{"type", "Replace"}}, "normalizer: member 'pattern' is missing"},
      {"/normalizer", {{"type", "Sequence"}, {"normalizers", 3}}, "expected an array"},
      {"/normalizer", "NFC", "normalizer: expected an object"},
      {"/pre_tokenizer", {{"type", "BertPreTokenizer"}}, "'BertPreTokenizer' is not supported"},
      {"/pre_tokenizer", {{"type", "ByteLevel"}}, "'add_prefix_space' is missing"},
      {"/pre_tokenizer", {{"type", "Metaspace"}, {"replacement", "ab"}}, "expected one character"},
      {"/pre_tokenizer",
       {{"type", "Sequence"}, {"pretokenizers", Json::array({{{"type", "Nope"}}})}},
       "pre_tokenizer.pretokenizers[0]: pre-tokenizer 'Nope' is not supported"},
      {"/pre_tokenizer", split("("), "missing closing parenthesis"},
      {"/pre_tokenizer", split("(?<a>b)"), "group '(?<a'"},
      {"/pre_tokenizer", split("(?R)"), "group '(?R)'"},
      {"/pre_tokenizer", split("(*FAIL)"), "group '(*FA'"},
      {"/pre_tokenizer", split("a(?i)b"), "group '(?i)'"},
      {"/pre_tokenizer", split("[a&&b]"), "'&&' in a character class"},
      {"/pre_tokenizer", split("[[:alpha:]]"), "nested or POSIX"},
      {"/pre_tokenizer", split("\\1"), "escape '\\1'"},
      {"/pre_tokenizer", split("\\K"), "escape '\\K'"},
      {"/pre_tokenizer", split("[\\W]"), "escape '\\W' in a character class"},
      {"/pre_tokenizer", split("a{2}+"), "'+' after an interval"},
      {"/pre_tokenizer", split("\\xff"), "\\x80 and above"},
      {"/pre_tokenizer", split("\\p{Nope}"), "unknown property"},
      {"/pre_tokenizer", split(std::string(20000, 'a')), "over the limit"},
      {"/pre_tokenizer", split(std::string(100, '(') + std::string(100, ')')), "parentheses"},
      {"/pre_tokenizer", split("((a{1000}){1000}){1000}"), "too large"},
      {"/pre_tokenizer/behavior", "Sideways", "behavior 'Sideways' is not supported"},
      {"/decoder", {{"type", "WordPiece"}}, "decoder 'WordPiece' is not supported"},
      {"/decoder",
       {{"type", "Sequence"},
        {"decoders", Json::array({{{"type", "Fuse"}}, {{"type", "ByteFallback"}}})}},
       "decoder.decoders[1]: this decoder is not supported behind Fuse"},
      {"/decoder", {{"type", "Strip"}, {"content", " "}, {"start", -1}, {"stop", 0}}, "from 0 to"},
      {"/post_processor", {{"type", "BertProcessing"}}, "'BertProcessing' is not supported"},
      {"/post_processor/special_tokens/<s>/ids", {999}, "ids[0]: no id of the vocabulary"},
      {"/post_processor/special_tokens", Json::object(), "'<s>' is missing"},
      {"/post_processor/single", Json::array(), "lacks sequence A"},
      {"/post_processor/single/1/Sequence/id", "B", "expected sequence A exactly once"},
      {"/added_tokens", 4, "added_tokens: expected an array"},
      {"/added_tokens/0/id", 77, "has id 77, but its place gives"},
      {"/added_tokens/0/id", -2, "added_tokens[0].id: expected an integer"},
      {"/added_tokens/0/content", "", "content must have 1 to"},
      {"/added_tokens/0/content", 5, "added_tokens[0].content: expected a string"},
      {"/added_tokens/0/special", nullptr, "member 'special' is missing"},
      {"/added_tokens/1/content", "<s>", "given twice, differently"},
  };
  for (const Reject& reject : table) {
    Json document = TinyTokenizer();
    if (reject.pointer == "/pre_tokenizer/behavior") document["pre_tokenizer"] = split("a");
    document[Json::json_pointer(reject.pointer)] = reject.value;
    const auto tokenizer = Tokenizer::FromJson(document.dump());
    ASSERT_FALSE(tokenizer.ok()) << reject.pointer << " " << reject.value.dump().substr(0, 80);
    EXPECT_EQ(tokenizer.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(tokenizer.status().message(), HasSubstr(reject.message));
  }
}

TEST(TokenizerJson, RefusesBrokenText) {
  const std::string good = TinyTokenizer().dump();
  for (const std::string& text :
       {std::string(), std::string("{"), good.substr(0, good.size() / 2), good + "x",
        std::string("\xff\xfe"), std::string("{\"model\": \"\xff\"}"), std::string(100'000, '['),
        "{\"a\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}"}) {
    const auto tokenizer = Tokenizer::FromJson(text);
    ASSERT_FALSE(tokenizer.ok());
    EXPECT_EQ(tokenizer.status().code(), StatusCode::kInvalidArgument);
  }
  Json document = TinyTokenizer();
  for (int i = 0; i < 20; ++i) {
    document["normalizer"] = {{"type", "Sequence"}, {"normalizers", {document["normalizer"]}}};
  }
  EXPECT_THAT(Tokenizer::FromJson(document.dump()).status().message(), HasSubstr("deeply nested"));
}

TEST(Tokenizer, AnswersAboutItsTokens) {
  const auto tokenizer = Load(TinyTokenizer());
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->vocab_size(), 8);
  EXPECT_EQ(tokenizer->IdToToken(0), "a");
  EXPECT_EQ(tokenizer->IdToToken(6), "<s>");
  EXPECT_EQ(tokenizer->IdToToken(8), std::nullopt);
  EXPECT_EQ(tokenizer->IdToToken(-1), std::nullopt);
  EXPECT_EQ(tokenizer->TokenToId("ab"), 3);
  EXPECT_EQ(tokenizer->TokenToId("<s>"), 6);
  EXPECT_EQ(tokenizer->TokenToId("zz"), std::nullopt);
  EXPECT_TRUE(tokenizer->IsSpecial(6));
  EXPECT_FALSE(tokenizer->IsSpecial(7));
  EXPECT_FALSE(tokenizer->IsSpecial(-5));
  EXPECT_EQ(tokenizer->TokenBytes(4), " ");
  EXPECT_EQ(tokenizer->TokenBytes(99), "");
  const std::vector<int32_t> wild = {-1, 99, 6, 0, INT32_MAX, INT32_MIN};
  EXPECT_EQ(tokenizer->Decode(wild, false), "<s>a");
  EXPECT_EQ(tokenizer->Decode(wild, true), "a");
  EXPECT_EQ(*tokenizer->Encode("ab c<x>", true), (std::vector<int32_t>{6, 3, 4, 2, 7}));
  EXPECT_EQ(*tokenizer->Encode("", true), (std::vector<int32_t>{6}));
}

TEST(Tokenizer, IsUsedByManyThreads) {
  const auto tokenizer = Load(TinyTokenizer());
  ASSERT_NE(tokenizer, nullptr);
  std::string text;
  for (int i = 0; i < 500; ++i) text += "ab c<x> bca ";
  const std::vector<int32_t> expected = *tokenizer->Encode(text, true);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) EXPECT_EQ(*tokenizer->Encode(text, true), expected);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Tokenizer, RefusesTextOverTheLimit) {
  const auto tokenizer = Load(TinyTokenizer());
  ASSERT_NE(tokenizer, nullptr);
  const std::string text(TokenizerLimits::kMaxTextBytes + 1, 'z');
  EXPECT_EQ(tokenizer->Encode(text, false).status().code(), StatusCode::kResourceExhausted);
}

TEST(Tokenizer, SurvivesPatternsThatRunAway) {
  for (const char* pattern : {"(a+)+b", "(a|aa)+$b", "(?:a*)*b", "(?=(a+)+b)a", "((a*)*)*c"}) {
    Json document = TinyTokenizer();
    document["pre_tokenizer"] = {{"type", "Split"},
                                 {"behavior", "Isolated"},
                                 {"invert", false},
                                 {"pattern", {{"Regex", pattern}}}};
    const auto tokenizer = Load(document);
    ASSERT_NE(tokenizer, nullptr);
    const std::clock_t start = std::clock();
    const auto ids = tokenizer->Encode(std::string(20'000, 'a'), false);
    // Refused, or matched after all; in any case soon.
    if (!ids.ok()) {
      EXPECT_EQ(ids.status().code(), StatusCode::kResourceExhausted);
    }
    EXPECT_LT(CpuSecondsSince(start), kMaxCpuSeconds) << pattern;
  }
}

TEST(Tokenizer, RefusesNormalizersThatGrowWithoutBound) {
  Json document = TinyTokenizer();
  const Json grow = {
      {"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(1000, 'a')}};
  document["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json::array()}};
  for (int i = 0; i < 10; ++i) document["normalizer"]["normalizers"].push_back(grow);
  const auto tokenizer = Load(document);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->Encode("a", false).status().code(), StatusCode::kResourceExhausted);
}

// Hugging Face's Strip panics where the text is shorter than `stop`, so it is no oracle here.
TEST(StreamDecoder, StripsBothEndsOfTheWholeText) {
  Json document = TinyTokenizer();
  document["decoder"] = {
      {"type", "Sequence"},
      {"decoders",
       {{{"type", "Fuse"}}, {{"type", "Strip"}, {"content", "a"}, {"start", 2}, {"stop", 1}}}}};
  const auto tokenizer = Load(document);
  ASSERT_NE(tokenizer, nullptr);
  const std::vector<std::pair<std::string, std::string>> table = {
      {"aaabaa", "aba"}, {"b", "b"}, {"a", ""}, {"aa", ""}, {"aaa", ""}, {"aaaa", "a"}, {"", ""}};
  for (const auto& [text, expected] : table) {
    StreamDecoder decoder(*tokenizer, false);
    std::string joined;
    std::vector<int32_t> ids;
    for (const char c : text) ids.push_back(c - 'a');
    for (const int32_t id : ids) joined += decoder.Push(id);
    joined += decoder.Finish();
    EXPECT_EQ(joined, expected) << text;
    EXPECT_EQ(tokenizer->Decode(ids, false), expected) << text;
  }
}

TEST(StopMatcher, CutsBeforeTheFirstStopStringWhereverThePiecesAreCut) {
  struct Case {
    std::vector<std::string> stops;
    std::string text, expected;
    int matched;
  };
  const std::vector<Case> table = {
      {{"stop"}, "go on stop here", "go on ", 0},
      {{"stop"}, "sto sto", "sto sto", -1},
      {{"stop"}, "ststop", "st", 0},
      {{"aab"}, "aaab", "a", 0},
      {{"abcd", "c"}, "abcd", "ab", 1},
      {{"c", "bc"}, "abc", "a", 1},
      {{"", "x"}, "axb", "a", 1},
      {{}, "anything", "anything", -1},
      {{"\n\n"}, "a\nb\n\nc", "a\nb", 0},
      {{"好"}, "你好吗", "你", 0},
      {{"好吗?"}, "你好吗", "你好吗", -1},
      {{"ab", "ab"}, "ab", "", 0},
  };
  for (const Case& c : table) {
    // Every way to cut the text into two pieces, and one byte at a time.
    for (size_t cut = 0; cut <= c.text.size() + 1; ++cut) {
      StopMatcher matcher(c.stops);
      std::string joined;
      if (cut <= c.text.size()) {
        joined = matcher.Push(c.text.substr(0, cut));
        joined += matcher.Push(c.text.substr(cut));
      } else {
        for (const char byte : c.text) joined += matcher.Push(std::string_view(&byte, 1));
      }
      joined += matcher.Finish();
      EXPECT_EQ(joined, c.expected) << c.text << " cut at " << cut;
      EXPECT_EQ(matcher.matched(), c.matched) << c.text << " cut at " << cut;
      EXPECT_EQ(matcher.Push("more"), matcher.stopped() ? "" : "more");
    }
  }
}

Result<std::string> RenderTemplate(const std::string& source,
                                   const nlohmann::ordered_json& extra = nullptr) {
  auto parsed = ChatTemplate::Parse(source, "<s>", "</s>");
  if (!parsed.ok()) return parsed.status();
  return parsed->Render(nlohmann::ordered_json::array(), false, extra);
}

TEST(ChatTemplate, RefusesByNameAndPosition) {
  const std::vector<std::pair<std::string, std::string>> table = {
      {"a\n  {% include 'x' %}", "line 2 column 6: tag 'include' is not supported"},
      {"{{ x | nope }}", "line 1 column 8: filter 'nope' is not supported"},
      {"{{ x is nope }}", "line 1 column 9: test 'nope' is not supported"},
      {"{% call f() %}{% endcall %}", "tag 'call' is not supported"},
      {"{% block b %}{% endblock %}", "tag 'block' is not supported"},
      {"{% filter upper %}{% endfilter %}", "tag 'filter' is not supported"},
      {"{% for x in y recursive %}{% endfor %}", "a recursive loop is not supported"},
      {"{% for x in y %}{% macro m() %}{% endmacro %}{% endfor %}", "a macro within a loop"},
      {"{{ f(*x) }}", "'*' arguments are not supported"},
      {"{{ self.x }}", "'self' is not supported"},
      {"{% if x %}", "the template ends where 'endif' is expected"},
      {"\xff", "not valid UTF-8"},
      {"{{ 99999999999999999999 }}", "integer out of range"},
      {std::string(2 << 20, ' '), "over the limit"},
      {"{{ " + std::string(5000, '(') + "1" + std::string(5000, ')') + " }}", "nested too deeply"},
      {"{{ " + std::string(5000, '[') + std::string(5000, ']') + " }}", "nested too deeply"},
      {"{{ " + std::string(5000, '-') + "1 }}", "nested too deeply"},
      {"{{ x" + std::string(5000, '!') + " }}", "unexpected character '!'"},
  };
  for (const auto& [source, message] : table) {
    const auto parsed = ChatTemplate::Parse(source, "", "");
    ASSERT_FALSE(parsed.ok()) << source.substr(0, 80);
    EXPECT_EQ(parsed.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(parsed.status().message(), HasSubstr(message));
  }
  for (const char* op : {"+1", ".a", "|upper", "[0]", "()", " is none", " if 1", " and 1"}) {
    std::string chain = "{{ x";
    for (int i = 0; i < 5000; ++i) chain += op;
    EXPECT_FALSE(ChatTemplate::Parse(chain + " }}", "", "").ok()) << op;
  }
  std::string blocks;
  for (int i = 0; i < 5000; ++i) blocks += "{% if x %}";
  EXPECT_THAT(ChatTemplate::Parse(blocks, "", "").status().message(), HasSubstr("too deeply"));
}

TEST(ChatTemplate, SaysWhereRenderingFailed) {
  const std::vector<std::pair<std::string, std::string>> table = {
      {"\n{{ raise_exception('no ' ~ 'way') }}", "line 2 column 19: no way"},
      {"{{ x.y }}", "line 1 column 6: 'y' of something undefined ('x')"},
      {"{{ 1 + x }}", "line 1 column 6: '+' of an integer and undefined: 'x' is undefined"},
      {"{{ f() }}", "'f' is undefined and can not be called"},
      {"{{ 'a'.format(1) }}", "'format' of a string"},
      {"{{ 'a' | int(1, 2, 3) }}", "filter 'int': too many arguments"},
  };
  for (const auto& [source, message] : table) {
    const auto text = RenderTemplate(source);
    ASSERT_FALSE(text.ok()) << source;
    EXPECT_EQ(text.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(text.status().message(), HasSubstr(message));
  }
}

TEST(ChatTemplate, BoundsStepsMemoryAndOutput) {
  const std::string many = "{% for a in range(99999) %}";
  const std::vector<std::string> table = {
      many + many + "{% endfor %}{% endfor %}",
      many + "{{ 'x' * 1000 }}{% endfor %}",
      "{{ 'x' * 1000000000000 }}",
      "{{ [1] * 1000000000000 }}",
      "{% set ns = namespace(s='ab') %}" + many + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
      "{% set ns = namespace(s=['ab']) %}" + many + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
      "{% set ns = namespace(s='ab') %}" + many +
          "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"
          "{% endfor %}",
      "{% set ns = namespace(s='ab') %}" + many +
          "{% set ns.s = ns.s.replace('a', 'aa') %}{% endfor %}",
      "{{ range(100000000) }}",
      // A small value that is huge when written: each level holds the one below twice.
      "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% "
      "endfor %}"
      "{{ ns.x | tojson }}",
      "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% "
      "endfor %}"
      "{{ ns.x == [ns.x, 1][0] }}{{ ns.x }}",
  };
  for (const std::string& source : table) {
    const std::clock_t start = std::clock();
    const auto text = RenderTemplate(source);
    ASSERT_FALSE(text.ok()) << source;
    EXPECT_EQ(text.status().code(), StatusCode::kResourceExhausted) << text.status().ToString();
    EXPECT_LT(CpuSecondsSince(start), kMaxCpuSeconds) << source;
  }
}

TEST(ChatTemplate, BoundsNesting) {
  for (const char* source : {
           "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
           "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% "
           "endfor %}",
           "{% set ns = namespace(x={}) %}{% for i in range(99999) %}{% set ns.x = {'a': ns.x} "
           "%}{% endfor %}",
       }) {
    EXPECT_EQ(RenderTemplate(source).status().code(), StatusCode::kInvalidArgument) << source;
  }
  nlohmann::ordered_json deep = 1;
  for (int i = 0; i < 10'000; ++i) deep = nlohmann::ordered_json::array({std::move(deep)});
  EXPECT_THAT(RenderTemplate("x", {{"deep", std::move(deep)}}).status().message(),
              HasSubstr("nested too deeply"));
}

TEST(ChatTemplate, TellsTheTimeOfItsClock) {
  const auto parsed = ChatTemplate::Parse("{{ strftime_now('%d %b %Y') }}", "", "",
                                          [] { return std::time_t{1'700'000'000}; });
  ASSERT_TRUE(parsed.ok());
  // Around the world it is the 14th or the 15th then.
  EXPECT_THAT(*parsed->Render(nlohmann::ordered_json::array(), false),
              testing::AnyOf("14 Nov 2023", "15 Nov 2023"));
  EXPECT_FALSE(RenderTemplate("{{ strftime_now('%') }}").ok());
  EXPECT_FALSE(RenderTemplate("{{ strftime_now('%Q') }}").ok());
  EXPECT_TRUE(RenderTemplate("{{ strftime_now('%Y-%m-%d') }}").ok());
}

TEST(ChatTemplate, RefusesMessagesThatAreNone) {
  const auto parsed = ChatTemplate::Parse("{{ messages | length }}", "", "");
  ASSERT_TRUE(parsed.ok());
  EXPECT_FALSE(parsed->Render("text", false).ok());
  EXPECT_FALSE(parsed->Render(nlohmann::ordered_json::object(), false).ok());
  EXPECT_FALSE(parsed->Render(nlohmann::ordered_json::array(), false, 5).ok());
  EXPECT_EQ(*parsed->Render(nlohmann::ordered_json::array({1}), false), "1");
}

TEST(Oniguruma, IsRewrittenWherePcre2WouldReadItAnotherWay) {
  const std::vector<std::pair<std::string, std::string>> table = {
      {R"(\s\S[^\s\S])", R"(\p{White_Space}\P{White_Space}[^\p{White_Space}\P{White_Space}])"},
      {R"(\h\v\u0041)", R"(\p{AHex}\x0b\x{0041})"},
      {R"(\p{Han}\p{L}\p{Letter}\P{^Lu})", R"(\p{sc:Han}\p{L}\p{L}\P{^Lu})"},
      {R"(a{,3}b{2}c{x})", R"(a{0,3}b{2}c\{x\})"},
      {R"((a)(?:b)(?i:c)x*+)", R"((?:a)(?:b)(?i:c)x*+)"},
  };
  for (const auto& [from, to] : table) {
    const auto translated = TranslateOniguruma(from);
    ASSERT_TRUE(translated.ok()) << translated.status().ToString();
    EXPECT_EQ(*translated, to);
  }
}

}  // namespace
}  // namespace stockpot
