// What the engine said about one request, and waiting for it.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "serve/engine/engine.h"

namespace stockpot::test {

class Collector {
 public:
  // Callbacks that record here. `on_token` sees each token first and may stop the sequence.
  EngineCallbacks Callbacks(std::function<bool(const TokenEvent&)> on_token = {});
  // Fails the test after a minute.
  void Wait();
  void WaitForTokens(size_t count);
  // As nothing but a crash of the engine thread could miss.
  bool done() const;

  // After Wait().
  std::vector<TokenEvent> prompt;
  std::vector<TokenEvent> tokens;
  FinishReason reason = FinishReason::kError;
  Status status;
  int prompt_calls = 0, done_calls = 0;
  bool token_after_done = false;

  std::vector<int32_t> ids() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
};

// Token for token the same, log-probabilities bit for bit.
bool SameEvents(const std::vector<TokenEvent>& a, const std::vector<TokenEvent>& b);

}  // namespace stockpot::test
