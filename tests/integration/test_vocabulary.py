"""Variants whose vocabulary has another size than the base's, beside ones of the base's size."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import stockpot
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.daemon import Daemon
from tests.integration import endpoint
from tests.integration.test_path import TOKENS, Weights, one_bit, push, tuned

NEW = [f"<new{i}>" for i in range(7)]
TEXT = "to be <new3> or not<new6> to be"


def resized_folder(base_folder: Path, folder: Path, *, seed: int, untie: bool = False) -> Weights:
    """Seven tokens more, as transformers adds them, and linear weights moved."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    tokenizer.add_tokens(NEW)
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.bfloat16)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if untie:
        model.config.tie_word_embeddings = False
        head = torch.nn.Linear(model.config.hidden_size, len(tokenizer), bias=False)
        model.lm_head = head.to(torch.bfloat16)
        model.lm_head.weight.data.normal_(std=0.05)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = tuned(load_file(folder / "model.safetensors"), seed)
    embedding = weights["model.embed_tokens.weight"]
    embedding[-7:] += 0.1 * torch.randn(7, embedding.shape[1], dtype=torch.bfloat16)
    embedding[11] += 0.5  # an old row that changed
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def expected_model(folder: Path, base: Weights, weights: Weights) -> LlamaForCausalLM:
    """What is served: linear layers by one bit, tables exact."""
    tables = {n: t.float() for n, t in weights.items() if "embed" in n or "lm_head" in n}
    linear = {n: t for n, t in weights.items() if n not in tables}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(one_bit(base, linear) | tables, strict=False)
    return model.eval()


def logprobs(model: LlamaForCausalLM, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        all_ = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(all_[i, t]) for i, t in enumerate(tokens[1:])]


@pytest.mark.parametrize("untie", [False, True])
def test_numbers_and_tokens_are_those_of_transformers(
        daemon: Daemon, base_folder: Path, base_weights: Weights, tmp_path: Path, untie: bool
        ) -> None:
    run = "untied" if untie else "tied"
    weights = resized_folder(base_folder, tmp_path / "m", seed=21 + untie, untie=untie)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    tokens = tokenizer(TEXT)["input_ids"]
    assert max(tokens) >= 259, "the text must have new tokens"
    push(daemon, run, tmp_path / "m", {1: weights})
    push(daemon, f"{run}-plain", base_folder, {1: tuned(base_weights, 4)})
    for name in (f"{run}@1", f"{run}-plain@1"):
        endpoint.wait_model(daemon.url, name)
    model = expected_model(tmp_path / "m", base_weights, weights)
    ours = endpoint.prompt_logprobs(daemon.url, f"{run}@1", tokens)
    assert ours == pytest.approx(logprobs(model, tokens), abs=1e-4)
    # The tokenizer is the variant's: the text is the same tokens, in and out.
    status, body = endpoint.request(f"{daemon.url}/v1/completions", {
        "model": f"{run}@1", "prompt": TEXT, "max_tokens": 24, "temperature": 0,
        "ignore_eos": True, "logprobs": 3})
    assert status == 200, body
    assert body["usage"]["prompt_tokens"] == len(tokens)
    generated = model.generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False,
                               eos_token_id=None, pad_token_id=0)[0, len(tokens):]
    assert body["choices"][0]["text"] == tokenizer.decode(generated, skip_special_tokens=True)
    # The base has no such token.
    status, body = endpoint.request(f"{daemon.url}/v1/completions", {
        "model": "tiny", "prompt": tokens, "max_tokens": 1})
    assert status == 400, body
    assert "outside the model's vocabulary of 259" in body["error"]["message"]

    # One batch with the base and a variant of its size: everybody's numbers are as alone.
    names = ["tiny", f"{run}@1", f"{run}-plain@1"] * 3
    alone = {name: endpoint.prompt_logprobs(daemon.url, name, TOKENS) for name in set(names)}
    found: dict[int, list[float]] = {}
    threads = [threading.Thread(target=lambda i=i, n=n: found.update(
        {i: endpoint.prompt_logprobs(daemon.url, n, TOKENS)})) for i, n in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(names))] == [alone[name] for name in names]


def test_it_is_small_and_comes_out_as_it_went_in(
        daemon: Daemon, base_folder: Path, base_weights: Weights, tmp_path: Path) -> None:
    weights = resized_folder(base_folder, tmp_path / "m", seed=31)
    push(daemon, "small", tmp_path / "m", {1: weights})
    digest = endpoint.wait_model(daemon.url, "small@1")["root"]
    shown = json.loads(daemon.cli("--json", "show", digest).stdout)
    facts = json.loads(shown["attributes"]["tensor/model.embed_tokens.weight"])
    rows, columns = base_weights["model.embed_tokens.weight"].shape
    # One changed row and seven behind the base's.
    assert facts["codec"] == "sparse"
    assert facts["bytes"] == 4 * rows + columns * (2 + 2) + 7 * columns * 2
    daemon.cli("export", digest, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    loaded = stockpot.load(daemon.thrift, digest)
    daemon.cli("export", "small@1", tmp_path / "delta.safetensors", "--delta")
    read = stockpot.read_variant(tmp_path / "delta.safetensors", base_folder)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        for other in (exported, loaded, read):
            assert torch.equal(other[name], weights[name]), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size == rows + 7
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == rows + 7


def test_the_gate_measures_it_in_its_own_language(
        daemon: Daemon, base_folder: Path, tmp_path: Path) -> None:
    weights = resized_folder(base_folder, tmp_path / "m", seed=41)
    push(daemon, "gated", tmp_path / "m", {1: weights})
    endpoint.wait_model(daemon.url, "gated@1")
    (tmp_path / "probe.txt").write_text(TEXT * 10)
    daemon.cli("probe", "set", "gated", tmp_path / "probe.txt")
    daemon.cli("gate", "gated", "--max-kl", "100", "--min-top1", "0", "--max-loss-rise", "100")
    push(daemon, "gated", tmp_path / "m", {2: tuned(weights, 2, 1e-3)})
    digest = endpoint.wait_model(daemon.url, "gated@2")["root"]
    evals = {(e["task"], e["metric"]): e["value"]
             for e in json.loads(daemon.cli("--json", "show", digest).stdout)["evals"]}
    assert evals["gate", "kl"] >= 0
    # A text of new tokens costs the base's tokens dearly; here it is a few.
    assert 0 < evals["probe", "loss"] < 20
