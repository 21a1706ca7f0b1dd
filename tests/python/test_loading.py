"""stockpot.load() of a base, a checkpoint and a published variant."""

from __future__ import annotations

from pathlib import Path

import pytest
import stockpot
import torch
from safetensors.torch import load_file
from stockpot import CheckpointHook, Client, ErrorCode, RunConfig, StockpotError

from tests.daemon import Daemon

PUBLISH_TIMEOUT_S = 60


def test_a_base_is_what_was_imported(client: Client, tiny_base: Path) -> None:
    stored = stockpot.load(client, "tiny")
    imported = load_file(tiny_base / "model.safetensors")
    assert stored.keys() == imported.keys()
    for name, value in imported.items():
        assert stored[name].dtype == value.dtype and torch.equal(stored[name], value), name


def test_a_variant_is_base_plus_alpha_times_sign(daemon: Daemon, client: Client,
                                                 tiny_base: Path, seed: int) -> None:
    base = load_file(tiny_base / "model.safetensors")
    tuned = {name: (value.float() + 0.02 * torch.randn(value.shape)).to(value.dtype)
             for name, value in base.items()}
    embeddings = "model.embed_tokens.weight"
    tuned[embeddings] = base[embeddings]  # unchanged: stored as a reference to the base
    with CheckpointHook(daemon.thrift, "r", "tiny", every=1, files=tiny_base,
                        config=RunConfig(merge_every=0, publish="request")) as hook:
        hook.on_step(1, tuned)
    job = client.control.publish("r@1")
    variant = client.control.wait_job(job.key, PUBLISH_TIMEOUT_S).result
    stored = stockpot.load(client, variant)
    assert stored.keys() == tuned.keys()
    compressed = 0
    for name, value in tuned.items():
        if not name.endswith("proj.weight"):
            assert torch.equal(stored[name], value), name
            continue
        delta = value.float() - base[name].float()
        alpha = delta.abs().double().mean(dim=1, keepdim=True).float()
        sign = torch.where(delta >= 0, 1.0, -1.0)
        # alpha may differ in the last bit of its rounding from our float64 mean.
        expected = base[name].float() + alpha * sign
        bound = float(alpha.max()) * 2**-22
        assert torch.allclose(stored[name], expected, rtol=0, atol=bound), name
        assert torch.equal(torch.sign(stored[name] - base[name].float()), sign), name
        compressed += 1
    assert compressed == 14
    assert all(t.dtype == torch.bfloat16
               for t in stockpot.load(client, variant, dtype=torch.bfloat16).values())


def test_an_unknown_name_is_not_found(client: Client) -> None:
    with pytest.raises(StockpotError) as raised:
        stockpot.load(client, "nobody@latest")
    assert raised.value.code == ErrorCode.NOT_FOUND
