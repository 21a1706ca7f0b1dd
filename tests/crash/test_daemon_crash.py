"""kill -9 of the daemon, at random moments and at named places of the store (STOCKPOT_FAILPOINTS):
nothing acknowledged is lost, training goes on.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import stockpot
import torch
from safetensors.torch import load_file
from stockpot import Client, Kind

from tests import tiny_llama
from tests.crash.trainer import weights_at
from tests.daemon import Daemon

KILLS = int(os.environ.get("STOCKPOT_CRASH_KILLS", "50"))
RUN = "crash"
# Saving, publishing, merging and collecting all pass these.
PLACES = ["put.checked=kill@9", "pack.written=kill", "pack.sync.data=kill@2",
          "commit.before_write=kill@6", "commit.after_write=kill@6", "commit.indexed=kill@3",
          "retention.applied=kill", "gc.marked=kill",
          "pack.sync=error,commit.before_write=error@4,commit.after_write=error@8"]
DIES_S = 120
KEEP_LAST = 4


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


@contextlib.contextmanager
def training(tmp_path: Path) -> Iterator[tuple[Daemon, subprocess.Popen[bytes], Path, Path,
                                               dict[str, torch.Tensor]]]:
    """A daemon, a training loop at it, where that notes what was acknowledged and when to stop,
    and the base.
    """
    folder = tmp_path / "base"
    tiny_llama.make(folder, hidden=256)  # tensors that go into packs, not only small ones
    daemon = Daemon(tmp_path / "data", "tiny")
    (tmp_path / "data").mkdir()
    daemon.start()
    daemon.cli("import-base", "tiny", folder)
    acks, stop = tmp_path / "acks", tmp_path / "stop"
    trainer = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("trainer.py"), daemon.thrift, RUN, folder, acks,
         stop])
    try:
        yield daemon, trainer, acks, stop, load_file(folder / "model.safetensors")
    finally:
        stop.touch()
        trainer.kill()
        trainer.wait()
        daemon.environment = {}
        daemon.stop()


@contextlib.contextmanager
def paused(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """The process stands still: no new checkpoint makes retention take the newest known one."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def wait_for_steps(acks: Path, more_than: int) -> None:
    """Until so many checkpoints were acknowledged."""
    deadline = time.monotonic() + DIES_S
    while len(acknowledged_steps(acks)) <= more_than:
        assert time.monotonic() < deadline, "no checkpoint is acknowledged any more"
        time.sleep(0.02)


def wait_for_training(steps: Path) -> None:
    """Until the loop has gone on."""
    before = int(steps.read_text())
    deadline = time.monotonic() + DIES_S
    while int(steps.read_text()) == before:
        assert time.monotonic() < deadline, "training stood still"
        time.sleep(0.02)


def wait_for_jobs(client: Client) -> None:
    """Until none is left to run."""
    deadline = time.monotonic() + DIES_S
    while any(job.state in ("queued", "running") for job in client.control.jobs()):
        assert time.monotonic() < deadline, client.control.jobs()
        time.sleep(0.1)


def test_named_places_kill_the_daemon(tmp_path: Path) -> None:
    with training(tmp_path) as (daemon, trainer, acks, stop, base):
        wait_for_steps(acks, 0)
        daemon.cli("retention", RUN, "--keep-last", str(KEEP_LAST), "--grace-hours", "0")
        for place in PLACES:
            daemon.kill()
            daemon.environment = {"STOCKPOT_FAILPOINTS": place}
            daemon.start()
            if place.endswith("kill") or "kill@" in place:
                assert daemon.process is not None
                assert daemon.process.wait(DIES_S) == -signal.SIGKILL, place
                daemon.environment = {}
                daemon.start()
            wait_for_steps(acks, len(acknowledged_steps(acks)))
            with paused(trainer), Client(daemon.thrift) as client:
                known = acknowledged_steps(acks)
                newest = max(known)
                check_step(client, base, newest, known[newest])
            assert trainer.poll() is None, "the training loop ended"
        stop.touch()
        assert trainer.wait(DIES_S) == 0
        known = acknowledged_steps(acks)
        with Client(daemon.thrift) as client:
            wait_for_jobs(client)
            daemon.cli("gc")  # retention has nothing left to do
            kept = [entry.artifact for entry in client.lineage.log(RUN)
                    if entry.step.kind == Kind.CHECKPOINT and not entry.artifact.purge_ms]
            assert max(known) == max(a.step for a in kept)
            assert len(kept) >= KEEP_LAST
            for artifact in kept:
                digest = artifact.digest.hex()
                check_step(client, base, artifact.step, known.get(artifact.step, digest))
            for route in client.control.routes():
                stockpot.load(client, route.target.hex())
        daemon.cli("scrub")


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
        wait_for_training(Path(f"{acks}.steps"))
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
