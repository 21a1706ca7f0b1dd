"""From a push to a fresh variant that answers, beside those that answered before."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import stockpot
import torch
from safetensors.torch import load_file
from stockpot import CheckpointHook, Client, RunConfig
from stockpot.rpc.ttypes import Run
from transformers import AutoModelForCausalLM

from tests.daemon import Daemon
from tests.integration import endpoint

TOKENS = [70, 75, 82, 3, 90, 101, 64, 77, 4, 120]
Weights = dict[str, torch.Tensor]


def tuned(base: Weights, step: int, scale: float = 2e-2) -> Weights:
    """Linear weights moved by noise; norms a little; embeddings untouched, as a fine-tune would."""
    generator = torch.Generator().manual_seed(step)
    result = {}
    for name, tensor in base.items():
        noise = scale * torch.randn(tensor.shape, generator=generator)
        keep = "embed" in name or "lm_head" in name
        result[name] = tensor if keep else (tensor.float() + noise).to(tensor.dtype)
    return result


def push(daemon: Daemon, run: str, folder: Path, steps: dict[int, Weights],
         config: RunConfig | None = None) -> None:
    with CheckpointHook(daemon.thrift, run=run, base="tiny", every=1, files=folder,
                        config=config, when_full="wait") as hook:
        for step, weights in steps.items():
            assert hook.save(step, weights, {"loss": 10.0 - step})
        assert hook.flush(60)
        assert hook.stats.failed == 0, hook.stats


def torch_logprobs(weights: Weights, folder: Path, tokens: list[int]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    missing = model.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
    assert not missing.unexpected_keys
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(logprobs[i, t]) for i, t in enumerate(tokens[1:])]


def one_bit(base: Weights, weights: Weights) -> Weights:
    """W_base + alpha * sign(delta) in fp32, straight from the definition."""
    result = {}
    for name, tensor in weights.items():
        delta = tensor.float() - base[name].float()
        linear = tensor.dim() == 2 and "embed" not in name and "lm_head" not in name
        if not linear or not delta.any():
            result[name] = tensor.float()
            continue
        sign = torch.where(delta >= 0, 1.0, -1.0)
        result[name] = base[name].float() + delta.abs().mean(1, keepdim=True) * sign
    return result


def test_steps_answer_side_by_side_and_a_stream_is_not_disturbed(
        daemon: Daemon, base_folder: Path, base_weights: Weights) -> None:
    endpoint.wait_ready(daemon.url)
    push(daemon, "side", base_folder, {1: tuned(base_weights, 1)})
    first = endpoint.wait_model(daemon.url, "side@1")
    before = {m: endpoint.prompt_logprobs(daemon.url, m, TOKENS) for m in ("tiny", "side@1")}
    alone = endpoint.greedy(daemon.url, "side@1", TOKENS, 200)

    texts: list[str] = []
    streams = [threading.Thread(target=lambda: texts.append(
        endpoint.greedy(daemon.url, "side@1", TOKENS, 200))) for _ in range(4)]
    for stream in streams:
        stream.start()
    push(daemon, "side", base_folder, {2: tuned(base_weights, 2), 3: tuned(base_weights, 3)})
    second = endpoint.wait_model(daemon.url, "side@3")
    for stream in streams:
        stream.join()
    assert texts == [alone] * 4

    after = {m: endpoint.prompt_logprobs(daemon.url, m, TOKENS)
             for m in ("tiny", "side@1", "side@2", "side@3", "side@latest")}
    assert after["tiny"] == before["tiny"]
    assert after["side@1"] == before["side@1"]
    assert after["side@latest"] == after["side@3"]
    assert len({tuple(after[m]) for m in ("tiny", "side@1", "side@2", "side@3")}) == 4
    assert first["root"] != second["root"]
    status, body = endpoint.request(f"{daemon.url}/v1/completions", {
        "model": "side@latest", "prompt": TOKENS, "max_tokens": 1})
    assert status == 200
    assert body["system_fingerprint"] == second["root"]


def test_numbers_are_those_of_transformers(daemon: Daemon, base_folder: Path, base_weights: Weights
                                           ) -> None:
    weights = tuned(base_weights, 7)
    push(daemon, "numbers", base_folder, {7: weights})
    daemon.cli("publish", "numbers@7", "--codec", "dense")
    for model, expected in {
        "tiny": base_weights,
        "numbers@7": one_bit(base_weights, weights),
        "numbers@7.full": weights,
    }.items():
        endpoint.wait_model(daemon.url, model)
        ours = endpoint.prompt_logprobs(daemon.url, model, TOKENS)
        theirs = torch_logprobs(expected, base_folder, TOKENS)
        assert ours == pytest.approx(theirs, abs=1e-4), model


def few_changed(base: Weights, share: float) -> Weights:
    """A short step of reinforcement learning: a few elements of every matrix, by much."""
    generator = torch.Generator().manual_seed(11)
    result = {}
    for name, tensor in base.items():
        changed = torch.rand(tensor.shape, generator=generator) < share
        moved = (tensor.float() + 0.1 * torch.randn(tensor.shape, generator=generator))
        result[name] = torch.where(changed & (tensor.dim() == 2), moved.to(tensor.dtype), tensor)
    return result


def test_few_changed_elements_lose_nothing(daemon: Daemon, base_folder: Path,
                                           base_weights: Weights, tmp_path: Path) -> None:
    weights = few_changed(base_weights, 0.01)
    push(daemon, "sparse", base_folder, {1: weights, 2: tuned(base_weights, 2)})
    for model in ("sparse@1", "sparse@2"):
        endpoint.wait_model(daemon.url, model)
    ours = endpoint.prompt_logprobs(daemon.url, "sparse@1", TOKENS)
    assert ours == pytest.approx(torch_logprobs(weights, base_folder, TOKENS), abs=1e-4)
    assert ours != pytest.approx(torch_logprobs(base_weights, base_folder, TOKENS), abs=1e-3)
    with Client(daemon.thrift) as client:
        routes = {route.name: route.target.hex() for route in client.control.routes()}
        variant = client.lineage.show(routes["sparse@1"])
        one_bit = client.lineage.show(routes["sparse@2"])
        loaded = stockpot.load(client, routes["sparse@1"])
    assert variant.stored_bytes < one_bit.stored_bytes
    daemon.cli("export", routes["sparse@1"], tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in weights.items():
        assert json.loads(variant.attributes.get(f"tensor/{name}", '{"codec": "base"}'))[
            "codec"] == ("sparse" if tensor.dim() == 2 else "base")
        assert torch.equal(exported[name].view(torch.int16), tensor.view(torch.int16)), name
        assert torch.equal(loaded[name].view(torch.int16), tensor.view(torch.int16)), name


def test_merge_and_lineage(daemon: Daemon, base_folder: Path, base_weights: Weights) -> None:
    config = RunConfig(merge_every=4, publish="every")
    steps = {s: tuned(base_weights, s) for s in (2, 3, 4)}
    push(daemon, "merged", base_folder, steps, config)
    endpoint.wait_model(daemon.url, "merged@4.merge")
    with Client(daemon.thrift) as client:
        merge = client.lineage.show("merged@4.merge")
        # By loss 10 - step, 3 was the best before 4.
        wanted = {bytes.fromhex(client.lineage.resolve(f"merged@{s}")) for s in (3, 4)}
        assert {e.parent for e in merge.parents if e.type == "merged_from"} == wanted
    log = json.loads(daemon.cli("log", "merged", "--json").stdout)
    assert log, "log --json is empty"
    for step in ("2", "3", "4"):
        assert step in daemon.cli("log", "merged").stdout


def test_export_is_what_was_pushed_and_transformers_loads_it(
        daemon: Daemon, base_folder: Path, base_weights: Weights, tmp_path: Path) -> None:
    weights = tuned(base_weights, 5)
    push(daemon, "export", base_folder, {5: weights})
    endpoint.wait_model(daemon.url, "export@5")
    daemon.cli("export", "export@5", tmp_path / "checkpoint")
    exported = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert set(exported) == set(weights)
    for name, tensor in weights.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name].view(torch.int16), tensor.view(torch.int16)), name
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "checkpoint" / file).read_bytes() == (base_folder / file).read_bytes()
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")

    with Client(daemon.thrift) as client:
        variant = next(r for r in client.control.routes() if r.name == "export@5").target.hex()
    daemon.cli("export", variant, tmp_path / "variant")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "variant", dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    theirs = [float(logprobs[i, t]) for i, t in enumerate(TOKENS[1:])]
    ours = endpoint.prompt_logprobs(daemon.url, "export@5", TOKENS)
    # The export may be rounded to the checkpoint's bf16; the endpoint never rounds.
    assert ours == pytest.approx(theirs, abs=5e-2)


def test_push_of_a_folder_by_hand(daemon: Daemon, base_folder: Path) -> None:
    daemon.cli("push", "byhand", 10, base_folder, "--base", "tiny", "--metric", "loss=1.5")
    assert "10" in daemon.cli("log", "byhand").stdout
    # Identical to the base: nothing to store, and it answers as the base does.
    endpoint.wait_model(daemon.url, "byhand@10")
    assert (endpoint.prompt_logprobs(daemon.url, "byhand@10", TOKENS)
            == endpoint.prompt_logprobs(daemon.url, "tiny", TOKENS))


def test_states_leave_and_come_back_through_the_cli(daemon: Daemon, base_folder: Path,
                                                    base_weights: Weights, tmp_path: Path) -> None:
    """A checkpoint with its optimizer, exported and pushed to another run, is the same bits."""
    weights = tuned(base_weights, 5)
    model = torch.nn.ParameterDict()  # names without dots, as a module's own may have them
    model["w"] = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.AdamW(model.values())
    model["w"].sum().backward()
    optimizer.step()
    config = RunConfig(merge_every=0, publish="request")
    with CheckpointHook(daemon.thrift, run="states", base="tiny", every=1, files=base_folder,
                        config=config, when_full="wait") as hook:
        assert hook.save(5, weights, state={"adam": optimizer}) and hook.flush(60)
        assert hook.stats.failed == 0, hook.stats
    daemon.cli("export", "states@5", tmp_path / "plain")
    assert not (tmp_path / "plain" / "states").exists()
    daemon.cli("export", "states@5", tmp_path / "whole", "--states")
    daemon.cli("push", "again", 5, tmp_path / "whole", "--base", "tiny", "--publish", "request")
    with Client(daemon.thrift) as client:
        for name in ("", ".optimizer"):
            before, after = (stockpot.load(client, f"{run}@5{name}") for run in ("states", "again"))
            assert before.keys() == after.keys() and len(before) > 3
            for key, tensor in before.items():
                assert (tensor.dtype, tensor.shape) == (after[key].dtype, after[key].shape), key
                assert torch.equal(tensor.contiguous().flatten().view(torch.uint8),
                                   after[key].contiguous().flatten().view(torch.uint8)), key
    stored = load_file(tmp_path / "whole" / "states" / "optimizer" / "model.safetensors")
    moments = optimizer.state[model["w"]]
    assert any(torch.equal(tensor, moments["exp_avg"]) for tensor in stored.values()
               if tensor.shape == moments["exp_avg"].shape)
    done = daemon.cli("export", "states@5", tmp_path / "whole", "--states", check=False)
    assert done.returncode == 1 and "holds a model" in done.stderr


def test_a_push_changes_of_a_run_what_it_was_told(daemon: Daemon, base_folder: Path) -> None:
    """Every field of the configuration that is not named stays, and so do the tags."""
    config = RunConfig(merge_every=7, publish="request", best_metric="acc", best_is_lower=False,
                       merge_energy=0.5, merge_rank=3, compress_history=True, quota_bytes=1 << 40)
    with Client(daemon.thrift) as client:
        client.create_run("kept", "tiny", config, {"lr": "1e-5"})

        def run() -> Run:
            return next(run for run in client.lineage.runs() if run.name == "kept")

        daemon.cli("push", "kept", 1, base_folder)
        assert (run().config, run().tags) == (config, {"lr": "1e-5"})
        daemon.cli("push", "kept", 2, base_folder, "--base", "tiny", "--merge-every", 5)
        config.merge_every = 5
        assert (run().config, run().tags) == (config, {"lr": "1e-5"})
        daemon.cli("push", "kept", 3, base_folder, "--quota-bytes", 0, "--publish", "merges")
        config.quota_bytes, config.publish = 0, "merges"
        assert (run().config, run().tags) == (config, {"lr": "1e-5"})


def test_everything_is_there_after_a_restart(daemon: Daemon, base_folder: Path,
                                             base_weights: Weights) -> None:
    push(daemon, "restart", base_folder, {1: tuned(base_weights, 11)})
    endpoint.wait_model(daemon.url, "restart@1")
    before = endpoint.prompt_logprobs(daemon.url, "restart@1", TOKENS)
    routes = daemon.cli("routes", "--json").stdout
    assert daemon.stop() == 0
    daemon.start()
    endpoint.wait_ready(daemon.url)
    assert daemon.cli("routes", "--json").stdout == routes
    assert endpoint.prompt_logprobs(daemon.url, "restart@1", TOKENS) == before
    assert "0" in daemon.cli("scrub").stdout
