"""Stockpot's kernels on torch tensors, as torch.ops.stockpot.*.

    import torch
    import stockpot

    stockpot.load_ops()
    signs, alpha, stats = torch.ops.stockpot.bitdelta_compress(base, fine_tuned)
    y = torch.ops.stockpot.bitdelta_linear(x, base, signs, alpha)

The library libstockpot_torch_ops.so is built by CMake against one LibTorch and loads into a Python
that has the same one. Operators, for CPU tensors and, in a CUDA build, CUDA tensors:

bitdelta_compress(base, fine_tuned) -> (signs, alpha, stats)
    base, fine_tuned [d_out, d_in] of float32, float16 or bfloat16, mixed freely. signs uint8
    [d_out, ceil(d_in / 8)], least significant bit first, 1 where fine_tuned >= base; alpha float32
    [d_out] = mean |fine_tuned - base| of the row. stats float64 [7]: elements, changed elements,
    values that are not finite, sum |delta|, sum delta^2, max |delta|, error of one bit
    (1 - (E|delta|)^2 / E[delta^2]).

bitdelta_linear(x, base, signs, alpha, variant_of_row=None, bias=None, folded=False) -> y
    y = x base^T + bias + sum over planes of alpha * (x S^T), W + alpha S never in memory.
    x [..., d_in]; y [..., d_out] of x's dtype. signs [d_out, B], or [planes, d_out, B], or
    [variants, planes, d_out, B], B = ceil(d_in / 8); alpha of the same shape without B.
    variant_of_row [rows of x] int32 or int64: which variant a row uses, -1 the base alone; needed
    where there are several. folded: one pass for both sums, faster for many rows of a variant; its
    one rounding more costs y less than 1e-5 of |x| (|W| + |alpha| sqrt(d_in)). Sums are float32,
    rounded once to x's dtype (float64 tensors are computed in float64, slowly). x and base of
    bfloat16 are multiplied in pairs where the processor can.
    Gradients: x, alpha, bias. The base is frozen: one that requires a gradient is refused.

sparse_delta_linear(x, row_offsets, columns, values, delta_of_row=None) -> y
    y = D x of exactly stored elements. row_offsets int64 [d_out + 1] or [deltas, d_out + 1] into
    columns int32 and values float32 [changed]; columns ascend within a row.

lora_linear(x, a, b, scale, delta_of_row=None) -> y
    y = scale * B (A x). a [r, d_in], b [d_out, r], or both with a leading dimension of adapters.

truncated_svd(fine_tuned, base, rank, oversampling=8, iterations=2, seed=0, name="") -> (u, s, v,
    report): the `rank` largest singular triplets of fine_tuned - base (base may be None), u [m, r],
    s [r], v [n, r] in float32; report float64 [3]: ||A||_F^2, share of it captured, relative error.
    The same bits for the same (seed, name), always.

Tensors need not be contiguous. A bad argument raises ValueError (a dtype: TypeError) that names it.
All have shape inference for torch.compile.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

LIBRARY = "libstockpot_torch_ops.so"

_lock = threading.Lock()
_loaded: Path | None = None


def _candidates() -> list[Path]:
    """Where the library is looked for, in order."""
    folders = [Path(__file__).parent, Path(__file__).parent / "lib"]
    if os.environ.get("STOCKPOT_LIB_DIR"):
        folders.insert(0, Path(os.environ["STOCKPOT_LIB_DIR"]))
    return [folder / LIBRARY for folder in folders]


def load_ops(path: str | os.PathLike[str] | None = None) -> Path:
    """Loads torch.ops.stockpot.* and returns the library's path; later calls do nothing.

    path: the library itself. None: looked for in the folder STOCKPOT_LIB_DIR, then beside this
    package. FileNotFoundError says where it was looked for; OSError what keeps it from loading
    (another LibTorch than it was built against). Thread promise: any thread.
    """
    global _loaded
    with _lock:
        if _loaded is not None:
            return _loaded
        places = [Path(path)] if path is not None else _candidates()
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise FileNotFoundError(
                f"{LIBRARY} is not at {', '.join(map(str, places))}: build the target "
                "stockpot_torch_ops and set STOCKPOT_LIB_DIR to the folder that holds it")
        torch.ops.load_library(str(found))
        _loaded = found
        return found
