// lora_linear by its definition, in double precision.
#include <vector>

#include "kernels/lora/lora_layout.h"
#include "kernels/lora/lora_linear.h"

namespace stockpot {

Status LoraLinearReference(const LoraLinearArgs& args) {
  STOCKPOT_RETURN_IF_ERROR(CheckLoraArgs(args));
  if (args.delta_of_row.empty()) return OkStatus();
  for (int64_t t = 0; t < args.x.rows; ++t) {
    const int32_t index = args.delta_of_row[t];
    if (index < 0 || args.deltas[index] == nullptr) continue;
    const LoraDelta::Layout& delta = args.deltas[index]->layout();
    if (delta.rank == 0) continue;
    std::vector<double> hidden(static_cast<size_t>(delta.rank));
    for (int64_t k = 0; k < delta.rank; ++k) {
      for (int64_t i = 0; i < delta.d_in; ++i) {
        hidden[k] += static_cast<double>(delta.A(k, i)) * args.x.row(t)[i];
      }
    }
    for (int64_t o = 0; o < delta.d_out; ++o) {
      double sum = 0;
      for (int64_t k = 0; k < delta.rank; ++k) sum += delta.B(o, k) * hidden[k];
      args.y.row(t)[o] = static_cast<float>(args.y.row(t)[o] + sum);
    }
  }
  return OkStatus();
}

}  // namespace stockpot
