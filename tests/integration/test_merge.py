"""Merges by every method against float64 from the formulas, and going on after a loss spike."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import stockpot
import torch
from stockpot import CheckpointHook, Client, RunConfig, StockpotError

from tests.daemon import Daemon

Weights = dict[str, torch.Tensor]
JOB_S = 120
LINEAR = "model.layers.0.mlp.up_proj.weight"
CONFIG = RunConfig(merge_every=0, publish="request")


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    """The formulas in NumPy (tests/unit/pipeline/merge_oracle.py)."""
    folder = Path(__file__).resolve().parents[1] / "unit" / "pipeline"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("merge_oracle", folder / "merge_oracle.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def tuned(base: Weights, step: int) -> Weights:
    """Moved by noise, of which every step has a part in common."""
    common, own = torch.Generator().manual_seed(1000), torch.Generator().manual_seed(step)
    return {name: tensor.float() + 0.02 * torch.randn(tensor.shape, generator=common)
            + 0.01 * torch.randn(tensor.shape, generator=own) for name, tensor in base.items()}


def push(daemon: Daemon, run: str, folder: Path, steps: dict[int, Weights],
         config: RunConfig = CONFIG) -> None:
    with CheckpointHook(daemon.thrift, run=run, base="tiny", every=1, files=folder, config=config,
                        when_full="wait") as hook:
        for step, weights in steps.items():
            assert hook.save(step, weights, {"loss": 1.0 / step})
        assert hook.flush(60)
        assert hook.stats.failed == 0, hook.stats


def check(oracle: ModuleType, merged: Weights, base: Weights, parents: list[Weights],
          options: dict[str, Any], attributes: dict[str, str]) -> None:
    """1e-6 of the update's norm, beside the rounding to float32."""
    options = {"energy": 0.95, "rank": 0, "spectral": 0, "weights": [], **options}
    assert merged.keys() == base.keys()
    for name, tensor in base.items():
        w0 = tensor.double().numpy()
        want = oracle.merge(name, w0, [p[name].double().numpy() for p in parents], options,
                            attributes)
        error = abs(merged[name].double().numpy() - want) - abs(want) * 2.0**-24
        update = float(((want - w0) ** 2).sum() ** 0.5)
        assert float((error.clip(0) ** 2).sum() ** 0.5) <= 1e-6 * update, name


@pytest.mark.parametrize(("flags", "options"), [
    ([], {"method": "monosoup"}),
    (["--energy", "0.6"], {"method": "monosoup", "energy": 0.6}),
    (["--rank", "9", "--energy", "0.1"], {"method": "monosoup", "rank": 9, "energy": 0.1}),
    (["--method", "monosoup-spectral"], {"method": "monosoup-spectral"}),
    (["--method", "monosoup-spectral", "--spectral", "0.8"],
     {"method": "monosoup-spectral", "spectral": 0.8}),
    (["--method", "mean"], {"method": "mean"}),
    (["--method", "mean", "--weights", "3,1,0.5"], {"method": "mean", "weights": [3, 1, 0.5]}),
    (["--method", "model-stock"], {"method": "model-stock"}),
])
def test_every_method_is_what_its_formula_says(
        daemon: Daemon, base_folder: Path, base_weights: Weights, oracle: ModuleType,
        flags: list[str], options: dict[str, Any]) -> None:
    parents = [tuned(base_weights, step) for step in (1, 2, 3)]
    push(daemon, "methods", base_folder, dict(enumerate(parents, start=1)))
    ids = [f"methods@{step}" for step in (1, 2, 3)]
    job = json.loads(daemon.cli("merge", *ids, *flags, "--json").stdout)
    assert job["state"] == "done"
    with Client(daemon.thrift) as client:
        shown = client.lineage.show(job["result"])
        assert shown.attributes["method"] == options["method"]
        assert sorted(e.parent.hex() for e in shown.parents if e.type == "merged_from") == sorted(
            client.lineage.resolve(i) for i in ids)
        check(oracle, stockpot.load(client, job["result"]), base_weights, parents, options,
              shown.attributes)
        # From Python the same merge is the same artifact.
        kwargs = {"spectral": 0.0} | options
        again = client.control.merge(ids, **kwargs)
        assert client.control.wait_job(again.key, JOB_S).result == job["result"]


def test_a_small_rank_is_refused_and_says_what_it_would_keep(
        daemon: Daemon, base_folder: Path, base_weights: Weights) -> None:
    push(daemon, "refused", base_folder, {s: tuned(base_weights, s) for s in (1, 2)})
    for rank in ("2", "40"):  # of 64: by far, and by little
        failed = daemon.cli("merge", "refused@1", "refused@2", "--rank", rank, check=False)
        assert failed.returncode == 1
        assert f"rank {rank} of" in failed.stderr
        assert "of the update's energy, the floor is 0.95" in failed.stderr
    daemon.cli("merge", "refused@1", "refused@2", "--rank", "2", "--force")


@pytest.mark.parametrize("flags", [
    ["--method", "average"], ["--spectral", "much"], ["--spectral", "1.5"], ["--last", "0"],
])
def test_wrong_usage_is_told_before_anything_is_asked(daemon: Daemon, flags: list[str]) -> None:
    assert daemon.cli("merge", "a@1", *flags, check=False).returncode == 2


def test_options_that_do_not_fit_are_refused(
        daemon: Daemon, base_folder: Path, base_weights: Weights) -> None:
    push(daemon, "unfit", base_folder, {s: tuned(base_weights, s) for s in (1, 2)})
    ids = ["unfit@1", "unfit@2"]
    with Client(daemon.thrift) as client:
        for wrong in (
                {"method": "mean", "rank": 3}, {"method": "mean", "weights": [1]},
                {"method": "mean", "weights": [1, -1]}, {"method": "model-stock", "spectral": 0.5},
                {"method": "soup"}, {"weights": [1, 1]}, {"last": 3}, {"last": 100_000},
                {"last": -1}):
            with pytest.raises(StockpotError) as caught:
                client.control.merge(ids, **wrong)
            assert caught.value.code == stockpot.ErrorCode.INVALID_ARGUMENT, wrong
        with pytest.raises(StockpotError, match="has 2 checkpoints, not 3"):
            client.control.merge(["unfit"], last=3)
        with pytest.raises(StockpotError):
            client.control.merge(["nowhere"], last=1)


def test_a_run_merges_by_the_method_of_its_configuration(
        daemon: Daemon, base_folder: Path, base_weights: Weights, oracle: ModuleType) -> None:
    parents = [tuned(base_weights, step) for step in (1, 2)]
    for name, config, options in (
            ("stock", RunConfig(merge_every=2, publish="request", merge_method="model-stock"),
             {"method": "model-stock"}),
            ("erank", RunConfig(merge_every=2, publish="request", merge_spectral=0.7,
                                merge_method="monosoup-spectral"),
             {"method": "monosoup-spectral", "spectral": 0.7})):
        push(daemon, name, base_folder, dict(enumerate(parents, start=1)), config)
        with Client(daemon.thrift) as client:
            job = next(j for j in client.control.jobs() if j.key.startswith(f"merge/{name}/2/"))
            client.control.wait_job(job.key, JOB_S)
            shown = client.lineage.show(f"{name}@2.merge")
            check(oracle, stockpot.load(client, f"{name}@2.merge"), base_weights, parents, options,
                  shown.attributes)
            config_shown = next(r for r in json.loads(daemon.cli("runs", "--json").stdout)
                                if r["name"] == name)["config"]
            assert config_shown["merge_method"] == options["method"]


class Toy(torch.nn.Module):
    """The tensors of the tiny base under their own names, trained towards a point."""

    def __init__(self, base: Weights) -> None:
        super().__init__()
        self.names = list(base)
        self.tensors = torch.nn.ParameterList(base[n].float().clone() for n in self.names)

    def named(self) -> Weights:
        return dict(zip(self.names, (p.data for p in self.tensors), strict=True))

    def step(self, target: Weights, rate: float) -> float:
        """One step of gradient descent; the loss before it."""
        loss = 0.0
        for name, parameter in self.named().items():
            gradient = parameter - target[name]
            loss += float((gradient**2).sum())
            parameter -= rate * gradient
        return loss


def test_training_goes_on_from_the_last_good_checkpoints_after_a_spike(
        daemon: Daemon, base_folder: Path, base_weights: Weights) -> None:
    target = tuned(base_weights, 0)
    model = Toy(base_weights)
    losses: dict[int, float] = {}
    with CheckpointHook(daemon.thrift, run="spike", base="tiny", every=1, files=base_folder,
                        config=CONFIG, when_full="wait") as hook:
        for step in range(1, 7):
            losses[step] = model.step(target, 0.2 if step < 6 else -30.0)  # 6: the spike
            assert hook.save(step, model.named(), {"loss": losses[step]})
        assert hook.flush(60)
    spiked = model.step(target, 0.0)
    assert spiked > 100 * losses[1]
    # The last three before it are averaged.
    job = json.loads(daemon.cli("merge", "spike@5", "--last", "3", "--method", "mean", "--json"
                                ).stdout)
    with Client(daemon.thrift) as client:
        merge = client.lineage.show("spike@5.merge")
        assert merge.digest.hex() == job["result"]
        wanted = {client.lineage.resolve(f"spike@{s}") for s in (3, 4, 5)}
        assert {e.parent.hex() for e in merge.parents if e.type == "merged_from"} == wanted
        average = stockpot.load(client, "spike@5.merge")
        loaded = [stockpot.load(client, f"spike@{s}") for s in (3, 4, 5)]
    for name in base_weights:
        mean = sum(w[name].double() for w in loaded) / 3
        assert torch.equal(average[name], mean.float()), name

    restarted = Toy(base_weights)
    with CheckpointHook(daemon.thrift, run="spike", base="tiny", every=1, files=base_folder,
                        config=CONFIG, when_full="wait") as hook:
        resumed = hook.resume(restarted.named(), at="spike@5.merge")
        assert resumed is not None and resumed.step == 5 and resumed.artifact == job["result"]
        assert all(torch.equal(t, average[n]) for n, t in restarted.named().items())
        for step in range(7, 10):
            losses[step] = restarted.step(target, 0.2)
            assert hook.save(step, restarted.named(), {"loss": losses[step]})
        assert hook.flush(60)
        assert hook.stats.failed == 0, hook.stats
    assert losses[7] < losses[3] and losses[9] < losses[7]
    with Client(daemon.thrift) as client:
        first = client.lineage.show("spike@7")
        assert {e.parent.hex() for e in first.parents if e.type == "resumed_from"} == {
            job["result"]}
        assert client.lineage.resolve("spike@latest") == client.lineage.resolve("spike@9")
