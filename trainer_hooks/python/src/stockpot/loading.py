"""load(): any artifact of the store as tensors.

A variant stores a tensor as the base's (codec "base"), as sign bits with a scale per row
("bitdelta": base + alpha * sign) or as itself ("raw"). Signs: row-major, ceil(columns / 8) bytes a
row, least significant bit first, 1 = +1; alpha: float32, one per row (kernels/bitdelta/signs.h).
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch

from stockpot import chunks, dtypes
from stockpot.client import Client
from stockpot.errors import ErrorCode, StockpotError


def load(client: Client | str, id: str, *, dtype: torch.dtype | None = None
         ) -> dict[str, torch.Tensor]:
    """Fetches and verifies an artifact; decodes what is compressed.

    Args:
        client: a Client or the daemon's address.
        id: a digest, an alias, a base's name, RUN@STEP, RUN@latest, RUN@best or a route.
        dtype: of the floating-point results. None: raw tensors as stored, decoded ones (base +
            alpha * sign) in float32, in which they are exact.

    Returns:
        Name -> tensor on the CPU; tied names share one tensor's memory.

    Raises:
        StockpotError: NOT_FOUND; CORRUPTION if any byte is not what its digest says; UNAVAILABLE.
    """
    if isinstance(client, str):
        with Client(client) as owned:
            return load(owned, id, dtype=dtype)
    return _Loader(client, client.lineage.resolve(id)).tensors(dtype)


class _Loader:
    """One artifact and, where a tensor refers to it, its base."""

    def __init__(self, client: Client, digest: str) -> None:
        self._client = client
        text = client.fetch_manifest(digest)
        if chunks.digest_of(text.encode()).hex() != digest:
            raise StockpotError(
                ErrorCode.CORRUPTION, f"the manifest of {digest[:12]} is not what its digest says")
        manifest = json.loads(text)
        self._digest = digest
        self._base_digest: str = manifest.get("base", "")
        self._entries: dict[str, dict[str, Any]] = {t["name"]: t for t in manifest["tensors"]}
        self._base: _Loader | None = None

    def tensors(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        result: dict[str, torch.Tensor] = {}
        for name, entry in self._entries.items():
            if not entry.get("alias_of"):
                tensor = self.tensor(name)
                is_cast = dtype is not None and tensor.is_floating_point()
                result[name] = tensor.to(dtype) if is_cast else tensor
        for name, entry in self._entries.items():
            if entry.get("alias_of"):
                result[name] = result[entry["alias_of"]]
        return {name: result[name] for name in self._entries}

    def tensor(self, name: str) -> torch.Tensor:
        """The values of one tensor, an alias followed."""
        entry = self._entries.get(name)
        if entry is None:
            raise self._corrupt(name, "the base has no such tensor")
        if entry.get("alias_of"):
            return self.tensor(entry["alias_of"])
        codec = entry.get("codec", "raw")
        if codec == "raw":
            return self._raw(name, entry)
        if codec == "base":
            tensor = self._base_loader(name).tensor(name)
            if self._base_loader(name).content(name) != entry["content"]:
                raise self._corrupt(name, "the base's tensor is another one")
            return tensor
        if codec == "bitdelta":
            return self._bitdelta(name, entry)
        raise self._corrupt(name, f"unknown codec {codec!r}")

    def content(self, name: str) -> str:
        """The hex digest of a raw tensor's bytes."""
        entry = self._entries[name]
        if entry.get("alias_of"):
            return self.content(entry["alias_of"])
        digests = entry["parts"]["data"]["chunks"] if "data" in entry["parts"] else []
        return chunks.tree_digest(bytes.fromhex(digest) for digest in digests).hex()

    def _raw(self, name: str, entry: dict[str, Any]) -> torch.Tensor:
        dtype, shape = dtypes.dtype_of(entry["dtype"]), entry["shape"]
        data = self._part(name, entry, "data", math.prod(shape) * dtype.itemsize)
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)

    def _bitdelta(self, name: str, entry: dict[str, Any]) -> torch.Tensor:
        rows, columns = entry["shape"]
        row_bytes = -(-columns // 8)
        signs = self._part(name, entry, "signs", rows * row_bytes)
        alpha = torch.frombuffer(self._part(name, entry, "alpha", 4 * rows), dtype=torch.float32)
        bits = np.unpackbits(np.frombuffer(signs, np.uint8).reshape(rows, row_bytes), axis=1,
                             count=columns, bitorder="little")
        base = self._base_loader(name).tensor(name)
        if list(base.shape) != [rows, columns]:
            raise self._corrupt(name, "the base's tensor has another shape")
        sign = torch.from_numpy(bits).float().mul_(2).sub_(1)
        return sign.mul_(alpha[:, None]).add_(base.float())

    def _part(self, name: str, entry: dict[str, Any], role: str, size: int) -> bytearray:
        part = entry["parts"].get(role, {"bytes": 0, "chunks": []})
        if part["bytes"] != size or len(part["chunks"]) != chunks.chunk_count(size):
            raise self._corrupt(name, f"part {role} has {part['bytes']} bytes instead of {size}")
        data = bytearray()
        for digest in part["chunks"]:
            chunk = self._client.fetch_chunk(bytes.fromhex(digest))
            if chunks.digest_of(chunk).hex() != digest:
                raise self._corrupt(name, f"chunk {digest[:12]} is damaged")
            data += chunk
        if len(data) != size:
            raise self._corrupt(name, f"part {role} has chunks of the wrong size")
        return data

    def _base_loader(self, name: str) -> _Loader:
        if self._base is None:
            if not self._base_digest:
                raise self._corrupt(name, "it needs a base and the manifest names none")
            self._base = _Loader(self._client, self._base_digest)
        return self._base

    def _corrupt(self, name: str, what: str) -> StockpotError:
        return StockpotError(ErrorCode.CORRUPTION, f"{self._digest[:12]}: tensor {name}: {what}")
