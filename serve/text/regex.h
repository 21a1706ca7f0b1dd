// A regular expression written for Oniguruma (what `tokenizers` uses), matched by PCRE2.
//
// The pattern is used as it is written, except where the two engines read the same text differently
// (\s, \w, \h, \v, \b, script names, \uHHHH, {,n}); there it is rewritten to mean what Oniguruma
// means. Constructs whose meaning would differ and that can not be rewritten are refused by name.
//
// Pattern and text are untrusted: pattern size, match steps, memory and the time of one
// RegexScratch are bounded.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/status.h"

struct pcre2_real_code_8;

namespace stockpot {

struct RegexLimits {
  static constexpr size_t kMaxPatternBytes = 16 << 10;
  static constexpr uint32_t kMaxNesting = 60;
  static constexpr uint32_t kMaxMatchSteps = 20'000'000;  // one match attempt (PCRE2 match limit)
  static constexpr uint32_t kMaxHeapKib = 32 << 10;       // one match attempt
  static constexpr double kMaxCpuSeconds = 5;  // of the thread, all matches with one scratch
};

// Half-open byte range.
struct ByteRange {
  size_t begin = 0;
  size_t end = 0;
  bool empty() const { return begin == end; }
};

// Memory of matching, for one thread and one piece of work. The time starts with the first match;
// it is the thread's processor time, so that a busy machine refuses nothing.
class RegexScratch {
 public:
  RegexScratch();
  ~RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  RegexScratch& operator=(const RegexScratch&) = delete;

 private:
  friend class Regex;
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

// Thread promise: immutable; one RegexScratch a thread.
class Regex {
 public:
  // InvalidArgument names the construct that is wrong or not supported and its offset.
  static Result<Regex> Compile(std::string_view oniguruma_pattern);

  // All matches from left to right, as Oniguruma's find_iter gives them: an empty match right after
  // the match before it is passed over. REQUIRES: `text` is valid UTF-8. ResourceExhausted: a
  // limit.
  Result<std::vector<ByteRange>> FindAll(std::string_view text, RegexScratch* scratch) const;

 private:
  explicit Regex(std::shared_ptr<pcre2_real_code_8> code) : code_(std::move(code)) {}
  std::shared_ptr<pcre2_real_code_8> code_;
};

// The PCRE2 text (for UTF, UCP, MULTILINE) that means what `oniguruma_pattern` means.
Result<std::string> TranslateOniguruma(std::string_view oniguruma_pattern);

}  // namespace stockpot
