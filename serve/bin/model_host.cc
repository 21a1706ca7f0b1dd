#include "serve/bin/model_host.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <optional>
#include <utility>

#include "serve/calibrate/calibrate.h"
#include "store/artifact_source.h"

namespace stockpot {
namespace {

constexpr int64_t kBasePollMs = 500;  // how soon a stop is noticed while no base is imported
constexpr int64_t kLoadPollMs = 50;   // likewise while a score waits for the base

bool IsBase(const CheckpointStore& store, const Digest& artifact) {
  const Result<Manifest> manifest = store.GetManifest(artifact);
  return manifest.ok() && manifest->kind == ArtifactKind::kBase;
}

// The base of that name, or without a name the one imported first.
std::optional<std::pair<std::string, Digest>> FindBase(const CheckpointStore& store,
                                                       const std::string& name) {
  std::optional<Alias> found;
  if (!name.empty()) {
    found = store.GetAlias(name);
    if (found && !IsBase(store, found->artifact)) found.reset();
  } else {
    for (const Alias& alias : store.ListAliases()) {
      if (found && found->moved_ms <= alias.moved_ms) continue;
      if (IsBase(store, alias.artifact)) found = alias;
    }
  }
  if (!found) return std::nullopt;
  return std::pair(found->name, found->artifact);
}

}  // namespace

struct ModelHost::Serving {
  Serving(std::string name, std::shared_ptr<const BaseModel> model, const CheckpointStore& store,
          const ModelHostOptions& options)
      : base(std::move(model)),
        text(store),
        cache(base, store, options.cache),
        router(std::move(name), base, store, cache),
        engine(base, options.engine, options.threads) {}

  std::shared_ptr<const BaseModel> base;
  TextAssetsCache text;
  VariantCache cache;
  Router router;
  Engine engine;
};

ModelHost::ModelHost(const CheckpointStore& store, ModelHostOptions options,
                     std::function<void(std::shared_ptr<ServingModel>)> on_ready)
    : store_(store), options_(std::move(options)), on_ready_(std::move(on_ready)) {
  state_ = {options_.base, "missing"};
  thread_ = std::thread([this] { Run(); });
}

ModelHost::~ModelHost() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  thread_.join();
}

ModelHost::State ModelHost::state() const {
  std::lock_guard lock(mutex_);
  return state_;
}

const Router* ModelHost::router() const {
  std::lock_guard lock(mutex_);
  return serving_ != nullptr ? &serving_->router : nullptr;
}

bool ModelHost::Drain(int64_t timeout_ms) {
  Engine* engine = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (serving_ != nullptr) engine = &serving_->engine;
  }
  return engine == nullptr || engine->Drain(timeout_ms);
}

void ModelHost::SetPhase(std::string phase) {
  std::lock_guard lock(mutex_);
  state_.phase = std::move(phase);
}

Result<Digest> ModelHost::WaitForBase() {
  int64_t since = 0;
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (stop_) return Unavailable("shutting down");
    }
    for (const Event& event : store_.EventsSince(since, 1000)) since = event.sequence;
    if (const auto base = FindBase(store_, options_.base)) {
      std::lock_guard lock(mutex_);
      state_.base = base->first;
      looked_ = false;
      return base->second;
    }
    {
      std::lock_guard lock(mutex_);
      looked_ = true;
    }
    store_.WaitForEvents(since, kBasePollMs);
  }
}

Status ModelHost::Load(const Digest& digest) {
  SetPhase("loading");
  const std::string name = state().base;
  const auto started = std::chrono::steady_clock::now();
  STOCKPOT_ASSIGN_OR_RETURN(std::unique_ptr<TensorSource> source, OpenArtifact(store_, digest));
  STOCKPOT_ASSIGN_OR_RETURN(std::shared_ptr<const BaseModel> base,
                            BaseModel::Load(digest, *source));
  auto serving = std::make_unique<Serving>(name, base, store_, options_);
  // The base's own text is what every request may need: a broken one is known before it is ready.
  const auto text = serving->text.Get(digest);
  if (!text.ok()) return text.status();
  auto model = std::shared_ptr<ServingModel>(new ServingModel{
      name, base, serving->engine, serving->router, serving->cache, serving->text});
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  spdlog::info("base {} ({}) is resident: {} MiB in {:.2f} s", name, digest.ShortHex(),
               base->resident_bytes() >> 20, seconds);
  {
    std::lock_guard lock(mutex_);
    serving_ = std::move(serving);
    state_.phase = "ready";
  }
  on_ready_(std::move(model));
  return OkStatus();
}

Result<ModelHost::Serving*> ModelHost::WaitForServing(const Digest& base,
                                                      const ProgressFunction& progress) const {
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (serving_ != nullptr) {
        if (serving_->base->digest() == base) return serving_.get();
        return NotFound("the base that is served here is " + state_.base + ", not " +
                        base.ShortHex());
      }
      if (state_.phase.starts_with("failed")) {
        return NotFound("the base is not served: " + state_.phase);
      }
      if (looked_) return NotFound("no base is served here");
    }
    if (progress) STOCKPOT_RETURN_IF_ERROR(progress(0));
    std::this_thread::sleep_for(std::chrono::milliseconds(kLoadPollMs));
  }
}

Result<std::vector<std::vector<int32_t>>> ModelHost::Tokenize(
    Serving& serving, const Manifest* speaker, const std::vector<std::string>& texts) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto assets, speaker == nullptr
                                                   ? serving.text.Get(serving.base->digest())
                                                   : serving.text.Get(*speaker));
  std::vector<std::vector<int32_t>> tokens;
  for (const std::string& text : texts) {
    STOCKPOT_ASSIGN_OR_RETURN(tokens.emplace_back(),
                              assets->tokenizer->Encode(text, /*add_special_tokens=*/false));
  }
  return tokens;
}

Result<Calibration> ModelHost::Calibrate(const CalibrationRequest& request,
                                         const ProgressFunction& progress) {
  STOCKPOT_ASSIGN_OR_RETURN(Serving* const serving, WaitForServing(request.base, progress));
  STOCKPOT_ASSIGN_OR_RETURN(const auto tokens, Tokenize(*serving, request.full, request.texts));
  CalibratedModels models{.base = serving->base};
  STOCKPOT_ASSIGN_OR_RETURN(models.full, VariantModel::Load(serving->base, store_, *request.full));
  if (progress) STOCKPOT_RETURN_IF_ERROR(progress(0));
  STOCKPOT_ASSIGN_OR_RETURN(models.draft,
                            VariantModel::Load(serving->base, store_, *request.draft));
  if (models.draft->config().vocab_size != serving->base->config().vocab_size) {
    return InvalidArgument("a model with a vocabulary of its own size is not calibrated");
  }
  CalibrateOptions options;
  options.closed_form.threads = options_.threads;
  options.distill.threads = options_.threads;
  options.distill.seconds = options_.distill_seconds;
  options.distill.steps = options_.distill_steps;
  return stockpot::Calibrate(models, request, tokens, options, progress);
}

Result<ProbeScores> ModelHost::Score(const ScoreRequest& request,
                                     const ProgressFunction& progress) {
  STOCKPOT_ASSIGN_OR_RETURN(Serving* const serving, WaitForServing(request.base, progress));
  // All of them speak one language, that of the first: a model may have a vocabulary of its own.
  const Manifest* const first = request.models.empty() ? nullptr : request.models.front();
  STOCKPOT_ASSIGN_OR_RETURN(const auto tokens, Tokenize(*serving, first, request.texts));
  std::vector<VariantLease> models;
  for (const Manifest* model : request.models) {
    models.emplace_back();
    if (model == nullptr) continue;
    STOCKPOT_ASSIGN_OR_RETURN(models.back(), VariantModel::Load(serving->base, store_, *model));
    if (progress) STOCKPOT_RETURN_IF_ERROR(progress(0));
  }
  return ScoreModels(serving->base, models, tokens, {.threads = options_.threads}, progress);
}

void ModelHost::Run() {
  const Result<Digest> digest = WaitForBase();
  if (!digest.ok()) return;
  const Status loaded = Load(*digest);
  if (loaded.ok()) return;
  spdlog::error("base {} cannot be served: {}", state().base, loaded.ToString());
  SetPhase("failed: " + loaded.message());
}

}  // namespace stockpot
