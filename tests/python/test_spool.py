"""The spool: what it holds on disk, and that nothing of it is lost or sent twice."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import stockpot
import torch
from safetensors.torch import load_file
from stockpot import CheckpointHook, Client, ErrorCode, RunConfig, StockpotError
from stockpot.sharding import Box, Piece, Place
from stockpot.spool import Contents, Spool
from stockpot.staging import CopyThreads, Layout, StagingBuffer

from tests.daemon import Daemon, bin_dir, free_port
from tests.python.conftest import REPOSITORY, poll
from tests.python.test_hook import noisy, same_bits

QUIET = RunConfig(merge_every=0, publish="request")
HEADER = {"run": "r", "base": "b", "config": vars(QUIET), "tags": {}}


def contents_of(step: int, tensors: dict[str, torch.Tensor]) -> Contents:
    layout = Layout.plan(tensors, None)
    buffer = StagingBuffer(layout.size, pinned=False)
    threads = CopyThreads(1)
    buffer.fill(layout, tensors, threads)
    threads.stop()
    return Contents(step, layout, buffer.views(layout),
                    {"config.json": b"{}", "empty": b""},
                    {"loss": 2.5, "nan": float("nan")}, Place())


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(33, 7, generator=generator)
    return {"mask": torch.ones(13, dtype=torch.bool), "embed": embed, "head": embed,
            "half": embed.bfloat16().t(), "none": torch.empty(0, 3), "one": torch.tensor(3.5)}


def make_hook(address: str, folder: Path, **options: object) -> CheckpointHook:
    given = {"run": "r", "base": "tiny", "every": 1, "config": QUIET, "when_full": "wait",
             "spool_dir": folder} | options
    return CheckpointHook(address, **given)


def test_an_entry_is_what_the_document_says(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "r", Place(), 1 << 30)
    tensors = some_tensors()
    spool.add(contents_of(7, tensors), HEADER)
    folder = tmp_path / "r/rank-0-of-1/step-000000000007"
    stored = load_file(folder / "tensors.safetensors")  # by the library
    assert stored.keys() == tensors.keys() - {"head"}
    assert all(same_bits(stored[name], tensors[name]) for name in stored)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == "stockpot-spool" and manifest["version"] == 1
    assert (manifest["run"], manifest["step"], manifest["rank"], manifest["world"]) == (
        "r", 7, 0, 1)
    assert manifest["aliases"] == {"head": "embed"}
    assert manifest["metrics"] == {"loss": 2.5, "nan": "nan"}
    assert (folder / "files/config.json").read_bytes() == b"{}"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["LOCK", folder.name]
    entry = spool.first()
    assert entry is not None and entry.contents.step == 7
    assert {slot.name: slot.alias_of for slot in entry.contents.layout.slots}["head"] == "embed"
    for slot in entry.contents.layout.slots:
        if not slot.alias_of:
            expected = tensors[slot.name].contiguous().flatten().view(torch.uint8).numpy()
            assert bytes(entry.contents.bytes_of[slot.key]) == expected.tobytes()
    entry.close()
    spool.remove(entry.folder)
    assert spool.first() is None and spool.size() == 0
    assert [path.name for path in folder.parent.iterdir()] == ["LOCK"]


def test_one_owner_and_no_leftovers(tmp_path: Path) -> None:
    folder = tmp_path / "r/rank-0-of-1"
    (folder / ".tmp-step-000000000001").mkdir(parents=True)
    (folder / ".gone-step-000000000002").mkdir()
    spool = Spool(tmp_path, "r", Place(), 1 << 30)
    assert [path.name for path in folder.iterdir()] == ["LOCK"]
    with pytest.raises(StockpotError, match="another process") as raised:
        Spool(tmp_path, "r", Place(), 1 << 30)
    assert raised.value.code == ErrorCode.ALREADY_EXISTS
    spool.close()
    Spool(tmp_path, "r", Place(), 1 << 30).close()


def test_ranks_of_another_world_are_taken_over(tmp_path: Path) -> None:
    for rank in range(4):
        spool = Spool(tmp_path, "r", Place(rank, 4), 1 << 30)
        spool.add(contents_of(10 + rank, some_tensors()), HEADER)
        spool.close()
    first, second = (Spool(tmp_path, "r", Place(rank, 2), 1 << 30) for rank in (0, 1))
    for spool, steps in ((first, [10, 12]), (second, [11, 13])):
        seen = []
        while (entry := spool.first()) is not None:
            seen.append(entry.contents.step)
            entry.close()
            spool.remove(entry.folder)
        assert seen == steps


def test_the_limit_holds(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "r", Place(), 3000)
    spool.add(contents_of(1, {"x": torch.zeros(300)}), HEADER)
    with pytest.raises(StockpotError, match="spool_bytes=3000") as raised:
        spool.add(contents_of(2, {"x": torch.zeros(500)}), HEADER)
    assert raised.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert spool.count() == 1 and not list(tmp_path.glob("r/*/.tmp*"))


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    """One byte flipped, a file cut short, a file gone: set aside, and the next one is given."""
    files = ["manifest.json", "tensors.safetensors", "files/config.json"]
    for index, (name, damage) in enumerate(
            [(name, damage) for name in files for damage in ("flip", "cut", "gone")]):
        root = tmp_path / str(index)
        spool = Spool(root, "r", Place(), 1 << 30)
        for step in (1, 2):
            spool.add(contents_of(step, some_tensors(step)), HEADER)
        path = root / "r/rank-0-of-1/step-000000000001" / name
        data = bytearray(path.read_bytes())
        if damage == "flip":
            place = data.index(b"sha256") + 12 if name == "manifest.json" else len(data) // 2
            data[place] ^= 1
        path.write_bytes(data[:-1] if damage == "cut" else data)
        if damage == "gone":
            path.unlink()
        with pytest.raises(StockpotError, match="step-000000000001 is damaged") as raised:
            spool.first()
        assert raised.value.code == ErrorCode.CORRUPTION
        assert (root / "r/rank-0-of-1/damaged-step-000000000001").is_dir()
        entry = spool.first()
        assert entry is not None and entry.contents.step == 2
        entry.close()
        spool.close()


def test_the_daemon_is_away_and_comes_back(daemon: Daemon, tiny_base: Path, tmp_path: Path,
                                           caplog: pytest.LogCaptureFixture) -> None:
    """Steps arrive in order and as they were; the loop never waits; one warning each way."""
    caplog.set_level(logging.WARNING, logger="stockpot")
    weights = load_file(tiny_base / "model.safetensors")
    with make_hook(daemon.thrift, tmp_path / "spool", files=tiny_base) as hook:
        assert hook.on_step(1, noisy(weights, 1)) and hook.flush(60)
        daemon.kill()
        for step in range(2, 7):
            assert hook.on_step(step, noisy(weights, step), {"loss": 1 / step})
        hook.report(6, {"accuracy": 0.5})
        assert hook.flush(60)
        stats, progress = hook.stats, hook.progress()
        assert (stats.committed, stats.spooled, stats.failed) == (1, 5, 0), stats
        assert progress.spooled == 5 and progress.spooled_bytes > 0
        daemon.start()
        poll(lambda: hook.stats.committed == 6 and hook.stats.reports == 1, 60)
        assert hook.progress().spooled == 0 and hook.stats.last_committed_step == 6
        assert hook.on_step(7, noisy(weights, 7)) and hook.flush(60)
    with Client(daemon.thrift) as client:
        log = client.lineage.log("r")
        assert [entry.step.step for entry in log] == list(range(1, 8))
        times = [entry.step.committed_ms for entry in log]
        assert times == sorted(times)
        for step in range(1, 8):
            stored = stockpot.load(client, f"r@{step}")
            assert all(same_bits(stored[n], v) for n, v in noisy(weights, step).items()), step
        assert [e.value for e in log[5].artifact.evals] == [0.5]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and "spool" in messages[0] and "again" in messages[1], messages


def test_a_later_process_sends_what_an_earlier_one_left(daemon: Daemon, tiny_base: Path,
                                                        tmp_path: Path) -> None:
    """The first one is killed with entries in its spool, and saves that were not there yet."""
    weights = load_file(tiny_base / "model.safetensors")
    daemon.kill()
    code = f"""
import os, signal, sys
sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / "trainer_hooks/python/src")!r}]
from safetensors.torch import load_file
from stockpot import CheckpointHook, RunConfig
from tests.python.test_hook import noisy
weights = load_file({str(tiny_base / "model.safetensors")!r})
hook = CheckpointHook({daemon.thrift!r}, "r", "tiny", every=1, when_full="wait",
                      config=RunConfig(merge_every=0, publish="request"),
                      spool_dir={str(tmp_path / "spool")!r}, files={str(tiny_base)!r})
for step in (1, 2, 3):
    assert hook.on_step(step, noisy(weights, step))
assert hook.flush(60) and hook.stats.spooled == 3, hook.stats
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    daemon.start()
    with make_hook(daemon.thrift, tmp_path / "spool", files=tiny_base) as hook:
        poll(lambda: hook.stats.committed == 3, 60)
        assert hook.on_step(4, noisy(weights, 4)) and hook.flush(60)
    with Client(daemon.thrift) as client:
        assert [entry.step.step for entry in client.lineage.log("r")] == [1, 2, 3, 4]
        stored = stockpot.load(client, "r@2")
        assert all(same_bits(stored[n], v) for n, v in noisy(weights, 2).items())


def rank_pieces(step: int, rank: int, world: int) -> list[Piece]:
    """What tests/unit/hooks/hook_rank.cc saves: rows of two matrices, a group a rank, a tie."""
    first, last = rank * 7 // world, (rank + 1) * 7 // world
    rows = (1000 * step + torch.arange(21.0)).view(7, 3)[first:last]
    box = Box((first, 0), (last - first, 3))
    pieces = [Piece("rows", rows, (7, 3), box),
              Piece("optimizer/rows/exp_avg", -rows, (7, 3), box, "optimizer"),
              Piece(f"loader/rank-{rank}", torch.tensor([rank]), (1,), Box.whole((1,)), "loader")]
    if rank == 0:
        whole = torch.tensor([float(step), -float(step)])
        pieces += [Piece("whole", whole, (2,), Box.whole((2,))),
                   Piece("tied", whole, (2,), Box.whole((2,)), alias_of="whole")]
    return pieces


def spool_rank(root: Path, step: int, rank: int, world: int) -> None:
    """Leaves one rank's part of a step in the spool, as a Python hook does."""
    spool = Spool(root, "r", Place(rank, world), 1 << 30)
    pieces = rank_pieces(step, rank, world)
    layout = Layout.plan(pieces, None)
    buffer = StagingBuffer(layout.size, pinned=False)
    threads = CopyThreads(1)
    buffer.fill(layout, pieces, threads)
    threads.stop()
    contents = Contents(step, layout, buffer.views(layout),
                        {"config.json": b"{}"} if rank == 0 else {}, {"loss": 1 / step},
                        Place(rank, world), "python")
    spool.add(contents, HEADER | {"base": "tiny"})
    spool.close()


def hook_rank(address: str, root: Path, rank: int, world: int, *steps: int) -> None:
    """One rank in C++; without steps it sends what is in the spool."""
    command = [bin_dir() / "hook_rank", address, root, str(rank), str(world), *map(str, steps)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def assert_ranks_stored(address: str, step: int, world: int) -> None:
    rows = (1000 * step + torch.arange(21.0)).view(7, 3)
    whole = torch.tensor([float(step), -float(step)])
    with Client(address) as client:
        stored = stockpot.load(client, f"r@{step}")
        assert stored.keys() == {"rows", "whole", "tied"}
        assert torch.equal(stored["rows"], rows) and torch.equal(stored["whole"], whole)
        assert torch.equal(stored["tied"], whole)
        moments = stockpot.load(client, f"r@{step}.optimizer")
        assert moments.keys() == {"optimizer/rows/exp_avg"}
        assert torch.equal(moments["optimizer/rows/exp_avg"], -rows)
        loaders = stockpot.load(client, f"r@{step}.loader")
        assert {name: int(value) for name, value in loaders.items()} == {
            f"loader/rank-{rank}": rank for rank in range(world)}
        (entry,) = [e for e in client.lineage.log("r") if e.step.step == step]
        assert entry.step.metrics == {"loss": 1 / step}


def test_what_ranks_in_cpp_left_is_sent(daemon: Daemon, tmp_path: Path) -> None:
    """Shards, groups and ties; one process takes over what three ranks of another world wrote."""
    daemon.kill()
    for rank in range(3):
        hook_rank(daemon.thrift, tmp_path / "spool", rank, 3, 1, 2)
    daemon.start()
    with make_hook(daemon.thrift, tmp_path / "spool") as hook:
        poll(lambda: hook.stats.committed == 6, 60)
        assert hook.progress().spooled == 0 and hook.stats.failed == 0
    for step in (1, 2):
        assert_ranks_stored(daemon.thrift, step, 3)


def test_ranks_in_cpp_send_what_was_left(daemon: Daemon, tmp_path: Path) -> None:
    """The other way round, into a world of one and into the same world."""
    for world in (1, 2):
        root = tmp_path / str(world)
        for rank in range(2):
            spool_rank(root, world, rank, 2)
        senders = [threading.Thread(target=hook_rank, args=(daemon.thrift, root, rank, world))
                   for rank in range(world)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        assert_ranks_stored(daemon.thrift, world, 2)


def test_a_part_stays_until_the_others_are_in(daemon: Daemon, tmp_path: Path) -> None:
    """Also if the daemon forgets it in between: what was sent is not yet a checkpoint."""
    root = tmp_path / "spool"
    spool_rank(root, 1, 0, 2)
    folder = root / "r/rank-0-of-2/step-000000000001"
    with make_hook(daemon.thrift, root) as hook:
        with Client(daemon.thrift) as client:
            poll(lambda: client.control.status().gatherings, 60)
        assert folder.is_dir() and hook.progress().spooled == 1
        daemon.kill()
        daemon.start()
        spool_rank(tmp_path / "other", 1, 1, 2)
        hook_rank(daemon.thrift, tmp_path / "other", 1, 2)
        poll(lambda: hook.stats.committed == 1, 60)
        poll(lambda: not folder.exists(), 10)
    assert_ranks_stored(daemon.thrift, 1, 2)


def test_a_refused_entry_is_kept_aside(daemon: Daemon, tmp_path: Path) -> None:
    """The step has another checkpoint: a person decides."""
    with make_hook(daemon.thrift, tmp_path / "first") as hook:
        assert hook.on_step(1, {"x": torch.ones(3)}) and hook.flush(60)
    spool = Spool(tmp_path / "second", "r", Place(), 1 << 30)
    spool.add(contents_of(1, {"x": torch.zeros(3)}), HEADER | {"base": "tiny"})
    spool.close()
    with make_hook(daemon.thrift, tmp_path / "second") as hook:
        poll(lambda: hook.stats.failed == 1, 60)
    assert (tmp_path / "second/r/rank-0-of-1/refused-step-000000000001").is_dir()


def test_close_keeps_what_could_not_be_sent(tmp_path: Path) -> None:
    """Also from a server that takes connections and never answers: close() stays bounded."""
    import socket
    with socket.create_server(("127.0.0.1", 0)) as stalled:
        for port in (stalled.getsockname()[1], free_port()):
            root = tmp_path / str(port)
            hook = make_hook(f"127.0.0.1:{port}", root)
            assert hook.on_step(1, {"x": torch.ones(3)}) and hook.on_step(2, {"x": torch.ones(4)})
            start = time.monotonic()
            hook.close(0.2)
            assert time.monotonic() - start < 20
            assert sorted(path.name for path in root.glob("r/rank-0-of-1/step-*")) == [
                "step-000000000001", "step-000000000002"]
            assert hook.stats.failed == 0 and hook.stats.spooled == 2


def test_an_unusable_spool_costs_checkpoints_only(tmp_path: Path,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing can be written the hook goes on as without a spool."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    hook = make_hook(f"127.0.0.1:{free_port()}", blocked, retry_for_s=0.1)
    assert hook.on_step(1, {"x": torch.ones(3)})
    poll(lambda: hook.stats.failed == 1, 20)
    assert any("no spool" in record.getMessage() for record in caplog.records)
    hook.close(1)
