// CHECK: an invariant of our own code. Failing one is a bug, so the process says where and dies;
// input from outside never meets a CHECK, it meets a Status (status.h).
#pragma once

#include <sstream>
#include <string>

namespace stockpot {

[[noreturn]] void DieOfFailedCheck(const char* file, int line, const char* condition,
                                   const std::string& values);

}  // namespace stockpot

// STOCKPOT_CHECK(a == b, a, b): the condition, then the values that explain its failure.
#define STOCKPOT_CHECK(condition, ...)                                                   \
  do {                                                                                   \
    if (!(condition)) [[unlikely]] {                                                     \
      ::stockpot::DieOfFailedCheck(__FILE__, __LINE__, #condition,                       \
                                   ::stockpot::CheckValues(__VA_ARGS__));                \
    }                                                                                    \
  } while (0)

namespace stockpot {
template <typename... Values>
std::string CheckValues(const Values&... values) {
  std::ostringstream out;
  ((out << values << ' '), ...);
  return out.str();
}
}  // namespace stockpot
