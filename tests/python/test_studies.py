"""The examples that measure quality, run to their end on a tiny base.

Of what their READMEs conclude, what holds for any model is asserted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_llama
from tests.daemon import bin_dir
from tests.python.conftest import REPOSITORY

STUDY = REPOSITORY / "examples" / "publish_study"


def run(*command: object) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *map(str, command)], env=environment, text=True,
                          capture_output=True, timeout=850)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def publish_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """study.json of two seeds, and its folder."""
    work = tmp_path_factory.mktemp("study")
    tiny_llama.make(work / "base", hidden=128)
    run(STUDY / "study.py", "--bin", bin_dir(), "--base-folder", work / "base", "--out",
        work / "out", "--seeds", 2, "--steps", 16, "--pushes", 2, "--passages", 2,
        "--calibration", 8)
    return json.loads((work / "out" / "study.json").read_text()), work / "out"


@pytest.mark.timeout(900)
def test_publish_study_finds_what_its_readme_says(
        publish_study: tuple[dict[str, Any], Path]) -> None:
    study, _ = publish_study
    assert [seed["seed"] for seed in study["seeds"]] == [0, 1]
    for seed in study["seeds"]:
        last = seed["steps"]["16"]
        assert last < seed["steps"]["8"], "training does nothing"
        ways = seed["variants"]
        for name in ("as it is", "sparse"):
            assert ways[name]["loss"] == pytest.approx(last, abs=1e-6), name
        kl = {name: way["kl"] for name, way in ways.items()}
        size = {name: way["bytes"] for name, way in ways.items()}
        one = {name: size[name] for name in ways if name.startswith("1 bit, ")}
        assert len(one) == 3 and max(one.values()) < 1.02 * min(one.values()), one
        assert kl["1 bit, closed form"] < 0.9 * kl["1 bit, mean"]
        assert kl["1 bit, distilled"] <= 1.05 * kl["1 bit, closed form"]
        assert kl["3 planes, mean"] < kl["2 planes, mean"] < 0.7 * kl["1 bit, mean"]
        assert kl["2 planes, closed form"] < kl["2 planes, mean"]
        assert kl["1 bit + rank 64, mean"] < kl["1 bit + rank 16, mean"] < kl["1 bit, mean"]
        assert size["1 bit, mean"] < size["2 planes, mean"] < size["3 planes, mean"]
        assert size["auto, a tenth of the bytes"] <= 0.1 * study["base_bytes"]
        assert ways["default"]["bytes"] == size["1 bit, closed form"]
        assert kl["default"] == kl["1 bit, closed form"], "the default where there are texts"
        # A short step of reinforcement learning changes few elements: they are stored exactly, in
        # a fraction of what the long one takes, and no form is far from the checkpoint.
        rl = seed["rl"]
        assert rl["sparse"]["loss"] == pytest.approx(rl["as it is"]["loss"], abs=1e-6)
        assert rl["sparse"]["bytes"] < size["sparse"] / 4
        for name, way in rl.items():
            assert way["loss"] == pytest.approx(rl["as it is"]["loss"], abs=1e-4), name
            assert name == "as it is" or way["bytes"] <= 1.1 * rl["sparse"]["bytes"], name
        # What a merge's README row says: half of the update thrown away is not the better half.
        merges = {name: merge["loss"] for name, merge in seed["merges"].items()}
        assert min(seed["steps"].values()) <= merges["mean"] <= max(seed["steps"].values())
        assert merges["monosoup-spectral, R = 0.8"] > merges["mean"]
        assert merges["monosoup, 95 % of the energy"] == pytest.approx(merges["mean"], rel=2e-3)


@pytest.mark.timeout(900)
def test_publish_study_reports_every_seed(publish_study: tuple[dict[str, Any], Path]) -> None:
    study, folder = publish_study
    printed = run(STUDY / "report.py", folder / "study.json")
    assert printed.strip() == (folder / "study.md").read_text().strip()
    row = next(line for line in printed.splitlines() if line.startswith("| 1 bit, mean |"))
    losses = sorted(seed["variants"]["1 bit, mean"]["loss"] for seed in study["seeds"])
    assert f"| {sum(losses) / 2:.4f} ({losses[0]:.4f}, {losses[1]:.4f}) |" in row, row


@pytest.mark.timeout(900)
def test_adapter_pool_example(tmp_path: Path) -> None:
    """Two adapters in a pool that has room for one.

    What is kept for the pool's record is as much as two such small adapters.
    """
    tiny_llama.make(tmp_path / "base")
    arguments = [REPOSITORY / "examples/adapter_pool/run.py", "--bin", bin_dir(), "--base-folder",
                 tmp_path / "base", "--work", tmp_path / "work", "--tasks", "licenses,cython",
                 "--room", 0.7, "--steps", 24]
    printed = run(*arguments)
    result = json.loads((tmp_path / "work" / "result.json").read_text())
    assert printed.count("24 steps, training loss") == 2
    assert result["reached"]["device"] == 0 and result["reached"]["peft"] < 1e-3
    losses = result["losses"]
    for task in ("licenses", "cython"):
        assert losses["own"][task] < losses["base"][task] - 0.05, losses
    for name in ("OPCM", "running mean"):
        pool = result["pools"][name]["pool"]
        assert [member["merged"] for member in pool["members"]] == [2], name
        assert result["pools"][name]["most_bytes"] <= pool["budget_bytes"]
        for task, loss in result["pools"][name]["losses"].items():
            assert loss < losses["base"][task] - 0.05, (name, losses)
            assert loss != losses["own"][task], (name, losses)
    assert result["pools"]["defaults"]["most_bytes"] <= pool["budget_bytes"]
    assert set(result["pools"]["defaults"]["losses"]) == {"licenses", "cython"}
    assert (tmp_path / "work" / "table.md").read_text().strip() in printed
    assert "licenses + cython" in printed or "cython + licenses" in printed
    # What was trained is kept.
    again = run(*arguments)
    assert "training loss" not in again
    assert json.loads((tmp_path / "work" / "result.json").read_text())["losses"] == losses
