"""The gate before a route moves: its numbers against transformers, and what a refusal leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stockpot import Client, RunConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.daemon import Daemon, running
from tests.integration import endpoint
from tests.integration.test_path import TOKENS, Weights, one_bit, push, tuned

WINDOW = 512  # tokens, ScorerOptions and max_position_embeddings of the tiny base
TEXTS = ["It was a bright cold day in April, and the clocks were striking thirteen. " * 11,
         "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich."]


def set_probe(daemon: Daemon, run: str, folder: Path, texts: list[str] = TEXTS) -> None:
    files = []
    for i, text in enumerate(texts):
        files.append(folder / f"probe{i}.txt")
        files[-1].write_text(text, encoding="utf-8")
    daemon.cli("probe", "set", run, *files)


def create(daemon: Daemon, run: str, config: RunConfig | None = None) -> None:
    with Client(daemon.thrift) as client:
        client.create_run(run, "tiny", config or RunConfig(merge_every=0))


def logits_of(weights: Weights, folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)


def expected(folder: Path, full: Weights, variant: Weights, texts: list[str] = TEXTS
             ) -> dict[str, float]:
    """Loss of both, KL and agreement, by windows, straight from the definition."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    count = full_loss = loss = kl = agreed = 0.0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        for begin in range(0, len(ids), WINDOW):
            window = ids[begin:begin + WINDOW]
            if len(window) < 2:
                continue
            p, q = (logits_of(w, folder, window)[:-1] for w in (full, variant))
            following = torch.tensor(window[1:])[:, None]
            full_loss -= float(p.gather(1, following).sum())
            loss -= float(q.gather(1, following).sum())
            kl += float((p.exp() * (p - q)).sum())
            agreed += float((p.argmax(1) == q.argmax(1)).sum())
            count += len(window) - 1
    return {"tokens": count, "full_loss": full_loss / count, "loss": loss / count,
            "kl": kl / count, "top1": agreed / count}


def events(daemon: Daemon, kind: str) -> list[dict[str, Any]]:
    lines = daemon.cli("events", "--json").stdout.splitlines()
    return [e for e in map(json.loads, lines) if e["type"] == kind]


def wait_jobs(daemon: Daemon, timeout_s: float = 240.0) -> None:
    """Until no job is queued or running."""
    deadline = time.monotonic() + timeout_s
    while True:
        jobs = json.loads(daemon.cli("jobs", "--json").stdout)
        if all(job["state"] in ("done", "failed") for job in jobs):
            return
        assert time.monotonic() < deadline, jobs
        time.sleep(0.1)


def eval_of(daemon: Daemon, name: str, task: str, metric: str) -> float:
    evals = json.loads(daemon.cli("eval", "list", name, "--json").stdout)
    found = [e for e in evals if (e["task"], e["metric"]) == (task, metric)]
    return max(found, key=lambda e: e["time_ms"])["value"]


def test_the_gates_numbers_are_those_of_transformers(
        daemon: Daemon, base_folder: Path, base_weights: Weights, tmp_path: Path) -> None:
    create(daemon, "numbers")
    set_probe(daemon, "numbers", tmp_path)
    daemon.cli("gate", "numbers", "--max-kl", 100, "--min-top1", 0, "--max-loss-rise", 100)
    weights = tuned(base_weights, 3, scale=5e-2)
    push(daemon, "numbers", base_folder, {1: weights})
    wait_jobs(daemon)
    event = events(daemon, "variant")[-1]["fields"]
    assert event["gate"] == "passed"
    want = expected(base_folder, weights, one_bit(base_weights, weights))
    assert int(event["tokens"]) == want["tokens"]
    for name in ("full_loss", "loss", "kl"):
        assert float(event[name]) == pytest.approx(want[name], abs=1e-4), name
    # Two tokens that are as likely as each other may change places.
    assert float(event["top1"]) == pytest.approx(want["top1"], abs=3 / want["tokens"])
    assert want["kl"] > 1e-2, "a gate of no difference would not show anything"
    assert eval_of(daemon, "numbers@1", "probe", "loss") == float(event["full_loss"])
    # The size of the update, over what changed.
    changed = [n for n, w in weights.items() if not torch.equal(w, base_weights[n])]
    update = sum(float((weights[n].double() - base_weights[n].double()).square().sum())
                 for n in changed)
    origin = sum(float(base_weights[n].double().square().sum()) for n in changed)
    assert float(event["update"]) == pytest.approx((update / origin) ** 0.5, rel=1e-4)
    # By hand, the same.
    line = daemon.cli("probe", "score", "numbers@1").stdout
    assert float(line.split("held-out loss ")[1].split()[0]) == pytest.approx(want["full_loss"],
                                                                              abs=1e-4)


def test_a_publish_is_judged_again_by_other_texts_and_limits(
        daemon: Daemon, base_folder: Path, base_weights: Weights, tmp_path: Path) -> None:
    create(daemon, "again")
    push(daemon, "again", base_folder, {1: tuned(base_weights, 3, scale=5e-2)})
    wait_jobs(daemon)

    def publish() -> tuple[int, int]:
        """The exit code, and how often a variant of the run was made or refused."""
        done = daemon.cli("publish", "again@1", check=False)
        made = [e for kind in ("variant", "publish_refused") for e in events(daemon, kind)
                if "again" in json.dumps(e)]
        return done.returncode, len(made)

    served = json.loads(daemon.cli("show", "again@1", "--json").stdout)["routes"]
    assert publish() == (0, 1), "nothing changed: nothing is done again"
    set_probe(daemon, "again", tmp_path)
    assert publish()[1] == 2, "there are texts to measure it on now"
    daemon.cli("gate", "again", "--max-kl", "1e-9", "--min-top1", 0, "--max-loss-rise", 100)
    assert publish() == (1, 3), "and a limit that it does not meet"
    assert json.loads(daemon.cli("show", "again@1", "--json").stdout)["routes"] == served
    daemon.cli("gate", "again", "--max-kl", 100)
    assert publish() == (0, 4)
    assert publish() == (0, 4)


def test_c14_a_bad_variant_is_refused_and_the_old_one_goes_on(
        daemon: Daemon, base_folder: Path, base_weights: Weights, tmp_path: Path) -> None:
    create(daemon, "guarded")
    set_probe(daemon, "guarded", tmp_path)
    daemon.cli("gate", "guarded", "--min-top1", 0, "--max-loss-rise", 10)
    good = tuned(base_weights, 1, scale=2e-3)
    push(daemon, "guarded", base_folder, {1: good})
    endpoint.wait_model(daemon.url, "guarded@1")
    wait_jobs(daemon)
    before = endpoint.prompt_logprobs(daemon.url, "guarded@latest", TOKENS)
    kl_of_good = eval_of(daemon, endpoint.wait_model(daemon.url, "guarded@1")["root"], "gate", "kl")

    # Some weights moved far: what one bit a weight cannot say, and too many to be kept exactly. The
    # checkpoint itself is fine.
    bad = {}
    generator = torch.Generator().manual_seed(2)
    for name, tensor in good.items():
        few = torch.rand(tensor.shape, generator=generator) < 0.2
        far = 0.15 * torch.randn(tensor.shape, generator=generator) * few
        bad[name] = (tensor.float() + far).to(tensor.dtype) if "proj" in name else tensor
    want = expected(base_folder, bad, one_bit(base_weights, bad))
    limit = (kl_of_good + want["kl"]) / 2
    assert kl_of_good < limit < want["kl"]
    daemon.cli("gate", "guarded", "--max-kl", limit, "--max-error", 1)
    push(daemon, "guarded", base_folder, {2: bad})
    wait_jobs(daemon)

    assert endpoint.request(f"{daemon.url}/v1/models/guarded@2")[0] == 404
    assert endpoint.prompt_logprobs(daemon.url, "guarded@latest", TOKENS) == before
    event = events(daemon, "publish_refused")[-1]["fields"]
    assert event["metric"] == "kl"
    assert float(event["measured"]) == pytest.approx(want["kl"], abs=1e-3)
    assert float(event["limit"]) == limit
    shown = f"{float(event['measured']):.4g}"
    for command in (("show", "guarded@2"), ("log", "guarded"), ("status",), ("jobs",)):
        assert shown in daemon.cli(*command).stdout, command
    refusals = json.loads(daemon.cli("show", "guarded@2", "--json").stdout)["refusals"]
    assert len(refusals) == 1 and shown in refusals[0]["reason"]
    # A person who asks is told the same.
    asked = daemon.cli("publish", "guarded@2", check=False)
    assert asked.returncode == 1 and shown in asked.stderr
    assert daemon.cli("publish", "guarded@2", "--force", check=False).returncode == 2
    assert endpoint.prompt_logprobs(daemon.url, "guarded@latest", TOKENS) == before

    daemon.cli("publish", "guarded@2", "--force", "--reason", "to look at it", "--as", "look")
    endpoint.wait_model(daemon.url, "look")
    event = events(daemon, "variant")[-1]["fields"]
    assert event["gate"] == "forced" and event["force"] == "to look at it" and event["by"]
    assert shown in event["overruled"]
    # Exactly stored it is the checkpoint, and passes.
    daemon.cli("publish", "guarded@2", "--codec", "dense", "--as", "exact")
    endpoint.wait_model(daemon.url, "exact")
    assert float(events(daemon, "variant")[-1]["fields"]["kl"]) == 0


def test_the_best_is_the_one_with_the_lowest_held_out_loss(
        daemon: Daemon, base_folder: Path, base_weights: Weights, tmp_path: Path) -> None:
    config = RunConfig(merge_every=0, best_metric="probe/loss")
    create(daemon, "judged", config)
    set_probe(daemon, "judged", tmp_path)
    daemon.cli("gate", "judged", "--max-kl", 100, "--min-top1", 0, "--max-loss-rise", 100)
    steps = {s: tuned(base_weights, s, scale=5e-2) for s in (1, 2, 3, 4)}
    push(daemon, "judged", base_folder, steps, config)
    wait_jobs(daemon)
    losses = {s: expected(base_folder, w, w)["full_loss"] for s, w in steps.items()}
    best = min(losses, key=losses.__getitem__)
    for step, loss in losses.items():
        assert eval_of(daemon, f"judged@{step}", "probe", "loss") == pytest.approx(loss, abs=1e-4)
    def digest(name: str) -> str:
        return json.loads(daemon.cli("show", name, "--json").stdout)["digest"]
    assert digest("judged@best") == digest(f"judged@{best}"), losses
    assert (endpoint.wait_model(daemon.url, "judged@best")["root"]
            == endpoint.wait_model(daemon.url, f"judged@{best}")["root"])


def test_a_merge_is_scored_beside_its_parents_and_their_mean(
        daemon: Daemon, base_folder: Path, base_weights: Weights, tmp_path: Path) -> None:
    config = RunConfig(merge_every=2, best_metric="probe/loss")
    create(daemon, "souped", config)
    set_probe(daemon, "souped", tmp_path)
    daemon.cli("gate", "souped", "--max-kl", 100, "--min-top1", 0, "--max-loss-rise", 100)
    steps = {s: tuned(base_weights, 20 + s, scale=5e-2) for s in (1, 2)}
    push(daemon, "souped", base_folder, steps, config)
    wait_jobs(daemon)
    daemon.cli("export", "souped@2.merge", tmp_path / "merged")
    models = {
        "merged": load_file(tmp_path / "merged" / "model.safetensors"),
        "mean": {n: ((steps[1][n].double() + steps[2][n].double()) / 2).to(w.dtype)
                 for n, w in base_weights.items()},
        "1": steps[1],
        "2": steps[2],
    }
    losses = {k: expected(base_folder, w, w)["full_loss"] for k, w in models.items()}
    event = events(daemon, "merge")[-1]["fields"]
    assert float(event["loss"]) == pytest.approx(losses["merged"], abs=1e-4)
    # A mean is rounded once, ours and torch's alike but for ties.
    assert float(event["mean_loss"]) == pytest.approx(losses["mean"], abs=1e-3)
    assert sorted(map(float, event["parent_losses"].split(","))) == pytest.approx(
        sorted([losses["1"], losses["2"]]), abs=1e-4)
    worse = losses["merged"] > min(losses["1"], losses["2"])
    assert len(events(daemon, "merge_worse")) == int(worse)
    best = min(("1", "2", "2.merge"), key=lambda k: losses["merged" if "m" in k else k])
    shown = json.loads(daemon.cli("show", "souped@best", "--json").stdout)["digest"]
    assert shown == json.loads(daemon.cli("show", f"souped@{best}", "--json").stdout)["digest"]
    assert "merge/mean_loss" in daemon.cli("log", "souped").stdout


def test_an_evaluation_that_arrives_later_moves_the_best(
        daemon: Daemon, base_folder: Path, base_weights: Weights) -> None:
    config = RunConfig(merge_every=0, best_metric="quiz/acc", best_is_lower=False)
    push(daemon, "quizzed", base_folder, {s: tuned(base_weights, s) for s in (1, 2)}, config)
    wait_jobs(daemon)
    roots = {s: endpoint.wait_model(daemon.url, f"quizzed@{s}")["root"] for s in (1, 2)}
    assert endpoint.request(f"{daemon.url}/v1/models/quizzed@best")[0] == 404
    for step, accuracy in ((1, 0.5), (2, 0.75)):
        daemon.cli("eval", "put", f"quizzed@{step}", "quiz", "acc", accuracy)
        wait_jobs(daemon)
        listed = json.loads(daemon.cli("routes", "--json").stdout)
        routes = {r["name"]: r["variant"] for r in listed}
        assert routes["quizzed@best"] == roots[step]
    forged = daemon.cli("eval", "put", "quizzed@1", "probe", "loss", 0, check=False)
    assert forged.returncode == 1 and "daemon's own" in forged.stderr


@pytest.fixture
def own_daemon(tmp_path: Path, base_folder: Path) -> Iterator[Daemon]:
    with running(tmp_path / "data", "tiny") as running_daemon:
        running_daemon.cli("import-base", "tiny", base_folder)
        yield running_daemon


def test_a_killed_score_is_done_after_the_restart(
        own_daemon: Daemon, base_folder: Path, base_weights: Weights, tmp_path: Path) -> None:
    daemon = own_daemon
    text = "All happy families are alike. " * 4000
    create(daemon, "killed")
    set_probe(daemon, "killed", tmp_path, [text])
    daemon.cli("gate", "killed", "--max-kl", 100, "--min-top1", 0, "--max-loss-rise", 100)
    push(daemon, "killed", base_folder, {1: tuned(base_weights, 1)})
    deadline = time.monotonic() + 60
    while not any(j["state"] == "running" for j in json.loads(daemon.cli("jobs", "--json").stdout)):
        jobs = json.loads(daemon.cli("jobs", "--json").stdout)
        assert time.monotonic() < deadline, jobs
        if jobs and all(j["state"] == "done" for j in jobs):
            break
    daemon.kill()
    daemon.start()
    wait_jobs(daemon)
    endpoint.wait_model(daemon.url, "killed@1")
    assert eval_of(daemon, "killed@1", "probe", "loss") > 0
    assert events(daemon, "variant")[-1]["fields"]["gate"] == "passed"
    assert not events(daemon, "publish_failed") and not events(daemon, "publish_refused")
