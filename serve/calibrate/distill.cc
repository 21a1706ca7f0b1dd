#include "serve/calibrate/distill.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <random>
#include <utility>

#include "kernels/base/check.h"
#include "serve/calibrate/low_priority.h"
#include "serve/calibrate/token_windows.h"

namespace stockpot {
namespace {

constexpr size_t kHeldBackEvery = 5;
constexpr size_t kMaxHeldBack = 32;
constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.999;
// Far under the gradients of single scales (1e-7 in a model of 1e8 weights), so that it only guards
// rows through which nothing goes.
constexpr double kEpsilon = 1e-14;

using Clock = std::chrono::steady_clock;
using Sequence = std::span<const int32_t>;

class Distiller {
 public:
  Distiller(const CalibratedModels& models, const ModelScales& start, const DistillOptions& options,
            const SaveDistillation& save, const ProgressFunction& progress)
      : start_(start),
        options_(options),
        save_(save),
        progress_(progress),
        threads_(options.threads),
        loss_(models, threads_) {
    for (const auto& [name, layer] : start) {
      DistillationState::Tensor& tensor = state_.tensors[name];
      for (std::vector<float>* values :
           {&tensor.log_scale, &tensor.first_moment, &tensor.second_moment, &tensor.best}) {
        values->resize(layer.size() * layer.at(0).size());
      }
    }
  }

  Result<Distillation> Run(std::span<const std::vector<int32_t>> texts,
                           const DistillationState* resume) {
    STOCKPOT_RETURN_IF_ERROR(Cut(texts));
    if (resume != nullptr && Fits(*resume)) {
      state_ = *resume;
    } else {
      STOCKPOT_ASSIGN_OR_RETURN(state_.loss_before, HeldBackLoss(start_));
      state_.best_loss = state_.loss_before;
    }
    const int64_t resumed_at = state_.step;
    started_ = Clock::now();
    seconds_before_ = state_.seconds;
    while (state_.step < options_.steps && Seconds() < options_.seconds) {
      STOCKPOT_RETURN_IF_ERROR(Step());
      const bool last = state_.step >= options_.steps || Seconds() >= options_.seconds;
      if (last || state_.step % options_.evaluate_every == 0) {
        STOCKPOT_RETURN_IF_ERROR(Evaluate());
      }
      if (save_ != nullptr && state_.step % options_.save_every == 0 && !last) {
        state_.seconds = Seconds();
        STOCKPOT_RETURN_IF_ERROR(save_(state_));
      }
    }
    Distillation found{.steps = state_.step,
                       .resumed_at = resumed_at,
                       .tokens = length_ * static_cast<int64_t>(sequences_.size()),
                       .held_back = length_ * static_cast<int64_t>(held_back_.size()),
                       .loss_before = state_.loss_before,
                       .loss = state_.best_loss};
    for (const auto& [name, tensor] : state_.tensors) {
      found.alpha[name] = Scaled(name, tensor.best);
    }
    return found;
  }

 private:
  double Seconds() const {
    return seconds_before_ + std::chrono::duration<double>(Clock::now() - started_).count();
  }

  // Sequences of one length; shorter ends of texts are left.
  Status Cut(std::span<const std::vector<int32_t>> texts) {
    int64_t longest = 0;
    for (const std::vector<int32_t>& text : texts) {
      longest = std::max(longest, static_cast<int64_t>(text.size()));
    }
    length_ = std::min(options_.sequence, longest);
    size_t index = 0;
    for (const Sequence window :
         TokenWindows(texts, std::max<int64_t>(length_, 1), options_.max_tokens)) {
      if (static_cast<int64_t>(window.size()) != length_) continue;
      const bool judges = index++ % kHeldBackEvery == 1 && held_back_.size() < kMaxHeldBack;
      (judges ? held_back_ : sequences_).push_back(window);
    }
    if (!sequences_.empty() && !held_back_.empty()) return OkStatus();
    return InvalidArgument(
        "the calibration texts are too short: a distillation needs two "
        "sequences of " +
        std::to_string(std::max<int64_t>(length_, 2)) + " tokens");
  }

  bool Fits(const DistillationState& other) const {
    if (other.tensors.size() != state_.tensors.size()) return false;
    for (const auto& [name, tensor] : state_.tensors) {
      const auto it = other.tensors.find(name);
      if (it == other.tensors.end()) return false;
      for (const std::vector<float>* values : {&it->second.log_scale, &it->second.first_moment,
                                               &it->second.second_moment, &it->second.best}) {
        if (values->size() != tensor.log_scale.size()) return false;
      }
    }
    return other.step >= 0;
  }

  // Asked once a layer.
  ProgressFunction Asked() const {
    if (progress_ == nullptr) return nullptr;
    return [this](double) { return progress_(std::min(1.0, Share())); };
  }
  double Share() const {
    const double of_steps = static_cast<double>(state_.step) / static_cast<double>(options_.steps);
    return started_ == Clock::time_point{} ? of_steps
                                           : std::max(of_steps, Seconds() / options_.seconds);
  }

  LayerScales Scaled(const std::string& name, const std::vector<float>& log_scale) const {
    LayerScales scales = start_.at(name);
    size_t i = 0;
    for (std::vector<float>& plane : scales) {
      for (float& alpha : plane) alpha *= std::exp(log_scale[i++]);
    }
    return scales;
  }
  ModelScales Scales() const {
    ModelScales scales;
    for (const auto& [name, tensor] : state_.tensors) {
      scales[name] = Scaled(name, tensor.log_scale);
    }
    return scales;
  }

  // The teacher of a sequence, computed once.
  Result<const std::vector<float>*> TeacherOf(const Sequence& sequence) {
    const auto [it, is_new] = teacher_.try_emplace(sequence.data());
    if (is_new) {
      Result<std::vector<float>> hidden = loss_.Teacher({&sequence, 1}, Asked());
      if (!hidden.ok()) {
        teacher_.erase(it);
        return hidden.status();
      }
      it->second = *std::move(hidden);
    }
    return &it->second;
  }

  Result<double> LossOf(const std::vector<Sequence>& sequences, const ModelScales& scales,
                        ModelScales* gradient) {
    std::vector<float> teacher;
    for (const Sequence& sequence : sequences) {
      STOCKPOT_ASSIGN_OR_RETURN(const std::vector<float>* hidden, TeacherOf(sequence));
      teacher.insert(teacher.end(), hidden->begin(), hidden->end());
    }
    return loss_.Student(sequences, teacher, scales, gradient, Asked());
  }

  Result<double> HeldBackLoss(const ModelScales& scales) {
    const auto batch = static_cast<size_t>(options_.batch);
    double sum = 0;
    for (size_t begin = 0; begin < held_back_.size(); begin += batch) {
      const size_t count = std::min(batch, held_back_.size() - begin);
      const auto from = held_back_.begin() + static_cast<std::ptrdiff_t>(begin);
      STOCKPOT_ASSIGN_OR_RETURN(
          const double loss,
          LossOf({from, from + static_cast<std::ptrdiff_t>(count)}, scales, nullptr));
      sum += loss * static_cast<double>(count);
    }
    return sum / static_cast<double>(held_back_.size());
  }

  // Every sequence once, then in another order again. What a step takes depends on its number
  // alone.
  std::vector<Sequence> BatchOf(int64_t step) const {
    std::vector<Sequence> batch;
    const auto count = static_cast<int64_t>(sequences_.size());
    for (int64_t i = 0; i < std::min(options_.batch, count); ++i) {
      const int64_t index = step * options_.batch + i;
      std::vector<size_t> order(sequences_.size());
      for (size_t j = 0; j < order.size(); ++j) order[j] = j;
      std::mt19937_64 random(static_cast<uint64_t>(index / count));
      std::shuffle(order.begin(), order.end(), random);
      batch.push_back(sequences_[order[static_cast<size_t>(index % count)]]);
    }
    return batch;
  }

  Status Step() {
    const double rate = options_.learning_rate * std::max(0.0, 1 - Share());
    const ModelScales scales = Scales();
    ModelScales gradient;
    STOCKPOT_RETURN_IF_ERROR(LossOf(BatchOf(state_.step), scales, &gradient).status());
    const auto step = static_cast<double>(++state_.step);
    const double correction1 = 1 - std::pow(kBeta1, step);
    const double correction2 = 1 - std::pow(kBeta2, step);
    for (auto& [name, tensor] : state_.tensors) {
      const LayerScales& alpha = scales.at(name);
      const LayerScales& grad = gradient.at(name);
      size_t i = 0;
      for (size_t plane = 0; plane < alpha.size(); ++plane) {
        for (size_t row = 0; row < alpha[plane].size(); ++row, ++i) {
          // By log(alpha).
          const double g = static_cast<double>(grad[plane][row]) * alpha[plane][row];
          if (!std::isfinite(g)) continue;
          const double first = kBeta1 * tensor.first_moment[i] + (1 - kBeta1) * g;
          const double second = kBeta2 * tensor.second_moment[i] + (1 - kBeta2) * g * g;
          tensor.first_moment[i] = static_cast<float>(first);
          tensor.second_moment[i] = static_cast<float>(second);
          tensor.log_scale[i] -= static_cast<float>(rate * (first / correction1) /
                                                    (std::sqrt(second / correction2) + kEpsilon));
        }
      }
    }
    return OkStatus();
  }

  Status Evaluate() {
    STOCKPOT_ASSIGN_OR_RETURN(const double loss, HeldBackLoss(Scales()));
    if (!(loss < state_.best_loss)) return OkStatus();
    state_.best_loss = loss;
    for (auto& [name, tensor] : state_.tensors) tensor.best = tensor.log_scale;
    return OkStatus();
  }

  const ModelScales& start_;
  const DistillOptions& options_;
  const SaveDistillation& save_;
  const ProgressFunction& progress_;
  ThreadPool threads_;
  LogitLoss loss_;
  int64_t length_ = 0;  // of a sequence
  std::vector<Sequence> sequences_;
  std::vector<Sequence> held_back_;
  std::map<const int32_t*, std::vector<float>> teacher_;  // by the sequence's first token
  DistillationState state_;
  Clock::time_point started_;
  double seconds_before_ = 0;
};

}  // namespace

Result<Distillation> Distill(const CalibratedModels& models, const ModelScales& start,
                             std::span<const std::vector<int32_t>> texts,
                             const DistillOptions& options, const DistillationState* resume,
                             const SaveDistillation& save, const ProgressFunction& progress) {
  STOCKPOT_CHECK(options.sequence > 1 && options.batch > 0 && options.steps >= 0 &&
                     options.evaluate_every > 0 && options.save_every > 0 && options.threads > 0,
                 options.sequence, options.batch, options.steps);
  Result<Distillation> found = Internal("the distillation did not run");
  RunAtLowPriority(options.nice, [&] {
    found = Distiller(models, start, options, save, progress).Run(texts, resume);
  });
  return found;
}

}  // namespace stockpot
