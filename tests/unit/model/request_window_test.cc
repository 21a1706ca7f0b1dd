#include "serve/variants/request_window.h"

#include <gtest/gtest.h>

namespace stockpot {
namespace {

constexpr int64_t kHourMs = 3600 * 1000;

TEST(RequestWindow, CountsTheLastDayOfEachName) {
  RequestWindow window;
  const int64_t start = 1'000'000 * kHourMs;
  EXPECT_EQ(window.Requests("a", start), 0);
  for (int hour = 0; hour < 30; ++hour) window.Count("a", start + hour * kHourMs);
  window.Count("b", start);
  const int64_t now = start + 29 * kHourMs;
  EXPECT_EQ(window.Requests("a", now), 24);
  EXPECT_EQ(window.Requests("b", start + 23 * kHourMs), 1);
  EXPECT_EQ(window.Requests("b", start + 24 * kHourMs), 0);
  EXPECT_EQ(window.Requests("a", now + 100 * kHourMs), 0);
}

TEST(RequestWindow, NamesAreBounded) {
  RequestWindow window;
  for (size_t i = 0; i < RequestWindow::kMaxNames; ++i) window.Count(std::to_string(i), kHourMs);
  window.Count("one more", kHourMs);
  EXPECT_EQ(window.Requests("one more", kHourMs), 0) << "all others were asked for today";
  window.Count("later", 100 * kHourMs);
  EXPECT_EQ(window.Requests("later", 100 * kHourMs), 1) << "what nobody asked for makes room";
}

}  // namespace
}  // namespace stockpot
