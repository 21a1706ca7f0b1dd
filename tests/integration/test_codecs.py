"""Publishing by measurement: sign planes, residuals and budgets, from the CLI to the logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import stockpot
import torch
from safetensors.torch import load_file
from stockpot import Client, RunConfig

from tests.daemon import Daemon
from tests.integration import endpoint
from tests.integration.test_path import TOKENS, Weights, push, torch_logprobs


def moved(base: Weights, step: int) -> Weights:
    """Everything moves, embeddings too; the matrices' update has directions that stand out."""
    generator = torch.Generator().manual_seed(step)
    result = {}
    for name, tensor in base.items():
        noise = 1e-2 * torch.randn(tensor.shape, generator=generator)
        if tensor.dim() == 2:
            u = torch.randn(tensor.shape[0], 2, generator=generator)
            v = torch.randn(2, tensor.shape[1], generator=generator)
            noise += 1e-2 * u @ v
        result[name] = (tensor.float() + noise).to(tensor.dtype)
    return result


def planes(base: torch.Tensor, weight: torch.Tensor, count: int) -> torch.Tensor:
    """W_base + sum of alpha * sign, each plane of what those before it leave: by the definition."""
    kept = torch.zeros_like(base, dtype=torch.float32)
    delta = weight.float() - base.float()
    for _ in range(count):
        rest = delta - kept
        kept = kept + rest.abs().mean(1, keepdim=True) * torch.where(rest >= 0, 1.0, -1.0)
    return base.float() + kept


def by_parts(client: Client, digest: str, base: Weights) -> Weights:
    """Every tensor of a variant in float64, from the bytes of its parts."""
    manifest = json.loads(client.fetch_manifest(digest))

    def part(entry: dict, role: str, dtype: str) -> np.ndarray:
        data = b"".join(client.fetch_chunk(bytes.fromhex(chunk))
                        for chunk in entry["parts"][role]["chunks"])
        return np.frombuffer(data, dtype)

    def bf16(raw: np.ndarray) -> np.ndarray:
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    result = {}
    for entry in manifest["tensors"]:
        name, codec = entry["name"], entry.get("codec", "raw")
        if entry.get("alias_of"):
            continue
        if codec == "base":
            result[name] = base[name].double()
        elif codec == "raw":
            raw = part(entry, "data", "<u2")
            result[name] = torch.from_numpy(bf16(raw)).reshape(entry["shape"])
        else:
            assert codec == "bitdelta", entry
            rows, columns = entry["shape"]
            value = base[name].double().numpy().copy()
            for role in [r for r in entry["parts"] if r.startswith("signs")]:
                bits = np.unpackbits(part(entry, role, "u1").reshape(rows, -1), axis=1,
                                     count=columns, bitorder="little")
                alpha = part(entry, role.replace("signs", "alpha"), "<f4").astype(np.float64)
                value += alpha[:, None] * (2.0 * bits - 1)
            if "residual_a" in entry["parts"]:
                value += (bf16(part(entry, "residual_b", "<u2")).reshape(rows, -1)
                          @ bf16(part(entry, "residual_a", "<u2")).reshape(-1, columns))
            result[name] = torch.from_numpy(value)
    return result


def lost(base: Weights, weights: Weights, other: Weights) -> float:
    """Share of the squared update that `other` does not have."""
    error = sum(float((weights[n].double() - other[n].double()).square().sum()) for n in weights)
    update = sum(float((weights[n].double() - base[n].double()).square().sum()) for n in weights)
    return error / update


@pytest.fixture(scope="module")
def weights(daemon: Daemon, base_folder: Path, base_weights: Weights) -> Weights:
    endpoint.wait_ready(daemon.url)
    weights = moved(base_weights, 5)
    push(daemon, "codecs", base_folder, {5: weights}, RunConfig(merge_every=0, publish="request"))
    return weights


@pytest.mark.parametrize(("route", "flags"), [
    ("planes", ["--codec", "bitdelta", "--planes", 3]),
    ("lowrank", ["--codec", "bitdelta", "--residual-rank", 4]),
    ("budget", ["--codec", "auto", "--max-bytes", "30%", "--residual-rank", 8]),
    ("faithful", ["--codec", "auto", "--max-error", 0.02]),
    ("lossless", ["--codec", "sparse"]),
])
def test_what_is_served_is_what_is_stored(
        daemon: Daemon, base_folder: Path, base_weights: Weights, weights: Weights, tmp_path: Path,
        route: str, flags: list[object]) -> None:
    daemon.cli("publish", "codecs@5", *flags, "--as", route)
    endpoint.wait_model(daemon.url, route)
    with Client(daemon.thrift) as client:
        digest = next(r.target.hex() for r in client.control.routes() if r.name == route)
        shown = client.lineage.show(digest)
        stored = by_parts(client, digest, base_weights)
        loaded = stockpot.load(client, digest)
    ours = endpoint.prompt_logprobs(daemon.url, route, TOKENS)
    theirs = torch_logprobs({n: t.float() for n, t in stored.items()}, base_folder, TOKENS)
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours == endpoint.prompt_logprobs(daemon.url, route, TOKENS)

    daemon.cli("export", digest, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in stored.items():
        assert torch.allclose(loaded[name].double(), value, rtol=1e-6, atol=1e-9), name
        # Rounded once: half a unit in the last of bf16's 8 bits.
        half = torch.ldexp(torch.tensor(0.5, dtype=torch.float64), torch.frexp(value)[1] - 8)
        assert exported[name].dtype == torch.bfloat16
        assert ((exported[name].double() - value).abs() <= half * (1 + 1e-6)).all(), name
    error = lost(base_weights, weights, stored)
    assert float(shown.attributes["update_error"]) == pytest.approx(error, abs=1e-3)
    codec = {name: json.loads(shown.attributes.get(f"tensor/{name}", "{}")) for name in weights}
    full = sum(t.numel() * 2 for t in weights.values())
    if route == "planes":
        for name, value in stored.items():
            if codec[name].get("codec") == "bitdelta":
                want = planes(base_weights[name], weights[name], 3)
                # At a rest of nearly 0 the sums' rounding decides: rare, and worth one alpha.
                close = torch.isclose(value.float(), want, rtol=1e-5, atol=1e-7)
                assert close.float().mean() > 0.999, name
    if route == "lowrank":
        assert error < 0.9 * lost(base_weights, weights, {
            n: planes(base_weights[n], weights[n], 1) if codec[n]["codec"] == "bitdelta"
            else weights[n] for n in weights})
    if route == "budget":
        assert shown.stored_bytes <= 0.3 * full
        assert codec["model.embed_tokens.weight"]["codec"] == "bitdelta"
    if route == "faithful":
        assert error <= 0.02 + 1e-6
        assert shown.stored_bytes < 0.7 * full
    if route == "lossless":
        assert error == 0
    told = daemon.cli("show", digest, "--tensors").stdout
    assert "model.embed_tokens.weight" in told and "next" in told.lower()


def test_a_budget_that_cannot_be_met_names_what_it_takes(daemon: Daemon, weights: Weights) -> None:
    done = daemon.cli("publish", "codecs@5", "--codec", "auto", "--max-bytes", 1000, "--as",
                      "small", check=False)
    assert done.returncode == 1
    needed = int(done.stderr.split("variant of ")[1].split()[0])
    daemon.cli("publish", "codecs@5", "--codec", "auto", "--max-bytes", needed, "--as", "small")
    with Client(daemon.thrift) as client:
        digest = next(r.target.hex() for r in client.control.routes() if r.name == "small")
        assert client.lineage.show(digest).stored_bytes == needed
    for flags in (["--codec", "dense", "--planes", 2], ["--codec", "sparse", "--max-error", 0.1]):
        done = daemon.cli("publish", "codecs@5", *flags, check=False)
        assert done.returncode == 1 and "options of" in done.stderr, done.stderr


def test_a_run_says_how_its_steps_are_published(
        daemon: Daemon, base_folder: Path, base_weights: Weights) -> None:
    config = RunConfig(merge_every=0, publish="every", publish_codec="auto",
                       publish_max_share=0.25, publish_residual_rank=4)
    push(daemon, "configured", base_folder, {1: moved(base_weights, 1)}, config)
    endpoint.wait_model(daemon.url, "configured@1")
    with Client(daemon.thrift) as client:
        digest = next(r.target.hex() for r in client.control.routes() if r.name == "configured@1")
        shown = client.lineage.show(digest)
    assert shown.attributes["codec"] == "auto"
    assert shown.stored_bytes <= 0.25 * sum(t.numel() * 2 for t in base_weights.values())
    runs = json.loads(daemon.cli("--json", "runs").stdout)
    config_shown = next(run for run in runs if run["name"] == "configured")["config"]
    assert config_shown["publish_codec"] == "auto"
    assert config_shown["publish_max_share"] == 0.25


def test_push_sets_and_changes_what_a_run_publishes(daemon: Daemon, base_folder: Path) -> None:
    def config() -> dict[str, object]:
        runs = json.loads(daemon.cli("--json", "runs").stdout)
        shown = next(run for run in runs if run["name"] == "flags")["config"]
        return {key: shown[f"publish_{key}"] for key in (
            "codec", "planes", "residual_rank", "max_bytes", "max_share", "max_error")}

    daemon.cli("push", "flags", 1, base_folder, "--base", "tiny", "--publish", "request",
               "--publish-codec", "auto", "--publish-planes", 3, "--publish-max-bytes", "40%")
    assert config() == {"codec": "auto", "planes": 3, "residual_rank": 0, "max_bytes": 0,
                        "max_share": 0.4, "max_error": -1}
    daemon.cli("push", "flags", 2, base_folder, "--publish-max-bytes", 100000,
               "--publish-max-error", 0.5)
    assert config() == {"codec": "auto", "planes": 3, "residual_rank": 0, "max_bytes": 100000,
                        "max_share": 0, "max_error": 0.5}
    for flags in (["--publish-max-bytes", "140%"], ["--publish-planes", 9],
                  ["--publish-codec", "zip"], ["--publish-max-bytes", "0"]):
        assert daemon.cli("push", "flags", 3, base_folder, *flags, check=False).returncode == 2
    # What the codec has no use for is refused by the daemon.
    done = daemon.cli("push", "flags", 3, base_folder, "--publish-codec", "dense", check=False)
    assert done.returncode == 1 and "options of" in done.stderr, done.stderr
