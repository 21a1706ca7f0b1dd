#include <atomic>
#include <cstdio>

#include "serve/bin/cli/commands.h"
#include "serve/bin/cli/json.h"
#include "serve/bin/cli/output.h"
#include "serve/bin/cli/states.h"
#include "store/records.h"
#include "store/safetensors.h"
#include "thrift/remote_source.h"

namespace stockpot::cli {
namespace {

// Counts what is read out of a source.
class CountedSource : public TensorSource {
 public:
  CountedSource(const TensorSource& inner, ProgressLine& line) : inner_(inner), line_(line) {
    for (const TensorInfo& tensor : inner.tensors()) {
      if (tensor.alias_of.empty()) total_ += tensor.bytes();
    }
  }
  int64_t total_bytes() const { return total_; }

  const std::vector<TensorInfo>& tensors() const override { return inner_.tensors(); }
  Status Read(std::string_view name, int64_t offset, std::span<std::byte> out) const override {
    STOCKPOT_RETURN_IF_ERROR(inner_.Read(name, offset, out));
    done_ += static_cast<int64_t>(out.size());
    line_.Show(total_ == 0 ? 1 : static_cast<double>(done_) / static_cast<double>(total_),
               HumanBytes(done_) + " of " + HumanBytes(total_));
    return OkStatus();
  }
  Result<std::string> ReadFile(std::string_view name) const override {
    return inner_.ReadFile(name);
  }
  std::vector<std::string> files() const override { return inner_.files(); }

 private:
  const TensorSource& inner_;
  ProgressLine& line_;
  int64_t total_ = 0;
  mutable int64_t done_ = 0;
};

struct ExportOptions {
  std::string id;
  std::string folder;
  bool states = false;
  bool delta = false;
};

// Each group that came with the checkpoint into DIR/states/GROUP. Returns the bytes of all.
Result<int64_t> ExportStates(Client& client, const Globals& globals, const Digest& checkpoint,
                             const ExportOptions& options) {
  int64_t bytes = 0;
  STOCKPOT_ASSIGN_OR_RETURN(const rpc::ArtifactInfo info, client.Show(checkpoint.Hex()));
  for (const rpc::Edge& edge : info.children) {
    if (edge.type != EdgeTypeName(EdgeType::kStateOf)) continue;
    STOCKPOT_ASSIGN_OR_RETURN(const Digest state, Digest::FromRaw(edge.child));
    STOCKPOT_ASSIGN_OR_RETURN(const rpc::ArtifactInfo shown, client.Show(state.Hex()));
    STOCKPOT_ASSIGN_OR_RETURN(const auto source, OpenRemoteArtifact(client, state.Hex()));
    ProgressLine line("fetching " + shown.group, globals.quiet);
    const CountedSource counted(*source, line);
    bytes += counted.total_bytes();
    STOCKPOT_RETURN_IF_ERROR(WriteState(counted, StateFolder(options.folder, shown.group)));
  }
  return bytes;
}

Status Export(const Globals& globals, const ExportOptions& options) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto client, ConnectTo(globals));
  if (options.delta) return ExportVariant(*client, globals, options.id, options.folder);
  STOCKPOT_ASSIGN_OR_RETURN(const Digest digest, client->Resolve(options.id));
  STOCKPOT_ASSIGN_OR_RETURN(const auto source, OpenRemoteArtifact(*client, digest.Hex()));
  int64_t bytes = 0;
  {
    ProgressLine line("fetching", globals.quiet);
    const CountedSource counted(*source, line);
    bytes = counted.total_bytes();
    STOCKPOT_RETURN_IF_ERROR(WriteModelFolder(counted, options.folder));
  }
  if (options.states) {
    STOCKPOT_ASSIGN_OR_RETURN(const int64_t of_states,
                              ExportStates(*client, globals, digest, options));
    bytes += of_states;
  }
  if (globals.json) {
    PrintJson({{"artifact", digest.Hex()},
               {"directory", options.folder},
               {"tensors", source->tensors().size()},
               {"bytes", bytes}});
  } else {
    std::printf("%s is in %s: %zu tensors, %s\n", digest.ShortHex().c_str(), options.folder.c_str(),
                source->tensors().size(), HumanBytes(bytes).c_str());
  }
  return OkStatus();
}

}  // namespace

void AddExportCommand(Registry& registry) {
  const auto options = std::make_shared<ExportOptions>();
  CLI::App* command = registry.app.add_subcommand(
      "export",
      "Write an artifact as a Hugging Face folder with full weights, an adapter as PEFT's");
  command->add_option("ID", options->id, "The artifact")->required();
  command->add_option("DIR", options->folder, "Where; must hold no model yet")->required();
  CLI::Option* states = command->add_flag(
      "--states", options->states,
      "Also what came with a checkpoint (the optimizer's), into DIR/states/GROUP");
  command
      ->add_flag("--delta", options->delta,
                 "A variant as it is stored, into ONE safetensors file DIR (import-variant)")
      ->excludes(states);
  command->callback([&registry, options] {
    registry.action = [&registry, options] { return Export(registry.globals, *options); };
  });
}

}  // namespace stockpot::cli
