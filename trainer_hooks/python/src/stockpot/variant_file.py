"""Variants as one safetensors file: what `stockpot export VARIANT FILE --delta` writes.

The format is store/variant_file.h's; read_variant() is all it takes to use such a file without
Stockpot. Weights come back in float32 where they are base + alpha * sign, else in their own type.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from stockpot import chunks
from stockpot.dtypes import dtype_of
from stockpot.errors import ErrorCode, StockpotError


def read_variant(path: str | Path, base_folder: str | Path) -> dict[str, torch.Tensor]:
    """The variant's weights by name. StockpotError: it was made against another base."""
    with safe_open(str(path), "pt") as file:
        metadata = file.metadata()
        if metadata.get("stockpot.format") != "variant 1":
            raise StockpotError(ErrorCode.INVALID_ARGUMENT, f"{path} is no variant's file")
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    base, digests = BaseWeights(base_folder), json.loads(metadata["stockpot.base_tensors"])
    weights, ties = {}, {}
    for entry in json.loads(metadata["stockpot.manifest"])["tensors"]:
        name = entry["name"]
        if "alias_of" in entry:
            ties[name] = entry["alias_of"]
            continue
        parts = {role: held[name if role == "data" else f"{name}.{role}"]
                 for role in entry.get("parts", {})}
        origin = base.checked(name, digests[name]) if name in digests else None
        weights[name] = _decode(entry, parts, origin)
    return weights | {name: weights[target] for name, target in ties.items()}


def _decode(entry: dict[str, Any], parts: dict[str, torch.Tensor], origin: torch.Tensor | None,
            ) -> torch.Tensor:
    if origin is None:  # its own bytes, whole or in the pieces that ranks sent
        if "data" in parts:
            return parts["data"]
        whole = torch.empty(entry["shape"], dtype=dtype_of(entry["dtype"]))
        for i, piece in enumerate(entry["pieces"]):
            box = tuple(slice(o, o + n) for o, n in zip(piece["offsets"], piece["shape"],
                                                        strict=True))
            whole[box] = parts[f"data/{i}"]
        return whole
    if "counts" in parts:  # the base with changed elements, and rows behind
        weight = origin[:len(parts["counts"])].clone()
        rows = torch.repeat_interleave(torch.arange(len(weight)), parts["counts"].long())
        weight[rows, parts["columns"].long()] = parts["values"]
        return torch.cat([weight, parts["rows"]]) if "rows" in parts else weight
    if not parts:
        return origin
    weight = origin.float()
    for plane in [""] + [f"/{i}" for i in range(1, 64) if f"signs/{i}" in parts]:
        bits = np.unpackbits(parts[f"signs{plane}"].numpy(), axis=1, bitorder="little")
        signs = torch.from_numpy(2.0 * bits[:, :weight.shape[1]] - 1).float()
        weight += parts[f"alpha{plane}"][:, None] * signs
    if "residual_a" in parts:
        weight += parts["residual_b"].float() @ parts["residual_a"].float()
    known = {"signs", "alpha", "residual_a", "residual_b"}
    unknown = {role.split("/")[0] for role in parts} - known
    if unknown:
        raise StockpotError(ErrorCode.INVALID_ARGUMENT,
                            f"{entry['name']!r} has parts that this reader does not know: "
                            + ", ".join(sorted(unknown)))
    return weight


class BaseWeights:
    """The tensors of a Hugging Face folder, read one at a time."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        index = self._folder / "model.safetensors.index.json"
        if index.exists():
            self._files = dict(json.loads(index.read_text())["weight_map"])
        else:
            with safe_open(str(self._folder / "model.safetensors"), "pt") as file:
                self._files = dict.fromkeys(file.keys(), "model.safetensors")

    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise StockpotError(ErrorCode.NOT_FOUND, f"{self._folder} has no tensor {name!r}")
        with safe_open(str(self._folder / self._files[name]), "pt") as file:
            return file.get_tensor(name)

    def checked(self, name: str, digest: str) -> torch.Tensor:
        """The tensor, if it is the one of that digest (store/digest.h, TreeDigest)."""
        tensor = self.read(name)
        if chunks.tree_digest(chunks.part_of(bytes_of(tensor)).chunks).hex() != digest:
            raise StockpotError(
                ErrorCode.INVALID_ARGUMENT,
                f"{self._folder} is another base than the variant's: tensor {name!r} differs")
        return tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, row-major."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
