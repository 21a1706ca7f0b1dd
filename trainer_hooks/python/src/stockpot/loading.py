"""Reading artifacts: load() gives one as tensors, Artifact any part of one.

A variant stores a tensor as the base's (codec "base"), as sign bits with a scale per row
("bitdelta": base + alpha * sign), as the elements that differ ("sparse") or as itself ("raw").
Signs: row-major, ceil(columns / 8) bytes a row, least significant bit first, 1 = +1; alpha:
float32, one per row (kernels/bitdelta/signs.h). Sparse: store/sparse_codec.h.
Every chunk is compared with its digest before a byte of it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from stockpot import chunks, dtypes
from stockpot.client import Client
from stockpot.errors import ErrorCode, StockpotError
from stockpot.sharding import Box


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
    return Artifact(client, id).tensors(dtype)


class Artifact:
    """One artifact and, where a tensor refers to it, its base. Reads when asked. One thread."""

    def __init__(self, client: Client, id: str) -> None:
        """Reads the manifest of what `id` names.

        Raises:
            StockpotError: NOT_FOUND; CORRUPTION; UNAVAILABLE.
        """
        self._client = client
        self.digest = client.lineage.resolve(id)  # hex
        text = client.fetch_manifest(self.digest)
        if chunks.digest_of(text.encode()).hex() != self.digest:
            raise StockpotError(
                ErrorCode.CORRUPTION,
                f"the manifest of {self.digest[:12]} is not what its digest says")
        manifest = json.loads(text)
        self.kind: str = manifest["kind"]
        self.run: str = manifest.get("run", "")
        self.step: int = manifest.get("step", -1)
        self._files: dict[str, dict[str, Any]] = manifest.get("files", {})
        self._base_digest: str = manifest.get("base", "")
        self._entries: dict[str, dict[str, Any]] = {t["name"]: t for t in manifest["tensors"]}
        self._base: Artifact | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor. KeyError: there is none."""
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Of the values that tensor() gives. KeyError: there is none."""
        entry = self._entries[name]
        if entry.get("codec", "raw") == "bitdelta":
            return torch.float32
        return dtypes.dtype_of(entry["dtype"])

    def root(self, name: str) -> str:
        """The name under which the bytes of a tied tensor are; of any other its own."""
        return str(self._entries[name].get("alias_of") or name)

    def files(self) -> list[str]:
        """Names of what travelled beside the tensors."""
        return list(self._files)

    def file(self, name: str) -> bytes:
        """The content of one of the files. KeyError: there is none."""
        part = self._files[name]
        return bytes(self._chunks(f"file {name}", part, 0, len(part["chunks"])))

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

    def tensor(self, name: str, box: Box | None = None) -> torch.Tensor:
        """The values of one tensor, an alias followed, or of a box of it, contiguous.

        Of a raw tensor only the chunks that hold rows of the box are fetched.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise self._corrupt(name, "there is no such tensor")
        if entry.get("alias_of"):
            return self.tensor(entry["alias_of"], box)
        codec = entry.get("codec", "raw")
        if codec == "raw":
            return self._raw(name, entry, box)
        if codec == "base":
            base = self._base_artifact(name)
            if name not in base or base.content(name) != entry["content"]:
                raise self._corrupt(name, "the base's tensor is another one")
            return base.tensor(name, box)
        if codec in ("bitdelta", "sparse"):
            decode = self._bitdelta if codec == "bitdelta" else self._sparse
            whole = decode(name, entry)
            return whole if box is None else _cut(whole, box).contiguous()
        raise self._corrupt(name, f"unknown codec {codec!r}")

    def content(self, name: str) -> str:
        """A name of a tensor's values: equal ones of one artifact have equal values."""
        entry = self._entries[self.root(name)]
        if "content" in entry:
            return str(entry["content"])
        parts = entry["parts"]
        if entry.get("codec", "raw") != "raw" or "pieces" in entry:
            return json.dumps([parts, entry.get("pieces")], sort_keys=True)
        digests = parts["data"]["chunks"] if "data" in parts else []
        return chunks.tree_digest(bytes.fromhex(digest) for digest in digests).hex()

    def _raw(self, name: str, entry: dict[str, Any], box: Box | None) -> torch.Tensor:
        dtype, shape = dtypes.dtype_of(entry["dtype"]), tuple(entry["shape"])
        box = box or Box.whole(shape)
        if len(box.sizes) != len(shape) or any(
                begin < 0 or size < 0 or begin + size > whole for begin, size, whole
                in zip(box.offsets, box.sizes, shape, strict=True)):
            raise StockpotError(ErrorCode.INVALID_ARGUMENT,
                                f"tensor {name} of {list(shape)} does not hold {box}")
        if "pieces" not in entry:
            return self._stored(name, entry, "data", shape, dtype, box)
        # As ranks cut it: the pieces hold each element once, so what they share with the box does.
        result = torch.empty(box.sizes, dtype=dtype)
        for index, piece in enumerate(entry["pieces"]):
            begins = [max(a, b) for a, b in zip(piece["offsets"], box.offsets, strict=True)]
            sizes = [min(a + n, b + m) - begin for a, n, b, m, begin in zip(
                piece["offsets"], piece["shape"], box.offsets, box.sizes, begins, strict=True)]
            if min(sizes) <= 0:
                continue
            within = Box(tuple(begin - a for begin, a
                               in zip(begins, piece["offsets"], strict=True)), tuple(sizes))
            into = tuple(slice(begin - b, begin - b + size) for begin, b, size
                         in zip(begins, box.offsets, sizes, strict=True))
            result[into] = self._stored(name, entry, f"data/{index}", tuple(piece["shape"]), dtype,
                                        within)
        return result

    def _stored(self, name: str, entry: dict[str, Any], role: str, shape: tuple[int, ...],
                dtype: torch.dtype, box: Box) -> torch.Tensor:
        """A box of what one part holds row-major in `shape`; fetches the chunks of its rows."""
        part = self._part(name, entry, role, math.prod(shape) * dtype.itemsize)
        if not box.elements:
            return torch.empty(box.sizes, dtype=dtype)
        # The rows [begin, end) along the first dimension are one run of bytes.
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        begin, rows = (box.offsets[0], box.sizes[0]) if shape else (0, 1)
        first = begin * row_bytes // chunks.CHUNK_BYTES
        data = self._chunks(f"tensor {name}", part, first,
                            chunks.chunk_count((begin + rows) * row_bytes))
        offset = begin * row_bytes - first * chunks.CHUNK_BYTES
        values = torch.frombuffer(data, dtype=torch.uint8, count=rows * row_bytes, offset=offset)
        if offset % dtype.itemsize:  # cannot be with chunks of 4 MiB and powers of two
            values = values.clone()
        if not shape:
            return values.view(dtype).view(())
        values = values.view(dtype).view(rows, *shape[1:])
        within = Box((0, *box.offsets[1:]), box.sizes)
        return _cut(values, within).contiguous()

    def _bitdelta(self, name: str, entry: dict[str, Any]) -> torch.Tensor:
        # In float64, in the server's order, and one rounding: the bits of an export in float32.
        rows, columns = entry["shape"]
        row_bytes = -(-columns // 8)
        base = self._base_artifact(name).tensor(name)
        if list(base.shape) != [rows, columns]:
            raise self._corrupt(name, "the base's tensor has another shape")
        result = base.double()
        for plane in range(len(entry["parts"])):
            end = f"/{plane}" if plane else ""
            if plane and f"signs{end}" not in entry["parts"]:
                break
            signs, alphas = (self._bytes(name, entry, role + end, size) for role, size in
                             (("signs", rows * row_bytes), ("alpha", 4 * rows)))
            bits = np.unpackbits(np.frombuffer(signs, np.uint8).reshape(rows, row_bytes), axis=1,
                                 count=columns, bitorder="little")
            alpha = torch.frombuffer(alphas, dtype=torch.float32).double()
            result += torch.from_numpy(bits).double().mul_(2).sub_(1).mul_(alpha[:, None])
        if "residual_a" in entry["parts"]:
            rank = entry["parts"]["residual_a"]["bytes"] // (2 * columns)
            a, b = (torch.frombuffer(self._bytes(name, entry, role, 2 * rank * size),
                                     dtype=torch.bfloat16).double()
                    for role, size in (("residual_a", columns), ("residual_b", rows)))
            a, b = a.view(rank, columns), b.view(rows, rank)
            for k in range(rank):
                result += b[:, k, None] * a[k]
        return result.float()

    def _bytes(self, name: str, entry: dict[str, Any], role: str, size: int) -> bytearray:
        part = self._part(name, entry, role, size)
        return self._chunks(f"tensor {name}", part, 0, len(part["chunks"]))

    def _sparse(self, name: str, entry: dict[str, Any]) -> torch.Tensor:
        rows, columns = entry["shape"]
        dtype = dtypes.dtype_of(entry["dtype"])
        column_type = np.dtype("<u2" if columns <= 65536 else "<u4")
        changed = entry["parts"].get("columns", {"bytes": 0})["bytes"] // column_type.itemsize
        # Rows behind the base's last: of a vocabulary that grew.
        row_bytes = columns * dtype.itemsize
        behind = entry["parts"].get("rows", {"bytes": 0})["bytes"] // (row_bytes or 1)
        sizes = {"counts": 4 * (rows - behind), "columns": changed * column_type.itemsize,
                 "values": changed * dtype.itemsize, "rows": behind * row_bytes}
        counts, where, values, more = (
            self._chunks(f"tensor {name}", part, 0, len(part["chunks"]))
            for part in (self._part(name, entry, role, size) for role, size in sizes.items()))
        row = np.repeat(np.arange(rows - behind), np.frombuffer(counts, "<u4"))
        column = np.frombuffer(where, column_type).astype(np.int64)
        base = self._base_artifact(name).tensor(name)
        result = base[:rows - behind].clone()
        if (list(result.shape) != [rows - behind, columns] or result.dtype != dtype
                or (behind and len(result) != len(base))):
            raise self._corrupt(name, "the base's tensor has another shape or dtype")
        if len(row) != changed or (column >= columns).any():
            raise self._corrupt(name, "its changed elements contradict their counts")
        if changed:
            result[torch.from_numpy(row), torch.from_numpy(column)] = torch.frombuffer(
                values, dtype=dtype)
        if behind:
            result = torch.cat([result, torch.frombuffer(more, dtype=dtype).view(behind, columns)])
        return result

    def _part(self, name: str, entry: dict[str, Any], role: str, size: int) -> dict[str, Any]:
        part: dict[str, Any] = entry["parts"].get(role, {"bytes": 0, "chunks": []})
        if part["bytes"] != size or len(part["chunks"]) != chunks.chunk_count(size):
            raise self._corrupt(name, f"part {role} has {part['bytes']} bytes instead of {size}")
        return part

    def _chunks(self, what: str, part: dict[str, Any], first: int, end: int) -> bytearray:
        """The bytes of the chunks [first, end) of a part."""
        data = bytearray()
        for index in range(first, end):
            digest = part["chunks"][index]
            chunk = self._client.fetch_chunk(bytes.fromhex(digest))
            size = min(chunks.CHUNK_BYTES, part["bytes"] - index * chunks.CHUNK_BYTES)
            if chunks.digest_of(chunk).hex() != digest or len(chunk) != size:
                raise StockpotError(
                    ErrorCode.CORRUPTION,
                    f"{self.digest[:12]}: {what}: chunk {digest[:12]} is damaged")
            data += chunk
        return data

    def _base_artifact(self, name: str) -> Artifact:
        if self._base is None:
            if not self._base_digest:
                raise self._corrupt(name, "it needs a base and the manifest names none")
            self._base = Artifact(self._client, self._base_digest)
        return self._base

    def _corrupt(self, name: str, what: str) -> StockpotError:
        return StockpotError(ErrorCode.CORRUPTION, f"{self.digest[:12]}: tensor {name}: {what}")


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (begin, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor
