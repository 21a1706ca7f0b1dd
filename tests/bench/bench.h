// What the bench programs share: their options, the timing of what is compared, and the rows of
// build/bench.json.
//
// Compared things are timed by Google Benchmark in alternation, round by round, so that whatever
// else the machine does meets all of them alike; medians are divided. A program prints one JSON
// line a ratio on stdout,
//   {"name", "value", "goal", "limit", "better", "sizes", "machine"}
// the times behind it on stderr, and leaves every single time as Google Benchmark's own JSON.
#pragma once

#include <filesystem>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace stockpot {

struct BenchOptions {
  bool quick = false;               // few rounds: to see that a bench works, not for the record
  std::string only;                 // part of a ratio's name; empty: all
  int threads = 2;                  // of our pool and of LibTorch's
  std::filesystem::path raw;        // folder for Google Benchmark's JSON; empty: none is kept
  std::filesystem::path directory;  // for benches of the disk

  int Rounds(int full) const { return quick ? 3 : full; }
};

// What a ratio should be. `limit` is what the hardware allows, nothing where that is not known.
struct Budget {
  std::optional<double> goal;
  std::optional<double> limit;
  enum class Better { kLower, kHigher } better = Better::kLower;
};

// Thread promise of both classes: one thread.
class BenchReport {
 public:
  explicit BenchReport(const BenchOptions& options);

  const BenchOptions& options() const { return options_; }

  // Whether one of these ratios was asked for: what serves none of them is not built up.
  bool Wants(std::initializer_list<std::string_view> names) const;

  // Prints the row, if it was asked for.
  void Ratio(std::string_view name, double value, const Budget& budget,
             std::string_view sizes) const;

 private:
  BenchOptions options_;
  std::string machine_;
};

class Comparison {
 public:
  // `group` names the file of raw times.
  Comparison(const BenchReport& report, std::string group, int rounds);

  // `body` does its work once a call; `per_call` such units of it count as one in Seconds().
  void Add(std::string name, std::function<void()> body, double per_call = 1);

  // Runs every body once to warm up, then all of them round by round in the order of Add().
  void Run();

  // Median seconds of one unit. A name that ends in '/' means the fastest of those that begin so.
  // REQUIRES: Run() was called and such a body was added.
  double Seconds(std::string_view name) const;

 private:
  struct Entry {
    std::string name;
    std::function<void()> body;
    double per_call = 1;
    std::vector<double> seconds;  // a round
  };
  const BenchReport& report_;
  std::string group_;
  int rounds_;
  std::vector<Entry> entries_;
};

double Median(std::vector<double> values);  // REQUIRES: not empty

// Parses the options, runs `body`, returns the exit status of the program.
int BenchMain(int argc, char** argv, const std::function<void(const BenchReport&)>& body);

}  // namespace stockpot
