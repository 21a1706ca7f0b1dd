"""Bad input of every kind: an error that names the thing, the daemon up, nothing half stored."""

from __future__ import annotations

import json
import random
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stockpot import CheckpointHook, Client

from tests.daemon import Daemon
from tests.integration import endpoint


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def lie_about_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 62) + file.read_bytes()[8:])


def overlap(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header["model.norm.weight"]["data_offsets"] = [0, 128]
    text = json.dumps(header).encode().ljust(size)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size:])


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "model.safetensors"),
    "header length": (lie_about_header, "model.safetensors"),
    "overlap": (overlap, "overlap"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json"),
}

# A base that the store takes as bytes but no endpoint may serve.
BAD_BASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "architecture": (
        lambda f: edit_config(f, architectures=["MambaForCausalLM"], model_type="mamba"), "Mamba"),
    "shape": (lambda f: edit_config(f, intermediate_size=96), "mlp"),
    "missing": (lambda f: edit_weights(
        f, lambda w: w.pop("model.layers.1.mlp.up_proj.weight")),
        "model.layers.1.mlp.up_proj.weight"),
}


def artifacts(daemon: Daemon) -> int:
    with Client(daemon.thrift) as client:
        return client.control.status().artifacts


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_folders_are_refused_by_name(daemon: Daemon, base_folder: Path, tmp_path: Path,
                                         name: str) -> None:
    endpoint.wait_ready(daemon.url)
    change, named = BAD_FOLDERS[name]
    bad = tmp_path / "bad"
    shutil.copytree(base_folder, bad)
    change(bad)
    before = artifacts(daemon)
    for command in (("import-base", "bad", bad), ("push", "bad", 1, bad, "--base", "tiny")):
        done = daemon.cli(*command, check=False)
        assert done.returncode == 1, done
        assert named in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert artifacts(daemon) == before


@pytest.mark.parametrize("name", BAD_BASES)
def test_bad_bases_are_never_served(base_folder: Path, tmp_path: Path, name: str) -> None:
    change, named = BAD_BASES[name]
    bad = tmp_path / "bad"
    shutil.copytree(base_folder, bad)
    change(bad)
    daemon = Daemon(tmp_path / "data", "bad").start()
    try:
        done = daemon.cli("import-base", "bad", bad, check=False)
        if done.returncode == 0:  # stored as bytes: then the endpoint says why it does not serve
            with Client(daemon.thrift) as client:
                for _ in range(600):
                    state = client.control.status().base_state
                    if state.startswith("failed"):
                        break
                    assert not state.startswith("ready")
                    client.control.watch(10**9, timeout_s=0.05)
            assert named in state, state
        else:
            assert named in done.stderr, done.stderr
        status, body = endpoint.request(f"{daemon.url}/v1/completions",
                                        {"model": "bad", "prompt": "x"})
        assert status == 503, body
        assert endpoint.request(f"{daemon.url}/health")[0] == 200
    finally:
        assert daemon.stop() == 0


def publish_failure(daemon: Daemon, id: str) -> str:
    done = daemon.cli("publish", id, check=False)
    assert done.returncode == 1
    return done.stderr


def test_a_checkpoint_that_cannot_be_a_variant_is_kept_but_not_published(
        daemon: Daemon, base_folder: Path, base_weights: dict[str, torch.Tensor]) -> None:
    norm, up = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
    nan = {**base_weights, up: base_weights[up].clone()}
    nan[up][0, 0] = float("nan")
    cases = {
        1: (nan, up),
        2: ({k: v for k, v in base_weights.items() if k != norm}, norm),
        3: ({**base_weights, norm: base_weights[norm][:10].clone()}, norm),
        4: ({**base_weights, "extra.weight": torch.zeros(3)}, "extra.weight"),
        5: ({**base_weights, norm: torch.zeros(64, dtype=torch.int32)}, norm),
    }
    with CheckpointHook(daemon.thrift, run="gate", base="tiny", every=1, files=base_folder,
                        when_full="wait") as hook:
        for step, (weights, _) in cases.items():
            assert hook.save(step, weights, {"loss": float("nan")})
        assert hook.flush(60)
        assert hook.stats.committed == len(cases), hook.stats
    for step, (_, named) in cases.items():
        assert named in publish_failure(daemon, f"gate@{step}")
        status, _ = endpoint.request(f"{daemon.url}/v1/models/gate@{step}")
        assert status == 404
    events = daemon.cli("events", "--json").stdout
    assert "publish_refused" in events
    status, body = endpoint.request(f"{daemon.url}/v1/completions",
                                    {"model": "gate@latest", "prompt": "x"})
    assert status == 404 and "gate@latest" in body["error"]["message"]


def test_http_errors(daemon: Daemon) -> None:
    url = f"{daemon.url}/v1/completions"
    table = [
        (b"{", 400), (b"", 400), (b"[]", 400), (b"\xff\xfe", 400), (b"[" * 100_000, 400),
        (json.dumps({"model": "tiny"}).encode(), 400),
        (json.dumps({"model": "tiny", "prompt": [99999]}).encode(), 400),
        (json.dumps({"model": "tiny", "prompt": [-1]}).encode(), 400),
        (json.dumps({"model": "tiny", "prompt": "x", "max_tokens": -1}).encode(), 400),
        (json.dumps({"model": "tiny", "prompt": "x", "temperature": "hot"}).encode(), 400),
        (json.dumps({"model": "tiny", "prompt": "x" * 5000}).encode(), 400),
        (json.dumps({"model": "nobody", "prompt": "x"}).encode(), 404),
        (json.dumps({"model": "tiny@latest", "prompt": "x"}).encode(), 404),
        (b"x" * (17 << 20), 413),
    ]
    for raw, expected in table:
        try:
            status, body = endpoint.request(url, raw=raw)
        except (ConnectionError, OSError):
            assert expected == 413, raw[:50]  # the reply may race with the unread body
            continue
        assert status == expected, (raw[:50], status, body)
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
        assert body["error"]["message"], raw[:50]
    assert endpoint.request(f"{daemon.url}/nowhere")[0] == 404
    assert endpoint.request(url)[0] == 405


def test_garbage_on_the_thrift_port(daemon: Daemon) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    host, port = daemon.thrift.split(":")
    before = daemon.rss_bytes()
    call = struct.pack(">I", 0x80010001) + struct.pack(">I", 16) + b"checkpoint:hello"
    for round_number in range(300):
        with socket.create_connection((host, int(port)), timeout=10) as wire:
            kind = round_number % 4
            try:
                if kind == 0:
                    wire.sendall(rng.randbytes(rng.randrange(1, 5000)))
                elif kind == 1:
                    wire.sendall(struct.pack(">I", 0x7FFFFFFF) * 4)
                elif kind == 2:
                    wire.sendall(call + rng.randbytes(rng.randrange(0, 100)))
                else:
                    wire.sendall(call[:rng.randrange(len(call))])
            except ConnectionError:
                pass  # refused while we were still sending: what is wanted
    with Client(daemon.thrift) as client:
        assert client.control.status().artifacts >= 1
    assert daemon.rss_bytes() - before < 200 << 20


def test_names_of_runs_cannot_be_given_away(daemon: Daemon, base_folder: Path) -> None:
    daemon.cli("push", "own", 1, base_folder, "--base", "tiny")
    daemon.cli("publish", "own@1")
    before = daemon.cli("routes", "--json").stdout
    for name in ("own@2", "own@latest", "own@best", "own@1.full", "nobody@7", "tiny"):
        done = daemon.cli("publish", "own@1", "--as", name, check=False)
        assert done.returncode == 1, name
        assert name in done.stderr, done.stderr
    assert daemon.cli("routes", "--json").stdout == before
    daemon.cli("publish", "own@1", "--as", "mine")
    endpoint.wait_model(daemon.url, "mine")


@pytest.mark.parametrize("step", ["9223372036854775808", "99999999999999999999", "-1", "1e3", "x"])
def test_a_step_that_is_none_is_refused(daemon: Daemon, base_folder: Path, step: str) -> None:
    before = artifacts(daemon)
    done = daemon.cli("push", "steps", "--base", "tiny", "--", step, base_folder, check=False)
    assert done.returncode != 0, done.stdout
    done = daemon.cli("push", "steps", step, base_folder, "--base", "tiny", check=False)
    assert done.returncode == 2, done.stdout
    assert artifacts(daemon) == before
