"""A job that was killed continues bit for bit (C16 for one rank; several: test_distributed.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stockpot
import torch
from stockpot import CheckpointHook, Client, ErrorCode, StockpotError

from tests.daemon import Daemon
from tests.python.conftest import REPOSITORY
from tests.python.resuming_trainer import QUIET, make_model

STEPS = 11


def train(daemon: Daemon, run: str, folder: Path, out: Path, kill_at: int = 0) -> str:
    source = REPOSITORY / "trainer_hooks/python/src"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("resuming_trainer.py"), daemon.thrift, run,
         folder, str(STEPS), out, str(kill_at)], text=True, capture_output=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"})
    expected = -signal.SIGKILL if kill_at else 0
    assert done.returncode == expected, done.stderr[-3000:]
    return done.stdout


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def test_c16_a_killed_job_resumes_bit_for_bit(daemon: Daemon, tiny_base: Path, tmp_path: Path
                                              ) -> None:
    """Weights, optimizer, schedule, loader, dropout and counters, killed twice."""
    assert "resumed 0" in train(daemon, "whole", tiny_base, tmp_path / "whole.pt")
    assert "resumed 0" in train(daemon, "broken", tiny_base, tmp_path / "no.pt", kill_at=4)
    assert "resumed 4" in train(daemon, "broken", tiny_base, tmp_path / "no.pt", kill_at=8)
    assert "resumed 8" in train(daemon, "broken", tiny_base, tmp_path / "broken.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    broken = torch.load(tmp_path / "broken.pt", weights_only=False)
    for key in whole:
        assert same(whole[key], broken[key]), key
    with Client(daemon.thrift) as client:
        edges = client.lineage.show("broken@6").parents
        assert [edge.parent.hex() for edge in edges if edge.type == "resumed_from"] == [
            client.lineage.resolve("broken@4")]


def test_what_does_not_fit_changes_nothing(daemon: Daemon, tiny_base: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    with CheckpointHook(daemon.thrift, "r", "tiny", every=1, config=QUIET, files=tiny_base) as hook:
        assert hook.resume(model) is None
        assert hook.on_step(1, model, state={"optimizer": optimizer, "count": 3})
        assert hook.flush(60) and hook.stats.committed == 1, hook.stats

    def refused(model: torch.nn.Module, state: dict[str, Any] | None, named: str) -> None:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        drawn = torch.get_rng_state()
        with pytest.raises(StockpotError, match=named) as raised:
            stockpot.resume(daemon.thrift, "r", model, state=state)
        assert raised.value.code == ErrorCode.INVALID_ARGUMENT
        assert same(before, dict(model.state_dict()))
        assert torch.equal(drawn, torch.get_rng_state())

    other = torch.nn.Sequential(*make_model(), torch.nn.Linear(1, 1))
    refused(other, None, r"5\.weight")
    refused(make_model()[:4], None, r"4\.weight")
    refused(make_model().double(), None, r"0\.weight is torch.float32")
    refused(make_model(), {"schedule": 1}, "schedule")
    refused(make_model(), {"optimizer": 1}, "optimizer")
    few = make_model()
    refused(few, {"optimizer": torch.optim.AdamW(few[0].parameters())}, "optimizer")
    fresh = make_model()
    state = {"optimizer": torch.optim.AdamW(fresh.parameters(), lr=7), "count": 0}
    resumed = stockpot.resume(daemon.thrift, "r", fresh, state=state)
    assert resumed is not None and resumed.step == 1 and resumed.values == {"count": 3}
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert same(state["optimizer"].state_dict(), optimizer.state_dict())
    assert stockpot.resume(daemon.thrift, "nobody", fresh) is None
    # A decision that the daemon refuses is not made by each rank for itself.
    with pytest.raises(StockpotError, match="key"):
        stockpot.resume(daemon.thrift, "r", fresh, key="k" * 1000)


def test_weights_alone_are_not_taken_for_a_whole_state(daemon: Daemon, tiny_base: Path) -> None:
    model = make_model()
    with CheckpointHook(daemon.thrift, "r", "tiny", every=1, config=QUIET, files=tiny_base) as hook:
        assert hook.on_step(1, model) and hook.flush(60)
    with pytest.raises(StockpotError, match="has no training state") as raised:
        stockpot.resume(daemon.thrift, "r", make_model(), state={"count": 0})
    assert raised.value.code == ErrorCode.NOT_FOUND
    assert stockpot.resume(daemon.thrift, "r", make_model()) is not None


def test_state_that_cannot_be_stored_costs_that_save_only(daemon: Daemon, tiny_base: Path) -> None:
    with CheckpointHook(daemon.thrift, "r", "tiny", every=1, config=QUIET, files=tiny_base) as hook:
        assert not hook.on_step(1, {"x": torch.ones(3)}, state={"loader": {"file": object()}})
        assert "loader/file is a object" in hook.stats.last_error
        assert hook.on_step(2, {"x": torch.ones(3)}, state={"loader": {"file": "name"}})
        assert hook.flush(60) and hook.stats.committed == 1, hook.stats
