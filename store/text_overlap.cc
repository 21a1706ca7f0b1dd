#include "store/text_overlap.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace stockpot {
namespace {

std::string_view Trimmed(std::string_view line) {
  constexpr std::string_view kSpace = " \t\r\n\v\f";
  const size_t begin = line.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return line.substr(begin, line.find_last_not_of(kSpace) - begin + 1);
}

std::vector<std::string_view> LinesOf(std::string_view text) {
  std::vector<std::string_view> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = Trimmed(text.substr(begin, end - begin));
    if (!line.empty()) lines.push_back(line);
    begin = end + 1;
  }
  return lines;
}

struct Overlap {
  const ProbeSet::Text* text = nullptr;   // of one set, half or more of it in the other; null: none
  const ProbeSet::Text* other = nullptr;  // of that one, with a line of it
};

Overlap FindOverlap(const ProbeSet& some, const ProbeSet& others) {
  std::map<std::string_view, const ProbeSet::Text*> known;
  for (const ProbeSet::Text& text : others.texts) {
    for (const std::string_view line : LinesOf(text.text)) known.emplace(line, &text);
  }
  for (const ProbeSet::Text& text : some.texts) {
    size_t all = 0;
    size_t shared = 0;
    Overlap overlap{.text = &text};
    for (const std::string_view line : LinesOf(text.text)) {
      all += line.size();
      const auto it = known.find(line);
      if (it == known.end()) continue;
      shared += line.size();
      overlap.other = it->second;
    }
    if (shared > 0 && 2 * shared >= all) return overlap;
  }
  return {};
}

Status SameText(const ProbeSet::Text& calibration, const ProbeSet::Text& probe) {
  return InvalidArgument("the calibration text '" + calibration.name + "' and the probe text '" +
                         probe.name +
                         "' are one text for the most part: scales that were fitted to it would "
                         "pass the gate too easily. Take another text");
}

}  // namespace

Status CheckApart(const ProbeSet& probe, const ProbeSet& calibration) {
  const Overlap in_probe = FindOverlap(calibration, probe);
  if (in_probe.text != nullptr) return SameText(*in_probe.text, *in_probe.other);
  const Overlap in_calibration = FindOverlap(probe, calibration);
  if (in_calibration.text != nullptr) return SameText(*in_calibration.other, *in_calibration.text);
  return OkStatus();
}

}  // namespace stockpot
