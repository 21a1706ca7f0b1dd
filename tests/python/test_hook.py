"""The hook against the real daemon: what is stored, what travels, what survives a kill -9."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import pytest
import stockpot
import torch
from safetensors.torch import load_file
from stockpot import CheckpointHook, Client, ErrorCode, RunConfig, StockpotError
from stockpot.hook import read_files

from tests.counting_proxy import CountingProxy
from tests.daemon import Daemon
from tests.python.conftest import poll

QUIET = RunConfig(merge_every=0, publish="request")  # the store alone
MIB = 1 << 20


def make_hook(daemon: Daemon, folder: Path, **options: object) -> CheckpointHook:
    given = {"run": "r", "base": "tiny", "every": 1, "files": folder, "config": QUIET,
             "when_full": "wait"} | options
    return CheckpointHook(daemon.thrift, **given)


def same_bits(stored: torch.Tensor, expected: torch.Tensor) -> bool:
    expected = expected.detach().contiguous()
    return (stored.dtype == expected.dtype and stored.shape == expected.shape
            and stored.flatten().view(torch.uint8).equal(expected.flatten().view(torch.uint8)))


def noisy(weights: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: (value.float() + 0.01 * torch.randn(value.shape, generator=generator)).to(
        value.dtype) for name, value in weights.items()}


def test_c03_values_at_the_call(daemon: Daemon, client: Client, tiny_base: Path) -> None:
    """The optimizer runs right after the hook returned."""
    weights = load_file(tiny_base / "model.safetensors")
    expected = {}
    with make_hook(daemon, tiny_base) as hook:
        for step in range(1, 6):
            weights = noisy(weights, step)
            expected[step] = {name: value.clone() for name, value in weights.items()}
            assert hook.on_step(step, weights, {"loss": 1 / step, "accuracy": step})
            for value in weights.values():
                value.zero_()
            weights = expected[step]
    assert hook.stats.committed == 5 and hook.stats.failed == 0
    for step, tensors in expected.items():
        stored = stockpot.load(client, f"r@{step}")
        assert stored.keys() == tensors.keys()
        for name, value in tensors.items():
            assert same_bits(stored[name], value), (step, name)
    log = client.lineage.log("r")
    assert [entry.step.step for entry in log] == [1, 2, 3, 4, 5]
    assert log[3].step.metrics == {"loss": 0.25, "accuracy": 4.0}
    assert client.lineage.resolve("r@latest") == hook.stats.last_artifact


def test_c12_tied_and_odd_tensors(daemon: Daemon, client: Client, tiny_base: Path) -> None:
    """Ties once, views as their content, types as given."""
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(300, 65, dtype=torch.bfloat16)
            self.head = torch.nn.Linear(65, 300, bias=False, dtype=torch.bfloat16)
            self.head.weight = self.embed.weight
            self.register_buffer("turned", torch.randn(33, 17).t())
            self.register_buffer("empty", torch.empty(0, 4))
            self.register_buffer("scalar", torch.tensor(7, dtype=torch.int64))
            self.register_buffer("mask", torch.rand(13) > 0.5)
            # More than one chunk, and no multiple of one.
            self.register_buffer("large", torch.randn(2 * MIB + 3, dtype=torch.float16))

    model = Model()
    with make_hook(daemon, tiny_base) as hook:
        assert hook.on_step(1, model)
    assert hook.stats.committed == 1, hook.stats
    manifest = json.loads(client.fetch_manifest("r@1"))
    entries = {entry["name"]: entry for entry in manifest["tensors"]}
    assert entries["head.weight"]["alias_of"] == "embed.weight"
    assert len(entries["large"]["parts"]["data"]["chunks"]) == 2
    stored = stockpot.load(client, "r@1")
    for name, value in model.state_dict().items():
        assert same_bits(stored[name], value), name
    assert stored["head.weight"].data_ptr() == stored["embed.weight"].data_ptr()


def test_c03_the_optimizer_runs_at_once(daemon: Daemon, client: Client, tiny_base: Path) -> None:
    """A real optimizer changes weights and its own state in place while the upload runs."""
    model = torch.nn.Linear(1024, 1024)  # 4 MiB
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    expected = []
    with make_hook(daemon, tiny_base) as hook:
        for step in range(1, 5):
            model(torch.randn(2, 1024)).square().mean().backward()
            optimizer.step()
            expected.append({name: value.clone() for name, value in model.state_dict().items()})
            assert hook.on_step(step, model, state={"optimizer": optimizer})
            for _ in range(3):
                optimizer.step()
    assert hook.stats.committed == 4, hook.stats
    for step, values in enumerate(expected, start=1):
        stored = stockpot.load(client, f"r@{step}")
        assert all(same_bits(stored[name], value) for name, value in values.items()), step


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_c13_types_are_kept_and_a_difference_is_told(
        daemon: Daemon, client: Client, tiny_base: Path, dtype: torch.dtype,
        caplog: pytest.LogCaptureFixture) -> None:
    """config.json says bfloat16; what is given is stored, and a warning names both, once."""
    tensors = {"x": torch.randn(5, 3).to(dtype), "n": torch.arange(3)}
    with make_hook(daemon, tiny_base) as hook:
        for step in (1, 2):
            hook.on_step(step, tensors)
    stored = stockpot.load(client, "r@2")
    assert all(same_bits(stored[name], value) for name, value in tensors.items())
    warnings = [r.getMessage() for r in caplog.records if "config.json says" in r.getMessage()]
    name = str(dtype).removeprefix("torch.")
    assert len(warnings) == (0 if dtype == torch.bfloat16 else 1), warnings
    assert all("bfloat16" in warning and name in warning for warning in warnings)


def test_c04_a_background_failure_shows(daemon: Daemon, client: Client, tiny_base: Path,
                                        caplog: pytest.LogCaptureFixture) -> None:
    """In the log once, in the counters, and at the next call where that was asked for."""
    def refuse(**options: object) -> CheckpointHook:
        hook = make_hook(daemon, tiny_base, **options)
        assert hook.on_step(1, {"x": torch.zeros(3)})  # step 1 has another checkpoint: refused
        assert hook.flush(60)
        return hook

    with make_hook(daemon, tiny_base) as hook:
        hook.on_step(1, {"x": torch.ones(3)})
    with refuse() as hook:
        stats = hook.stats
        assert stats.failed == 1 and "ALREADY_EXISTS" in stats.last_error
        assert hook.on_step(2, {"x": torch.zeros(3)})  # training goes on
        assert hook.flush(60) and hook.stats.committed == 1
    messages = [r.getMessage() for r in caplog.records if "step 1 is not stored" in r.getMessage()]
    assert len(messages) == 1, messages
    with refuse(raise_errors=True) as hook:
        with pytest.raises(StockpotError) as raised:
            hook.on_step(3, {"x": torch.zeros(3)})
        assert raised.value.code == ErrorCode.ALREADY_EXISTS
        assert hook.on_step(3, {"x": torch.zeros(3)})  # told once


def test_progress_of_an_upload(daemon: Daemon, tiny_base: Path, monkeypatch: pytest.MonkeyPatch,
                               caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stockpot")
    monkeypatch.setattr(stockpot.progress, "LOG_EVERY_S", 0.0)
    with make_hook(daemon, tiny_base) as hook:
        assert hook.progress() == stockpot.Progress()
        seen = []
        monkeypatch.setattr(stockpot.progress.logger, "info", lambda *args: seen.append(
            hook.progress()))  # asked from the threads that send, while they do
        hook.on_step(1, {"a": torch.randn(3 * MIB), "b": torch.zeros(MIB), "c": torch.zeros(MIB)})
        assert hook.flush(60)
    under_way = [p for p in seen if p.step == 1]
    assert under_way, seen
    assert {p.total_bytes for p in under_way} == {20 * MIB + sum(
        (tiny_base / name).stat().st_size for name in read_files(tiny_base))}
    done = [p.done_bytes for p in under_way]
    assert done == sorted(done) and done[-1] == under_way[-1].total_bytes
    assert 16 * MIB <= under_way[-1].sent_bytes < 17 * MIB  # b and c are the same chunk
    assert under_way[-1].share == 1.0 and under_way[-1].bytes_per_second > 0


def test_files_travel_along(daemon: Daemon, client: Client, tiny_base: Path) -> None:
    weights = load_file(tiny_base / "model.safetensors")
    with make_hook(daemon, tiny_base) as hook:
        hook.on_step(1, weights)
    files = json.loads(client.fetch_manifest("r@1"))["files"]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        content = (tiny_base / name).read_bytes()
        assert files[name]["bytes"] == len(content)
        assert files[name]["chunks"] == [hashlib.sha256(content).hexdigest()]
        assert client.fetch_chunk(hashlib.sha256(content).digest()) == content


def test_unchanged_bytes_do_not_travel(daemon: Daemon, tiny_base: Path) -> None:
    tensors = {f"t{index}": torch.randn(MIB) for index in range(4)}
    with make_hook(daemon, tiny_base) as hook:
        hook.on_step(1, tensors)
        assert hook.flush(60)
        first = hook.stats.sent_bytes
        assert first >= 16 * MIB
        hook.on_step(2, tensors)
        assert hook.flush(60)
        assert hook.stats.sent_bytes == first
        tensors["t2"][0] += 1
        hook.on_step(3, tensors)
        assert hook.flush(60)
        assert hook.stats.sent_bytes == first + 4 * MIB
    assert hook.stats.committed == 3


def test_an_unchanged_checkpoint_moves_nothing_worth_naming(daemon: Daemon, tiny_base: Path
                                                            ) -> None:
    """Under 1 % of its bytes pass on the wire, counted outside of both ends, or grow on disk."""
    tensors = {f"t{index}": torch.randn(MIB // 4) for index in range(32)}  # as many chunks
    total = 32 * MIB

    def on_disk() -> int:
        return sum(path.stat().st_size for path in daemon.data.rglob("*") if path.is_file())

    proxy = CountingProxy(daemon.thrift)
    with CheckpointHook(proxy.address, run="r", base="tiny", every=1, files=tiny_base,
                        config=QUIET, when_full="wait") as hook:
        moved = []
        for step in (1, 2, 3):
            before = proxy.passed_bytes, on_disk()
            assert hook.on_step(step, tensors) and hook.flush(60)
            moved.append((proxy.passed_bytes - before[0], on_disk() - before[1]))
        assert hook.stats.committed == 3, hook.stats
    proxy.close()
    assert moved[0][0] > total and moved[0][1] > 0.9 * total, "the first time all of it does"
    for wire, disk in moved[1:]:
        assert wire < total / 100 and disk < total / 100, moved


def test_more_than_300_mib_over_one_connection(daemon: Daemon, client: Client, tiny_base: Path
                                               ) -> None:
    """Thrift's own transports drop a connection after 100 MiB of strings."""
    tensor = torch.randint(0, 2**31, (80 * MIB,), dtype=torch.int32)  # 320 MiB
    with make_hook(daemon, tiny_base, connections=1) as hook:
        hook.on_step(1, {"large": tensor})
    assert hook.stats.committed == 1 and hook.stats.retries == 0, hook.stats
    assert hook.stats.sent_bytes >= 320 * MIB
    assert same_bits(stockpot.load(client, "r@1")["large"], tensor)


def test_the_same_step_twice(daemon: Daemon, client: Client, tiny_base: Path) -> None:
    """Saving a step again is no error if the bytes are the same, and is refused if they are not."""
    weights = load_file(tiny_base / "model.safetensors")
    for tensors, committed in ((weights, 1), (weights, 1), (noisy(weights, 1), 0)):
        with make_hook(daemon, tiny_base) as hook:
            hook.on_step(1, tensors)
        assert (hook.stats.committed, hook.stats.failed) == (committed, 1 - committed), hook.stats
    stored = stockpot.load(client, "r@1")
    assert all(same_bits(stored[name], value) for name, value in weights.items())


def test_an_unknown_base_costs_checkpoints_only(daemon: Daemon, tiny_base: Path) -> None:
    with make_hook(daemon, tiny_base, base="nobody", retry_for_s=0.1) as hook:
        hook.on_step(1, {"x": torch.ones(3)})
        assert hook.flush(30)
        assert hook.stats.failed == 1
        assert "nobody" in hook.stats.last_error


def test_a_daemon_that_comes_later(daemon: Daemon, tiny_base: Path) -> None:
    weights = load_file(tiny_base / "model.safetensors")
    assert daemon.stop() == 0
    with make_hook(daemon, tiny_base) as hook:
        assert hook.on_step(1, weights)
        poll(lambda: hook.stats.retries > 0, 20)
        daemon.start()
        assert hook.flush(60)
        assert hook.stats.committed == 1


def test_kill_9_in_the_middle_of_a_loop(daemon: Daemon, tiny_base: Path, seed: int) -> None:
    """Training goes on, and everything that was acknowledged is there after the restart."""
    weights = load_file(tiny_base / "model.safetensors")
    weights["large"] = torch.randn(3 * MIB)  # 12 MiB a step: a kill meets an upload
    acknowledged: dict[int, str] = {}

    def note() -> bool:
        stats = hook.stats
        if stats.last_committed_step > 0:
            acknowledged[stats.last_committed_step] = stats.last_artifact
        return True

    with make_hook(daemon, tiny_base) as hook:
        for step in range(1, 31):
            weights["large"] = torch.randn(
                3 * MIB, generator=torch.Generator().manual_seed(step))
            assert hook.on_step(step, weights)
            note()
            if step in (8, 19):
                daemon.kill()
                daemon.start()
        assert hook.flush(120)
        note()
    assert hook.stats.committed == 30, hook.stats
    assert len(acknowledged) >= 10
    with Client(daemon.thrift) as client:
        for step in range(1, 31):
            digest = client.lineage.resolve(f"r@{step}")
            assert acknowledged.get(step, digest) == digest
            stored = stockpot.load(client, digest)["large"]
            expected = torch.randn(3 * MIB, generator=torch.Generator().manual_seed(step))
            assert same_bits(stored, expected), step


def test_evaluations_are_reported(daemon: Daemon, client: Client, tiny_base: Path) -> None:
    with make_hook(daemon, tiny_base) as hook:
        hook.on_step(1, load_file(tiny_base / "model.safetensors"))
        assert hook.report(1, {"accuracy": 0.75}, task="quiz", by="test")
        assert hook.flush(60)
        assert hook.stats.reports == 1
    evals = client.lineage.show("r@1").evals
    assert [(e.task, e.metric, e.value, e.by) for e in evals] == [
        ("quiz", "accuracy", 0.75, "test")]


def test_unix_socket(tmp_path: Path, tiny_base: Path) -> None:
    socket_path = tmp_path / "stockpot.sock"
    (tmp_path / "other").mkdir()
    daemon = Daemon(tmp_path / "other", "", "--unix-socket", str(socket_path)).start()
    try:
        daemon.cli("import-base", "tiny", tiny_base)
        with CheckpointHook(f"unix:{socket_path}", run="r", base="tiny", every=1, config=QUIET,
                            files=tiny_base) as hook:
            hook.on_step(1, load_file(tiny_base / "model.safetensors"))
        assert hook.stats.committed == 1, hook.stats
    finally:
        daemon.stop()


def test_client_errors_have_codes_and_names(client: Client) -> None:
    table = [
        (lambda: client.lineage.resolve("nobody"), ErrorCode.NOT_FOUND, "nobody"),
        (lambda: client.fetch_chunk(b"\x01" * 32), ErrorCode.NOT_FOUND, "0101"),
        (lambda: client.fetch_chunk(b"short"), ErrorCode.INVALID_ARGUMENT, ""),
        (lambda: client.control.job("nothing"), ErrorCode.NOT_FOUND, "nothing"),
        (lambda: client.create_run("", "tiny"), ErrorCode.INVALID_ARGUMENT, ""),
        (lambda: client.create_run("r", "nobody"), ErrorCode.NOT_FOUND, "nobody"),
        (lambda: client.report_eval("nobody", "t", "m", 1.0, "x"), ErrorCode.NOT_FOUND, "nobody"),
    ]
    for call, code, named in table:
        with pytest.raises(StockpotError) as raised:
            call()
        assert raised.value.code == code, raised.value
        assert named in raised.value.message
    assert client.lineage.runs() == []  # the connection survived all of it


def test_a_hook_without_a_configuration_keeps_the_runs_own(
        daemon: Daemon, client: Client, tiny_base: Path) -> None:
    own = RunConfig(merge_every=7, publish="request", best_metric="acc", best_is_lower=False)
    client.create_run("kept", "tiny", own)
    weights = load_file(tiny_base / "model.safetensors")
    for run in ("kept", "new"):
        with CheckpointHook(daemon.thrift, run=run, base="tiny", every=1) as hook:
            hook.on_step(1, weights)
        assert hook.stats.committed == 1, hook.stats
    configs = {run.name: run.config for run in client.lineage.runs()}
    assert configs == {"kept": own, "new": RunConfig()}
    assert client.create_run("kept", "tiny", RunConfig(merge_every=9)).config.merge_every == 9


def test_a_lying_chunk_is_refused(daemon: Daemon, client: Client, tiny_base: Path) -> None:
    client.create_run("r", "tiny", QUIET)
    request = stockpot.client.SessionRequest(run="r", step=1)
    session = client.open_session(request)
    with pytest.raises(StockpotError) as raised:
        client.put_chunk(session, hashlib.sha256(b"one thing").digest(), b"another thing")
    assert raised.value.code in (ErrorCode.CORRUPTION, ErrorCode.INVALID_ARGUMENT)
    assert client.have_chunks(session, [hashlib.sha256(b"one thing").digest()]) == [False]
    client.abort(session)
