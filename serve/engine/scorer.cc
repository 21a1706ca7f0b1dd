#include "serve/engine/scorer.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/check.h"
#include "kernels/base/threads.h"
#include "serve/model/kv_cache.h"

namespace stockpot {
namespace {

// Sums over tokens; ModelScore's means times their count.
struct Sums {
  double loss = 0;
  double kl = 0;
  double agreed = 0;
};

double LogSumExp(std::span<const float> logits) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - max);
  return max + std::log(sum);
}

// The lowest of the most likely ones.
size_t TopToken(std::span<const float> logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

int64_t VocabularyOf(const BaseModel& base, const VariantLease& model) {
  return model != nullptr ? model->config().vocab_size : base.config().vocab_size;
}

class Scorer {
 public:
  Scorer(std::shared_ptr<const BaseModel> base, std::span<const VariantLease> models,
         const ScorerOptions& options)
      : vocab_(VocabularyOf(*base, models[0])),
        models_(models),
        rows_(options.rows),
        window_(Window(*base, models, options)),
        threads_(options.threads),
        pool_(base->config(), PoolBytes(base->config())),
        transformer_(std::move(base), threads_),
        sums_(models.size()) {
    first_logits_.Reserve(rows_ * vocab_);
    first_log_sums_.resize(static_cast<size_t>(rows_));
  }

  Result<ProbeScores> Run(std::span<const std::vector<int32_t>> texts,
                          const ProgressFunction& progress) {
    for (const std::vector<int32_t>& text : texts) total_ += static_cast<int64_t>(text.size());
    for (const std::vector<int32_t>& text : texts) {
      tokens_ = text;
      const auto count = static_cast<int64_t>(text.size());
      for (int64_t begin = 0; begin + 1 < count; begin += window_) {
        const int64_t end = std::min(begin + window_, count);
        STOCKPOT_RETURN_IF_ERROR(ScoreWindow(begin, end, progress));
      }
      done_ += count;
    }
    if (scored_ == 0) return InvalidArgument("probe texts need at least two tokens");
    ProbeScores scores{.tokens = scored_, .models = {}};
    const auto n = static_cast<double>(scored_);
    for (const Sums& sums : sums_) {
      scores.models.push_back({sums.loss / n, sums.kl / n, sums.agreed / n});
    }
    return scores;
  }

 private:
  static int64_t Window(const BaseModel& base, std::span<const VariantLease> models,
                        const ScorerOptions& options) {
    int64_t window = std::min(options.window, base.config().max_positions);
    for (const VariantLease& model : models) {
      if (model != nullptr) window = std::min(window, model->config().max_positions);
    }
    return std::max<int64_t>(window, 2);
  }

  // One window of every model.
  int64_t PoolBytes(const ModelConfig& config) const {
    const int64_t page_bytes = config.layers * 2 * kKvPageTokens * config.kv_heads *
                               config.head_dim * static_cast<int64_t>(sizeof(float));
    return static_cast<int64_t>(models_.size()) * KvPool::PagesFor(window_) * page_bytes;
  }

  Status ScoreWindow(int64_t begin, int64_t end, const ProgressFunction& progress) {
    if (end - begin < 2) return OkStatus();  // nothing before it
    std::vector<KvSequence> caches;
    for (size_t m = 0; m < models_.size(); ++m) {
      STOCKPOT_RETURN_IF_ERROR(caches.emplace_back(pool_.NewSequence()).Reserve(end - begin));
    }
    const int64_t prompt_end = begin + (end - begin + 1) / 2;
    for (int64_t first = begin; first + 1 < end; first += rows_) {
      const int64_t last = std::min(first + rows_, end - 1);  // the last token predicts nothing
      for (size_t m = 0; m < models_.size(); ++m) {
        const BatchSegment segment{
            .kv = &caches[m],
            .tokens = tokens_.subspan(static_cast<size_t>(first), static_cast<size_t>(last - first)),
            .variant = models_[m].get(),
            .logits_from = 0,
            .prompt_rows = std::clamp<int64_t>(prompt_end - first, 0, last - first)};
        const LogitsSink sink = [&](int64_t, int64_t row, std::span<const float> logits) {
          AddRow(m, row, tokens_[static_cast<size_t>(first + row + 1)], logits);
        };
        STOCKPOT_RETURN_IF_ERROR(transformer_.Forward({&segment, 1}, sink));
        if (progress) {
          const int64_t of_pass = (last - first) * static_cast<int64_t>(m) /
                                  static_cast<int64_t>(models_.size());
          STOCKPOT_RETURN_IF_ERROR(progress(static_cast<double>(done_ + first + of_pass) /
                                            static_cast<double>(total_)));
        }
      }
      scored_ += last - first;
    }
    return OkStatus();
  }

  // `token` is what followed.
  void AddRow(size_t model, int64_t row, int32_t token, std::span<const float> logits) {
    STOCKPOT_CHECK(token >= 0 && token < vocab_, token, vocab_);
    const double log_sum = LogSumExp(logits);
    Sums& sums = sums_[model];
    sums.loss += log_sum - logits[static_cast<size_t>(token)];
    float* const kept = first_logits_.data() + row * vocab_;
    if (model == 0) {
      std::copy(logits.begin(), logits.end(), kept);
      first_log_sums_[static_cast<size_t>(row)] = log_sum;
      sums.agreed += 1;
      return;
    }
    const std::span<const float> first(kept, logits.size());
    const double first_log_sum = first_log_sums_[static_cast<size_t>(row)];
    double kl = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      const double log_p = first[i] - first_log_sum;
      kl += std::exp(log_p) * (log_p - (logits[i] - log_sum));
    }
    sums.kl += kl;
    sums.agreed += TopToken(first) == TopToken(logits) ? 1 : 0;
  }

  const int64_t vocab_;
  const std::span<const VariantLease> models_;
  const int64_t rows_;
  const int64_t window_;
  ThreadPool threads_;
  KvPool pool_;
  Transformer transformer_;
  std::vector<Sums> sums_;
  std::span<const int32_t> tokens_;  // of the text that is scored
  int64_t total_ = 0;                // tokens of all texts
  int64_t done_ = 0;                 // of the texts before it
  int64_t scored_ = 0;
  AlignedBuffer<float> first_logits_;   // [rows, vocab] of the first model's last pass
  std::vector<double> first_log_sums_;  // [rows]
};

Status CheckTokens(int64_t vocab, std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) {
    if (token >= 0 && token < vocab) continue;
    return InvalidArgument("the probe text has token " + std::to_string(token) +
                           ", the model has 0.." + std::to_string(vocab - 1));
  }
  return OkStatus();
}

// Distributions over different vocabularies cannot be compared.
Status CheckVocabularies(const BaseModel& base, std::span<const VariantLease> models) {
  const int64_t first = VocabularyOf(base, models[0]);
  for (const VariantLease& model : models) {
    const int64_t vocab = VocabularyOf(base, model);
    if (vocab == first) continue;
    return InvalidArgument("models with vocabularies of " + std::to_string(first) + " and of " +
                           std::to_string(vocab) + " tokens cannot be scored beside each other");
  }
  return OkStatus();
}

}  // namespace

Result<ProbeScores> ScoreModels(std::shared_ptr<const BaseModel> base,
                                std::span<const VariantLease> models,
                                std::span<const std::vector<int32_t>> texts,
                                const ScorerOptions& options, const ProgressFunction& progress) {
  STOCKPOT_CHECK(!models.empty() && options.rows > 0 && options.threads > 0, models.size(),
                 options.rows, options.threads);
  STOCKPOT_RETURN_IF_ERROR(CheckVocabularies(*base, models));
  for (const std::vector<int32_t>& text : texts) {
    STOCKPOT_RETURN_IF_ERROR(CheckTokens(VocabularyOf(*base, models[0]), text));
  }
  Result<ProbeScores> scores = Internal("the scorer did not run");
  // Its own thread, since a nice value that went up does not come down again; the threads of the
  // pool inherit it.
  std::thread([&] {
    if (options.nice > 0) ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), options.nice);
    scores = Scorer(std::move(base), models, options).Run(texts, progress);
  }).join();
  return scores;
}

}  // namespace stockpot
