#include "serve/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <ctime>

#include "kernels/base/check.h"
#include "serve/text/stand_ins.h"
#include "serve/text/utf8.h"

namespace stockpot {
namespace {

constexpr size_t kJitStackStartBytes = 32 << 10;
constexpr size_t kJitStackMaxBytes = 1 << 20;
constexpr size_t kMatchesBetweenLooks = 8;  // at the clock, a system call

double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::string Pcre2Message(int error) {
  PCRE2_UCHAR buffer[160];
  const int length = pcre2_get_error_message(error, buffer, sizeof(buffer));
  return length > 0 ? std::string(reinterpret_cast<char*>(buffer), length)
                    : "PCRE2 error " + std::to_string(error);
}

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* pointer) const {
    Free(pointer);
  }
};

}  // namespace

struct RegexScratch::Memory {
  std::unique_ptr<pcre2_match_data, Deleter<pcre2_match_data_free>> match;
  std::unique_ptr<pcre2_match_context, Deleter<pcre2_match_context_free>> context;
  std::unique_ptr<pcre2_jit_stack, Deleter<pcre2_jit_stack_free>> stack;
  double deadline_s = 0;  // of ThreadSeconds()
};

RegexScratch::RegexScratch() = default;
RegexScratch::~RegexScratch() = default;

Result<Regex> Regex::Compile(std::string_view oniguruma_pattern) {
  if (oniguruma_pattern.size() > RegexLimits::kMaxPatternBytes) {
    return InvalidArgument("regex of " + std::to_string(oniguruma_pattern.size()) +
                           " bytes is over the limit of " +
                           std::to_string(RegexLimits::kMaxPatternBytes));
  }
  STOCKPOT_ASSIGN_OR_RETURN(const std::string pattern, TranslateOniguruma(oniguruma_pattern));
  std::unique_ptr<pcre2_compile_context, Deleter<pcre2_compile_context_free>> context(
      pcre2_compile_context_create(nullptr));
  STOCKPOT_CHECK(context != nullptr);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context.get(), RegexLimits::kMaxNesting);
  int error = 0;
  PCRE2_SIZE error_offset = 0;
  std::shared_ptr<pcre2_code> code(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error,
                    &error_offset, context.get()),
      pcre2_code_free);
  if (code == nullptr) {
    return InvalidArgument("regex '" + pattern + "': " + Pcre2Message(error) + " at offset " +
                           std::to_string(error_offset));
  }
  // Without a JIT (a failure here) the interpreter gives the same matches, slower.
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
  return Regex(std::move(code));
}

Result<std::vector<ByteRange>> Regex::FindAll(std::string_view original,
                                              RegexScratch* scratch) const {
  if (scratch->memory_ == nullptr) {
    auto memory = std::make_unique<RegexScratch::Memory>();
    memory->match.reset(pcre2_match_data_create(1, nullptr));
    memory->context.reset(pcre2_match_context_create(nullptr));
    memory->stack.reset(pcre2_jit_stack_create(kJitStackStartBytes, kJitStackMaxBytes, nullptr));
    STOCKPOT_CHECK(memory->match != nullptr && memory->context != nullptr);
    pcre2_set_match_limit(memory->context.get(), RegexLimits::kMaxMatchSteps);
    pcre2_set_heap_limit(memory->context.get(), RegexLimits::kMaxHeapKib);
    if (memory->stack) pcre2_jit_stack_assign(memory->context.get(), nullptr, memory->stack.get());
    memory->deadline_s = ThreadSeconds() + RegexLimits::kMaxCpuSeconds;
    scratch->memory_ = std::move(memory);
  }
  RegexScratch::Memory& memory = *scratch->memory_;
  std::string storage;
  const std::string_view text = WithStandIns(original, &storage);
  std::vector<ByteRange> found;
  size_t from = 0, matches = 0;
  while (from <= text.size()) {
    const int count =
        pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                    PCRE2_NO_UTF_CHECK, memory.match.get(), memory.context.get());
    if (count == PCRE2_ERROR_NOMATCH) break;
    if (count < 0) return ResourceExhausted("pre-tokenizer regex: " + Pcre2Message(count));
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(memory.match.get());
    const ByteRange range{ends[0], ends[1]};
    if (range.empty() && !found.empty() && found.back().end == range.end) {
      from += from < text.size() ? NextCodePoint(text, from).bytes : 1;
    } else {
      found.push_back(range);
      from = range.end;
    }
    if (++matches % kMatchesBetweenLooks == 0 && ThreadSeconds() > memory.deadline_s) {
      return ResourceExhausted("pre-tokenizer regex ran for more than " +
                               std::to_string(RegexLimits::kMaxCpuSeconds) + " s");
    }
  }
  return found;
}

}  // namespace stockpot
