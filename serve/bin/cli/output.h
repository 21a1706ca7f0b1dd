// What people see: tables, sizes, times, progress. Everything for programs is in json.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace stockpot::cli {

std::string HumanBytes(int64_t bytes);                  // "270.9 MB"; decimal units
std::string HumanAgo(int64_t then_ms, int64_t now_ms);  // "3 min ago"
std::string HumanDuration(int64_t milliseconds);        // "2 h 05 min"
std::string HumanNumber(double value);                  // at most 6 significant digits
std::string ShortDigest(const std::string& raw);  // 12 hex digits of 32 raw bytes; "-" for none
std::string HexDigest(const std::string& raw);    // 64 hex digits, or ""
int64_t NowMs();
// Control characters from outside would move the terminal's cursor: they become '?', line ends
// spaces.
std::string Printable(const std::string& text);
// Digests inside a text, for people: their first 12 hex digits.
std::string Abbreviate(const std::string& text);

// Columns aligned by their widest cell; numbers are to be given right-aligned by their column.
class Table {
 public:
  struct Column {
    std::string title;
    bool right = false;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void Add(std::vector<std::string> row);
  void Print() const;  // to stdout; only the titles if there are no rows

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// Shows how far something is, on stderr: a bar that is redrawn on a terminal, a line every few
// seconds elsewhere, nothing when `quiet`. Thread promise: one thread at a time.
class ProgressLine {
 public:
  ProgressLine(std::string label, bool quiet);
  ~ProgressLine();  // ends the bar's line
  void Show(double share, const std::string& detail);

 private:
  const std::string label_;
  const bool quiet_;
  const bool tty_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace stockpot::cli
