#!/usr/bin/env python3
"""What merging and publishing cost in quality: the experiment behind Stockpot's defaults.

    python examples/publish_study/study.py --bin build/release/bin --base-folder SMOLLM2_FOLDER \\
        --out study [--quick]

For each seed a fine-tune of SmolLM2-135M (examples/finetune_python) and a short step like those of
reinforcement learning (rl_step.py), all in one daemon. Then, on held-out text that no choice looks
at: the loss of every checkpoint, of the merge of the last two by each method, and of the last one
published in every way. All numbers come from the daemon, on the path that answers requests.

Writes OUT/study.json and OUT/study.md (report.py); started again, it goes on where it was. A
seed took 18 minutes on two cores that had little else to do; --quick: one seed, fewer steps and
ways.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "finetune_python"))

import corpus  # noqa: E402
import report  # noqa: E402

MERGES = {
    "mean": ["--method", "mean"],
    "model-stock": ["--method", "model-stock"],
    "monosoup, 95 % of the energy": ["--method", "monosoup"],
    "monosoup, 80 %": ["--method", "monosoup", "--energy", "0.8"],
    "monosoup-spectral, effective rank": ["--method", "monosoup-spectral"],
    "monosoup-spectral, R = 0.8": ["--method", "monosoup-spectral", "--spectral", "0.8"],
}
ONE_BIT = ["--codec", "bitdelta"]
VARIANTS = {
    "as it is": ["--codec", "dense"],
    "1 bit, mean": [*ONE_BIT, "--alpha", "mean"],
    "1 bit, closed form": [*ONE_BIT, "--alpha", "closed-form"],
    "1 bit, distilled": [*ONE_BIT, "--alpha", "distilled"],
    "2 planes, mean": [*ONE_BIT, "--planes", "2", "--alpha", "mean"],
    "2 planes, closed form": [*ONE_BIT, "--planes", "2", "--alpha", "closed-form"],
    "3 planes, mean": [*ONE_BIT, "--planes", "3", "--alpha", "mean"],
    "1 bit + rank 16, mean": [*ONE_BIT, "--residual-rank", "16", "--alpha", "mean"],
    "1 bit + rank 64, mean": [*ONE_BIT, "--residual-rank", "64", "--alpha", "mean"],
    "auto, error 0.2": ["--codec", "auto", "--max-error", "0.2"],
    "auto, a tenth of the bytes": ["--codec", "auto", "--max-bytes", "10%"],
    "sparse": ["--codec", "sparse"],
    "default": [],
}
QUICK_MERGES = ["mean", "monosoup, 95 % of the energy"]
QUICK_VARIANTS = ["as it is", "1 bit, mean", "1 bit, closed form", "2 planes, mean", "default"]
RL_VARIANTS = ["as it is", "1 bit, mean", "1 bit, closed form", "2 planes, mean",
               "auto, error 0.2", "sparse", "default"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--bin", type=Path, required=True, metavar="DIR", help="where stockpot and stockpotd are")
    add("--base-folder", type=Path, required=True, metavar="DIR",
        help="the base as a Hugging Face folder (examples/base_model/fetch.sh prints it)")
    add("--out", type=Path, required=True, metavar="DIR", help="made if it does not exist")
    add("--seeds", type=int, default=2, help="(default: %(default)s)")
    add("--steps", type=int, default=48, help="of a fine-tune (default: %(default)s)")
    add("--pushes", type=int, default=4, help="checkpoints of it (default: %(default)s)")
    add("--passages", type=int, default=10, help="held-out texts (default: %(default)s)")
    add("--calibration", type=int, default=6,
        help="texts of training that alphas are found on (default: %(default)s)")
    add("--quick", action="store_true", help="one seed, 16 steps, fewer ways and texts")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.pushes, args.passages, args.calibration = 1, 16, 2, 4, 4
    return args


class Study:
    """One daemon with the base, and what is asked of it."""

    def __init__(self, args: argparse.Namespace, server: str) -> None:
        self.args = args
        hook = str(HERE.parents[1] / "trainer_hooks/python/src")
        self.environment = os.environ | {
            "STOCKPOT_SERVER": server, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join([hook, os.environ.get("PYTHONPATH", "")])}
        self.server = server

    def cli(self, *arguments: object) -> Any:
        """The answer of `stockpot --json ...`; SystemExit with its message if it failed."""
        done = subprocess.run(
            [self.args.bin / "stockpot", "--json", "--quiet", *map(str, arguments)],
            env=self.environment, text=True, capture_output=True)
        if done.returncode != 0:
            sys.exit(f"stockpot {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def train(self, script: str, run: str, *arguments: object) -> None:
        """Unless the run is there: what was interrupted goes on."""
        if any(known["name"] == run for known in self.cli("runs")):
            return
        subprocess.run(
            [sys.executable, HERE.parent / script, "--base-folder", self.args.base_folder,
             "--server", self.server, "--run", run, *map(str, arguments)],
            env=self.environment, check=True)

    def measured(self, identifier: str) -> dict[str, Any]:
        """What the daemon noted of an artifact on the held-out texts."""
        shown = self.cli("show", identifier)
        values = {f"{item['task']}/{item['metric']}": item["value"] for item in shown["evals"]}
        return {"loss": values.get("probe/loss"), "kl": values.get("gate/kl"),
                "top1": values.get("gate/top1"), "bytes": shown["stored_bytes"],
                "attributes": {key: value for key, value in shown["attributes"].items()
                               if not key.startswith("tensor/")}}

    def give_texts(self, run: str) -> None:
        """The held-out passages, and paragraphs of the training text for the alphas."""
        texts = self.args.out / "texts"
        texts.mkdir(exist_ok=True)
        heldout = [passage["text"] for passage in corpus.heldout_passages()]
        training = corpus.calibration_texts(self.args.calibration)
        for kind, passages in (("heldout", heldout[:self.args.passages]),
                               ("calibration", training)):
            files = []
            for index, passage in enumerate(passages):
                files.append(texts / f"{kind}-{index}.txt")
                files[-1].write_text(passage)
            self.cli("probe" if kind == "heldout" else "calibration", "set", run, *files)

    def losses_of_steps(self, run: str) -> dict[int, float]:
        losses = {}
        for step in self.cli("log", run):
            if step["kind"] == "checkpoint":
                self.cli("probe", "score", f"{run}@{step['step']}")
                losses[step["step"]] = self.measured(f"{run}@{step['step']}")["loss"]
        return losses

    def merges(self, run: str, methods: dict[str, list[str]]) -> dict[str, Any]:
        """Of the last two checkpoints."""
        found = {}
        for name, options in methods.items():
            job = self.cli("merge", run, "--last", "2", *options)
            if (measured := self.measured(job["result"]))["loss"] is None:
                self.cli("probe", "score", job["result"])
                measured = self.measured(job["result"])
            found[name] = measured
            print(f"{run}: merge by {name}: loss {measured['loss']:.4f}", flush=True)
        return found

    def variants(self, identifier: str, ways: dict[str, list[str]]) -> dict[str, Any]:
        """Over the gate's limits, too: what they should be is the question."""
        found = {}
        for index, (name, options) in enumerate(ways.items()):
            job = self.cli("publish", identifier, "--as", f"study-{identifier.replace('@', '-')}-"
                           f"{index}", "--force", "--reason", "the study", *options)
            found[name] = self.measured(job["result"]) | {"options": options}
            print(f"{identifier}: {name}: loss {found[name]['loss']:.4f}, "
                  f"{found[name]['bytes'] / 1e6:.1f} MB", flush=True)
        return found


@contextlib.contextmanager
def daemon(args: argparse.Namespace) -> Iterator[str]:
    """Yields the Thrift address of a daemon over OUT/data."""
    data = args.out / "data"
    (data / "addresses.json").unlink(missing_ok=True)
    with (args.out / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            [args.bin / "stockpotd", "--data", data, "--base", "smollm2", "--http", "127.0.0.1:0",
             "--thrift", "127.0.0.1:0"], stdout=log, stderr=log)
    try:
        while not (data / "addresses.json").exists():
            if process.poll() is not None:
                sys.exit(f"stockpotd did not start: {args.out / 'daemon.log'}")
            time.sleep(0.1)
        yield json.loads((data / "addresses.json").read_text())["thrift"]
    finally:
        process.terminate()
        process.wait()


def study_of_seed(study: Study, seed: int) -> dict[str, Any]:
    args = study.args
    pick = (lambda ways, names: {name: ways[name] for name in names}) if args.quick else (
        lambda ways, _: ways)
    tune, rl = f"tune-{seed}", f"rl-{seed}"
    study.train("finetune_python/finetune.py", tune, "--seed", seed, "--steps", args.steps,
                "--push-every", args.steps // args.pushes, "--merge-every", 0,
                "--publish", "request")
    study.give_texts(tune)
    steps = study.losses_of_steps(tune)
    last = f"{tune}@{args.steps}"
    found = {"seed": seed, "steps": steps, "merges": study.merges(tune, pick(MERGES, QUICK_MERGES)),
             "variants": study.variants(last, pick(VARIANTS, QUICK_VARIANTS))}
    study.train("publish_study/rl_step.py", rl, "--seed", seed)
    study.give_texts(rl)
    [rl_step] = study.losses_of_steps(rl)
    ways = {name: VARIANTS[name] for name in RL_VARIANTS
            if not args.quick or name in QUICK_VARIANTS}
    return found | {"rl": study.variants(f"{rl}@{rl_step}", ways)}


def main() -> int:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with daemon(args) as server:
        study = Study(args, server)
        study.cli("import-base", "smollm2", args.base_folder)
        base_bytes = study.cli("show", "smollm2")["logical_bytes"]
        seeds = [study_of_seed(study, seed) for seed in range(args.seeds)]
    result = {"steps": args.steps, "passages": args.passages, "calibration": args.calibration,
              "base_bytes": base_bytes, "minutes": (time.monotonic() - start) / 60, "seeds": seeds}
    (args.out / "study.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "study.md").write_text(report.markdown(result))
    print((args.out / "study.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
