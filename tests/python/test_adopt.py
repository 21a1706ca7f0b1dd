"""adopt_merge(): whole or not at all, into the model that trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import stockpot
import torch
from safetensors.torch import load_file
from stockpot import CheckpointHook, Client, ErrorCode, RunConfig, StockpotError
from transformers import AutoModelForCausalLM

from tests.daemon import Daemon
from tests.python.test_hook import noisy

QUIET = RunConfig(merge_every=0, publish="request")
MERGE_TIMEOUT_S = 60


def push(daemon: Daemon, folder: Path, run: str, *steps: dict[str, torch.Tensor]) -> None:
    with CheckpointHook(daemon.thrift, run, "tiny", every=1, files=folder, config=QUIET,
                        when_full="wait") as hook:
        for step, tensors in enumerate(steps, start=1):
            hook.on_step(step, tensors)
    assert hook.stats.committed == len(steps), hook.stats


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_merge_goes_into_the_model_that_trains(daemon: Daemon, client: Client, tiny_base: Path
                                                 ) -> None:
    """C12 too: embeddings and head stay one tensor."""
    weights = load_file(tiny_base / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.bfloat16)
    # As a module, so that the head is stored as the alias it is.
    with CheckpointHook(daemon.thrift, "r", "tiny", every=1, config=QUIET, when_full="wait"
                        ) as hook:
        for step in (1, 2):
            model.load_state_dict(noisy(weights, step), strict=False)
            hook.on_step(step, model)
    job = client.control.merge(["r@1", "r@2"], "r", 2)
    merge = client.control.wait_job(job.key, MERGE_TIMEOUT_S).result
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
    optimizer.step()
    moments = optimizer.state[model.lm_head.weight]["exp_avg"].clone()
    parameters = list(model.parameters())

    assert stockpot.adopt_merge(client, "r@2.merge", model) == merge
    expected = stockpot.load(client, merge)
    assert equal(values_of(model), expected)
    assert not equal(expected, stockpot.load(client, "r@2"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert torch.equal(optimizer.state[model.lm_head.weight]["exp_avg"], moments)
    stockpot.adopt_merge(client, merge, model, optimizer=optimizer)
    assert not optimizer.state
    optimizer.step()  # goes on with new moments


def other_shape(t: dict[str, Any]) -> None:
    t["b"] = torch.zeros(5)


def other_type(t: dict[str, Any]) -> None:
    t["b"] = t["b"].double()


def untied(t: dict[str, Any]) -> None:
    t["d"] = t["a"] + 1


@pytest.mark.parametrize(("change", "named"), [
    (lambda t: t.pop("b"), "lacks b"), (lambda t: t.update(e=torch.ones(1)), "e$"),
    (other_shape, r"b is \[5\]"), (other_type, "b is torch.float64"), (untied, "a and d"),
], ids=["missing", "left over", "shape", "type", "untied"])
def test_what_does_not_fit_is_named_and_nothing_changes(
        daemon: Daemon, client: Client, tiny_base: Path, change: Any, named: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.randn(3, 2))
            self.b = torch.nn.Parameter(torch.randn(4))
            self.register_buffer("c", torch.tensor(3))
            self.d = self.a

    model = Model()
    tensors = {name: value.detach() + 1 for name, value in model.state_dict().items()}
    tensors["d"] = tensors["a"]
    change(tensors)
    push(daemon, tiny_base, "r", tensors)
    before = values_of(model)
    with pytest.raises(StockpotError, match=named) as raised:
        stockpot.adopt_merge(client, "r@1", model)
    assert raised.value.code == ErrorCode.INVALID_ARGUMENT
    assert equal(values_of(model), before)


def test_types_are_rounded_only_where_asked_for(daemon: Daemon, client: Client, tiny_base: Path
                                                ) -> None:
    weights = load_file(tiny_base / "model.safetensors")
    push(daemon, tiny_base, "r", weights)
    model = torch.nn.ParameterDict({  # fp32 master weights of a bf16 run
        name.replace(".", "/"): torch.zeros_like(value, dtype=torch.float32)
        for name, value in weights.items()})
    renamed = {name.replace(".", "/"): value for name, value in weights.items()}
    push(daemon, tiny_base, "s", renamed)
    with pytest.raises(StockpotError, match="cast=True"):
        stockpot.adopt_merge(client, "s@1", model)
    stockpot.adopt_merge(client, "s@1", model, cast=True)
    assert equal(values_of(model), {name: value.float() for name, value in renamed.items()})


def test_a_damaged_chunk_changes_nothing(daemon: Daemon, client: Client, tiny_base: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk that is fetched is another one: nothing was copied before it was looked at."""
    weights = noisy(load_file(tiny_base / "model.safetensors"), 1)
    push(daemon, tiny_base, "r", weights)
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    manifest = json.loads(client.fetch_manifest("r@1"))
    last = next(t for t in reversed(manifest["tensors"]) if t["name"] == "model.norm.weight")
    digest = bytes.fromhex(last["parts"]["data"]["chunks"][0])
    fetch = client.fetch_chunk

    def damaged(wanted: bytes) -> bytes:
        data = fetch(wanted)
        return bytes([data[0] ^ 1]) + data[1:] if wanted == digest else data

    monkeypatch.setattr(client, "fetch_chunk", damaged)
    with pytest.raises(StockpotError, match=r"model\.norm\.weight") as raised:
        stockpot.adopt_merge(client, "r@1", model)
    assert raised.value.code == ErrorCode.CORRUPTION
    assert all(not value.any() for value in model.state_dict().values())
