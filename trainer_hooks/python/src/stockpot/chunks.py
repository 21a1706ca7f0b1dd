"""Cutting bytes into chunks and naming them, exactly as store/digest.h does.

A run of bytes is cut into chunks of CHUNK_BYTES, the last one shorter; a chunk is named by the
SHA-256 of its bytes, a run by the SHA-256 over its chunks' digests. No bytes: no chunks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

CHUNK_BYTES = 4 << 20  # part of the format: digests depend on it
DIGEST_BYTES = 32


@dataclass(frozen=True)
class Part:
    """A run of bytes in the store: its length and its chunks' digests (32 raw bytes each)."""

    bytes: int
    chunks: tuple[bytes, ...]


def chunk_count(size: int) -> int:
    """How many chunks a run of `size` bytes has."""
    return -(-size // CHUNK_BYTES)


def cut(data: memoryview) -> Iterator[memoryview]:
    """The chunks of a byte view, in order, without copying."""
    for begin in range(0, len(data), CHUNK_BYTES):
        yield data[begin:begin + CHUNK_BYTES]


def digest_of(data: bytes | memoryview) -> bytes:
    """SHA-256. Releases the GIL while it runs."""
    return hashlib.sha256(data).digest()


def tree_digest(chunks: Iterable[bytes]) -> bytes:
    """The name of a run of bytes: SHA-256 over its chunks' digests."""
    return hashlib.sha256(b"".join(chunks)).digest()


def part_of(data: memoryview) -> Part:
    """Names a run of bytes."""
    return Part(len(data), tuple(digest_of(chunk) for chunk in cut(data)))
