"""Scales of a published variant against the same computed by PyTorch in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stockpot import Client, RunConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.daemon import Daemon, running
from tests.integration import endpoint
from tests.integration.test_gate import TEXTS, create, events, set_probe, wait_jobs
from tests.integration.test_path import Weights, push, tuned

WINDOW = 512  # CalibratorOptions and max_position_embeddings of the tiny base
CLOSED_FORM = RunConfig(merge_every=0, publish_alpha="closed-form")
CALIBRATION = ["The tee command reads from standard input and writes to files. " * 12,
               "Falsches Üben von Xylophonmusik quält jeden größeren Zwerg."]


def set_calibration(daemon: Daemon, run: str, folder: Path, texts: list[str] = CALIBRATION
                    ) -> None:
    files = []
    for i, text in enumerate(texts):
        files.append(folder / f"calibration{i}.txt")
        files[-1].write_text(text, encoding="utf-8")
    daemon.cli("calibration", "set", run, *files)


def stored_alphas(client: Client, variant: str) -> dict[str, np.ndarray]:
    """Of every 1-bit tensor, as the store has them."""
    alphas = {}
    for entry in json.loads(client.fetch_manifest(variant))["tensors"]:
        if entry.get("codec") == "bitdelta":
            chunks = entry["parts"]["alpha"]["chunks"]
            data = b"".join(client.fetch_chunk(bytes.fromhex(chunk)) for chunk in chunks)
            alphas[entry["name"]] = np.frombuffer(data, "<f4").astype(np.float64)
    return alphas


@torch.no_grad()
def closed_form(folder: Path, base: Weights, weights: Weights, texts: list[str]
                ) -> tuple[dict[str, np.ndarray], dict[str, tuple[float, float]]]:
    """Scales a row; relative squared error of the layer's output with mean and with them."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager")
    model.load_state_dict({k: v.double() for k, v in weights.items()}, strict=False)
    inputs: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.register_forward_pre_hook(
                lambda _, args, name=name: inputs.setdefault(f"{name}.weight", []).append(
                    args[0][0]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        for begin in range(0, len(ids), WINDOW):
            model(torch.tensor([ids[begin:begin + WINDOW]]))
    alphas, errors = {}, {}
    for name, rows in inputs.items():
        x = torch.cat(rows)
        delta = weights[name].double() - base[name].double()
        a, b = x @ delta.T, x @ torch.where(delta >= 0, 1.0, -1.0).double().T
        alpha, mean = (a * b).sum(0) / b.square().sum(0), delta.abs().mean(1)
        assert (alpha > 0).double().mean() > 0.8
        alpha = torch.where(alpha > 0, alpha, mean)
        alphas[name] = alpha.numpy()
        errors[name] = tuple(float((a - s * b).square().sum() / a.square().sum())
                             for s in (mean, alpha))
    return alphas, errors


def variant_of(daemon: Daemon, name: str) -> dict[str, Any]:
    return json.loads(daemon.cli("show", endpoint.wait_model(daemon.url, name)["root"],
                                 "--json").stdout)


def test_scales_are_those_of_torch(daemon: Daemon, base_folder: Path, base_weights: Weights,
                                   tmp_path: Path) -> None:
    create(daemon, "scales", CLOSED_FORM)
    set_calibration(daemon, "scales", tmp_path)
    weights = tuned(base_weights, 5)
    push(daemon, "scales", base_folder, {1: weights}, CLOSED_FORM)
    wait_jobs(daemon)
    want, errors = closed_form(base_folder, base_weights, weights, CALIBRATION)
    with Client(daemon.thrift) as client:
        shown = variant_of(daemon, "scales@1")
        got = stored_alphas(client, shown["digest"])
    assert got.keys() == want.keys()
    for name, alpha in want.items():
        np.testing.assert_allclose(got[name], alpha, rtol=1e-4, err_msg=name)
        facts = json.loads(shown["attributes"][f"tensor/{name}"])
        assert facts["output_error_mean"] == pytest.approx(errors[name][0], rel=1e-3), name
        assert facts["output_error"] == pytest.approx(errors[name][1], rel=1e-3), name
        assert facts["output_error"] <= facts["output_error_mean"], name
    mean = {name: (weights[name].double() - base_weights[name].double()).abs().mean(1).numpy()
            for name in want}
    assert max(np.abs(want[n] / mean[n] - 1).max() for n in want) > 0.01, "mean would pass too"
    report = json.loads(shown["attributes"]["alpha"])
    assert report["method"] == "closed-form"
    assert report["rows_kept"] == sum(int((want[n] == mean[n]).sum()) for n in want)
    assert report["error"] < report["error_before"]
    event = events(daemon, "variant")[-1]["fields"]
    assert (event["alpha"], int(event["alpha_tokens"])) == ("closed-form", report["tokens"])


def test_a_publish_chooses_and_the_gate_sees_what_it_chose(
        daemon: Daemon, base_folder: Path, base_weights: Weights, tmp_path: Path) -> None:
    create(daemon, "choice")
    set_probe(daemon, "choice", tmp_path)
    set_calibration(daemon, "choice", tmp_path)
    daemon.cli("gate", "choice", "--max-kl", 100, "--min-top1", 0, "--max-loss-rise", 100)
    push(daemon, "choice", base_folder, {1: tuned(base_weights, 6, scale=5e-2)})
    wait_jobs(daemon)
    found = events(daemon, "variant")[-1]["fields"]
    assert found["alpha"] == "closed-form", "the default, where there are texts"
    daemon.cli("publish", "choice@1", "--alpha", "mean")
    mean = events(daemon, "variant")[-1]["fields"]
    assert "alpha" not in mean
    assert found["kl"] != mean["kl"]
    assert endpoint.wait_model(daemon.url, "choice@1")["root"] == mean["variant"]
    # And back, under the same names.
    daemon.cli("publish", "choice@1", "--alpha", "closed-form")
    assert events(daemon, "variant")[-1]["fields"]["variant"] == found["variant"]
    refused = daemon.cli("publish", "choice@1", "--codec", "dense", "--alpha", "closed-form",
                         check=False)
    assert refused.returncode != 0
    assert "alpha" in refused.stderr


def test_calibration_texts_are_not_the_probes(daemon: Daemon, base_folder: Path, tmp_path: Path
                                              ) -> None:
    create(daemon, "apart")
    set_probe(daemon, "apart", tmp_path)
    file = tmp_path / "same.txt"
    file.write_text(TEXTS[1] + "\n", encoding="utf-8")
    refused = daemon.cli("calibration", "set", "apart", file, check=False)
    assert refused.returncode != 0
    assert "same.txt" in refused.stderr
    assert "no calibration texts" in daemon.cli("calibration", "show", "apart").stdout
    set_calibration(daemon, "apart", tmp_path)
    shown = json.loads(daemon.cli("calibration", "show", "apart", "--json").stdout)
    back = daemon.cli("probe", "set", "apart", tmp_path / "calibration1.txt", check=False)
    assert "calibration1.txt" in back.stderr
    assert [text["name"] for text in shown["texts"]] == ["calibration0.txt", "calibration1.txt"]
    with Client(daemon.thrift) as client:
        assert [t.text for t in client.lineage.calibration("apart").texts] == CALIBRATION


def test_without_texts_the_scales_are_mean_and_the_event_says_so(
        daemon: Daemon, base_folder: Path, base_weights: Weights) -> None:
    create(daemon, "without", CLOSED_FORM)
    push(daemon, "without", base_folder, {1: tuned(base_weights, 8)}, CLOSED_FORM)
    wait_jobs(daemon)
    event = events(daemon, "variant")[-1]["fields"]
    assert (event["alpha"], event["alpha_asked"]) == ("mean", "closed-form")
    assert "no calibration texts" in event["alpha_why"]


SEQUENCE = 128  # DistillOptions
STEPS = 40


def reference_distillation(folder: Path, base: Weights, weights: Weights, text: str
                           ) -> tuple[float, float]:
    """Held-back loss at the start and of the best, by Adam on log(alpha) in PyTorch.

    For a text of five sequences: one is held back and a step takes all of the others, so that the
    order in which they are drawn makes no difference.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False).input_ids
    assert len(ids) // SEQUENCE == 5
    sequences = torch.tensor(ids[:5 * SEQUENCE]).view(5, SEQUENCE)
    held_back, seen = sequences[1:2], sequences[[0, 2, 3, 4]]
    start, _ = closed_form(folder, base, weights, [text])
    alphas = {name: torch.tensor(alpha, dtype=torch.float32)[:, None]
              for name, alpha in start.items()}
    signs = {name: torch.where(weights[name].float() >= base[name].float(), 1.0, -1.0)
             for name in alphas}
    logs = {name: torch.zeros_like(alpha, requires_grad=True) for name, alpha in alphas.items()}
    with torch.no_grad():
        teachers = {id(tokens): model(tokens).logits for tokens in (held_back, seen)}

    def loss_on(tokens: torch.Tensor) -> torch.Tensor:
        changed = {name: base[name].float() + alphas[name] * logs[name].exp() * signs[name]
                   for name in alphas}
        student = torch.func.functional_call(model, changed, (tokens,)).logits
        return (student - teachers[id(tokens)]).square().mean()

    optimizer = torch.optim.Adam(logs.values(), lr=3e-3, betas=(0.9, 0.999), eps=1e-14)
    with torch.no_grad():
        before = best = float(loss_on(held_back))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / STEPS)
        optimizer.zero_grad()
        loss_on(seen).backward()
        optimizer.step()
        if (step + 1) % 20 == 0:
            with torch.no_grad():
                best = min(best, float(loss_on(held_back)))
    return before, best


def test_a_killed_distillation_goes_on_and_ends_where_torch_does(
        base_folder: Path, base_weights: Weights, tmp_path: Path) -> None:
    with running(tmp_path / "data", "tiny", "--distill-seconds", "100000",
                 "--distill-steps", str(STEPS)) as daemon:
        daemon.cli("import-base", "tiny", base_folder)
        config = RunConfig(merge_every=0, publish="request", publish_alpha="distilled")
        create(daemon, "killed", config)
        text = (CALIBRATION[0] * 2)[:5 * SEQUENCE + 9]
        set_calibration(daemon, "killed", tmp_path, [text])
        weights = tuned(base_weights, 4, scale=5e-2)
        push(daemon, "killed", base_folder, {1: weights}, config)
        job = json.loads(daemon.cli("publish", "killed@1", "--no-wait", "--json").stdout)["key"]
        shares = []
        while not shares or shares[-1] < 0.5:
            jobs = json.loads(daemon.cli("jobs", "--json").stdout)
            (running_job,) = [j for j in jobs if j["key"] == job]
            assert running_job["state"] in ("queued", "running"), "too fast to be killed"
            shares.append(running_job["share"])
        daemon.kill()
        daemon.start()
        wait_jobs(daemon)
        event = events(daemon, "variant")[-1]["fields"]
        assert event["alpha"] == "distilled"
        assert int(event["alpha_resumed_at"]) > 0
        assert int(event["alpha_steps"]) == STEPS
        before, best = reference_distillation(base_folder, base_weights, weights, text)
        assert float(event["alpha_loss_before"]) == pytest.approx(before, rel=1e-3)
        assert float(event["alpha_loss"]) == pytest.approx(best, rel=2e-2)
        assert best < 0.99 * before, "steps that do nothing would pass"
        shown = variant_of(daemon, "killed@1")
        assert json.loads(shown["attributes"]["alpha"])["method"] == "distilled"
