"""Recomputes merges in float64 from the formulas alone: NumPy's SVD, no code of Stockpot.

matrices FOLDER   index.json lists decompositions; I.delta and I.merged are float32
models FOLDER     options.json; base/, p0/, p1/, ... and merged/ are models (model.safetensors)

Agreement is 1e-6 of the norm of the merged tensor, and 1e-6 of that of the update (merged - base)
alone; of an update that is cut in float32, whose smaller side is 128 or more, 1e-5. All beside the
one rounding to the tensor's own type.
"""

import itertools
import json
import os
import sys

# Threads that share small matrices spend their time waiting for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from bitdelta_oracle import neighbours_ok, read

TOLERANCE = 1e-6
CUT_TOLERANCE = 1e-5
CUT_SIDE = 128


def update_tolerance(shape, method):
    return CUT_TOLERANCE if method == "monosoup" and min(shape) >= CUT_SIDE else TOLERANCE


def truncate(delta, energy, rank):
    """U_r S_r V_r^T, the rank and the kept share of the energy."""
    u, s, vh = np.linalg.svd(delta, full_matrices=False)
    if not np.any(s):
        return delta, 0, 1.0
    share = np.cumsum(s**2) / np.sum(s**2)
    if rank == 0:
        rank = len(s) if energy >= 1 else int(np.searchsorted(share, energy)) + 1
    rank = min(rank, len(s))
    return (u[:, :rank] * s[:rank]) @ vh[:rank], rank, share[rank - 1]


def reweight(delta, base_norm, spectral):
    """The paper's form: the new delta, k, P, l_low, l_high."""
    if np.linalg.norm(delta) / (base_norm + 1e-12) < 1e-6:
        return delta, 0, 1.0, 0.0, 1.0
    u, s, vh = np.linalg.svd(delta, full_matrices=False)
    share = np.cumsum(s**2) / np.sum(s**2)
    if spectral == 0:
        p = s / np.sum(s)
        p = p[p > 0]
        k = min(max(int(np.ceil(np.exp(-np.sum(p * np.log(p))))), 1), len(s))
    else:
        k = min(int(np.searchsorted(share, spectral)) + 1, len(s))
    rho = (s[k] / s[0]) ** 2 if k < len(s) else 0.0
    c = np.sqrt(max(1 - share[k - 1], 0))
    low = float(np.clip(rho + (1 - rho) * c, 0, 1))
    high = float(np.clip(1 - low, 0, 1))
    first = (u[:, :k] * s[:k]) @ vh[:k]
    return high * first + low * (delta - first), k, share[k - 1], low, high


def model_stock(w0, values):
    deltas = [(w - w0).ravel() for w in values]
    k = len(values)
    cosines = []
    for a, b in itertools.combinations(deltas, 2):
        norms = np.linalg.norm(a) * np.linalg.norm(b)
        cosines.append(a @ b / norms if norms > 0 else 0.0)
    c = np.mean(cosines) if cosines else 1.0
    t = min(k * c / (1 + (k - 1) * c), 1.0) if c > 0 else 0.0
    return t * np.mean(values, axis=0) + (1 - t) * w0, c, t


def matrices(folder):
    with open(os.path.join(folder, "index.json"), encoding="utf-8") as f:
        index = json.load(f)
    for i, case in enumerate(index):
        shape = (case["rows"], case["cols"])
        delta = np.fromfile(os.path.join(folder, f"{i}.delta"), "<f4").reshape(shape)
        merged = np.fromfile(os.path.join(folder, f"{i}.merged"), "<f4").reshape(shape)
        delta = delta.astype(np.float64)
        if case["method"] == "monosoup":
            want, rank, kept = truncate(delta, case["energy"], case["rank"])
        else:
            want, rank, kept, low, high = reweight(delta, case["base_norm"], case["spectral"])
            # Square roots of what cancels: half the digits.
            assert abs(low - case["low"]) < 1e-7, (i, low, case["low"])
            assert abs(high - case["high"]) < 1e-7, (i, high, case["high"])
        assert rank == case["got_rank"], (i, rank, case["got_rank"])
        tolerance = update_tolerance(shape, case["method"])
        in_float32 = tolerance > TOLERANCE
        assert abs(kept - case["kept"]) < (1e-6 if in_float32 else 1e-9), (i, kept, case["kept"])
        error = np.linalg.norm(merged - want)
        assert error <= tolerance * np.linalg.norm(want), (i, error / np.linalg.norm(want))


def merge(name, w0, values, options, attributes):
    """The merged tensor; checks what the merge reported of it."""
    method = options["method"]
    report = json.loads(attributes.get("tensor/" + name, "{}"))
    table = "embed" in name or "lm_head" in name
    if method == "monosoup" and w0.ndim == 2 and not table:
        taus = [truncate(w - w0, options["energy"], options["rank"]) for w in values]
        assert report["rank"] == [tau[1] for tau in taus], name
        assert np.allclose(report["kept_energy"], [tau[2] for tau in taus], atol=2e-6), name
        return w0 + np.mean([tau[0] for tau in taus], axis=0)
    if method == "monosoup-spectral" and w0.ndim >= 2 and not table:
        delta = (np.mean(values, axis=0) - w0).reshape(w0.shape[0], -1)
        new, k, kept, low, high = reweight(delta, np.linalg.norm(w0), options["spectral"])
        assert report["rank"] == [k], (name, report, k)
        got = report["kept_energy"] + [report["low"], report["high"]]
        assert np.allclose(got, [kept, low, high], atol=2e-6), (name, report)
        return w0 + new.reshape(w0.shape)
    if method == "model-stock" and w0.ndim >= 2:
        want, c, t = model_stock(w0, values)
        assert np.allclose([report["cosine"], report["t"]], [c, t], atol=2e-6), (name, report, c, t)
        return want
    assert not report, name
    return np.average(values, axis=0, weights=options["weights"] or None)


def models(folder):
    with open(os.path.join(folder, "options.json"), encoding="utf-8") as f:
        options = json.load(f)
    base, merged = (read(os.path.join(folder, name)) for name in ("base", "merged"))
    parents = [read(os.path.join(folder, f"p{i}")) for i in range(options["parents"])]
    assert merged.keys() == base.keys()
    for name, (_, w0) in base.items():
        want = merge(name, w0, [p[name][1] for p in parents], options, options["attributes"])
        dtype, got = merged[name]
        assert dtype == parents[0][name][0], name
        update = np.linalg.norm(want - w0)
        rounding = np.abs(want) * 2.0 ** -{"BF16": 8, "F16": 11, "F32": 24}[dtype]
        error = np.linalg.norm(np.maximum(np.abs(got - want) - rounding, 0))
        assert error <= TOLERANCE * np.linalg.norm(want), (name, error)
        tolerance = update_tolerance(want.shape, options["method"])
        assert error <= tolerance * update, (name, error, update)
        # And the value of its type nearest to something as near as that in every element.
        slack = 10 * tolerance * np.max(np.abs(want - w0))
        assert neighbours_ok(got, want, dtype, slack=slack), name


if __name__ == "__main__":
    {"matrices": matrices, "models": models}[sys.argv[1]](*sys.argv[2:])
