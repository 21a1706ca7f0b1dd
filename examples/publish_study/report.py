#!/usr/bin/env python3
"""The study's numbers as Markdown: tables, and curves as Mermaid draws them.

    python examples/publish_study/report.py study/study.json

prints them from what study.py wrote.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Seed = dict[str, Any]


def markdown(study: dict[str, Any]) -> str:
    """All of it. `study` is what study.py wrote to study.json."""
    seeds, full_bytes = study["seeds"], study["base_bytes"]
    several = (f"{len(seeds)} seeds ({', '.join(str(seed['seed']) for seed in seeds)})"
               if len(seeds) > 1 else f"one seed ({seeds[0]['seed']})")
    brackets = {1: "", 2: " Means, in brackets the two seeds' values, smaller first."}.get(
        len(seeds), " Means, in brackets the seeds' smallest and largest value.")
    parts = [
        f"{several}, {study['steps']} steps each, {study['passages']} held-out passages, "
        f"{study['calibration']} texts for the alphas; {study['minutes']:.0f} minutes in all. "
        f"Losses are nats a token.{brackets} What stands over a checkpoint's or a parent's loss is "
        "taken seed by seed.",
        "## Held-out loss of the checkpoints", _curve(seeds),
        "## Merges of the last two checkpoints", _merges(seeds),
        "## The last checkpoint published", _variants(seeds, "variants", full_bytes),
        "## After a short step of reinforcement learning", _variants(seeds, "rl", full_bytes),
    ]
    return "\n\n".join(parts) + "\n"


def _mean(values: list[float], digits: int, unit: str = "") -> str:
    """The mean; of several values also the smallest and the largest."""
    text = f"{statistics.fmean(values):.{digits}f}{unit}"
    if len(values) == 1:
        return text
    return f"{text} ({min(values):.{digits}f}, {max(values):.{digits}f})"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _curve(seeds: list[Seed]) -> str:
    steps = sorted(map(int, seeds[0]["steps"]))
    losses = [{int(step): loss for step, loss in seed["steps"].items()} for seed in seeds]
    lines = "\n".join(f"    line [{', '.join(f'{loss[step]:.4f}' for step in steps)}]"
                      for loss in losses)
    title = "held-out loss" + (", a line a seed" if len(seeds) > 1 else "")
    chart = (f"```mermaid\nxychart-beta\n    title \"{title}\"\n"
             f"    x-axis \"step\" [{', '.join(map(str, steps))}]\n{lines}\n```")
    rows = [[str(step), _mean([loss[step] for loss in losses], 4)] for step in steps]
    return chart + "\n\n" + _table(["step", "loss"], rows)


def _column(seeds: list[Seed], part: str, name: str,
            value: Callable[[dict[str, Any]], float | None], digits: int) -> str:
    values = [value(seed[part][name]) for seed in seeds]
    known = [v for v in values if v is not None]
    return _mean(known, digits) if known else ""


def _merges(seeds: list[Seed]) -> str:
    """The best first."""
    def mean_loss(name: str) -> float:
        return statistics.fmean(seed["merges"][name]["loss"] for seed in seeds)

    rows = []
    for name in sorted(seeds[0]["merges"], key=mean_loss):
        over = [seed["merges"][name]["loss"] - min(_last_two(seed)) for seed in seeds]
        rows.append([name, _column(seeds, "merges", name, lambda m: m["loss"], 4), _mean(over, 4)])
    return _table(["method", "loss", "over the better parent's"], rows)


def _last_two(seed: Seed) -> list[float]:
    """Losses of the last two checkpoints."""
    return [loss for _, loss in sorted((int(step), loss) for step, loss in seed["steps"].items())
            ][-2:]


def _variants(seeds: list[Seed], part: str, full_bytes: int) -> str:
    rows = []
    for name in seeds[0][part]:
        rise = [100 * (seed[part][name]["loss"] / seed[part]["as it is"]["loss"] - 1)
                for seed in seeds]
        size = [seed[part][name]["bytes"] for seed in seeds]
        rows.append([
            name, _column(seeds, part, name, lambda v: v["loss"], 4), _mean(rise, 2, " %"),
            _column(seeds, part, name, lambda v: v["kl"], 5),
            _column(seeds, part, name, lambda v: v["top1"], 3),
            f"{statistics.fmean(size) / 1e6:.1f}", f"1/{full_bytes / statistics.fmean(size):.1f}"])
    return _table(["published as", "loss", "over the checkpoint's", "KL", "top-1", "MB", "of bf16"],
                  rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
