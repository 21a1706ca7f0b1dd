"""Checkpoints on the trainer's disk while the daemon is away. The format: trainer_hooks/SPOOL.md.

Threads: one, the uploader's; size() and count() may be asked by any.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stockpot import dtypes
from stockpot.errors import ErrorCode, StockpotError
from stockpot.sharding import Place
from stockpot.staging import Layout, Slot

FORMAT = "stockpot-spool"
VERSION = 1
BYTES_BY_DEFAULT = 64 << 30
MAX_HEADER_BYTES = 100 << 20  # of a safetensors file, as the format says
MAX_MANIFEST_BYTES = 256 << 20
WRITE_BYTES = 16 << 20  # handed to the file system at once

_ENTRY = re.compile(r"step-(\d{12})$")
_RANK = re.compile(r"rank-(\d+)-of-(\d+)$")


@dataclass(frozen=True)
class Contents:
    """One rank's checkpoint, wherever its bytes are."""

    step: int
    layout: Layout
    bytes_of: Mapping[str, memoryview]  # by Slot.key, of those that are no aliases
    files: Mapping[str, bytes]
    metrics: Mapping[str, float]
    place: Place
    attempt: str = ""
    resumed_from: str = ""  # hex


@dataclass
class Entry:
    """A spooled checkpoint whose bytes were verified. close() it before it is removed."""

    folder: Path
    contents: Contents
    _map: mmap.mmap | None = field(default=None, repr=False)

    def close(self) -> None:
        """Unmaps the file, at the latest when the last view of it is gone."""
        for view in self.contents.bytes_of.values():
            with contextlib.suppress(BufferError):
                view.release()
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()


class Spool:
    """The folders of one rank of a run: its own, and those that ranks of another world left.

    Rank r of this world takes over rank R of another one if R % world == r.
    """

    def __init__(self, root: Path, run: str, place: Place, limit_bytes: int) -> None:
        """Takes ownership; makes the folder; deletes what was begun and never finished.

        Raises:
            StockpotError: ALREADY_EXISTS if another process owns this rank's folder.
            OSError: the folder cannot be made.
        """
        self._limit = limit_bytes
        self._own = root / run / f"rank-{place.rank}-of-{place.world}"
        self._own.mkdir(parents=True, exist_ok=True)
        self._locks = [self._lock(self._own)]
        self._folders = [self._own]
        for folder in sorted((root / run).iterdir()):
            match = _RANK.match(folder.name)
            if (match and int(match[2]) != place.world
                    and int(match[1]) % place.world == place.rank):
                with contextlib.suppress(StockpotError):  # its owner lives
                    self._locks.append(self._lock(folder))
                    self._folders.append(folder)
        for folder in self._folders:
            for leftover in folder.glob(".*step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        self._guard = threading.Lock()
        self._sizes = {entry: _size_of(entry) for entry in self._entries()}  # guarded by _guard
        self._held: set[Path] = set()  # likewise; sent, and other ranks' parts are awaited

    @property
    def folder(self) -> Path:
        """Where this rank's entries are written."""
        return self._own

    def size(self) -> int:
        """Bytes of the entries that wait."""
        with self._guard:
            return sum(self._sizes.values())

    def count(self) -> int:
        """Entries that wait, to be sent or for other ranks' parts."""
        with self._guard:
            return len(self._sizes)

    def unsent(self) -> int:
        """Entries that wait to be sent."""
        with self._guard:
            return len(self._sizes.keys() - self._held)

    def add(self, contents: Contents, header: Mapping[str, Any]) -> None:
        """Makes a checkpoint durable here. `header`: run, base, config and tags of the manifest.

        Raises:
            StockpotError: RESOURCE_EXHAUSTED if it does not fit the limit.
            OSError: the disk refused; nothing is left of it.
        """
        final = self._own / f"step-{contents.step:012d}"
        size = sum(slot.size for slot in contents.layout.slots) + sum(
            len(data) for data in contents.files.values())
        if self.size() + size > self._limit:
            raise StockpotError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"the spool {self._own} holds {self.size()} bytes: {size} more do not fit "
                f"spool_bytes={self._limit}", False)
        if final.exists():
            raise StockpotError(
                ErrorCode.ALREADY_EXISTS, f"step {contents.step} is in the spool already")
        folder = self._own / f".tmp-{final.name}"
        try:
            _write_entry(folder, contents, header)
            folder.rename(final)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _sync_folder(self._own)
        with self._guard:
            self._sizes[final] = _size_of(final)

    def first(self) -> Entry | None:
        """The oldest entry that is to be sent, every byte of it verified; None: there is none.

        Raises:
            StockpotError: CORRUPTION names an entry that is damaged. It is set aside, and the next
                call gives the one behind it.
        """
        with self._guard:
            folders = sorted(self._sizes.keys() - self._held,
                             key=lambda folder: (folder.name, folder))
        if not folders:
            return None
        try:
            return _read_entry(folders[0])
        except (StockpotError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            aside = self.set_aside(folders[0], "damaged")
            raise StockpotError(
                ErrorCode.CORRUPTION, f"the spooled checkpoint {folders[0]} is damaged ({error}); "
                f"it is kept as {aside.name}") from error

    def hold(self, folder: Path, is_held: bool = True) -> None:
        """An entry that is held stays, and first() does not give it."""
        with self._guard:
            if is_held:
                self._held.add(folder)
            else:
                self._held.discard(folder)

    def remove(self, folder: Path) -> None:
        """The entry was acknowledged."""
        gone = folder.with_name(f".gone-{folder.name}")
        folder.rename(gone)
        self._forget(folder)
        shutil.rmtree(gone, ignore_errors=True)

    def set_aside(self, folder: Path, prefix: str) -> Path:
        """The entry cannot be sent; it is kept under another name, for a person to look at."""
        aside = folder.with_name(f"{prefix}-{folder.name}")
        self._forget(folder)
        shutil.rmtree(aside, ignore_errors=True)  # of the same step, once before
        folder.rename(aside)
        return aside

    def close(self) -> None:
        """Gives ownership back."""
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    def _forget(self, folder: Path) -> None:
        with self._guard:
            self._sizes.pop(folder, None)
            self._held.discard(folder)

    def _entries(self) -> Iterator[Path]:
        for folder in self._folders:
            for entry in folder.iterdir():
                if _ENTRY.match(entry.name):
                    yield entry

    @staticmethod
    def _lock(folder: Path) -> int:
        file = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise
            raise StockpotError(
                ErrorCode.ALREADY_EXISTS, f"another process owns the spool {folder}") from None
        return file


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_file(path: Path, parts: Iterator[bytes | memoryview]) -> str:
    """Writes and syncs; returns the SHA-256 in hex."""
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            for begin in range(0, len(view), WRITE_BYTES):
                piece = view[begin:begin + WRITE_BYTES]
                digest.update(piece)
                while len(piece):
                    piece = piece[file.write(piece):]
        os.fdatasync(file.fileno())
    return digest.hexdigest()


def _write_entry(folder: Path, contents: Contents, header: Mapping[str, Any]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "files").mkdir(parents=True)
    files = {name: {"bytes": len(data),
                    "sha256": _write_file(folder / "files" / name, iter([data]))}
             for name, data in contents.files.items()}
    tensors = folder / "tensors.safetensors"
    digest = _write_file(tensors, _safetensors(contents))
    slots = contents.layout.slots
    manifest = {
        "format": FORMAT, "version": VERSION, **header, "step": contents.step,
        "rank": contents.place.rank, "world": contents.place.world, "attempt": contents.attempt,
        "metrics": {name: value if math.isfinite(value) else str(value)
                    for name, value in contents.metrics.items()},
        "tensors": {"bytes": tensors.stat().st_size, "sha256": digest}, "files": files,
        "aliases": {slot.name: slot.alias_of for slot in slots if slot.alias_of},
        "groups": {slot.name: slot.group for slot in slots if slot.group},
        "shards": {slot.name: {"global_shape": slot.global_shape, "offset": slot.begin}
                   for slot in slots if slot.begin},
    }
    if contents.resumed_from:
        manifest["resumed_from"] = contents.resumed_from
    _write_file(folder / "manifest.json", iter([json.dumps(manifest, indent=1).encode()]))
    _sync_folder(folder / "files")
    _sync_folder(folder)


def _safetensors(contents: Contents) -> Iterator[bytes | memoryview]:
    """The file's bytes: header, then the tensors, those of wide elements first."""
    stored = [slot for slot in contents.layout.slots if not slot.alias_of]
    stored.sort(key=lambda slot: (-slot.dtype.itemsize, slot.name))
    header: dict[str, Any] = {}
    end = 0
    for slot in stored:
        header[slot.name] = {"dtype": dtypes.name_of(slot.dtype), "shape": slot.shape,
                             "data_offsets": [end, end + slot.size]}
        end += slot.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for slot in stored:
        yield contents.bytes_of[slot.key]


def _read_entry(folder: Path) -> Entry:
    text = (folder / "manifest.json").read_bytes()[:MAX_MANIFEST_BYTES]
    manifest = json.loads(text)
    if manifest["format"] != FORMAT or manifest["version"] != VERSION:
        raise ValueError(f"version {manifest.get('version')!r} is not one this hook reads")
    files = {}
    for name, stated in manifest["files"].items():
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"file name {name!r}")
        files[name] = (folder / "files" / name).read_bytes()
        _check("file " + name, files[name], stated)
    path = folder / "tensors.safetensors"
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = memoryview(mapped)
    _check(path.name, view, manifest["tensors"])
    layout, bytes_of = _read_tensors(view, manifest)
    metrics = {name: float(value) for name, value in manifest["metrics"].items()}
    view.release()
    return Entry(folder, Contents(
        int(manifest["step"]), layout, bytes_of, files, metrics,
        Place(int(manifest["rank"]), int(manifest["world"])), str(manifest.get("attempt", "")),
        str(manifest.get("resumed_from", ""))), mapped)


def _check(what: str, data: bytes | memoryview, stated: Mapping[str, Any]) -> None:
    if len(data) != stated["bytes"] or hashlib.sha256(data).hexdigest() != stated["sha256"]:
        raise ValueError(f"{what} is not what the manifest says")


def _read_tensors(view: memoryview, manifest: Mapping[str, Any]
                  ) -> tuple[Layout, dict[str, memoryview]]:
    begin = 8 + int.from_bytes(view[:8], "little")
    if begin > min(len(view), 8 + MAX_HEADER_BYTES):
        raise ValueError("the header of tensors.safetensors is too long")
    groups, shards = manifest.get("groups", {}), manifest.get("shards", {})
    slots: dict[str, Slot] = {}
    bytes_of = {}
    for name, entry in json.loads(bytes(view[8:begin])).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        dtype, shape = dtypes.dtype_of(entry["dtype"]), tuple(entry["shape"])
        if last - first != math.prod(shape) * dtype.itemsize or begin + last > len(view):
            raise ValueError(f"tensor {name} has the wrong size")
        shard = shards.get(name)
        where = (tuple(shard["global_shape"]), tuple(shard["offset"])) if shard else ()
        slot = Slot(name, dtype, shape, begin + first, last - first, "", groups.get(name, ""),
                    *where)
        slots[name] = slot
        bytes_of[slot.key] = view[begin + first:begin + last]
    for name, root in manifest.get("aliases", {}).items():
        tied = slots[root]
        slots[name] = Slot(name, tied.dtype, tied.global_shape or tied.shape, 0, 0, root,
                           tied.group)
    return Layout(tuple(slots.values()), len(view)), bytes_of

