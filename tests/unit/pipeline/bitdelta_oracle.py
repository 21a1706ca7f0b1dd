"""Recomputes a variant from safetensors files, by the formulas alone (NumPy; no code of Stockpot).

FOLDER holds base/, tuned/, decoded/ and decoded_f32/ (model.safetensors each) and, for every
compressed tensor, NAME.signs and NAME.alpha. Compressed must be exactly the 2-D weights of layers.
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


def main(folder):
    base, tuned = read(os.path.join(folder, "base")), read(os.path.join(folder, "tuned"))
    decoded = read(os.path.join(folder, "decoded"))
    decoded_f32 = read(os.path.join(folder, "decoded_f32"))
    assert base.keys() == tuned.keys() == decoded.keys() == decoded_f32.keys()
    compressed = {f[: -len(".signs")] for f in os.listdir(folder) if f.endswith(".signs")}
    layers = {n for n, (_, w) in base.items() if w.ndim == 2 and ".layers." in n}
    assert compressed == layers, compressed ^ layers
    for name, (dtype, w) in tuned.items():
        if name not in compressed:
            assert decoded[name][0] == dtype and np.array_equal(decoded[name][1], w), name
            continue
        delta = w.astype(np.float32) - base[name][1].astype(np.float32)
        bits = np.packbits(delta >= 0, axis=1, bitorder="little")
        stored = np.fromfile(os.path.join(folder, name + ".signs"), np.uint8)
        assert np.array_equal(stored.reshape(bits.shape), bits), name
        alpha = np.fromfile(os.path.join(folder, name + ".alpha"), "<f4").astype(np.float64)
        mean = np.abs(delta.astype(np.float64)).mean(axis=1)
        assert np.all(np.abs(alpha - mean) <= 1e-6 * mean), name
        exact = base[name][1] + alpha[:, None] * np.where(delta >= 0, 1.0, -1.0)
        assert decoded_f32[name][0] == "F32"
        assert np.array_equal(decoded_f32[name][1], exact.astype(np.float32)), name
        assert decoded[name][0] == dtype
        assert neighbours_ok(decoded[name][1], exact, dtype), name


if __name__ == "__main__":
    main(sys.argv[1])
