"""Cutting and naming bytes: must agree with store/digest.h bit by bit."""

from __future__ import annotations

import hashlib

import pytest
from stockpot import chunks
from stockpot.rpc import constants

MIB = 1 << 20


def test_chunk_size_is_the_protocols() -> None:
    assert chunks.CHUNK_BYTES == constants.MAX_CHUNK_BYTES == 4 * MIB


@pytest.mark.parametrize(("size", "lengths"), [
    (0, []),
    (1, [1]),
    (4 * MIB - 1, [4 * MIB - 1]),
    (4 * MIB, [4 * MIB]),
    (4 * MIB + 1, [4 * MIB, 1]),
    (12 * MIB + 7, [4 * MIB, 4 * MIB, 4 * MIB, 7]),
])
def test_cut(size: int, lengths: list[int]) -> None:
    data = memoryview(bytes(range(251)) * (size // 251 + 1))[:size]
    pieces = list(chunks.cut(data))
    assert [len(piece) for piece in pieces] == lengths
    assert b"".join(pieces) == data
    assert chunks.chunk_count(size) == len(lengths)


def test_part_of_names_each_chunk_and_the_whole() -> None:
    data = b"\x01" * (4 * MIB) + b"\x02" * 3
    part = chunks.part_of(memoryview(data))
    first = hashlib.sha256(data[:4 * MIB]).digest()
    second = hashlib.sha256(b"\x02\x02\x02").digest()
    assert part == chunks.Part(4 * MIB + 3, (first, second))
    assert chunks.tree_digest(part.chunks) == hashlib.sha256(first + second).digest()


def test_digests_of_nothing() -> None:
    assert chunks.part_of(memoryview(b"")) == chunks.Part(0, ())
    assert chunks.tree_digest([]).hex() == (
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
