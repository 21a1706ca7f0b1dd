"""Recomputes MonoSoup merges by NumPy's SVD in float64.

FOLDER          index.json lists matrices; I.deltas and I.merged are float32
FOLDER ENERGY   base/, a/, b/, c/ and merged/ are models in bf16
"""

import json
import os
import sys

import numpy as np
from bitdelta_oracle import neighbours_ok, read


def truncate(delta, energy, rank):
    """tau, the rank and the kept share of the energy."""
    u, s, vh = np.linalg.svd(delta, full_matrices=False)
    share = np.cumsum(s**2) / np.sum(s**2)
    if rank == 0:
        rank = len(s) if energy >= 1 else int(np.searchsorted(share, energy)) + 1
    rank = min(rank, len(s))
    return (u[:, :rank] * s[:rank]) @ vh[:rank], rank, share[rank - 1]


def matrices(folder):
    with open(os.path.join(folder, "index.json"), encoding="utf-8") as f:
        index = json.load(f)
    for i, case in enumerate(index):
        shape = (-1, case["rows"], case["cols"])
        deltas = np.fromfile(os.path.join(folder, f"{i}.deltas"), "<f4").reshape(shape)
        merged = np.fromfile(os.path.join(folder, f"{i}.merged"), "<f4").reshape(shape[1:])
        taus = []
        for p, delta in enumerate(deltas.astype(np.float64)):
            tau, rank, kept = truncate(delta, case["energy"], case["rank"])
            assert rank == case["ranks"][p], (i, rank, case["ranks"][p])
            assert abs(kept - case["kept"][p]) < 1e-9, (i, kept, case["kept"][p])
            taus.append(tau)
        want = np.mean(taus, axis=0)
        error = np.linalg.norm(merged - want) / np.linalg.norm(want)
        assert error < 1e-6, (i, error)


def models(folder, energy):
    base, merged = (read(os.path.join(folder, name)) for name in ("base", "merged"))
    parents = [read(os.path.join(folder, name)) for name in ("a", "b", "c")]
    assert merged.keys() == base.keys()
    for name, (_, w0) in base.items():
        values = [p[name][1] for p in parents]
        if w0.ndim == 2 and "embed" not in name:
            want = w0 + np.mean([truncate(w - w0, energy, 0)[0] for w in values], axis=0)
        else:
            want = np.mean(values, axis=0)
        dtype, got = merged[name]
        # One rounding to bf16, of a mean delta that passed through float32.
        assert dtype == "BF16"
        assert neighbours_ok(got, want, dtype, slack=1e-7 * np.abs(want - w0)), name


if __name__ == "__main__":
    if len(sys.argv) == 2:
        matrices(sys.argv[1])
    else:
        models(sys.argv[1], float(sys.argv[2]))
