"""The only part of a save that a training step waits for: one copy of the tensors into a buffer.

A StagingBuffer holds all tensors of one checkpoint as their logical content (contiguous, row-major,
little-endian as torch holds them). Buffers are reused, so that from the second save on a copy does
not pay for page faults, and their total size is limited.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch

from stockpot import dtypes
from stockpot.errors import ErrorCode, StockpotError
from stockpot.sharding import Piece, Place, pieces_of

ALIGNMENT_BYTES = 64  # of every tensor in a buffer; a multiple of every element size
PIECE_BYTES = 4 << 20  # copied at once by one thread
MAX_COPY_THREADS = 4  # more do not add memory bandwidth on common machines
BUFFERS_BY_DEFAULT = 2  # the limit where none is given: one uploading, one being filled


@dataclass(frozen=True)
class Slot:
    """Where one tensor of a checkpoint, or this rank's piece of it, lies in its buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the piece
    offset: int  # bytes
    size: int  # bytes; 0 for an alias
    alias_of: str = ""  # not empty: tied to that tensor, no bytes of its own
    group: str = ""  # not empty: no weight, but training state of that group
    global_shape: tuple[int, ...] = ()  # of the whole tensor; both empty: the slot is all of it
    begin: tuple[int, ...] = ()  # of the piece, in elements of the whole tensor

    @cached_property
    def key(self) -> str:
        """Unique within a checkpoint: names are within their group, pieces by where they begin."""
        place = f"@{self.begin}" if self.begin else ""
        return f"{self.group}/{self.name}{place}"


@dataclass(frozen=True)
class Layout:
    """The slots of a checkpoint in the model's order, and how many bytes they need together."""

    slots: tuple[Slot, ...]
    size: int  # bytes

    @classmethod
    def plan(cls, pieces: Sequence[Piece] | Mapping[str, torch.Tensor],
             cast_to: torch.dtype | None) -> Layout:
        """Lays out what a rank sends; tensors that share all their memory are stored once.

        Args:
            pieces: what sharding.pieces_of() gave, or name -> whole tensor.
            cast_to: the type in which floating-point weights are stored; None: as they are.

        Raises:
            StockpotError: INVALID_ARGUMENT for a tensor that has no dense bytes to store.
        """
        if isinstance(pieces, Mapping):
            pieces = pieces_of(pieces, Place())
        slots: list[Slot] = []
        end = 0
        for piece in pieces:
            _check_storable(piece.name, piece.tensor)
            is_cast = not piece.group and piece.tensor.is_floating_point()
            dtype = cast_to if is_cast and cast_to is not None else piece.tensor.dtype
            dtypes.name_of(dtype)
            sizes, shape = piece.box.sizes, piece.shape
            if tuple(piece.tensor.shape) != sizes:
                raise StockpotError(
                    ErrorCode.INVALID_ARGUMENT,
                    f"{piece.name}: this rank holds {tuple(piece.tensor.shape)} of {shape}, "
                    f"its placement says {sizes}")
            if piece.alias_of:
                slots.append(Slot(piece.name, dtype, shape, 0, 0, piece.alias_of, piece.group))
                continue
            size = piece.box.elements * dtype.itemsize
            where = () if sizes == shape else (shape, piece.box.offsets)
            slots.append(Slot(piece.name, dtype, sizes, end, size, "", piece.group, *where))
            end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(slots), end)


class Planner:
    """Plans layouts and knows the last one again.

    Training pushes the same shapes every time, and waits while a plan is made.
    """

    def __init__(self, cast_to: torch.dtype | None) -> None:
        self._cast_to = cast_to
        self._facts: list[tuple[object, ...]] = []  # all that a plan depends on
        self._layout: Layout | None = None

    def plan(self, pieces: Sequence[Piece]) -> Layout:
        """As Layout.plan()."""
        facts: list[tuple[object, ...]] = []
        for piece in pieces:
            tensor, box = piece.tensor, piece.box
            facts.append((piece.name, piece.group, piece.alias_of, piece.shape, box.offsets,
                          box.sizes, tensor.shape, tensor.dtype, tensor.layout, tensor.is_meta))
        if self._layout is None or facts != self._facts:
            self._layout = Layout.plan(pieces, self._cast_to)
            self._facts = facts
        return self._layout


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise StockpotError(
            ErrorCode.INVALID_ARGUMENT, f"{name} is not a dense tensor with values")


class CopyThreads:
    """Copies runs of memory with several threads. One caller at a time.

    Each thread takes the next piece when it is done with one, so that a thread that is held up by
    other work on the machine delays its piece alone. PyTorch's own copy meets at a barrier for
    every tensor; with hundreds of small tensors on a busy machine it took twice as long and more.
    """

    def __init__(self, threads: int) -> None:
        """`threads` including the caller's."""
        self._helpers = threads - 1
        self._executor = ThreadPoolExecutor(max(1, self._helpers), "stockpot-copy")

    def copy(self, runs: list[tuple[int, int, int]]) -> None:
        """Copies (to, from, bytes) each. REQUIRES: valid addresses, no overlap."""
        pieces = [(to + done, source + done, min(size - done, PIECE_BYTES))
                  for to, source, size in runs for done in range(0, size, PIECE_BYTES)]

        def work() -> None:
            while pieces:
                try:
                    to, source, size = pieces.pop()
                except IndexError:  # another thread took the last one
                    return
                ctypes.memmove(to, source, size)  # releases the GIL

        helpers = [self._executor.submit(work)
                   for _ in range(min(self._helpers, len(pieces) - 1))]
        work()
        for helper in helpers:
            helper.result()

    def stop(self) -> None:
        """Ends the helpers."""
        self._executor.shutdown(wait=False)


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are the bytes at its address (no subclass, no lazy negation)."""
    return (type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu
            and tensor.is_contiguous() and not tensor.is_neg())


class StagingBuffer:
    """Memory for one checkpoint. Owned by the pool; lent to one save at a time."""

    def __init__(self, capacity: int, pinned: bool) -> None:
        self.capacity = capacity  # bytes
        self.pinned = pinned
        self._bytes = torch.empty(capacity, dtype=torch.uint8, pin_memory=pinned)

    def fill(self, layout: Layout, pieces: Sequence[Piece] | Mapping[str, torch.Tensor],
             threads: CopyThreads) -> None:
        """Copies the values of what was laid out as they are now.

        REQUIRES: layout = Layout.plan(pieces, ...), layout.size <= capacity.
        """
        if isinstance(pieces, Mapping):
            pieces = pieces_of(pieces, Place())
        devices = set()
        plain: list[tuple[int, int, int]] = []
        begin = self._bytes.data_ptr()
        with torch.no_grad():
            for slot, piece in zip(layout.slots, pieces, strict=True):
                if slot.size == 0:
                    continue
                source = piece.tensor
                if _is_plain_memory(source) and source.dtype == slot.dtype:
                    plain.append((begin + slot.offset, source.data_ptr(), slot.size))
                    continue
                target = self._bytes.narrow(0, slot.offset, slot.size)
                target = target.view(slot.dtype).view(slot.shape)
                target.copy_(source, non_blocking=True)
                if source.is_cuda:
                    devices.add(source.device)
            threads.copy(plain)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def views(self, layout: Layout) -> dict[str, memoryview]:
        """The bytes of each slot by its key; valid until the buffer goes back to the pool."""
        whole = memoryview(self._bytes.numpy())
        return {slot.key: whole[slot.offset:slot.offset + slot.size] for slot in layout.slots}


class StagingPool:
    """Buffers up to a limit. Any thread."""

    def __init__(self, limit: int | None) -> None:
        """`limit` in bytes; None: BUFFERS_BY_DEFAULT of the largest checkpoint so far."""
        self._limit = limit
        self._grows = limit is None
        self._changed = threading.Condition()
        self._free: list[StagingBuffer] = []  # guarded by _changed
        self._allocated = 0  # bytes, likewise

    def acquire(self, size: int, pinned: bool, wait_s: float) -> StagingBuffer | None:
        """A buffer of at least `size` bytes, or None if none got free within wait_s.

        Raises:
            StockpotError: RESOURCE_EXHAUSTED if `size` is above the limit altogether.
        """
        with self._changed:
            if self._grows:  # the first checkpoint may lack the optimizer's state
                self._limit = max(self._limit or 1, BUFFERS_BY_DEFAULT * size)
            limit = self._limit
            assert limit is not None
            if size > limit:
                raise StockpotError(
                    ErrorCode.RESOURCE_EXHAUSTED,
                    f"a checkpoint of {size} bytes does not fit staging_bytes={limit}", False)
            deadline = time.monotonic() + wait_s
            while True:
                buffer = self._take(size, pinned, limit)
                remaining = deadline - time.monotonic()
                if buffer is not None or remaining <= 0:
                    return buffer
                self._changed.wait(remaining)

    def is_full(self, size: int) -> bool:
        """Whether a checkpoint of `size` bytes would have to wait for a buffer."""
        with self._changed:
            free = sum(buffer.capacity for buffer in self._free)
            return self._limit is not None and self._allocated - free + size > self._limit

    def release(self, buffer: StagingBuffer) -> None:
        """Takes a buffer back; nobody may look at it any more."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def _take(self, size: int, pinned: bool, limit: int) -> StagingBuffer | None:
        for index, buffer in enumerate(self._free):
            if buffer.capacity >= size and buffer.pinned == pinned:
                return self._free.pop(index)
        while self._free and self._allocated + size > limit:  # they do not fit: make room
            self._allocated -= self._free.pop().capacity
        if self._allocated + size > limit:
            return None
        self._allocated += size
        return StagingBuffer(size, pinned)
