#include "serve/bin/cli/output.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "store/digest.h"

namespace stockpot::cli {
namespace {

constexpr int kBarWidth = 28;
constexpr std::chrono::milliseconds kRedrawEvery{100};
constexpr std::chrono::seconds kLineEvery{5};

std::string Format(const char* format, double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

// Columns a terminal uses: bytes of UTF-8 that continue a character use none.
size_t Width(const std::string& text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

}  // namespace

std::string HumanBytes(int64_t bytes) {
  constexpr std::array kUnits = {"B", "kB", "MB", "GB", "TB", "PB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 999.95 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return Format(unit == 0 ? "%.0f " : "%.1f ", value) + kUnits[unit];
}

std::string HumanDuration(int64_t milliseconds) {
  const int64_t seconds = std::max<int64_t>(milliseconds, 0) / 1000;
  if (seconds < 60) return std::to_string(seconds) + " s";
  if (seconds < 3600) return std::to_string(seconds / 60) + " min";
  if (seconds < 48 * 3600) {
    const int64_t minutes = seconds / 60 % 60;
    return std::to_string(seconds / 3600) + " h " + (minutes < 10 ? "0" : "") +
           std::to_string(minutes) + " min";
  }
  return std::to_string(seconds / 86400) + " days";
}

std::string HumanAgo(int64_t then_ms, int64_t now_ms) {
  if (then_ms <= 0) return "-";
  if (now_ms - then_ms < 1000) return "just now";
  return HumanDuration(now_ms - then_ms) + " ago";
}

std::string HumanNumber(double value) { return Format("%.6g", value); }

std::string ShortDigest(const std::string& raw) {
  const Result<Digest> digest = Digest::FromRaw(raw);
  return digest.ok() && !digest->IsZero() ? digest->ShortHex() : "-";
}

std::string HexDigest(const std::string& raw) {
  const Result<Digest> digest = Digest::FromRaw(raw);
  return digest.ok() && !digest->IsZero() ? digest->Hex() : "";
}

int64_t NowMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string Printable(const std::string& text) {
  std::string out = text;
  std::replace(out.begin(), out.end(), '\n', ' ');
  std::replace_if(
      out.begin(), out.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return out;
}

std::string Abbreviate(const std::string& text) {
  constexpr size_t kDigestDigits = 64;
  constexpr size_t kShownDigits = 12;
  std::string out;
  for (size_t i = 0; i < text.size();) {
    size_t end = text.find_first_not_of("0123456789abcdef", i);
    if (end == std::string::npos) end = text.size();
    out += text.substr(i, end - i == kDigestDigits ? kShownDigits : end - i);
    if (end < text.size()) out += text[end];
    i = end + 1;
  }
  return out;
}

void Table::Add(std::vector<std::string> row) {
  row.resize(columns_.size());
  for (std::string& cell : row) cell = Printable(cell);
  rows_.push_back(std::move(row));
}

void Table::Print() const {
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t width = Width(columns_[c].title);
    for (const auto& row : rows_) width = std::max(width, Width(row[c]));
    widths.push_back(width);
  }
  const auto print = [&](const auto& cell_of) {
    std::string line;
    for (size_t c = 0; c < columns_.size(); ++c) {
      const std::string& cell = cell_of(c);
      const std::string pad(widths[c] - Width(cell), ' ');
      line += columns_[c].right ? pad + cell : cell + pad;
      line += "  ";
    }
    line.erase(line.find_last_not_of(' ') + 1);
    std::printf("%s\n", line.c_str());
  };
  print([&](size_t c) -> const std::string& { return columns_[c].title; });
  for (const auto& row : rows_) print([&](size_t c) -> const std::string& { return row[c]; });
}

ProgressLine::ProgressLine(std::string label, bool quiet)
    : label_(std::move(label)), quiet_(quiet), tty_(::isatty(STDERR_FILENO) != 0) {
  if (!tty_) last_ = std::chrono::steady_clock::now();  // the first line only after a while
}

ProgressLine::~ProgressLine() {
  if (drawn_ && tty_) std::fputc('\n', stderr);
}

void ProgressLine::Show(double share, const std::string& detail) {
  if (quiet_) return;
  const auto now = std::chrono::steady_clock::now();
  const bool complete = tty_ && share >= 1;
  if (!complete && now - last_ < (tty_ ? std::chrono::milliseconds(kRedrawEvery)
                                       : std::chrono::milliseconds(kLineEvery))) {
    return;
  }
  last_ = now;
  drawn_ = true;
  share = std::clamp(share, 0.0, 1.0);
  if (!tty_) {
    std::fprintf(stderr, "%s: %3.0f %%  %s\n", label_.c_str(), share * 100, detail.c_str());
    return;
  }
  const int filled = static_cast<int>(share * kBarWidth);
  const std::string bar = std::string(filled, '#') + std::string(kBarWidth - filled, '.');
  std::fprintf(stderr, "\r%s [%s] %3.0f %%  %s\033[K", label_.c_str(), bar.c_str(), share * 100,
               detail.c_str());
  std::fflush(stderr);
}

}  // namespace stockpot::cli
