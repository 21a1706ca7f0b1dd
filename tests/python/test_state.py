"""Training state as JSON and tensors: exact, and nothing from outside is executed."""

from __future__ import annotations

import json
import math
import pickle
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from stockpot import ErrorCode, StockpotError, state
from stockpot.loaders import ResumableLoader


def round_trip(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(state.pack(value, tensors, "x"))
    return state.unpack(json.loads(text), tensors.__getitem__)


@pytest.mark.parametrize("value", [
    None, True, 0, -(2**70), 0.1, -0.0, 5e-324, "", "text \u2603", [], [1, [2.5, None]], (),
    (1, "a"), {}, {"a": {"b": (1, [2])}}, {1: "a", None: 2, 2.5: 4},
    {"$tensor": "not one"}, {"a$": 1}, b"", b"\x00\xff", {3, 1}, Counter({5: 2, 9: 1}),
    OrderedDict(a=1, b=[2]), random.Random(3).getstate(),
], ids=str)
def test_plain_values_come_back(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value) or isinstance(value, OrderedDict)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_floats_that_json_lacks(value: float) -> None:
    assert str(round_trip(value)) == str(value)


@pytest.mark.parametrize("dtype", [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8,
    torch.bool, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_tensors_keep_their_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = math.prod(shape) * dtype.itemsize
    value = torch.randint(0, 2, (size,), dtype=torch.uint8).view(dtype).view(shape)
    back = round_trip({"t": [value]})["t"][0]
    assert back.dtype == dtype and back.shape == value.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_numpy_values_keep_their_type() -> None:
    for value in (np.float32(1.1), np.int64(-3), np.bool_(True), np.arange(6).reshape(2, 3).T,
                  np.random.default_rng(0).random((3, 2)).astype(np.float16)):
        back = round_trip(value)
        assert back.dtype == value.dtype and np.array_equal(back, value), value


class Foreign:
    """What cannot be described by data."""


@pytest.mark.parametrize(("value", "place"), [
    (Foreign(), "x is a Foreign"), ({"a": [0, Foreign()]}, "x/a/1 is a Foreign"),
    ({"a": {(1, 2): 3}}, "x/a has a key"), (lambda: 0, "function"), ([[]], None),
    ({"a": torch.ones(2, dtype=torch.complex64)}, None),
], ids=str)
def test_what_cannot_be_stored_is_named(value: Any, place: str | None) -> None:
    if place is None:
        state.pack(value, {}, "x")
        return
    with pytest.raises(StockpotError, match=place) as raised:
        state.pack(value, {}, "x")
    assert raised.value.code == ErrorCode.INVALID_ARGUMENT


def test_depth_is_limited() -> None:
    value: list[Any] = []
    for _ in range(2000):
        value = [value]
    for call in (lambda: state.pack(value, {}, "x"), lambda: state.unpack(value, {}.__getitem__)):
        with pytest.raises(StockpotError, match="deep"):
            call()


@pytest.mark.parametrize("document", [
    {"$pickle": "gASVIQAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjARleGl0lIWUUpQu"}, {"$eval": "1"},
    {"$tensor": "nobody"}, {"$tensor": 3}, {"$tensor": []}, {"$scalar": ["F32", "AAA="]},
    {"$scalar": ["X", "AAAAAA=="]}, {"$scalar": 1}, {"$number": ["O", "AAAAAAAAAAA="]},
    {"$number": ["<f4", "A"]}, {"$number": ["<f4", ""]}, {"$float": "1"}, {"$bytes": "\u2603"},
    {"$dtype": "X"}, {"$tuple": 1}, {"$set": [[1]]}, {"$map": [[1]]}, {"$map": [[[], 1]]},
    {"$counter": 1},
], ids=str)
def test_hostile_documents_are_refused(document: Any) -> None:
    with pytest.raises(StockpotError) as raised:
        state.unpack(document, {}.__getitem__)
    assert raised.value.code == ErrorCode.CORRUPTION


def test_generators_go_back(seed: int) -> None:
    saved = round_trip(state.rng_state())

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(())),
                random.gauss(0, 1), float(np.random.randn())]

    first = draw()
    draw()
    state.set_rng_state(saved)
    assert draw() == first
    assert pickle.dumps(saved)  # nothing lazy in it


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own_generator", [False, True])
def test_a_loader_continues_in_the_middle_of_an_epoch(workers: int, own_generator: bool,
                                                      seed: int) -> None:
    def make() -> ResumableLoader[torch.Tensor]:
        generator = torch.Generator().manual_seed(7) if own_generator else None
        return ResumableLoader(torch.utils.data.DataLoader(
            torch.arange(10), batch_size=3, shuffle=True, num_workers=workers,
            generator=generator))

    def run(loader: ResumableLoader[torch.Tensor], until: int, save_at: int = -1
            ) -> tuple[list[list[int]], Any]:
        seen: list[list[int]] = []
        saved = None
        while True:
            for batch in loader:
                seen.append([*batch.tolist(), int(torch.randint(0, 100, ()))])
                if len(seen) == save_at:
                    saved = round_trip({"loader": loader.state_dict(), "rng": state.rng_state()})
                if len(seen) == until:
                    return seen, saved

    save_points = (2,) if workers else (1, 3, 4, 6)
    for save_at in save_points:
        torch.manual_seed(seed)
        expected, saved = run(make(), 11, save_at)
        loader = make()
        torch.manual_seed(seed + 1)
        loader.load_state_dict(saved["loader"])
        state.set_rng_state(saved["rng"])
        continued, _ = run(loader, 11 - save_at)
        assert continued == expected[save_at:], save_at
