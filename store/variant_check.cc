#include "store/variant_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "store/delta_reader.h"
#include "store/model_structure.h"
#include "store/records.h"
#include "store/tensor_source.h"

namespace stockpot {
namespace {

constexpr int64_t kBlockElements = int64_t{1} << 20;  // decoded at a time

std::string Quoted(std::string_view name) { return "tensor '" + std::string(name) + "'"; }

class VariantCheck {
 public:
  VariantCheck(const Manifest& variant, const Manifest& base, const ModelStructure& structure,
               const PartReader& read)
      : variant_(variant), base_(base), structure_(structure), read_(read) {}

  Result<double> Check() {
    for (const TensorEntry& origin : base_.tensors) {
      const TensorEntry* entry = variant_.Resolve(origin.name);
      if (entry == nullptr) return InvalidArgument(Quoted(origin.name) + " of the base is missing");
      STOCKPOT_RETURN_IF_ERROR(CheckShape(origin.name, *entry, origin));
    }
    for (const TensorEntry& entry : variant_.tensors) {
      if (base_.Find(entry.name) != nullptr) continue;
      const TensorEntry* embedding = base_.Resolve(structure_.embedding());
      if (embedding == nullptr || !ModelStructure::IsHeadName(entry.name)) {
        return InvalidArgument(Quoted(entry.name) + " is not in the base");
      }
      STOCKPOT_RETURN_IF_ERROR(CheckShape(entry.name, entry, *embedding));
    }
    for (const TensorEntry& entry : variant_.tensors) {
      if (!entry.alias_of.empty() || entry.codec == Codec::kBase) continue;
      STOCKPOT_RETURN_IF_ERROR(CheckValues(entry).WithContext(Quoted(entry.name)));
    }
    if (update_square_ == 0) return 0.0;
    return base_square_ == 0 ? kGateNoLimit : std::sqrt(update_square_ / base_square_);
  }

 private:
  using ElementReader = std::function<Status(int64_t first, std::span<float> out)>;

  Status CheckShape(const std::string& name, const TensorEntry& entry,
                    const TensorEntry& origin) const {
    if (entry.shape == origin.shape) return OkStatus();
    const bool table = structure_.RoleOf(name, origin.shape) == TensorRole::kTable &&
                       entry.shape.size() == 2 && entry.shape[1] == origin.shape[1];
    if (table) return OkStatus();
    return InvalidArgument(Quoted(name) + " has shape " + ShapeText(entry.shape) +
                           ", the base's is " + ShapeText(origin.shape));
  }

  // What a changed tensor is counted over; null: nothing.
  const TensorEntry* OriginOf(const TensorEntry& entry) const {
    const TensorEntry* origin = base_.Resolve(entry.name);
    return origin != nullptr ? origin : base_.Resolve(structure_.embedding());
  }

  Status CheckValues(const TensorEntry& entry) {
    const TensorEntry* origin = OriginOf(entry);
    if (origin == nullptr || !IsWeightDType(entry.dtype) || !IsWeightDType(origin->dtype)) {
      const bool same = origin != nullptr && SameContent(entry, *origin).value_or(false) &&
                        entry.dtype == origin->dtype;
      return same ? OkStatus() : InvalidArgument("changed, and is not F32, F16 or BF16");
    }
    if (entry.codec == Codec::kRaw) {
      const RawTensorReader reader(entry, read_);
      return Compare(entry, *origin, Elements(entry.dtype, [&](int64_t at, auto out) {
                       return reader.Read(at, out);
                     }));
    }
    STOCKPOT_RETURN_IF_ERROR(DeltaReader::Check(entry, *origin));
    const DeltaReader reader(entry, *origin, read_, /*as_f32=*/true);
    return Compare(entry, *origin, Elements(reader.dtype(), [&](int64_t at, auto out) {
                     return reader.Read(at, out);
                   }));
  }

  static ElementReader Elements(DType dtype, ByteReader read) {
    return [dtype, read = std::move(read), bytes = std::vector<std::byte>()](
               int64_t first, std::span<float> out) mutable {
      const int64_t size = DTypeSize(dtype);
      bytes.resize(out.size() * static_cast<size_t>(size));
      STOCKPOT_RETURN_IF_ERROR(read(first * size, bytes));
      for (size_t i = 0; i < out.size(); ++i) {
        out[i] = LoadWeight(bytes.data(), dtype, static_cast<int64_t>(i));
      }
      return OkStatus();
    };
  }

  // Finite, and how far it is from the base where that has elements too: the first ones of both.
  Status Compare(const TensorEntry& entry, const TensorEntry& origin, const ElementReader& own) {
    const RawTensorReader base_reader(origin, read_);
    const ElementReader base =
        Elements(origin.dtype, [&](int64_t at, auto out) { return base_reader.Read(at, out); });
    const int64_t both = std::min(entry.elements(), origin.elements());
    std::vector<float> values, origins;
    for (int64_t first = 0, count = 0; first < entry.elements(); first += count) {
      const int64_t end = first < both ? both : entry.elements();
      count = std::min(kBlockElements, end - first);
      values.resize(static_cast<size_t>(count));
      STOCKPOT_RETURN_IF_ERROR(own(first, values));
      const auto bad = std::find_if(values.begin(), values.end(),
                                    [](float value) { return !std::isfinite(value); });
      if (bad != values.end()) {
        return InvalidArgument("element " + std::to_string(first + (bad - values.begin())) +
                               " is not finite");
      }
      if (first >= both) continue;
      origins.resize(values.size());
      STOCKPOT_RETURN_IF_ERROR(base(first, origins));
      for (size_t i = 0; i < values.size(); ++i) {
        const double moved = static_cast<double>(values[i]) - origins[i];
        update_square_ += moved * moved;
        base_square_ += static_cast<double>(origins[i]) * origins[i];
      }
    }
    return OkStatus();
  }

  const Manifest& variant_;
  const Manifest& base_;
  const ModelStructure& structure_;
  const PartReader& read_;
  double update_square_ = 0;
  double base_square_ = 0;
};

}  // namespace

Result<double> CheckVariant(const Manifest& variant, const Manifest& base,
                            std::string_view config_json, const PartReader& read) {
  STOCKPOT_ASSIGN_OR_RETURN(StructureConfig config, ParseStructureConfig(config_json));
  config.vocab_size.reset();  // the variant's own; what is looked at are the base's tables
  std::vector<TensorInfo> tensors;
  for (const TensorEntry& entry : base.tensors) {
    tensors.push_back({entry.name, entry.dtype, entry.shape, entry.alias_of});
  }
  const ModelStructure structure(std::move(config), tensors);
  return VariantCheck(variant, base, structure, read).Check();
}

}  // namespace stockpot
