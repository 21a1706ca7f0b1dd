// Trains a small byte-level Llama in LibTorch on real text and pushes a checkpoint every few steps
// through CheckpointHook.
//
//   train_cpp --text LICENSE --run demo --base tiny --write-base DIR --import-base
//
// The first --base-steps steps make the base; the rest is the run that is pushed. Without a daemon
// it trains all the same: the hook counts what it could not deliver.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>

#include "examples/train_cpp/llama.h"
#include "examples/train_cpp/model_files.h"
#include "trainer_hooks/cpp/checkpoint_hook.h"
#include "trainer_hooks/cpp/libtorch_adapter.h"

namespace stockpot::train_cpp {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{16} << 20;
constexpr double kHeldOutShare = 0.1;
constexpr int64_t kHeldOutBatches = 8;
constexpr int64_t kFlushMs = 120'000;

struct Options {
  std::string text;
  std::string server{kDefaultRpcAddress};
  std::string run = "train-cpp";
  std::string base = "train-cpp-base";
  std::string write_base;
  bool import_base = false;
  int64_t base_steps = 150;
  int64_t steps = 100;
  int64_t push_every = 25;
  int64_t merge_every = 50;
  int64_t batch = 16;
  int64_t length = 128;
  double learning_rate = 2e-3;
  int64_t seed = 1;
  int threads = 1;  // the daemon on the same machine wants a core too
};

// Random windows of a text.
class Batches {
 public:
  Batches(const std::string& text, int64_t batch, int64_t length)
      : text_(text), batch_(batch), length_(length) {}

  // tokens [batch, length + 1]
  torch::Tensor Next(std::mt19937_64& random) const {
    torch::Tensor tokens = torch::empty({batch_, length_ + 1}, torch::kInt64);
    auto rows = tokens.accessor<int64_t, 2>();
    std::uniform_int_distribution<int64_t> start(0,
                                                 static_cast<int64_t>(text_.size()) - length_ - 1);
    for (int64_t b = 0; b < batch_; ++b) {
      const int64_t begin = start(random);
      for (int64_t i = 0; i <= length_; ++i) rows[b][i] = static_cast<uint8_t>(text_[begin + i]);
    }
    return tokens;
  }

 private:
  const std::string text_;
  const int64_t batch_;
  const int64_t length_;
};

torch::Tensor Loss(Llama& model, const torch::Tensor& tokens) {
  const int64_t length = tokens.size(1) - 1;
  const torch::Tensor logits = model.forward(tokens.narrow(1, 0, length));
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1),
                                              tokens.narrow(1, 1, length).flatten());
}

class Trainer {
 public:
  Trainer(const Options& options, const std::string& text)
      : options_(options),
        held_out_size_(static_cast<int64_t>(kHeldOutShare * static_cast<double>(text.size()))),
        training_(text.substr(0, text.size() - held_out_size_), options.batch, options.length),
        held_out_(text.substr(text.size() - held_out_size_), options.batch, options.length),
        model_(std::make_shared<Llama>(shape_)),
        optimizer_(model_->parameters(), torch::optim::AdamWOptions(options.learning_rate)),
        random_(options.seed) {}

  const ModelShape& shape() const { return shape_; }
  Llama& model() { return *model_; }

  double Step() {
    optimizer_.zero_grad();
    torch::Tensor loss = Loss(*model_, training_.Next(random_));
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model_->parameters(), 1.0);
    optimizer_.step();
    return loss.item<double>();
  }

  // The same windows every time.
  double HeldOutLoss() {
    const torch::NoGradGuard no_grad;
    std::mt19937_64 random(1);
    double sum = 0;
    for (int64_t i = 0; i < kHeldOutBatches; ++i) {
      sum += Loss(*model_, held_out_.Next(random)).item<double>();
    }
    return sum / kHeldOutBatches;
  }

 private:
  const Options& options_;
  const ModelShape shape_;
  const int64_t held_out_size_;
  const Batches training_;
  const Batches held_out_;
  std::shared_ptr<Llama> model_;
  torch::optim::AdamW optimizer_;
  std::mt19937_64 random_;
};

Status MakeBase(Trainer& trainer, const Options& options) {
  for (int64_t step = 1; step <= options.base_steps; ++step) {
    const double loss = trainer.Step();
    if (step % 25 == 0) std::printf("base  step %4ld  loss %.3f\n", static_cast<long>(step), loss);
  }
  std::printf("base  held-out loss %.3f\n", trainer.HeldOutLoss());
  if (options.write_base.empty()) return OkStatus();
  STOCKPOT_ASSIGN_OR_RETURN(const TorchTensors tensors, CollectTensors(trainer.model()));
  STOCKPOT_RETURN_IF_ERROR(WriteFolder(tensors.views, trainer.shape(), options.write_base));
  std::printf("base  written to %s\n", options.write_base.c_str());
  if (!options.import_base) return OkStatus();
  STOCKPOT_RETURN_IF_ERROR(ImportBase(options.server, options.base, options.write_base));
  std::printf("base  imported as %s\n", options.base.c_str());
  return OkStatus();
}

Result<std::unique_ptr<CheckpointHook>> MakeHook(const Trainer& trainer, const Options& options) {
  CheckpointHookOptions hook;
  hook.address = options.server;
  hook.run = options.run;
  hook.base = options.base;
  hook.run_config = {.merge_every = options.merge_every, .best_metric = "eval_loss"};
  hook.files = ModelFiles(trainer.shape());
  hook.on_error = [](const Status& status) {
    std::fprintf(stderr, "hook: %s\n", status.ToString().c_str());
  };
  return CheckpointHook::Create(std::move(hook));
}

Status Run(const Options& options) {
  torch::manual_seed(options.seed);
  torch::set_num_threads(options.threads);
  STOCKPOT_ASSIGN_OR_RETURN(const std::string text, ReadText(options.text, kMaxTextBytes));
  if (static_cast<double>(text.size()) * kHeldOutShare <
      2.0 * static_cast<double>(options.length)) {
    return InvalidArgument("'" + options.text + "' is too short: " + std::to_string(text.size()) +
                           " bytes");
  }
  Trainer trainer(options, text);
  STOCKPOT_RETURN_IF_ERROR(MakeBase(trainer, options));
  STOCKPOT_ASSIGN_OR_RETURN(const auto hook, MakeHook(trainer, options));
  for (int64_t step = 1; step <= options.steps; ++step) {
    const double loss = trainer.Step();
    if (step % options.push_every != 0) continue;
    const double held_out = trainer.HeldOutLoss();
    STOCKPOT_ASSIGN_OR_RETURN(const TorchTensors tensors, CollectTensors(trainer.model()));
    const bool staged =
        hook->OnStep(step, tensors.views, {{"loss", loss}, {"eval_loss", held_out}}).staged;
    std::printf("%s  step %4ld  loss %.3f  held-out %.3f  %s in %.2f ms\n", options.run.c_str(),
                static_cast<long>(step), loss, held_out, staged ? "staged" : "skipped",
                hook->Stats().last_stall_ms);
  }
  const bool flushed = hook->Flush(kFlushMs);
  const CheckpointHookStats stats = hook->Stats();
  std::printf("%s  %ld of %ld checkpoints committed, %ld skipped, %ld failed, %.1f MB sent\n",
              options.run.c_str(), static_cast<long>(stats.committed),
              static_cast<long>(stats.offered), static_cast<long>(stats.skipped),
              static_cast<long>(stats.failed), static_cast<double>(stats.sent_bytes) / 1e6);
  if (flushed && stats.committed == stats.offered) return OkStatus();
  return stats.last_error.ok() ? Unavailable("not every checkpoint arrived") : stats.last_error;
}

int Main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // progress is seen in a log file too
  Options options;
  CLI::App app("Trains a small Llama on text and pushes its checkpoints", "train_cpp");
  app.add_option("--text", options.text, "A text file, or a folder of them")->required();
  app.add_option("--server", options.server, "The daemon")->envname("STOCKPOT_SERVER");
  app.add_option("--run", options.run, "Name of the run");
  app.add_option("--base", options.base, "Name of the base");
  CLI::Option* folder =
      app.add_option("--write-base", options.write_base, "Write the base as a Hugging Face folder");
  app.add_flag("--import-base", options.import_base, "Import what --write-base wrote")
      ->needs(folder);
  app.add_option("--base-steps", options.base_steps, "Steps that make the base");
  app.add_option("--steps", options.steps, "Steps of the run");
  app.add_option("--push-every", options.push_every, "Steps between two checkpoints")
      ->check(CLI::PositiveNumber);
  app.add_option("--merge-every", options.merge_every, "Steps between two merges, 0 = never");
  app.add_option("--batch", options.batch)->check(CLI::PositiveNumber);
  app.add_option("--length", options.length, "Bytes of one training text")
      ->check(CLI::Range(2, 512));
  app.add_option("--learning-rate", options.learning_rate);
  app.add_option("--seed", options.seed);
  app.add_option("--threads", options.threads)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    const Status status = Run(options);
    if (status.ok()) return 0;
    std::fprintf(stderr, "train_cpp: %s\n", status.ToString().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_cpp: %s\n", error.what());
  }
  return 1;
}

}  // namespace
}  // namespace stockpot::train_cpp

int main(int argc, char** argv) { return stockpot::train_cpp::Main(argc, argv); }
