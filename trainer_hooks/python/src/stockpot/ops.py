"""Stockpot's kernels on torch tensors, as torch.ops.stockpot.*.

Build the library once, in the repository, and say where it is:

    cmake/setup.sh
    cmake --preset release && cmake --build --preset release --target stockpot_torch_ops
    export STOCKPOT_LIB_DIR=$PWD/build/release/lib
    export PYTHONPATH=$PWD/trainer_hooks/python/src     # or: pip install trainer_hooks/python
    $(cmake/setup.sh --print-python)                    # or any Python with the same torch

    import torch
    import stockpot

    stockpot.load_ops()
    base = torch.randn(64, 128).bfloat16()
    fine_tuned = base + 0.01 * torch.randn(64, 128).bfloat16()
    signs, alpha, stats = torch.ops.stockpot.bitdelta_compress(base, fine_tuned)
    y = torch.ops.stockpot.bitdelta_linear(torch.randn(3, 128), base, signs, alpha)

Operators, for CPU tensors and, in a CUDA build, CUDA tensors. "Weight types" are float32, float16
and bfloat16; arguments of one call may mix them.

bitdelta_compress(base, fine_tuned) -> (signs, alpha, stats)
    base, fine_tuned [d_out, d_in] of weight types. signs uint8 [d_out, ceil(d_in / 8)], least
    significant bit first, 1 where fine_tuned >= base; alpha float32 [d_out] = mean |fine_tuned -
    base| of the row. stats float64 [7]: elements, changed elements, elements whose difference is
    not finite (NaN or infinity on either side, or an overflow of float32), sum |delta|, sum
    delta^2, max |delta|, error of one bit (1 - (E|delta|)^2 / E[delta^2]). Elements that are not
    finite are not refused: they drop out of the sums, and of alpha's, which still divides by d_in;
    look at stats[2]. No gradients: call it under torch.no_grad() or with detached weights.

bitdelta_linear(x, base, signs, alpha, variant_of_row=None, bias=None, folded=False) -> y
    y = x base^T + bias + sum over planes of alpha * (x S^T), W + alpha S never in memory.
    x [..., d_in]; y [..., d_out] of x's dtype. signs uint8 [d_out, B], or [planes, d_out, B], or
    [variants, planes, d_out, B], B = ceil(d_in / 8), 1 to 8 planes; alpha of the same shape without
    B. x, base, alpha and bias of weight types, and of float64 where x is float64 (computed in
    float64, slowly). variant_of_row int32 or int64 [rows of x]: which variant a row uses, -1 the
    base alone; needed where there are several. folded: one pass for both sums, faster for many rows
    of a variant; its one rounding more costs y less than 1e-5 of |x| (|W| + |alpha| sqrt(d_in)).
    Sums are float32, rounded once to x's dtype. x and base of bfloat16 are multiplied in pairs
    where the processor can. The signs of the variants in use are packed in every call.
    Gradients: x, alpha, bias. The base is frozen: one that requires a gradient is refused while
    gradients are recorded. The backward pass is a plain loop over variants and planes that unpacks
    each to a dense matrix, made for scale distillation, not for speed: 10 to 25 times the forward
    pass at [11008, 4096], 64 rows. Second derivatives, torch.func.grad and jvp are not supported.

sparse_delta_linear(x, row_offsets, columns, values, delta_of_row=None) -> y
    y = D x of exactly stored elements, x of a weight type. row_offsets int64 [d_out + 1] or
    [deltas, d_out + 1] into columns int32 and values float32 [changed]; columns ascend within a
    row. delta_of_row as variant_of_row, -1: y is 0. No gradients.

lora_linear(x, a, b, scale, delta_of_row=None) -> y
    y = scale * B (A x). a [r, d_in], b [d_out, r], or both with a leading dimension of adapters; x,
    a and b of weight types. delta_of_row likewise. No gradients.

truncated_svd(fine_tuned, base, rank, oversampling=8, iterations=2, seed=0, name="") -> (u, s, v,
    report): the `rank` largest singular triplets of fine_tuned - base (base may be None) of weight
    types, u [m, r], s [r], v [n, r] in float32; report float64 [3]: ||A||_F^2, share of it
    captured, relative error. iterations 1 to 64; ||A||_F at most 1e37. The same bits for the same
    (seed, name), always. No gradients.

Tensors need not be contiguous. A bad argument raises ValueError (a dtype: TypeError) that names it.
All have shape inference for torch.compile. A process that was forked after CPU operators ran may
hang in its first one: the threads of GNU OpenMP, which torch itself uses too, do not survive a
fork. Start workers with spawn.
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
