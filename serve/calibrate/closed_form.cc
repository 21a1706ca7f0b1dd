#include "serve/calibrate/closed_form.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "kernels/base/aligned_buffer.h"
#include "kernels/base/check.h"
#include "kernels/base/threads.h"
#include "kernels/bitdelta/unpack_signs.h"
#include "kernels/lora/lora_linear.h"
#include "serve/calibrate/low_priority.h"
#include "serve/calibrate/row_statistics.h"
#include "serve/calibrate/token_windows.h"
#include "serve/model/kv_cache.h"
#include "serve/model/transformer.h"
#include "serve/model/weights_internal.h"

namespace stockpot {
namespace {

// Output rows whose delta and signs exist as matrices at a time.
constexpr int64_t kBlockRows = 256;
constexpr int64_t kGrainRows = 16;

class Calibrator {
 public:
  Calibrator(const CalibratedModels& models, const CalibratorOptions& options,
             const ProgressFunction& progress)
      : models_(models),
        rows_(options.rows),
        progress_(progress),
        threads_(options.threads),
        pool_(models.base->config(), PoolBytes(options.window)),
        transformer_(models.base, threads_) {
    for (size_t layer = 0; layer < DraftLayers().size(); ++layer) {
      for (size_t p = 0; p < kProjections; ++p) {
        const PackedSigns* const signs = DraftLayers()[layer].linear[p].delta.signs;
        if (signs == nullptr) continue;
        statistics_.try_emplace({layer, p}, signs->d_out(), signs->planes());
      }
    }
  }

  Result<Calibration> Run(std::span<const std::span<const int32_t>> windows) {
    Calibration calibration;
    if (statistics_.empty()) return calibration;
    for (const std::span<const int32_t> window : windows) {
      total_ += static_cast<int64_t>(window.size());
    }
    if (total_ == 0) return InvalidArgument("the calibration texts have no token");
    for (const std::span<const int32_t> window : windows) {
      STOCKPOT_RETURN_IF_ERROR(RunWindow(window));
    }
    calibration.tokens = done_;
    for (const auto& [place, statistics] : statistics_) {
      const auto [layer, p] = place;
      const PackedSigns& signs = *DraftLayers()[layer].linear[p].delta.signs;
      std::vector<std::vector<float>> draft;
      for (int64_t plane = 0; plane < signs.planes(); ++plane) {
        draft.push_back(ScalesOf(signs, plane));
      }
      calibration.tensors[ProjectionName(static_cast<int64_t>(layer), static_cast<Projection>(p),
                                         "weight")] = statistics.Solve(draft);
    }
    return calibration;
  }

 private:
  using Place = std::pair<size_t, size_t>;  // layer, projection

  const std::vector<DecoderLayerView>& DraftLayers() const {
    return models_.draft->tensors().view.layers;
  }

  int64_t PoolBytes(int64_t window) const {
    const ModelConfig& config = models_.base->config();
    const int64_t page_bytes = config.layers * 2 * kKvPageTokens * config.kv_heads *
                               config.head_dim * static_cast<int64_t>(sizeof(float));
    return KvPool::PagesFor(window) * page_bytes;
  }

  Status RunWindow(std::span<const int32_t> window) {
    KvSequence cache = pool_.NewSequence();
    const auto count = static_cast<int64_t>(window.size());
    STOCKPOT_RETURN_IF_ERROR(cache.Reserve(count));
    const LinearObserver observer = [this](int64_t layer, Projection projection,
                                           ConstFloatMatrix x) {
      Observe({static_cast<size_t>(layer), static_cast<size_t>(projection)}, x);
    };
    for (int64_t first = 0; first < count; first += rows_) {
      const int64_t rows = std::min(rows_, count - first);
      const BatchSegment segment{
          .kv = &cache,
          .tokens = window.subspan(static_cast<size_t>(first), static_cast<size_t>(rows)),
          .variant = models_.full.get(),
          .logits_from = rows,
          .prompt_rows = rows};
      STOCKPOT_RETURN_IF_ERROR(transformer_.Forward({&segment, 1}, nullptr, &observer));
      STOCKPOT_RETURN_IF_ERROR(stopped_);
      done_ += rows;
    }
    return OkStatus();
  }

  void Observe(const Place& place, ConstFloatMatrix x) {
    const auto it = statistics_.find(place);
    if (it == statistics_.end() || !stopped_.ok()) return;
    if (progress_) {
      stopped_ = progress_(static_cast<double>(done_) / static_cast<double>(total_));
      if (!stopped_.ok()) return;
    }
    const LinearView& draft = DraftLayers()[place.first].linear[place.second];
    const PackedSigns& signs = *draft.delta.signs;
    AddResidual(draft, x);
    for (int64_t first = 0; first < signs.d_out(); first += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, signs.d_out() - first);
      AddBlock(place, signs, first, rows, x, it->second);
    }
  }

  // residual_ = what the draft has beside its signs, [tokens, d_out]; without: no rows.
  void AddResidual(const LinearView& draft, ConstFloatMatrix x) {
    residual_ = {};
    if (draft.lora == nullptr) return;
    const int64_t cols = draft.lora->d_out();
    residual_ = {.data = residual_memory_.Reserve(x.rows * cols),
                 .rows = x.rows,
                 .cols = cols,
                 .stride = cols};
    std::fill_n(residual_.data, x.rows * cols, 0.0f);
    rows_of_residual_.assign(static_cast<size_t>(x.rows), 0);
    const Status status = LoraLinearCpu(
        {.x = x, .deltas = {&draft.lora, 1}, .delta_of_row = rows_of_residual_, .y = residual_},
        lora_scratch_, threads_);
    STOCKPOT_CHECK(status.ok(), status.ToString());
  }

  void AddBlock(const Place& place, const PackedSigns& signs, int64_t first, int64_t rows,
                ConstFloatMatrix x, RowStatistics& statistics) {
    const int64_t count = 1 + signs.planes();
    float* const y = products_.Reserve(count * x.rows * rows);
    std::vector<LinearOutput> outputs;
    for (int64_t i = 0; i < count; ++i) {
      const WeightMatrix weight =
          i == 0 ? DeltaBlock(place, first, rows)
                 : UnpackSigns(signs, i - 1, first, rows, sign_memory_[static_cast<size_t>(i - 1)],
                               threads_);
      outputs.push_back(
          {.base = weight,
           .variants = {},
           .y = {.data = y + i * x.rows * rows, .rows = x.rows, .cols = rows, .stride = rows}});
    }
    const Status status = BitDeltaLinearCpu(
        {.x = x, .outputs = outputs, .variant_of_row = {}, .sum_of_row = {}}, scratch_, threads_);
    STOCKPOT_CHECK(status.ok(), status.ToString());
    const FloatMatrix& a = outputs[0].y;
    for (int64_t t = 0; t < residual_.rows; ++t) {
      const float* const taken = residual_.row(t) + first;
      for (int64_t i = 0; i < rows; ++i) a.row(t)[i] -= taken[i];
    }
    std::vector<ConstFloatMatrix> views;
    for (const LinearOutput& output : outputs) {
      views.push_back({output.y.data, output.y.rows, output.y.cols, output.y.stride});
    }
    statistics.Add(first, views[0], std::span(views).subspan(1));
  }

  // Rows of W_full - W_base in float32: exact for 16-bit weights that are near each other.
  WeightMatrix DeltaBlock(const Place& place, int64_t first, int64_t rows) {
    const auto [layer, p] = place;
    const WeightMatrix& base = models_.base->tensors().layers[layer].weight[p];
    const WeightMatrix* const dense =
        models_.full->tensors().view.layers[layer].linear[p].delta.dense;
    const WeightMatrix& full = dense == nullptr ? base : *dense;
    float* const out = delta_memory_.Reserve(rows * base.cols);
    threads_.ParallelFor(rows, kGrainRows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const void* const of_base = base.row(first + r);
        const void* const of_full = full.row(first + r);
        for (int64_t c = 0; c < base.cols; ++c) {
          out[r * base.cols + c] =
              LoadWeight(of_full, full.dtype, c) - LoadWeight(of_base, base.dtype, c);
        }
      }
    });
    return {
        .data = out, .dtype = DType::kF32, .rows = rows, .cols = base.cols, .stride = base.cols};
  }

  const CalibratedModels& models_;
  const int64_t rows_;
  const ProgressFunction& progress_;
  ThreadPool threads_;
  KvPool pool_;
  Transformer transformer_;
  std::map<Place, RowStatistics> statistics_;
  Status stopped_;
  int64_t total_ = 0;
  int64_t done_ = 0;

  LinearScratch scratch_;
  LoraScratch lora_scratch_;
  AlignedBuffer<float> products_;  // [1 + planes][tokens, rows of the block]
  AlignedBuffer<float> delta_memory_;
  std::array<AlignedBuffer<uint16_t>, static_cast<size_t>(kMaxSignPlanes)> sign_memory_;
  AlignedBuffer<float> residual_memory_;
  FloatMatrix residual_;
  std::vector<int32_t> rows_of_residual_;
};

Status CheckTokens(const ModelConfig& config, std::span<const std::vector<int32_t>> texts) {
  for (const std::vector<int32_t>& text : texts) {
    for (const int32_t token : text) {
      if (token >= 0 && token < config.vocab_size) continue;
      return InvalidArgument("a calibration text has token " + std::to_string(token) +
                             ", the model has 0.." + std::to_string(config.vocab_size - 1));
    }
  }
  return OkStatus();
}

}  // namespace

Result<Calibration> CalibrateClosedForm(const CalibratedModels& models,
                                        std::span<const std::vector<int32_t>> texts,
                                        const CalibratorOptions& options,
                                        const ProgressFunction& progress) {
  STOCKPOT_CHECK(options.rows > 0 && options.threads > 0 && options.window > 0, options.rows,
                 options.threads, options.window);
  STOCKPOT_RETURN_IF_ERROR(CheckTokens(models.base->config(), texts));
  CalibratorOptions bounded = options;
  bounded.window = std::min(
      {options.window, models.base->config().max_positions, models.full->config().max_positions});
  const auto windows = TokenWindows(texts, bounded.window, options.max_tokens);
  Result<Calibration> found = Internal("the calibration did not run");
  RunAtLowPriority(options.nice,
                   [&] { found = Calibrator(models, bounded, progress).Run(windows); });
  return found;
}

}  // namespace stockpot
