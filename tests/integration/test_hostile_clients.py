"""Clients that send garbage, giant lengths and half calls, while another one pushes and is served.

12 seconds by default; STOCKPOT_HOSTILE_SECONDS=60 for the long one.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from stockpot import CheckpointHook, Client, RunConfig

from tests.daemon import Daemon, running

SECONDS = float(os.environ.get("STOCKPOT_HOSTILE_SECONDS", "12"))
ATTACKERS = 24
HELD_SECONDS = 3.0  # how long an attacker keeps a half-sent call open
# thrift/limits.h: each connection may hold 6 MiB of a call, all of them together 256 MiB more.
ALLOWED_GROWTH = ATTACKERS * (6 << 20) + (256 << 20) + (96 << 20)
PUSHED_BYTES = 8 << 20


def call(name: str) -> bytes:
    """The beginning of a call, as the binary protocol writes it."""
    return struct.pack(">Ii", 0x80010001, len(name)) + name.encode() + struct.pack(">i", 0)


def field(kind: int, number: int) -> bytes:
    return struct.pack(">bh", kind, number)


STRING, STRUCT, LIST = 11, 12, 15
GIANT = struct.pack(">i", 0x7FFFFFFF)
LONGEST_LIST = struct.pack(">i", 262_144)
CHUNK = struct.pack(">i", 4 << 20)


def garbage(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 65536))


def giant_length(rng: random.Random) -> bytes:
    return rng.choice([
        struct.pack(">I", 0x80010001) + GIANT,
        call("checkpoint:put_chunk") + field(STRING, 3) + GIANT,
        call("checkpoint:have_chunks") + field(LIST, 2) + struct.pack(">b", STRING) + GIANT,
        struct.pack(">Q", 1 << 62) * 16,
    ])


def announced(rng: random.Random) -> bytes:
    """Lengths that are allowed, of what never comes."""
    return rng.choice([
        call("checkpoint:commit_shard") + field(STRUCT, 2) + field(LIST, 1)
        + struct.pack(">b", STRUCT) + LONGEST_LIST,
        call("checkpoint:have_chunks") + field(LIST, 2) + struct.pack(">b", STRING) + LONGEST_LIST,
        call("checkpoint:put_chunk") + field(STRING, 3) + CHUNK,
    ])


def half_chunk(rng: random.Random) -> bytes:
    return call("checkpoint:put_chunk") + field(STRING, 3) + CHUNK + bytes(rng.randrange(4 << 20))


KINDS: list[Callable[[random.Random], bytes]] = [garbage, giant_length, announced, half_chunk]


def attack(address: tuple[str, int], seed: int, until: float, streams: list[int]) -> None:
    """Opens one connection after the other, each with something else that is no call."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(address, 5) as connection:
            connection.settimeout(HELD_SECONDS)
            connection.sendall(rng.choice(KINDS)(rng))
            streams[0] += 1
            if rng.random() < 0.5:
                connection.recv(1 << 16)  # until it hangs up, or for a while


def push(daemon: Daemon, base: dict[str, torch.Tensor], first: int, until: float) -> int:
    """Pushes steps from `first` on until then; every one must arrive. Returns the last one."""
    step = first - 1
    with CheckpointHook(daemon.thrift, run="served", base="tiny", every=1, when_full="wait",
                        config=RunConfig(merge_every=0, publish="request")) as hook:
        while time.monotonic() < until or step < first:
            step += 1
            weights = base | {"extra": torch.randint(0, 256, (PUSHED_BYTES,), dtype=torch.uint8)}
            assert hook.save(step, weights, {"loss": 1.0})
            assert hook.flush(60), hook.stats
        assert hook.stats.committed == step - first + 1, hook.stats
    return step


def test_hostile_clients_cost_bounded_memory_and_nobody_else(
        base_folder: Path, base_weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with running(tmp_path / "data", "tiny") as daemon:
        daemon.cli("import-base", "tiny", base_folder)
        push(daemon, base_weights, 1, 0)  # what the first push needs is not theirs
        before = daemon.rss_bytes()
        until = time.monotonic() + SECONDS
        host, port = daemon.thrift.split(":")
        streams = [0]
        attackers = [threading.Thread(target=attack, args=((host, int(port)), seed, until, streams))
                     for seed in range(ATTACKERS)]
        highest = [before]

        def measure() -> None:
            while time.monotonic() < until:
                highest[0] = max(highest[0], daemon.rss_bytes())
                time.sleep(0.05)

        watcher = threading.Thread(target=measure)
        for thread in (*attackers, watcher):
            thread.start()
        steps = push(daemon, base_weights, 2, until)
        for thread in (*attackers, watcher):
            thread.join()
        grown = highest[0] - before
        print(f"{streams[0]} hostile connections in {SECONDS:g} s, {steps} checkpoints pushed, "
              f"resident memory grew by {grown / 1e6:.0f} MB at most")
        assert streams[0] > ATTACKERS
        assert grown < ALLOWED_GROWTH
        with Client(daemon.thrift) as client:
            assert client.lineage.show(f"served@{steps}").step == steps
