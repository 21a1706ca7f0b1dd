#include "tests/unit/engine/collector.h"

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cstdint>

namespace stockpot::test {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);

bool SameBits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

bool SameEvent(const TokenEvent& a, const TokenEvent& b) {
  if (a.token != b.token || a.ends != b.ends || !SameBits(a.logprob, b.logprob) ||
      a.top.size() != b.top.size()) {
    return false;
  }
  for (size_t i = 0; i < a.top.size(); ++i) {
    if (a.top[i].token != b.top[i].token || !SameBits(a.top[i].logprob, b.top[i].logprob)) {
      return false;
    }
  }
  return true;
}

}  // namespace

EngineCallbacks Collector::Callbacks(std::function<bool(const TokenEvent&)> on_token) {
  EngineCallbacks callbacks;
  callbacks.on_prompt = [this](std::vector<TokenEvent> events) {
    std::lock_guard lock(mutex_);
    prompt = std::move(events);
    ++prompt_calls;
  };
  callbacks.on_token = [this, on_token = std::move(on_token)](const TokenEvent& event) {
    bool goes_on = true;
    if (on_token) goes_on = on_token(event);
    std::lock_guard lock(mutex_);
    token_after_done |= done_calls > 0;
    tokens.push_back(event);
    changed_.notify_all();
    return goes_on;
  };
  callbacks.on_done = [this](FinishReason why, const Status& what) {
    std::lock_guard lock(mutex_);
    reason = why;
    status = what;
    ++done_calls;
    changed_.notify_all();
  };
  return callbacks;
}

void Collector::Wait() {
  std::unique_lock lock(mutex_);
  ASSERT_TRUE(changed_.wait_for(lock, kPatience, [&] { return done_calls > 0; }));
}

void Collector::WaitForTokens(size_t count) {
  std::unique_lock lock(mutex_);
  ASSERT_TRUE(
      changed_.wait_for(lock, kPatience, [&] { return done_calls > 0 || tokens.size() >= count; }));
}

bool Collector::done() const {
  std::lock_guard lock(mutex_);
  return done_calls > 0;
}

std::vector<int32_t> Collector::ids() const {
  std::vector<int32_t> ids;
  for (const TokenEvent& event : tokens) ids.push_back(event.token);
  return ids;
}

bool SameEvents(const std::vector<TokenEvent>& a, const std::vector<TokenEvent>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!SameEvent(a[i], b[i])) return false;
  }
  return true;
}

}  // namespace stockpot::test
