#!/usr/bin/env python3
"""Eight LoRA adapters in a pool that has room for four.

    python examples/adapter_pool/run.py BASE_FOLDER WORK_FOLDER [--steps 30]

Trains an adapter for each of eight kinds of text (packages of Python's standard library), puts
them one after another into a pool of `stockpot` with OPCM and into one with K-Merge's running mean,
and prints the held-out loss of each task: the base, its own adapter, and whatever answers for it in
the pool; beside them PEFT's `linear` combination of the same groups of adapters. What is trained is
kept in WORK_FOLDER, so that a second run only merges and measures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TASKS = ["asyncio", "email", "json", "unittest", "xml", "tkinter", "logging", "sqlite3"]
BLOCK = 128          # tokens of a training sequence
BATCH = 2
RANK = 8
HELDOUT_CHARACTERS = 12_000
ROOM = 4.6           # adapters: four, and what a pool keeps free to swap one (less than one more)


def texts(task: str) -> tuple[str, str]:
    """Training and held-out text of a package: every fourth file, or the end of an only one."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / task
    files = sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")]
    files = [file for file in files if file.stat().st_size > 500 and "/test" not in str(file)]
    contents = [file.read_text() for file in files]
    heldout = "".join(contents[3::4]) or contents[-1][-HELDOUT_CHARACTERS:]
    training = "".join(text for i, text in enumerate(contents) if i % 4 != 3 or len(contents) < 4)
    return training.replace(heldout, ""), heldout[:HELDOUT_CHARACTERS]


def train(base: Path, folder: Path, task: str, steps: int) -> None:
    """One adapter on the task's training text, saved by PEFT."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = torch.tensor(tokenizer(texts(task)[0], verbose=False)["input_ids"])
    blocks = ids[:len(ids) // BLOCK * BLOCK].view(-1, BLOCK)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj", "o_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _step in range(steps):
        batch = blocks[torch.randint(len(blocks), (BATCH,))]
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{task}: trained {steps} steps, loss {loss.item():.3f}", file=sys.stderr)
    model.save_pretrained(folder)


def held_out(model: torch.nn.Module, base: Path, task: str) -> float:
    """Mean loss of a token of the held-out text, in windows as the daemon scores it."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(base)(
        texts(task)[1], verbose=False)["input_ids"])
    total, count = 0.0, 0
    with torch.no_grad():
        for window in ids.split(512):
            if len(window) < 2:
                continue
            logprobs = model(window[None, :-1]).logits[0].log_softmax(-1)
            total -= float(logprobs.gather(1, window[1:, None]).sum())
            count += len(window) - 1
    return total / count


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def daemon(binaries: Path, data: Path) -> Iterator[Any]:
    """A daemon over a fresh folder; gives the function that calls `stockpot`."""
    http, thrift = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with (data.with_suffix(".log")).open("ab") as log:
        process = subprocess.Popen([binaries / "stockpotd", "--data", data, "--http", http,
                                    "--thrift", thrift], stdout=log, stderr=log)

    def cli(*args: object, check: bool = True) -> str:
        done = subprocess.run([binaries / "stockpot", "-q", *map(str, args)], text=True,
                              env=os.environ | {"STOCKPOT_SERVER": thrift}, capture_output=True)
        if done.returncode != 0:
            print(done.stderr, file=sys.stderr)
            if check:
                raise SystemExit(1)
        return done.stdout

    try:
        while not (data / "addresses.json").exists():
            assert process.poll() is None, "stockpotd did not start"
            time.sleep(0.05)
        yield cli, f"http://{http}"
    finally:
        process.terminate()
        process.wait()


def fill_pool(cli: Any, name: str, method: str, budget: int, work: Path) -> dict[str, Any]:
    """The pool after all eight came, by task."""
    cli("pool", "create", name, "--base", "smollm2", "--bytes", budget, "--method", method,
        "--quality", 0.9, "--no-evict")
    for task in TASKS:
        cli("pool", "add", name, task, work / task, "--probe", work / f"{task}.txt", check=False)
    return json.loads(cli("pool", "show", name, "--json"))


def linear(base: Path, work: Path, group: list[str]) -> torch.nn.Module:
    """PEFT's own mean of the factors."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = PeftModel.from_pretrained(model, work / group[0], adapter_name=group[0])
    for task in group[1:]:
        peft.load_adapter(work / task, adapter_name=task)
    peft.add_weighted_adapter(group, [1 / len(group)] * len(group), "mean",
                              combination_type="linear")
    peft.set_adapter("mean")
    return peft.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--bin", type=Path, default=Path("build/release/bin"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        (args.work / f"{task}.txt").write_text(texts(task)[1])
        if not (args.work / task / "adapter_config.json").exists():
            train(args.base, args.work / task, task, args.steps)
    size = sum(f.stat().st_size for f in (args.work / TASKS[0]).iterdir())
    pools = {}
    with daemon(args.bin, args.work / f"data{int(time.time())}") as (cli, url):
        cli("import-base", "smollm2", args.base)
        while True:
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"{url}/ready").status == 200:
                    break
            time.sleep(0.2)
        for name, method in (("opcm", "opcm"), ("mean", "mean")):
            pools[name] = fill_pool(cli, name, method, int((ROOM + 0.8) * size), args.work)
    by_task = {name: {t["task"]: t for t in pool["tasks"]} for name, pool in pools.items()}
    base = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32).eval()
    print("| task | base | own adapter | pool, OPCM | pool, running mean | PEFT `linear`, "
          "groups of the OPCM pool |\n|---|---|---|---|---|---|")
    for task in TASKS:
        opcm = by_task["opcm"].get(task)
        group = [t for t, v in by_task["opcm"].items() if opcm and v["member"] == opcm["member"]]
        cells = [f"{held_out(base, args.base, task):.4f}"]
        own = next((p[task]["own_loss"] for p in by_task.values() if task in p), None)
        cells.append("-" if own is None else f"{own:.4f}")
        for name in ("opcm", "mean"):
            entry = by_task[name].get(task)
            shared = [t for t, v in by_task[name].items()
                      if entry and v["member"] == entry["member"]]
            cells.append("refused" if entry is None else
                         f"{entry['loss']:.4f} (of {len(shared)})")
        cells.append("-" if len(group) < 2 else
                     f"{held_out(linear(args.base, args.work, group), args.base, task):.4f}")
        print("| " + " | ".join([task, *cells]) + " |")
    for name, pool in pools.items():
        print(f"\n{name}: {len(pool['tasks'])} of {len(TASKS)} tasks by {len(pool['members'])} "
              f"adapters, {pool['bytes']} of {pool['budget_bytes']} bytes")


if __name__ == "__main__":
    main()
