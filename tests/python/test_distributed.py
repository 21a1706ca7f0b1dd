"""DDP, FSDP2 and torch.distributed.checkpoint with 2 and 4 Gloo processes: any n to any m."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import stockpot
import torch
import torch.distributed.checkpoint as dcp
from stockpot import Artifact, CheckpointHook, Client, ErrorCode, RunConfig, StockpotError
from stockpot.dcp import StockpotReader, StockpotWriter
from torch.distributed.checkpoint.api import CheckpointException

from tests.daemon import Daemon, bin_dir
from tests.python.conftest import REPOSITORY
from tests.python.distributed_job import JOB_TIMEOUT_S, same

QUIET = RunConfig(merge_every=0, publish="request")


def test_c11_c16_any_number_of_ranks_to_any_other(daemon: Daemon, client: Client, tiny_base: Path,
                                                  tmp_path: Path) -> None:
    """Ranks save, other ranks load, and one process reads what they stored."""
    settings = {"address": daemon.thrift, "folder": str(tmp_path), "base": str(tiny_base),
                "cli": str(bin_dir() / "stockpot")}
    path = f"{REPOSITORY}:{REPOSITORY / 'trainer_hooks/python/src'}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("distributed_job.py"),
         json.dumps(settings)],
        text=True, capture_output=True, timeout=JOB_TIMEOUT_S,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    for run in ("ddp4", "fsdp4", "hsdp4", "ddp2", "fsdp2"):
        expected = torch.load(tmp_path / f"{run}.pt", weights_only=False)
        stored = stockpot.load(client, f"{run}@2")
        assert same(stored, {name: expected["weights"][name] for name in stored}), run
        assert stored.keys() == expected["weights"].keys()
        artifact = Artifact(client, f"{run}@2")
        assert artifact.root("head.weight") == "embed.weight", run  # C12
        log = {entry.step.step: entry.step.metrics for entry in client.lineage.log(run)}
        assert log[1] == {"loss": 1.0} and log[2] == {"loss": 2.0}
    for run in ("dcp-fsdp4", "dcp-ddp2"):
        expected = torch.load(tmp_path / f"{run}.pt", weights_only=False)
        stored = stockpot.load(client, f"{run}@2")
        stored.pop("rank_note")  # differs between ranks: DCP keeps one of them
        assert all(same(value, expected["weights"][name]) for name, value in stored.items()), run


def test_dcp_in_one_process(daemon: Daemon, client: Client, tiny_base: Path) -> None:
    """All of a state dict, also what is no tensor; errors say what is wrong."""
    weight = torch.randn(5, 3)
    state = {"model": {"a": weight, "b": torch.arange(7), "tied": weight},
             "optim": {"step": torch.tensor(3.0), "lr": 0.1, "betas": (0.9, 0.99), "on": True},
             "epoch": 4}
    writer = StockpotWriter(daemon.thrift, "one", "tiny", config=QUIET, files=tiny_base,
                            metrics={"loss": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP: "assuming the intent is to save in one process"
        dcp.save(state, checkpoint_id="one@3", storage_writer=writer)
        assert writer.artifact == client.lineage.resolve("one@3")
        assert client.lineage.log("one")[0].step.metrics == {"loss": 0.5}
        stored = stockpot.load(client, "one@3")
        assert same(stored, state["model"])
        assert stored["tied"].data_ptr() == stored["a"].data_ptr()  # C12

        target = {"model": {name: torch.zeros_like(v) for name, v in state["model"].items()},
                  "optim": {"step": torch.tensor(0.0), "lr": 0.0, "betas": (), "on": False},
                  "epoch": 0}
        dcp.load(target, checkpoint_id="one@3", storage_reader=StockpotReader(daemon.thrift))
        assert same(target["model"], state["model"]) and target["epoch"] == 4
        assert same(target["optim"]["step"], state["optim"]["step"])
        assert target["optim"]["lr"] == 0.1 and target["optim"]["on"] is True

        # What a hook saved can be read as well.
        with CheckpointHook(daemon.thrift, "hook", "tiny", every=1, config=QUIET, files=tiny_base
                            ) as hook:
            hook.on_step(1, state["model"])
        target = {"model": {name: torch.zeros_like(v) for name, v in state["model"].items()}}
        dcp.load(target, checkpoint_id="hook@latest", storage_reader=StockpotReader(daemon.thrift))
        assert same(target["model"], state["model"])

        for bad, named in (({"model": {"a": torch.zeros(5, 3).double()}}, "a is torch.float32"),
                           ({"model": {"nobody": torch.zeros(1)}}, "nobody")):
            with pytest.raises(CheckpointException, match=named):
                dcp.load(bad, checkpoint_id="one@3", storage_reader=StockpotReader(daemon.thrift))
        with pytest.raises(CheckpointException, match="epoch is a object"):
            dcp.save({"model": {"a": weight}, "epoch": object()}, checkpoint_id="one@4",
                     storage_writer=writer)
    assert [entry.step.step for entry in client.lineage.log("one")] == [3]


@pytest.mark.parametrize(("id", "valid"), [
    ("run@3", True), ("r.u-n@0", True), ("run", False), ("/tmp/run", False), ("run@x", False),
    ("a/b@3", False)])
def test_checkpoint_ids(id: str, valid: bool) -> None:
    assert StockpotWriter.validate_checkpoint_id(id) is valid
    writer = StockpotWriter("127.0.0.1:1", "run", "b")
    if id == "run@3":
        writer.reset(id)
        assert writer.step == 3
    else:
        with pytest.raises(StockpotError) as raised:
            writer.reset(id)
        assert raised.value.code == ErrorCode.INVALID_ARGUMENT
