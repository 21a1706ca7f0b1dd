#include "store/tensor_box.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace stockpot {
namespace {

int64_t End(const TensorBox& box, size_t dim) { return box.offsets[dim] + box.shape[dim]; }

// One end of a box in the dimension that is looked at.
struct Corner {
  int64_t position = 0;
  const TensorBox* box = nullptr;
  int64_t sign = 0;
};

// Finds the first point in lexicographic order at which the signs of the corners do not add up to
// zero, from dimension `dim` on. False: there is none.
bool FindImbalance(std::span<const Corner> boxes, size_t dim, std::vector<int64_t>& point) {
  if (dim == point.size()) {
    int64_t sum = 0;
    for (const Corner& corner : boxes) sum += corner.sign;
    return sum != 0;
  }
  const TensorBox& first = *boxes.front().box;
  const bool is_cut = std::any_of(boxes.begin(), boxes.end(), [&](const Corner& corner) {
    return corner.box->offsets[dim] != first.offsets[dim] ||
           corner.box->shape[dim] != first.shape[dim];
  });
  if (!is_cut) {  // then the lower ends balance if, and only if, the upper ones do
    point[dim] = first.offsets[dim];
    return FindImbalance(boxes, dim + 1, point);
  }
  std::vector<Corner> ends;
  ends.reserve(2 * boxes.size());
  for (const Corner& corner : boxes) {
    ends.push_back({corner.box->offsets[dim], corner.box, corner.sign});
    ends.push_back({End(*corner.box, dim), corner.box, -corner.sign});
  }
  std::sort(ends.begin(), ends.end(),
            [](const Corner& a, const Corner& b) { return a.position < b.position; });
  for (size_t begin = 0; begin < ends.size();) {
    size_t end = begin + 1;
    while (end < ends.size() && ends[end].position == ends[begin].position) ++end;
    point[dim] = ends[begin].position;
    if (FindImbalance(std::span(ends).subspan(begin, end - begin), dim + 1, point)) return true;
    begin = end;
  }
  return false;
}

bool Holds(const TensorBox& box, const std::vector<int64_t>& point) {
  for (size_t dim = 0; dim < point.size(); ++dim) {
    if (point[dim] < box.offsets[dim] || point[dim] >= End(box, dim)) return false;
  }
  return true;
}

TensorBox Intersection(const TensorBox& a, const TensorBox& b) {
  TensorBox both = a;
  for (size_t dim = 0; dim < a.shape.size(); ++dim) {
    both.offsets[dim] = std::max(a.offsets[dim], b.offsets[dim]);
    both.shape[dim] = std::min(End(a, dim), End(b, dim)) - both.offsets[dim];
  }
  return both;
}

// `point`, which no box holds, made as long as it goes: in the last dimension first.
TensorBox GrowGap(const std::vector<int64_t>& shape, std::span<const TensorBox> boxes,
                  const std::vector<int64_t>& point) {
  TensorBox gap{.offsets = point, .shape = std::vector<int64_t>(point.size(), 1)};
  for (size_t grow = point.size(); grow-- > 0;) {
    int64_t end = shape[grow];
    for (const TensorBox& box : boxes) {
      bool is_beside = box.elements() > 0 && box.offsets[grow] > point[grow];
      for (size_t dim = 0; is_beside && dim < point.size(); ++dim) {
        is_beside =
            dim == grow || (box.offsets[dim] < End(gap, dim) && gap.offsets[dim] < End(box, dim));
      }
      if (is_beside) end = std::min(end, box.offsets[grow]);
    }
    gap.shape[grow] = end - point[grow];
  }
  return gap;
}

}  // namespace

int64_t TensorBox::elements() const {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

TensorBox WholeBox(const std::vector<int64_t>& shape) {
  return {.offsets = std::vector<int64_t>(shape.size(), 0), .shape = shape};
}

std::string BoxText(const TensorBox& box) {
  std::string text = "[";
  for (size_t dim = 0; dim < box.shape.size(); ++dim) {
    text += (dim == 0 ? "" : ", ") + std::to_string(box.offsets[dim]) + ":" +
            std::to_string(End(box, dim));
  }
  return text + "]";
}

Status CheckBox(const std::vector<int64_t>& shape, const TensorBox& box) {
  if (box.offsets.size() != shape.size() || box.shape.size() != shape.size()) {
    return InvalidArgument("a piece of rank " + std::to_string(box.shape.size()) +
                           " with offsets of rank " + std::to_string(box.offsets.size()) +
                           ": the tensor has rank " + std::to_string(shape.size()));
  }
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const int64_t offset = box.offsets[dim];
    const int64_t size = box.shape[dim];
    if (offset < 0 || size < 0 || offset > shape[dim] || size > shape[dim] - offset) {
      return InvalidArgument("a piece of " + std::to_string(size) + " from " +
                             std::to_string(offset) + " on in dimension " + std::to_string(dim) +
                             ": the tensor has " + std::to_string(shape[dim]) + " there");
    }
  }
  return OkStatus();
}

std::optional<CoverFault> FindCoverFault(const std::vector<int64_t>& shape,
                                         std::span<const TensorBox> boxes) {
  const TensorBox whole = WholeBox(shape);
  if (whole.elements() == 0) return std::nullopt;
  std::vector<Corner> signs{{.box = &whole, .sign = -1}};
  signs.reserve(boxes.size() + 1);
  for (const TensorBox& box : boxes) {
    if (box.elements() > 0) signs.push_back({.box = &box, .sign = 1});
  }
  std::vector<int64_t> point(shape.size());
  if (!FindImbalance(signs, 0, point)) return std::nullopt;

  std::vector<size_t> holders;
  for (size_t i = 0; i < boxes.size() && holders.size() < 2; ++i) {
    if (Holds(boxes[i], point)) holders.push_back(i);
  }
  STOCKPOT_CHECK(holders.size() != 1, BoxText(boxes[holders[0]]));
  if (holders.empty()) return CoverFault{.range = GrowGap(shape, boxes, point)};
  return CoverFault{.is_overlap = true,
                    .range = Intersection(boxes[holders[0]], boxes[holders[1]]),
                    .first = holders[0],
                    .second = holders[1]};
}

int64_t CoverCorners(const std::vector<int64_t>& shape, std::span<const TensorBox> boxes) {
  int64_t corners = static_cast<int64_t>(boxes.size());
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const bool is_cut = std::any_of(boxes.begin(), boxes.end(), [&](const TensorBox& box) {
      return box.shape[dim] != shape[dim];
    });
    if (is_cut) corners *= 2;
  }
  return corners;
}

}  // namespace stockpot
