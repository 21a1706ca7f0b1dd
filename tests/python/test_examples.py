"""The example programs on SmolLM2: conversion, evaluation, chat."""

from __future__ import annotations

import filecmp
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import corpus
import pytest
import torch
from transformers import AutoTokenizer

from tests.daemon import Daemon, running
from tests.integration import endpoint
from tests.python.conftest import REPOSITORY

EVALUATE = REPOSITORY / "examples" / "evaluate"


def run(*command: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"STOCKPOT_PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(part) for part in command], env=environment, text=True,
                          capture_output=True, timeout=900)
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Daemon]:
    """A daemon that serves SmolLM2 and nothing else."""
    data = tmp_path_factory.mktemp("smollm2") / "data"
    data.mkdir()
    with running(data, "smollm2") as daemon:
        daemon.cli("import-base", "smollm2", smollm2)
        endpoint.wait_ready(daemon.url, timeout_s=120)
        yield daemon


def test_conversion_gives_the_same_bytes_again(smollm2: Path, tmp_path: Path) -> None:
    run(sys.executable, REPOSITORY / "examples/base_model/convert_smollm2.py", tmp_path / "again")
    names = sorted(path.name for path in smollm2.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    _, different, errors = filecmp.cmpfiles(smollm2, tmp_path / "again", names, shallow=False)
    assert not different and not errors


def test_conversion_does_not_touch_other_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    done = run(sys.executable, REPOSITORY / "examples/base_model/convert_smollm2.py", tmp_path,
               check=False)
    assert done.returncode == 1 and "not touching it" in done.stderr
    assert (tmp_path / "config.json").read_text() == "mine"


def test_corpus_is_split_by_topic(smollm2: Path) -> None:
    passages = corpus.heldout_passages()
    training = corpus.paragraph_key(corpus.training_text())
    assert len(passages) >= 30
    assert len({p["id"] for p in passages}) == len(passages)
    for passage in passages:  # topics overlap: no paragraph of these may be trained on
        for paragraph in passage["text"].split("\n\n"):
            key = corpus.paragraph_key(paragraph)
            assert len(key) < 40 or key not in training, (passage["id"], key)
    blocks = corpus.training_blocks(AutoTokenizer.from_pretrained(smollm2), 256)
    assert blocks.shape[0] > 200 and blocks.shape[1] == 256
    assert blocks.dtype == torch.int64


@pytest.mark.timeout(900)
def test_lm_eval_agrees_with_its_own_hf_model(served: Daemon, smollm2: Path) -> None:
    done = run(sys.executable, EVALUATE / "compare_with_hf.py", "--endpoint", served.url,
               "--model", "smollm2", "--weights", smollm2, "--tolerance", "1e-3")
    assert "26 items, 62 log-likelihoods" in done.stdout, done.stdout


@pytest.mark.timeout(900)
def test_evaluate_runs_the_harness(served: Daemon, smollm2: Path, tmp_path: Path) -> None:
    done = run(EVALUATE / "evaluate.sh", served.url, "smollm2", smollm2, "--limit", "2",
               "--output_path", tmp_path)
    for task in ("stockpot_cloze", "stockpot_choice", "stockpot_completion"):
        assert task in done.stdout, done.stdout
    results = json.loads(next(tmp_path.rglob("results_*.json")).read_text())["results"]
    assert 0 <= results["stockpot_choice"]["acc,none"] <= 1


@pytest.mark.timeout(900)
def test_heldout_loss(served: Daemon, tmp_path: Path) -> None:
    corpus.write_jsonl(tmp_path / "text.jsonl", corpus.heldout_passages())
    arguments = [sys.executable, EVALUATE / "heldout_loss.py", "--endpoint", served.url, "--text",
                 tmp_path / "text.jsonl", "--passages", "2"]
    done = run(*arguments, "smollm2")
    loss = float(re.search(r"^smollm2 +([0-9.]+)", done.stdout, re.MULTILINE).group(1))
    assert 1.5 < loss < 4.5
    # A model is not better than itself, and an unknown one is an error, not the base's numbers.
    done = run(*arguments, "--base", "smollm2", "--require-better", "smollm2", "smollm2",
               check=False)
    assert done.returncode == 1 and "0.0000 only" in done.stderr
    done = run(*arguments, "nobody@latest", check=False)
    assert done.returncode == 1 and "404" in done.stderr and "nobody@latest" in done.stderr


def test_chat_streams(served: Daemon) -> None:
    done = run(sys.executable, EVALUATE / "chat_stream.py", "--endpoint", served.url, "--model",
               "smollm2", "--max-tokens", "12", "What is the capital of France?")
    assert "Paris" in done.stdout and "tokens, first after" in done.stdout
