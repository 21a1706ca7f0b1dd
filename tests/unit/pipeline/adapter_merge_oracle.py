"""Recomputes merges of adapters on dense matrices in float64: NumPy's SVD, no code of Stockpot.

FOLDER/cases.json: adapters, options and what Stockpot made of them. Agreement is 1e-5 of the norm.
"""

import json
import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

TOLERANCE = 1e-5


def dense(adapter):
    """Weight -> scale * B A."""
    out = {}
    for layer in adapter:
        b = np.array(layer["b"], dtype=np.float64).reshape(layer["d_out"], layer["rank"])
        a = np.array(layer["a"], dtype=np.float64).reshape(layer["rank"], layer["d_in"])
        out[layer["weight"]] = b @ a
    return out


def cut(matrix, rank):
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    kept = len(s) if rank == 0 else min(rank, len(s))
    return (u[:, :kept] * s[:kept]) @ vh[:kept], np.sum(s[:kept] ** 2), np.sum(s**2)


def norm(adapter):
    return np.sqrt(sum(np.sum(m**2) for m in adapter.values()))


def cosine(x, y):
    n = np.linalg.norm(x) * np.linalg.norm(y)
    return np.sum(x * y) / n if n > 0 else 0.0


def project(member, added, share):
    """The paper's tau': everything of `added` but the leading block and the diagonal."""
    u, s, vh = np.linalg.svd(member, full_matrices=True)
    rank = int(np.sum(s > s[0] * max(member.shape) * np.finfo(float).eps)) if s[0] > 0 else 0
    if rank == 0:
        return added
    block = int(np.argmax(np.cumsum(s[:rank]) / np.sum(s[:rank]) > share))
    p = u.T @ added @ vh.T
    p[:block, :block] = 0
    p[np.arange(rank), np.arange(rank)] = 0
    return u @ p @ vh


def merge(case):
    member, added = dense(case["member"]), dense(case["added"])
    names = sorted(member.keys() | added.keys())
    zero = {n: np.zeros_like((member | added)[n]) for n in names}
    m = {n: member.get(n, zero[n]) for n in names}
    t = {n: added.get(n, zero[n]) for n in names}
    count, lam = case["state"]["count"], case["state"]["lambda"]
    if case["method"] == "opcm":
        total = {n: lam * m[n] + project(m[n], t[n], case["projection"]) for n in names}
        mean = (case["state"]["norm_sum"] + norm(t)) / (count + 1)
        new = norm(total) / mean if mean > 0 and norm(total) > 0 else 1.0
        return {n: total[n] / new for n in names}, new
    if case["method"] == "mean":
        return {n: (1 - 1 / (count + 1)) * m[n] + t[n] / (count + 1) for n in names}, lam
    first = case["scale"] if count == 1 else 1.0
    return {n: first * m[n] + case["scale"] * t[n] for n in names}, lam


def check(case):
    member, added = dense(case["member"]), dense(case["added"])
    names = member.keys() | added.keys()
    pairs = [cosine(member[n], added[n]) if n in member and n in added else 0.0 for n in names]
    assert abs(np.mean(pairs) - case["similarity"]) < TOLERANCE, "similarity"
    full, lam = merge(case)
    assert abs(lam - case["new_lambda"]) <= TOLERANCE * lam, f"lambda {lam} {case['new_lambda']}"
    got = dense(case["merged"])
    assert got.keys() == full.keys()
    kept = total = 0.0
    for name, matrix in full.items():
        wanted, of_layer, all_of_layer = cut(matrix, case["rank"])
        kept += of_layer
        total += all_of_layer
        off = np.linalg.norm(got[name] - wanted)
        assert off <= TOLERANCE * max(np.linalg.norm(matrix), 1e-30), f"{name}: off by {off}"
    energy = kept / total if total > 0 else 1.0
    assert abs(energy - case["kept_energy"]) < TOLERANCE, f"energy {energy}"


def main(folder):
    with open(os.path.join(folder, "cases.json"), encoding="utf-8") as file:
        cases = json.load(file)
    assert cases, "no cases"
    for i, case in enumerate(cases):
        try:
            check(case)
        except AssertionError as error:
            sys.exit(f"case {i} ({case['method']}, rank {case['rank']}): {error}")
    print(f"{len(cases)} cases agree")


main(sys.argv[1])
