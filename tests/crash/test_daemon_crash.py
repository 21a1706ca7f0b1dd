"""kill -9 of the daemon at random moments: nothing acknowledged is lost, training goes on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import stockpot
import torch
from safetensors.torch import load_file
from stockpot import Client

from tests import tiny_llama
from tests.crash.trainer import weights_at
from tests.daemon import Daemon

KILLS = int(os.environ.get("STOCKPOT_CRASH_KILLS", "50"))
RUN = "crash"


def acknowledged_steps(path: Path) -> dict[int, str]:
    """Step -> artifact of every complete line."""
    if not path.exists():
        return {}
    lines = path.read_text().split("\n")[:-1]
    return {int(step): artifact for step, artifact in (line.split() for line in lines)}


def check_step(client: Client, base: dict[str, torch.Tensor], step: int, artifact: str) -> None:
    """The step resolves to the acknowledged artifact, bit for bit that of the training loop."""
    assert client.lineage.resolve(f"{RUN}@{step}") == artifact
    stored = stockpot.load(client, artifact)
    expected = weights_at(base, step)
    for name, tensor in expected.items():
        assert torch.equal(stored[name].view(torch.int16), tensor.view(torch.int16)), (step, name)


def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    seed = int(os.environ.get("STOCKPOT_SEED", str(random.SystemRandom().randrange(2**31))))
    print(f"seed {seed} (set STOCKPOT_SEED to repeat)")
    rng = random.Random(seed)
    folder = tmp_path / "base"
    tiny_llama.make(folder)
    base = load_file(folder / "model.safetensors")
    daemon = Daemon(tmp_path / "data", "tiny")
    (tmp_path / "data").mkdir()
    daemon.start()
    daemon.cli("import-base", "tiny", folder)

    acks, stop = tmp_path / "acks", tmp_path / "stop"
    trainer = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("trainer.py"), daemon.thrift, RUN, folder, acks,
         stop])
    checked: set[int] = set()
    routes: dict[str, bytes] = {}
    try:
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.05, 1.5))
            with Client(daemon.thrift) as client:
                routes |= {r.name: r.target for r in client.control.routes()}
            time.sleep(rng.uniform(0.0, 0.05))
            daemon.kill()
            assert trainer.poll() is None, "the training loop ended"
            known = acknowledged_steps(acks)
            daemon.start()
            with Client(daemon.thrift) as client:
                for step in sorted(set(known) - checked)[-8:]:
                    check_step(client, base, step, known[step])
                    checked.add(step)
                now = {r.name: r.target for r in client.control.routes()}
                missing = set(routes) - set(now)
                assert not missing, missing
                moving = {f"{RUN}@latest", f"{RUN}@best"}
                for name, target in routes.items():
                    assert name in moving or now[name] == target, name
        steps_before = int(Path(f"{acks}.steps").read_text())
        time.sleep(1.0)
        assert int(Path(f"{acks}.steps").read_text()) > steps_before, "training stood still"
        stop.touch()
        assert trainer.wait(120) == 0
        known = acknowledged_steps(acks)
        with Client(daemon.thrift) as client:
            for step, artifact in known.items():
                check_step(client, base, step, artifact)
            for route in client.control.routes():
                stockpot.load(client, route.target.hex())
            jobs = client.control.jobs()
            assert not [j for j in jobs if j.state == "failed"], jobs
        scrub = daemon.cli("scrub")
        print(f"{KILLS} kills, {len(known)} acknowledged checkpoints, {len(routes)} routes\n"
              f"{scrub.stdout}")
        assert len(known) >= KILLS // 4
    finally:
        stop.touch()
        trainer.kill()
        trainer.wait()
        daemon.stop()
