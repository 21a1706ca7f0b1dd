"""Publishing and merging take memory for a few tensors, not for two models."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stockpot import CheckpointHook, RunConfig

from tests.daemon import Daemon, running
from tests.integration import endpoint

ALLOWED_BYTES = 200 << 20  # beside three times the largest tensor
RUN = RunConfig(merge_every=0, publish="request")


def resident_bytes(daemon: Daemon, field: str) -> int:
    """VmRSS: now; VmHWM: at most, since reset_peak."""
    assert daemon.process is not None
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found, status
    return int(found[1]) << 10


def reset_peak(daemon: Daemon) -> None:
    assert daemon.process is not None
    Path(f"/proc/{daemon.process.pid}/clear_refs").write_text("5")


@pytest.mark.skipif("STOCKPOT_SMOLLM2" not in os.environ, reason="needs STOCKPOT_SMOLLM2")
def test_a_publish_and_a_merge_take_a_few_tensors(tmp_path: Path) -> None:
    folder = Path(os.environ["STOCKPOT_SMOLLM2"])
    weights = load_file(folder / "model.safetensors")
    largest = max(tensor.nbytes for tensor in weights.values())
    whole = sum(tensor.nbytes for tensor in weights.values())
    allowed = 3 * largest + ALLOWED_BYTES
    assert allowed < 2 * whole, "two models would be within the bound: no test"
    generator = torch.Generator().manual_seed(1)
    with running(tmp_path / "data", "smollm2") as daemon:
        daemon.cli("import-base", "smollm2", folder)
        endpoint.wait_ready(daemon.url, 300)
        with CheckpointHook(daemon.thrift, run="m", base="smollm2", every=1, files=folder,
                            config=RUN, when_full="wait") as hook:
            for step in (1, 2):
                moved = {n: (t.float() + 1e-3 * torch.randn(t.shape, generator=generator)
                             ).to(t.dtype) for n, t in weights.items()}
                assert hook.save(step, moved, {"loss": 1.0})
                assert hook.flush(300)
        for command in (("publish", "m@1"), ("merge", "m@1", "m@2"),
                        ("merge", "m@1", "m@2", "--method", "mean"), ("publish", "m@2")):
            idle = resident_bytes(daemon, "VmRSS")
            reset_peak(daemon)
            daemon.cli(*command)
            grown = resident_bytes(daemon, "VmHWM") - idle
            assert grown <= allowed, (command, grown >> 20, allowed >> 20)
