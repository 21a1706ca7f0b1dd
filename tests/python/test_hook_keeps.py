"""What costs no checkpoint.

A limit that was measured early, memory that is full while the disk is not, refusals that somebody
can put right, a metric that is no number.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stockpot import CheckpointHook, Client, ErrorCode, RunConfig, StockpotError, adopt_merge
from transformers import AutoModelForCausalLM

from tests.daemon import Daemon, running
from tests.python.conftest import poll

QUIET = RunConfig(merge_every=0, publish="request")


def hook_of(daemon: Daemon, run: str = "kept", **options: object) -> CheckpointHook:
    return CheckpointHook(daemon.thrift, run=run, base="tiny", every=1,
                          **{"config": QUIET, **options})  # type: ignore[arg-type]


def steps_of(client: Client, run: str) -> list[int]:
    return [entry.step.step for entry in client.lineage.log(run)]


def test_the_automatic_limit_grows_with_the_checkpoints(daemon: Daemon, tiny_base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    with hook_of(daemon, when_full="wait") as hook:
        assert hook.save(0, model, state={"optimizer": optimizer})  # no moments yet
        for step in range(1, 5):
            model(torch.arange(8)[None]).logits.square().mean().backward()
            optimizer.step()
            assert hook.save(step, model, state={"optimizer": optimizer}), hook.stats
        assert hook.flush()
    assert hook.stats.committed == 5


@pytest.mark.parametrize("value", [None, "abc", torch.ones(3), {}], ids=str)
def test_a_metric_that_is_no_number_costs_itself_only(
        daemon: Daemon, client: Client, tiny_base: Path, value: object,
        caplog: pytest.LogCaptureFixture) -> None:
    weights = load_file(tiny_base / "model.safetensors")
    with hook_of(daemon) as hook, caplog.at_level(logging.WARNING):
        assert hook.save(1, weights, {"eval_loss": value, "loss": torch.tensor(2.5)})
        assert hook.flush()
    [entry] = client.lineage.log("kept")
    assert entry.step.metrics == {"loss": 2.5}
    assert "'eval_loss' of step 1 is no number" in caplog.text


def test_full_memory_spills_to_the_spool(daemon: Daemon, client: Client, tiny_base: Path,
                                         tmp_path: Path) -> None:
    """A daemon that does not answer: two copies fit the memory, twelve saves come."""
    weights = load_file(tiny_base / "model.safetensors")
    with hook_of(daemon, spool_dir=tmp_path / "spool", when_full="wait", max_wait_s=30) as hook:
        hook.save(1, weights)
        assert hook.flush()
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            for step in range(2, 14):
                assert hook.save(step, {n: t + step for n, t in weights.items()}), hook.stats
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        assert hook.flush(120), hook.stats
    assert hook.stats.skipped == 0 and hook.stats.failed == 0
    assert hook.stats.spooled >= 8
    assert steps_of(client, "kept") == list(range(1, 14))


def test_what_somebody_can_put_right_waits_in_the_spool(tmp_path: Path, tiny_base: Path,
                                                         caplog: pytest.LogCaptureFixture) -> None:
    """The base is not imported yet."""
    (tmp_path / "data").mkdir()
    weights = load_file(tiny_base / "model.safetensors")
    with running(tmp_path / "data", "tiny") as daemon, Client(daemon.thrift) as client:
        with caplog.at_level(logging.WARNING), \
                hook_of(daemon, spool_dir=tmp_path / "spool") as hook:
            assert hook.save(1, weights) and hook.save(2, weights)
            assert hook.flush(30) and hook.stats.failed == 0 and hook.stats.spooled == 2
            assert not hook.close()
            assert f"2 checkpoints wait in {tmp_path / 'spool' / 'kept'}" in caplog.text
        with hook_of(daemon, spool_dir=tmp_path / "spool") as hook:
            daemon.cli("import-base", "tiny", tiny_base)
            poll(lambda: hook.stats.committed == 2, 60)
            assert hook.close()
        assert steps_of(client, "kept") == [1, 2]


def test_close_says_whether_all_is_stored(daemon: Daemon, tiny_base: Path) -> None:
    weights = load_file(tiny_base / "model.safetensors")
    hook = hook_of(daemon)
    assert hook.save(1, weights) and hook.close() and hook.close()
    hook = hook_of(daemon)
    assert hook.save(1, {n: t + 1 for n, t in weights.items()})  # step 1 exists
    assert hook.flush() and not hook.close() and not hook.close()


@pytest.mark.parametrize("run", ["a@b", "..", "-x", "a b", "a/b", "", "ä", "x" * 129])
def test_names_that_no_run_can_have_are_refused_at_once(run: str) -> None:
    with pytest.raises(StockpotError) as raised:
        CheckpointHook("127.0.0.1:1", run=run, base="tiny")
    assert raised.value.code == ErrorCode.INVALID_ARGUMENT


def test_a_refused_upload_leaves_no_session_open(daemon: Daemon, client: Client,
                                                 tiny_base: Path) -> None:
    weights = load_file(tiny_base / "model.safetensors")
    with hook_of(daemon, config=RunConfig(merge_every=0, quota_bytes=1000)) as hook:
        hook.save(1, weights)
        poll(lambda: hook.stats.retries >= 3, 60)
        assert client.control.status().open_sessions <= 1
        hook.close(0.1)


def test_weights_that_are_not_finite_are_not_adopted(daemon: Daemon, client: Client,
                                                     tiny_base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    broken = {n: t.clone() for n, t in before.items()}
    broken["model.norm.weight"][3] = float("nan")
    with hook_of(daemon) as hook:
        hook.save(1, broken)
        assert hook.flush()
    with pytest.raises(StockpotError, match=r"model\.norm\.weight has values that are NaN"):
        adopt_merge(client, "kept@1", model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_going_back_branches_into_another_run(daemon: Daemon, client: Client, tiny_base: Path,
                                              caplog: pytest.LogCaptureFixture) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    with hook_of(daemon, when_full="wait") as hook:
        for step in (1, 2, 3):
            hook.save(step, {n: t + step for n, t in model.state_dict().items()})
        assert hook.flush()
    with caplog.at_level(logging.WARNING), hook_of(daemon) as hook:
        assert hook.resume(model, at="kept@1").step == 1
        assert "goes back to step 1, but the run has steps up to 3" in caplog.text
    caplog.clear()
    with hook_of(daemon, run="branch") as hook:
        resumed = hook.resume(model, at="kept@1")
        hook.save(2, model)
        assert hook.flush()
    assert "goes back" not in caplog.text
    assert steps_of(client, "branch") == [2] and steps_of(client, "kept") == [1, 2, 3]
    parents = [edge.parent.hex() for edge in client.lineage.show("branch@2").parents]
    assert resumed.artifact in parents
