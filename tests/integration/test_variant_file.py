"""Variants as one file: out of a daemon, into Python and another daemon; BitDelta's own files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stockpot
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stockpot import StockpotError, bitdelta_import

from tests import tiny_llama
from tests.daemon import Daemon, running
from tests.integration import endpoint
from tests.integration.test_path import TOKENS, Weights, one_bit, push, torch_logprobs, tuned


def export(daemon: Daemon, variant: str, file: Path) -> str:
    """The digest."""
    done = daemon.cli("--json", "export", variant, file, "--delta")
    return json.loads(done.stdout)["artifact"]


def take(daemon: Daemon, file: Path, name: str) -> str:
    done = daemon.cli("--json", "import-variant", file, "--as", name)
    return json.loads(done.stdout)["artifact"]


def refusal(daemon: Daemon, *args: object) -> str:
    done = daemon.cli(*args, check=False)
    assert done.returncode == 1, done
    return done.stderr


def mixed(base: Weights) -> Weights:
    """A tensor of every codec: one bit, a few elements, exact, the base's own."""
    weights = tuned(base, 3)
    embedding = base["model.embed_tokens.weight"].clone()
    embedding[[5, 77]] += 0.5
    weights["model.embed_tokens.weight"] = embedding
    weights["model.layers.1.mlp.up_proj.weight"] = base["model.layers.1.mlp.up_proj.weight"]
    return weights


@pytest.fixture(scope="module")
def file(daemon: Daemon, base_folder: Path, base_weights: Weights,
         tmp_path_factory: pytest.TempPathFactory) -> Path:
    push(daemon, "file", base_folder, {1: mixed(base_weights)})
    endpoint.wait_model(daemon.url, "file@1")
    path = tmp_path_factory.mktemp("file") / "variant.safetensors"
    with stockpot.Client(daemon.thrift) as client:
        routes = {route.name: route.target.hex() for route in client.control.routes()}
    assert export(daemon, "file@1", path) == routes["file@1"]
    return path


def test_python_reads_it_without_a_daemon(file: Path, base_folder: Path, base_weights: Weights
                                          ) -> None:
    weights = stockpot.read_variant(file, base_folder)
    expected = one_bit(base_weights, mixed(base_weights))
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=1e-6, atol=1e-7)
    with safe_open(file, "pt") as opened:
        held = set(opened.keys())
    assert "model.layers.0.self_attn.q_proj.weight.signs" in held
    assert "model.embed_tokens.weight.columns" in held
    assert "model.norm.weight" in held
    assert not any(name.startswith("model.layers.1.mlp.up_proj") for name in held)


def test_another_daemon_serves_it_as_the_same_artifact(
        daemon: Daemon, file: Path, base_folder: Path, tmp_path: Path) -> None:
    ours = endpoint.prompt_logprobs(daemon.url, "file@1", TOKENS)
    with running(tmp_path / "data", "tiny") as other:
        assert "import it first" in refusal(other, "import-variant", file, "--as", "taken")
        other.cli("import-base", "tiny", base_folder)
        digest = take(other, file, "taken")
        assert endpoint.wait_model(other.url, "taken")["root"] == digest
        assert endpoint.prompt_logprobs(other.url, "taken", TOKENS) == ours
        assert take(other, file, "taken") == digest, "again: no error"
        again = tmp_path / "again.safetensors"
        assert export(other, "taken", again) == digest
        assert again.read_bytes() == file.read_bytes()
    assert endpoint.wait_model(daemon.url, "file@1")["root"] == digest


def test_what_does_not_fit_is_refused_by_name(daemon: Daemon, file: Path, base_folder: Path,
                                              base_weights: Weights, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_llama.make(other)
    weights = load_file(other / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name][0, 0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    daemon.cli("import-base", "other", other)
    said = refusal(daemon, "import-variant", file, "--as", "x", "--base", "other")
    assert f"tensor '{name}' differs" in said
    with pytest.raises(StockpotError, match=name):
        stockpot.read_variant(file, other)
    with running(tmp_path / "data", "other") as elsewhere:
        elsewhere.cli("import-base", "other", other)
        endpoint.wait_ready(elsewhere.url)
        assert name in refusal(elsewhere, "import-variant", file, "--as", "x")
    bytes_ = bytearray(file.read_bytes())
    bytes_[-1] ^= 1
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(bytes_)
    assert "are not those that its manifest names" in refusal(
        daemon, "import-variant", bad, "--as", "x")
    save_file({"w": torch.zeros(3)}, bad)
    assert "not a variant's file" in refusal(daemon, "import-variant", bad, "--as", "x")
    with stockpot.Client(daemon.thrift) as client:
        checkpoint = client.lineage.resolve("file@1")
    assert "is a checkpoint" in refusal(daemon, "export", checkpoint, tmp_path / "c", "--delta")
    assert endpoint.request(f"{daemon.url}/v1/models/x")[0] == 404


def reference_pack(bits: torch.Tensor) -> torch.Tensor:
    """[d_in, d_out] of 0 and 1 to [d_in / 32, d_out] words, the lowest bit first."""
    words = bits.reshape(bits.shape[0] // 32, 32, bits.shape[1]).long()
    packed = sum(words[:, i] << i for i in range(32))
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def test_bitdeltas_own_file_is_taken(daemon: Daemon, base_folder: Path, base_weights: Weights,
                                     tmp_path: Path) -> None:
    """A diff.pt by the written rule of the reference, against W_base + coeff * sign."""
    weights = tuned(base_weights, 5)
    diff, expected = {}, {}
    for name, tensor in weights.items():
        delta = tensor.float() - base_weights[name].float()
        if "proj" not in name:
            if delta.any():
                diff[name] = torch.nn.Parameter(tensor)
            expected[name] = tensor.float()
            continue
        module, coeff = name.removesuffix(".weight"), delta.abs().mean()
        diff[f"{module}.mask"] = reference_pack((delta >= 0).T)
        diff[f"{module}.coeff"] = torch.nn.Parameter(coeff)
        expected[name] = base_weights[name].float() + coeff * torch.where(delta >= 0, 1.0, -1.0)
    torch.save(diff, tmp_path / "diff.pt")
    out = tmp_path / "bitdelta.safetensors"
    with stockpot.Client(daemon.thrift) as client:
        base = client.lineage.resolve("tiny")
    bitdelta_import.convert(tmp_path / "diff.pt", base_folder, out, base)
    read = stockpot.read_variant(out, base_folder)
    for name, tensor in expected.items():
        torch.testing.assert_close(read[name].float(), tensor, rtol=1e-6, atol=1e-7)
    take(daemon, out, "theirs")
    endpoint.wait_model(daemon.url, "theirs")
    assert endpoint.prompt_logprobs(daemon.url, "theirs", TOKENS) == pytest.approx(
        torch_logprobs(expected, base_folder, TOKENS), abs=1e-4)

    del diff["model.layers.0.mlp.up_proj.coeff"]
    diff["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    diff["model.layers.0.mlp.up_proj.coeff"] = torch.tensor(float("nan"))
    torch.save(diff, tmp_path / "bad.pt")
    with pytest.raises(StockpotError, match=r"layers\.9"):
        bitdelta_import.convert(tmp_path / "bad.pt", base_folder, tmp_path / "bad", base)
    del diff["model.layers.9.mlp.up_proj.weight"]
    torch.save(diff, tmp_path / "bad.pt")
    bitdelta_import.convert(tmp_path / "bad.pt", base_folder, tmp_path / "bad", base)
    assert "model.layers.0.mlp.up_proj.weight" in refusal(
        daemon, "import-variant", tmp_path / "bad", "--as", "nan")
