#!/usr/bin/env python3
"""The ratios of the whole path, on SmolLM2-135M: stalls, uploads, publish to first token, serving.

    path_bench.py --base FOLDER [--quick] [--only SUBSTRING] [--repeats N]

Starts stockpotd itself. Prints one JSON line a ratio:
    {"name", "value", "goal", "limit", "better", "sizes", "machine"}
Each ratio is measured beside its yardstick in this run, repeated, and the median is reported.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import platform
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from stockpot import CheckpointHook, Client, RunConfig

from tests.counting_proxy import CountingProxy
from tests.daemon import running

Weights = dict[str, torch.Tensor]
PROMPT = list(range(100, 164))
FLAT = "memmove of one run by two threads"


def machine() -> str:
    model = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text()
                  .splitlines() if line.startswith("model name")), platform.processor())
    return f"{model}, {os.cpu_count()} cores"


class Report:
    def __init__(self, only: str) -> None:
        self.only = only

    def wants(self, *names: str) -> bool:
        return any(self.only in name for name in names)

    def add(self, name: str, value: float, goal: float, limit: float | None, better: str,
            sizes: str) -> None:
        if self.wants(name):
            print(json.dumps({"name": name, "value": round(value, 4), "goal": goal, "limit": limit,
                              "better": better, "sizes": sizes, "machine": machine()}), flush=True)


def median_seconds(body: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        body()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def perturbed(base: Weights, seed: int) -> Weights:
    """A fine-tune of the blocks: linear weights and norms move, embeddings stay."""
    generator = torch.Generator().manual_seed(seed)
    return {n: t if "embed" in n else
            (t.float() + 1e-3 * torch.randn(t.shape, generator=generator)).to(t.dtype)
            for n, t in base.items()}


def total_bytes(weights: Weights) -> int:
    return sum(t.numel() * t.element_size() for t in weights.values())


def complete(url: str, model: str, max_tokens: int, prompt: list[int] = PROMPT) -> float:
    """Seconds of one request."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True}
    call = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    start = time.perf_counter()
    with urllib.request.urlopen(call, timeout=120) as reply:
        reply.read()
    return time.perf_counter() - start


def answers(url: str, model: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models/{model}", timeout=10):
            return True
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.005)


def with_adam(base: Weights) -> Weights:
    """The weights and what Adam keeps of each, in the weights' type as torch.optim makes it."""
    state = {n: t.clone() for n, t in base.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        state |= {f"optimizer.{moment}.{n}": torch.rand_like(t) for n, t in base.items()}
    return state


def copies_of(state: Weights) -> dict[str, Callable[[], None]]:
    """Ways to copy all bytes once into memory that was touched before: the yardsticks of a stall.

    The tensors lie where a trainer has them, each by itself: torch's own copy of each, and two
    threads that take one after the other. FLAT is for comparison: the same number of bytes in one
    run, which no trainer has; the C library copies such a run past the cache.
    """
    kept = {n: torch.zeros_like(t) for n, t in state.items()}
    source = torch.cat([t.flatten().view(torch.uint8) for t in state.values()])
    target = torch.zeros_like(source)
    half = len(source) // 2
    runs = [(kept[n].data_ptr(), t.data_ptr(), t.numel() * t.element_size())
            for n, t in state.items()]

    def each() -> None:
        for name, tensor in state.items():
            kept[name].copy_(tensor)

    def in_turn() -> None:
        left = list(runs)

        def work() -> None:
            while left:
                try:
                    run = left.pop()
                except IndexError:
                    return
                ctypes.memmove(*run)

        other = threading.Thread(target=work)
        other.start()
        work()
        other.join()

    def halves() -> None:
        other = threading.Thread(target=ctypes.memmove,
                                 args=(target.data_ptr(), source.data_ptr(), half))
        other.start()
        ctypes.memmove(target.data_ptr() + half, source.data_ptr() + half, len(source) - half)
        other.join()

    return {"copy_ of each tensor": each, "memmove of each by two threads": in_turn, FLAT: halves}


def bench_stall(report: Report, address: str, base: Weights, repeats: int) -> None:
    """The stall of a save over one copy of the bytes; torch.save's and async DCP's over ours."""
    if not report.wants("stall_copy", "stall_vs_async_dcp", "stall_vs_torch_save"):
        return
    state = with_adam(base)
    copies = copies_of(state)
    ours, theirs, saves = [], [], []
    plain: dict[str, list[float]] = {name: [] for name in copies}
    with CheckpointHook(address, run="stall", base="smollm2", every=1, when_full="wait",
                        config=RunConfig(merge_every=0, publish="request")) as hook, \
            tempfile.TemporaryDirectory() as folder:
        for step in range(1, repeats + 2):
            for name, copy in copies.items():
                plain[name].append(median_seconds(copy, 1))
            start = time.perf_counter()
            assert hook.save(step, state, {}), hook.stats
            ours.append(time.perf_counter() - start)
            hook.flush()
            start = time.perf_counter()
            pending = dcp.async_save(state, checkpoint_id=Path(folder) / "dcp")
            theirs.append(time.perf_counter() - start)
            pending.result()
            saves.append(median_seconds(
                lambda: torch.save(state, Path(folder) / "state.pt"), 1))  # page cache only
    size = f"SmolLM2-135M and Adam, {total_bytes(state) >> 20} MiB of bf16"
    mine = statistics.median(ours[1:])
    one_copy = {name: statistics.median(times[1:]) for name, times in plain.items()}
    best = min(seconds for name, seconds in one_copy.items() if name != FLAT)
    each = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in one_copy.items())
    size += f"; {each}"
    print(f"medians: {each}, hook {mine * 1e3:.0f}, "
          f"async_save {statistics.median(theirs[1:]) * 1e3:.0f}, torch.save "
          f"{statistics.median(saves[1:]) * 1e3:.0f}", file=sys.stderr)
    report.add("stall_copy", mine / best, 1.1, 1.0, "lower", size)
    report.add("stall_vs_async_dcp", statistics.median(theirs[1:]) / mine, 2.0, None, "higher",
               size)
    report.add("stall_vs_torch_save", statistics.median(saves[1:]) / mine, 2.0, None, "higher",
               size + "; torch.save without waiting for the disk")


def raw_direct_write(data: memoryview, folder: Path) -> float:
    """Seconds to write the bytes to one O_DIRECT file and fdatasync it."""
    block = 4 << 20
    buffer = mmap.mmap(-1, block)
    path = folder / "raw"
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    for begin in range(0, len(data) - block + 1, block):
        buffer[:] = data[begin:begin + block]
        os.write(fd, buffer)
    os.fdatasync(fd)
    os.close(fd)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def bench_ingest(report: Report, address: str, data_folder: Path, repeats: int) -> None:
    """Bytes in the client to durable in the store, both hashing, over a raw file."""
    if not report.wants("ingest_loopback_python"):
        return
    ratios = []
    with CheckpointHook(address, run="ingest", base="smollm2", every=1, when_full="wait",
                        config=RunConfig(merge_every=0, publish="request")) as hook:
        for step in range(1, repeats + 2):
            weights = {f"t{i}": torch.randint(0, 256, (64 << 20,), dtype=torch.uint8)
                       for i in range(4)}
            flat = memoryview(torch.cat(list(weights.values())).numpy())
            raw = raw_direct_write(flat, data_folder)
            start = time.perf_counter()
            hook.save(step, weights, {})
            hook.flush()
            ratios.append(raw / (time.perf_counter() - start))
        assert hook.stats.failed == 0, hook.stats
    report.add("ingest_loopback_python", statistics.median(ratios[1:]), 0.5, 1.0, "higher",
               "256 MiB of random bytes in 64 MiB tensors, Python hook, loopback TCP, sha256 twice")


def folder_bytes(folder: Path) -> int:
    """Of all files together."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def bench_resend(report: Report, address: str, data: Path, base: Weights) -> None:
    """An unchanged checkpoint under a new step: what passes on the wire, what grows on disk."""
    if not report.wants("resend_bytes", "resend_disk_bytes"):
        return
    state = with_adam(base)
    proxy = CountingProxy(address)
    wire, disk = [], []
    with CheckpointHook(proxy.address, run="resend", base="smollm2", every=1, when_full="wait",
                        config=RunConfig(merge_every=0, publish="request")) as hook:
        for step in range(1, 4):
            before = proxy.passed_bytes, folder_bytes(data)
            assert hook.save(step, state, {"loss": 1.0}) and hook.flush()
            wire.append((proxy.passed_bytes - before[0]) / total_bytes(state))
            disk.append((folder_bytes(data) - before[1]) / total_bytes(state))
        assert hook.stats.failed == 0, hook.stats
    proxy.close()
    size = (f"SmolLM2-135M and Adam, {total_bytes(state) >> 20} MiB, sent a second and third time; "
            f"the first time {wire[0]:.3f} on the wire, {disk[0]:.3f} on disk")
    report.add("resend_bytes", max(wire[1:]), 0.01, 0.0, "lower", size)
    report.add("resend_disk_bytes", max(disk[1:]), 0.01, 0.0, "lower", size)


def bench_publish(report: Report, address: str, url: str, base: Weights, repeats: int) -> None:
    """Commit of a step to its variant's first token; publish over one read of the checkpoint."""
    if not report.wants("commit_to_token_s", "publish_over_read"):
        return
    to_token, publishes, reads = [], [], []
    with CheckpointHook(address, run="fresh", base="smollm2", every=1, when_full="wait",
                        config=RunConfig(merge_every=0, publish="every")) as hook, \
            Client(address) as client:
        for step in range(1, repeats + 2):
            hook.save(step, perturbed(base, step), {"loss": 1.0})
            committed = threading.Event()

            def watch(step: int = step, done: threading.Event = committed) -> None:
                wait_for(lambda: hook.stats.last_committed_step == step, "commit")
                done.set()

            threading.Thread(target=watch, daemon=True).start()
            committed.wait(120)
            start = time.perf_counter()
            wait_for(lambda step=step: answers(url, f"fresh@{step}"), "route")
            complete(url, f"fresh@{step}", 1)
            to_token.append(time.perf_counter() - start)
            job = next(j for j in client.control.jobs()
                       if j.kind == "publish" and j.result and client.lineage.show(j.result).step
                       == step and client.lineage.show(j.result).run == "fresh")
            publishes.append((job.finished_ms - job.created_ms) / 1000)
            manifest = json.loads(client.fetch_manifest(f"fresh@{step}"))
            chunks = [c for t in manifest["tensors"] for p in t.get("parts", {}).values()
                      for c in p["chunks"]]
            start = time.perf_counter()
            for chunk in chunks:
                hashlib.sha256(client.fetch_chunk(bytes.fromhex(chunk))).digest()
            reads.append(time.perf_counter() - start)
    size = "SmolLM2-135M, all block weights changed, no gate on held-out text"
    report.add("commit_to_token_s", statistics.median(to_token[1:]), 1.0, None, "lower", size)
    report.add("publish_over_read", statistics.median(publishes[1:]) / statistics.median(reads[1:]),
               1.5, 1.0, "lower", size + "; read = fetching and hashing every chunk once over RPC")


def bench_serving(report: Report, address: str, url: str, base: Weights, repeats: int) -> None:
    """TTFT of a resident variant over the base's; memory of base + 14 variants over 14 dense."""
    if not report.wants("ttft_variant", "memory14"):
        return
    with CheckpointHook(address, run="many", base="smollm2", every=1, when_full="wait",
                        config=RunConfig(merge_every=0, publish="every")) as hook:
        for step in range(1, 15):
            hook.save(step, perturbed(base, 100 + step), {"loss": 1.0})
        hook.flush()
    wait_for(lambda: answers(url, "many@14"), "routes")
    for step in range(1, 15):
        complete(url, f"many@{step}", 1)
    names = ["smollm2", "many@14"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats * 5):
        for name in names:
            seconds[name].append(complete(url, name, 1))
    base_s, variant_s = (statistics.median(seconds[name]) for name in names)
    report.add("ttft_variant", variant_s / base_s, 1.05, 1.0, "lower",
               f"64-token prompt, one request at a time, base {base_s * 1000:.1f} ms")
    with Client(address) as client:
        served = {m.digest: m.resident_bytes for m in client.control.status().served
                  if m.name.startswith("many@") or m.name == "smollm2"}
    dense = total_bytes(base)
    report.add("memory14", sum(served.values()) / (14 * dense), 0.135, None, "lower",
               f"SmolLM2-135M bf16: base and 14 variants are {sum(served.values()) >> 20} MiB, "
               f"14 dense models {14 * dense >> 20} MiB")


def bench_merge(report: Report, address: str, base: Weights) -> None:
    """A MonoSoup merge of two checkpoints over the same with torch.linalg.svd."""
    if not report.wants("merge_vs_torch"):
        return
    pair = [perturbed(base, 201), perturbed(base, 202)]
    with CheckpointHook(address, run="merge", base="smollm2", every=1, when_full="wait",
                        config=RunConfig(merge_every=0, publish="request")) as hook:
        for step, weights in enumerate(pair, start=1):
            hook.save(step, weights, {"loss": 1.0})
        hook.flush()
    start = time.perf_counter()
    for name, tensor in base.items():
        if tensor.dim() != 2 or "embed" in name:
            continue
        merged = tensor.float()
        for weights in pair:
            u, s, vh = torch.linalg.svd(weights[name].float() - tensor.float(),
                                        full_matrices=False)
            energy = (s.double() ** 2).cumsum(0) / (s.double() ** 2).sum()
            rank = int((energy < 0.95).sum()) + 1
            merged = merged + (u[:, :rank] * s[:rank]) @ vh[:rank] / 2
        merged.to(tensor.dtype)
    theirs = time.perf_counter() - start
    with Client(address) as client:
        start = time.perf_counter()
        job = client.control.merge(["merge@1", "merge@2"], "merge", 2)
        client.control.wait_job(job.key, 600)
        ours = time.perf_counter() - start
    report.add("merge_vs_torch", theirs / ours, 5.0, None, "higher",
               f"two SmolLM2-135M, energy 0.95; ours {ours:.1f} s with reads and commit, "
               f"torch {theirs:.1f} s without")


def bench_connection(report: Report) -> None:
    """Says on stderr what a raw loopback copy reaches here, to judge ingest by."""
    listener = socket.create_server(("127.0.0.1", 0))
    total = 256 << 20

    def sink() -> None:
        peer, _ = listener.accept()
        while peer.recv(1 << 20):
            pass

    thread = threading.Thread(target=sink)
    thread.start()
    block = bytes(1 << 20)
    start = time.perf_counter()
    with socket.create_connection(listener.getsockname()) as out:
        for _ in range(total >> 20):
            out.sendall(block)
    thread.join()
    print(f"raw loopback TCP: {total / (time.perf_counter() - start) / 1e9:.2f} GB/s",
          file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    report = Report(options.only)
    repeats = 2 if options.quick else options.repeats
    base = load_file(options.base / "model.safetensors")
    with tempfile.TemporaryDirectory() as folder, \
            running(Path(folder) / "data", "smollm2") as daemon:
        daemon.cli("import-base", "smollm2", options.base)
        wait_for(lambda: answers(daemon.url, "smollm2"), "base")
        bench_connection(report)
        bench_stall(report, daemon.thrift, base, repeats)
        bench_resend(report, daemon.thrift, Path(folder) / "data", base)
        bench_ingest(report, daemon.thrift, Path(folder), repeats)
        bench_publish(report, daemon.thrift, daemon.url, base, repeats)
        bench_serving(report, daemon.thrift, daemon.url, base, repeats)
        bench_merge(report, daemon.thrift, base)


if __name__ == "__main__":
    main()
