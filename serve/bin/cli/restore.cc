// stockpot-restore BACKUP DATA: a new store out of a backup, verified. `stockpot restore` runs it.
// Exit status: 0 done, 1 failed, 2 wrong usage.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "serve/bin/cli/output.h"
#include "store/checkpoint_store.h"

int main(int argc, char** argv) {
  using stockpot::BackupReport;
  using stockpot::Result;
  CLI::App app("Make a new store from a backup; every byte is verified", "stockpot restore");
  std::string backup;
  std::string data;
  bool quiet = false;
  app.add_option("BACKUP", backup, "Folder that `stockpot backup` wrote")->required();
  app.add_option("DATA", data, "Folder of the new store; must not exist")->required();
  app.add_flag("--quiet,-q", quiet, "No progress");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  stockpot::cli::ProgressLine line("restore", quiet);
  const Result<BackupReport> report = stockpot::RestoreStore(
      backup, data, stockpot::SystemClock(), [&](int64_t done, int64_t total) {
        line.Show(static_cast<double>(done) / static_cast<double>(total), "");
      });
  if (!report.ok()) {
    std::fprintf(stderr, "stockpot: restore: %s\n",
                 stockpot::cli::Printable(report.status().message()).c_str());
    return 1;
  }
  line.Show(1, "");
  std::printf("%lld artifacts, %s, verified: stockpot serve --data %s\n",
              static_cast<long long>(report->artifacts),
              stockpot::cli::HumanBytes(report->copied_bytes).c_str(), data.c_str());
  return 0;
}
