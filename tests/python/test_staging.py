"""What is copied: logical content, types, ties; and the limit on buffers."""

from __future__ import annotations

import threading

import pytest
import torch
from stockpot import ErrorCode, StockpotError
from stockpot.sharding import Place, pieces_of
from stockpot.staging import (
    ALIGNMENT_BYTES,
    PIECE_BYTES,
    CopyThreads,
    Layout,
    Planner,
    StagingBuffer,
    StagingPool,
)

from tests.python.conftest import poll

EVERY_DTYPE = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
]


def stage(tensors: dict[str, torch.Tensor], cast_to: torch.dtype | None = None
          ) -> tuple[Layout, dict[str, bytes]]:
    layout = Layout.plan(tensors, cast_to)
    buffer = StagingBuffer(layout.size, pinned=False)
    threads = CopyThreads(3)
    buffer.fill(layout, tensors, threads)
    threads.stop()
    views = buffer.views(layout)
    return layout, {slot.name: bytes(views[slot.key]) for slot in layout.slots}


def bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_c13_every_dtype_is_kept(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (7, 5 * dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype)
    layout, staged = stage({"x": tensor})
    assert layout.slots[0].dtype == dtype
    assert staged["x"] == raw.numpy().tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (64, 33), (2, 3, 5, 7)])
def test_shapes(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    layout, staged = stage({"x": tensor})
    assert layout.slots[0].shape == shape
    assert staged["x"] == bytes_of(tensor)


def test_views_are_stored_as_their_logical_content(seed: int) -> None:
    whole = torch.randn(40, 24)
    tensors = {"transposed": whole.t(), "strided": whole[::3, 1::2], "row": whole[5],
               "expanded": whole[:1].expand(6, 24),
               "permuted": whole.view(4, 10, 24).permute(2, 0, 1),
               "negated": torch._neg_view(whole), "parameter": torch.nn.Parameter(whole + 1)}
    layout, staged = stage(tensors)
    for name, tensor in tensors.items():
        assert staged[name] == bytes_of(tensor.detach().resolve_neg()), name
    assert not any(slot.alias_of for slot in layout.slots)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_large_and_small_tensors_with_any_number_of_threads(count: int, seed: int) -> None:
    sizes = [1, 3 * PIECE_BYTES + 5, PIECE_BYTES, PIECE_BYTES - 1, 17]
    tensors = {f"t{size}": torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes}
    layout = Layout.plan(tensors, None)
    buffer = StagingBuffer(layout.size, pinned=False)
    threads = CopyThreads(count)
    buffer.fill(layout, tensors, threads)
    threads.stop()
    views = buffer.views(layout)
    for slot in layout.slots:
        assert bytes(views[slot.key]) == bytes_of(tensors[slot.name]), slot.name


def test_nan_and_negative_zero_keep_their_bits() -> None:
    bits = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000, 0x00000001], dtype=torch.int32)
    _, staged = stage({"x": bits.view(torch.float32)})
    assert staged["x"] == bytes_of(bits)


def test_c12_tied_weights_are_one_tensor_and_an_alias() -> None:
    weight = torch.randn(10, 4)
    layout, _ = stage({"embed": weight, "other": torch.randn(10, 4), "head": weight})
    assert [(slot.name, slot.alias_of) for slot in layout.slots] == [
        ("embed", ""), ("other", ""), ("head", "embed")]
    assert layout.size == 2 * -(-10 * 4 * 4 // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def test_a_view_of_part_of_a_tensor_is_no_alias() -> None:
    weight = torch.randn(10, 4)
    layout, _ = stage({"whole": weight, "half": weight[:5], "turned": weight.t().t(),
                       "reshaped": weight.view(4, 10)})
    assert [slot.alias_of for slot in layout.slots] == ["", "", "whole", ""]


def test_cast_rounds_floats_to_nearest_even_and_leaves_the_rest() -> None:
    tensors = {"w": torch.tensor([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8]), "n": torch.tensor([1, 2])}
    layout, staged = stage(tensors, cast_to=torch.bfloat16)
    assert [slot.dtype for slot in layout.slots] == [torch.bfloat16, torch.int64]
    assert staged["w"] == bytes_of(torch.tensor([1.0, 1.0, 1.0 + 2**-6], dtype=torch.bfloat16))
    assert staged["n"] == bytes_of(tensors["n"])


@pytest.mark.parametrize(("tensor", "message"), [
    (torch.randn(3, dtype=torch.complex64), "complex64"),
    (torch.eye(3).to_sparse(), "dense"),
    (torch.empty(3, device="meta"), "dense"),
    ("text", "str"),
], ids=["complex", "sparse", "meta", "no tensor"])
def test_what_cannot_be_stored_is_refused(tensor: object, message: str) -> None:
    with pytest.raises(StockpotError, match=message) as raised:
        Layout.plan({"x": tensor}, None)
    assert raised.value.code == ErrorCode.INVALID_ARGUMENT


def test_buffers_are_reused_and_limited() -> None:
    pool = StagingPool(limit=1000)
    first = pool.acquire(500, pinned=False, wait_s=0)
    second = pool.acquire(500, pinned=False, wait_s=0)
    assert first is not None and second is not None
    assert pool.acquire(1, pinned=False, wait_s=0) is None
    pool.release(first)
    assert pool.acquire(400, pinned=False, wait_s=0) is first


def test_small_buffers_make_room_for_a_larger_one() -> None:
    pool = StagingPool(limit=1000)
    buffers = [pool.acquire(300, pinned=False, wait_s=0) for _ in range(3)]
    for buffer in buffers:
        pool.release(buffer)
    large = pool.acquire(1000, pinned=False, wait_s=0)
    assert large is not None and large.capacity == 1000
    assert pool.acquire(1, pinned=False, wait_s=0) is None


def test_a_checkpoint_above_the_limit_is_an_error() -> None:
    with pytest.raises(StockpotError, match="staging_bytes=1000"):
        StagingPool(limit=1000).acquire(1001, pinned=False, wait_s=0)


def test_without_a_limit_two_checkpoints_fit() -> None:
    pool = StagingPool(limit=None)
    assert pool.acquire(100, pinned=False, wait_s=0) is not None
    assert pool.acquire(100, pinned=False, wait_s=0) is not None
    assert pool.acquire(100, pinned=False, wait_s=0) is None


def test_waiting_ends_when_a_buffer_gets_free() -> None:
    pool = StagingPool(limit=100)
    buffer = pool.acquire(100, pinned=False, wait_s=0)
    got: list[StagingBuffer | None] = []
    waiter = threading.Thread(target=lambda: got.append(pool.acquire(100, False, wait_s=60)))
    waiter.start()
    poll(lambda: len(pool._changed._waiters) == 1, 10)
    pool.release(buffer)
    waiter.join(10)
    assert got == [buffer]


def test_a_plan_is_made_again_for_whatever_it_depends_on() -> None:
    weight, other = torch.randn(4, 6), torch.randn(4, 6)
    planner = Planner(None)

    def plan(tensors: dict[str, torch.Tensor], group: str = "") -> Layout:
        return planner.plan(pieces_of(tensors, Place(), group=group))

    first = plan({"a": weight, "b": other})
    assert plan({"a": weight + 1, "b": other}) is first  # other values and memory, the same plan
    changed = {
        "name": {"a": weight, "c": other},
        "order": {"b": weight, "a": other},
        "shape": {"a": weight, "b": torch.randn(6, 4)},
        "dtype": {"a": weight, "b": other.double()},
        "tie": {"a": weight, "b": weight},
        "fewer": {"a": weight},
        "more": {"a": weight, "b": other, "c": other + 1},
    }
    for what, tensors in changed.items():
        plan({"a": weight, "b": other})
        assert plan(tensors) == Layout.plan(tensors, None), what
    assert plan({"a": weight}, "optimizer").slots[0].group == "optimizer"
    with pytest.raises(StockpotError, match="b is not a dense tensor"):
        plan({"a": weight, "b": torch.empty(4, 6, device="meta")})
