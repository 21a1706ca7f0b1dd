"""Runs lm-evaluation-harness on the tasks of tasks/ and returns what it computed, item by item."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Before lm_eval and its libraries are imported: nothing here needs a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).resolve().parent / "tasks"
GROUP = "stockpot"


def run(model: str, model_args: dict[str, Any]) -> dict[str, Any]:
    """lm_eval's own result: "results" by task, "samples" with every request's answer."""
    return simple_evaluate(
        model=model, model_args=model_args, tasks=[GROUP], batch_size=4, log_samples=True,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0, verbosity="WARNING")


def endpoint_args(endpoint: str, model: str, tokenizer: str) -> dict[str, Any]:
    """What lm_eval's `local-completions` model is told about a Stockpot endpoint."""
    return {"base_url": endpoint.rstrip("/") + "/v1/completions", "model": model,
            "tokenizer": tokenizer, "tokenizer_backend": "huggingface", "max_retries": 3,
            "num_concurrent": 1}


def log_likelihoods(result: dict[str, Any]) -> dict[str, list[tuple[float, bool]]]:
    """Item -> (log-likelihood, is it what greedy decoding gives) of each of its requests."""
    items = {}
    for task, samples in result["samples"].items():
        for sample in samples:
            pairs = [pair for response in sample["resps"] for pair in response]
            if pairs and isinstance(pairs[0], (tuple, list)):
                items[f"{task}/{sample['doc_id']}"] = [(float(v), bool(g)) for v, g in pairs]
    return items


def generations(result: dict[str, Any]) -> dict[str, str]:
    """Item -> generated text."""
    return {f"{task}/{sample['doc_id']}": sample["resps"][0][0]
            for task, samples in result["samples"].items() for sample in samples
            if isinstance(sample["resps"][0][0], str)}
