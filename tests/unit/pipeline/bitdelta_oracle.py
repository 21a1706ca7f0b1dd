"""Recomputes a variant from safetensors files, by the formulas alone (NumPy; no code of Stockpot).

FOLDER holds base/, tuned/, decoded/ and decoded_f32/ (model.safetensors each), the variant's
attributes as facts.json and, for every compressed tensor, its parts as NAME.ROLE. The second
argument says where tensors are compressed: "layers", exactly their 2-D weights, or "anywhere".
"""

import json
import os
import struct
import sys

import numpy as np


def read(path):
    """Name -> (dtype, float64 array); bf16 is widened by hand, so that no library has a say."""
    with open(os.path.join(path, "model.safetensors"), "rb") as f:
        blob = f.read()
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    tensors = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        raw = blob[8 + length + begin : 8 + length + end]
        if info["dtype"] == "BF16":
            wide = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
            values = wide.view(np.float32)
        else:
            values = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[info["dtype"]])
        tensors[name] = (info["dtype"], values.astype(np.float64).reshape(info["shape"]))
    return tensors


def neighbours_ok(got, exact, dtype, slack=0.0):
    """Got is a value of its type nearest to something within slack of exact."""
    bits = {"BF16": 8, "F16": 11, "F32": 24}[dtype]
    exponent = np.frexp(exact)[1]
    ulp = np.ldexp(1.0, np.maximum(exponent - bits, {"F16": -24}.get(dtype, -149)))
    return np.all(np.abs(got - exact) <= ulp / 2 + slack)


def parts_of(folder, name):
    """Role -> bytes, of a compressed tensor ("signs-1" is the role "signs/1")."""
    begin = name + "."
    return {f[len(begin):]: np.fromfile(os.path.join(folder, f), np.uint8)
            for f in os.listdir(folder) if f.startswith(begin)}


def bf16(raw, shape):
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


def check_planes(name, parts, delta):
    """Each plane is the rule applied to what those before it leave; returns their float64 sum."""
    rest, total = np.zeros_like(delta), np.zeros(delta.shape)
    planes = sum(1 for role in parts if role.startswith("signs"))
    for p in range(planes):
        end = f"-{p}" if p else ""
        now = delta - rest  # float32
        bits = np.packbits(now >= 0, axis=1, bitorder="little")
        assert np.array_equal(parts["signs" + end].reshape(bits.shape), bits), (name, p)
        alpha = parts["alpha" + end].view("<f4")
        mean = np.abs(now.astype(np.float64)).mean(axis=1)
        assert np.all(np.abs(alpha - mean) <= 1e-6 * mean), (name, p)
        sign = np.where(now >= 0, np.float32(1), np.float32(-1))
        rest = rest + alpha[:, None] * sign
        total += alpha.astype(np.float64)[:, None] * sign
    return total


def check_residual(name, parts, left):
    """The factors leave little more than the best of their rank do; returns their ranks' sum."""
    rows, columns = left.shape
    rank = len(parts["residual_a"]) // (2 * columns)
    a = bf16(parts["residual_a"], (rank, columns)).astype(np.float64)
    b = bf16(parts["residual_b"], (rows, rank)).astype(np.float64)
    best = np.square(np.linalg.svd(left, compute_uv=False)[rank:]).sum()
    assert np.square(left - b @ a).sum() <= 1.1 * best + 1e-4 * np.square(left).sum(), name
    return [b[:, k, None] * a[k] for k in range(rank)]


def main(folder, where):
    base, tuned = read(os.path.join(folder, "base")), read(os.path.join(folder, "tuned"))
    decoded = read(os.path.join(folder, "decoded"))
    decoded_f32 = read(os.path.join(folder, "decoded_f32"))
    with open(os.path.join(folder, "facts.json")) as f:
        facts = json.load(f)
    assert base.keys() == tuned.keys() == decoded.keys() == decoded_f32.keys()
    compressed = {f[: -len(".signs")] for f in os.listdir(folder) if f.endswith(".signs")}
    layers = {n for n, (_, w) in base.items() if w.ndim == 2 and ".layers." in n}
    assert where == "anywhere" or compressed == layers, compressed ^ layers
    lost = update = 0.0
    for name, (dtype, w) in tuned.items():
        update += np.square(w - base[name][1]).sum()
        if name not in compressed:
            assert decoded[name][0] == dtype and np.array_equal(decoded[name][1], w), name
            continue
        delta = w.astype(np.float32) - base[name][1].astype(np.float32)
        parts = parts_of(folder, name)
        exact = base[name][1].copy()
        kept = check_planes(name, parts, delta)
        terms = list(planes_in_order(parts, delta.shape))
        if "residual_a" in parts:
            ranks = check_residual(name, parts, delta - kept)
            terms += ranks
            kept = kept + sum(ranks)
        for term in terms:  # in the order that is part of the format
            exact += term
        assert decoded_f32[name][0] == "F32"
        assert np.array_equal(decoded_f32[name][1], exact.astype(np.float32)), name
        assert decoded[name][0] == dtype
        assert neighbours_ok(decoded[name][1], exact, dtype), name
        left, all_ = np.square(delta - kept).sum(), np.square(delta.astype(np.float64)).sum()
        assert abs(facts["tensor/" + name]["row_error"] - left / all_) <= 1e-4, name
        lost += left
    assert abs(facts["update_error"] - lost / update) <= 1e-4


def planes_in_order(parts, shape):
    for p in range(sum(1 for role in parts if role.startswith("signs"))):
        end = f"-{p}" if p else ""
        bits = np.unpackbits(parts["signs" + end].reshape(shape[0], -1), axis=1, count=shape[1],
                             bitorder="little")
        yield parts["alpha" + end].view("<f4").astype(np.float64)[:, None] * (2.0 * bits - 1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
