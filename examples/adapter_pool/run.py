#!/usr/bin/env python3
"""Eight LoRA adapters in a pool that has room for four.

    python examples/adapter_pool/run.py --bin build/release/bin \\
        --base-folder "$(examples/base_model/fetch.sh)" --work pool-study

Trains an adapter for each of eight kinds of text (tasks.py), puts them one after another into pools
of `stockpot`, and measures the held-out loss of each task through the endpoint: with the base, with
its own adapter, and as POOL/TASK; beside them PEFT's `linear` combination of the same groups of
adapters. Then it proves that a request reaches the right member, and that an exported pool answers
the same from another daemon.

Writes WORK/result.json and WORK/table.md. Adapters are kept in WORK and not trained again. About
10 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import adapters
import tasks
from served import Served, daemon

# Two pools that merge only when they are full, but then at whatever price, to see what merging
# costs; one as it is made when nothing is said; and one that merges what is similar at once, rather
# puts a task out than that another loses much.
ANY_PRICE = ["--threshold", "1", "--quality", "0.2", "--no-evict"]
POOLS: dict[str, list[str]] = {
    "OPCM": ["--method", "opcm", *ANY_PRICE],
    "running mean": ["--method", "mean", *ANY_PRICE],
    "defaults": [],
    "strict": ["--quantile", "0.5", "--quality", "0.95"],
}
RECORD_BYTES = 60_000  # of a pool, its probe texts among them
CHECKED_TOKENS = 128  # of each task, for PEFT beside the endpoint


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--bin", type=Path, required=True, metavar="DIR", help="where stockpot and stockpotd are")
    add("--base-folder", type=Path, required=True, metavar="DIR", help="a Hugging Face folder")
    add("--work", type=Path, required=True, metavar="DIR", help="made if it does not exist")
    add("--tasks", default=",".join(tasks.KINDS), help="(default: %(default)s)")
    add("--room", type=float, default=5, metavar="N",
        help="of a pool, in adapters: what it holds, and one more, since a merge writes its result "
             "before its parts go (default: %(default)s)")
    add("--steps", type=int, default=24, help="of training (default: %(default)s)")
    add("--seed", type=int, default=0, help="of training (default: %(default)s)")
    args = parser.parse_args()
    args.tasks = args.tasks.split(",")
    return args


class Study:
    """The adapters, the texts, and what was found so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        work = args.work
        work.mkdir(parents=True, exist_ok=True)
        self.adapters = {task: work / f"adapter-{args.seed}-{task}" for task in args.tasks}
        adapters.train(args.base_folder, self.adapters, args.steps, args.seed)
        self.texts, self.tokens = {}, {}
        for task in args.tasks:
            self.texts[task] = work / f"{task}.txt"
            self.texts[task].write_text(tasks.texts(task)[1])
            self.tokens[task] = adapters.token_ids(args.base_folder, tasks.texts(task)[1])

    def fresh(self, name: str) -> Path:
        """A path in WORK at which nothing is."""
        path = self.args.work / name.replace(" ", "-")
        shutil.rmtree(path, ignore_errors=True)
        return path

    def daemon(self, name: str) -> Any:
        return daemon(self.args.bin, self.fresh(f"data-{name}"), self.args.base_folder)

    def adapter_bytes(self, served: Served) -> int:
        """What a pool counts for one adapter."""
        served.cli("pool", "create", "size", "--base", "base", "--bytes", 2**40)
        task, folder = next(iter(self.adapters.items()))
        pool = json.loads(served.cli("pool", "add", "size", task, folder))
        served.cli("pool", "delete", "size", "--force")
        return pool["members"][0]["bytes"]

    def fill(self, served: Served, options: list[str]) -> dict[str, Any]:
        """The pool "pool" after all adapters came, with what became of each and its losses."""
        size = self.adapter_bytes(served)
        budget = int(self.args.room * size) + RECORD_BYTES
        served.cli("pool", "create", "pool", "--base", "base", "--bytes", budget, *options)
        most, refused = 0, {}
        for task, folder in self.adapters.items():
            _, error = served.try_cli("pool", "add", "pool", task, folder, "--probe",
                                      self.texts[task])
            if error:
                refused[task] = error
            pool = json.loads(served.cli("pool", "show", "pool"))
            most = max(most, pool["bytes"])
            print(f"{task}: {len(pool['tasks'])} tasks by {len(pool['members'])} adapters, "
                  f"{pool['bytes']} of {budget} bytes", flush=True)
        events = map(json.loads, served.cli("events").splitlines())
        adds = [event["fields"] for event in events
                if event["type"] == "pool" and event["fields"]["op"] == "add"
                and event["subject"] == "pool"]
        losses = {}
        for entry in pool["tasks"]:
            served.wait(f"/v1/models/{entry['route']}")
            losses[entry["task"]] = served.loss(entry["route"], self.tokens[entry["task"]])
        return {"pool": pool, "adapter_bytes": size, "most_bytes": most, "refused": refused,
                "adds": adds, "losses": losses}

    def reach(self, served: Served, pool: dict[str, Any]) -> dict[str, float]:
        """That POOL/TASK answers as the exported member does, by PEFT and from a device.

        The largest difference of a log-probability to each.
        """
        folder = self.fresh("export")
        served.cli("pool", "export", "pool", folder)
        members = json.loads((folder / "pool.json").read_text())["tasks"]
        by_peft = on_device = 0.0
        with self.daemon("device") as device:
            device.cli("pool", "import", folder)
            for entry in pool["tasks"]:
                tokens = self.tokens[entry["task"]][:CHECKED_TOKENS]
                device.wait(f"/v1/models/{entry['route']}")
                ours = served.logprobs(entry["route"], tokens)
                for found, which in ((device.logprobs(entry["route"], tokens), "device"),
                                     (adapters.logprobs(self.args.base_folder, folder / members[
                                         entry["task"]], tokens), "peft")):
                    worst = max(abs(a - b) for a, b in zip(ours, found, strict=True))
                    if which == "device":
                        on_device = max(on_device, worst)
                    else:
                        by_peft = max(by_peft, worst)
        return {"peft": by_peft, "device": on_device}

    def singles(self, groups: list[list[str]]) -> dict[str, dict[str, float]]:
        """Losses with the base, the task's own adapter, and `linear` of its group."""
        losses: dict[str, dict[str, float]] = {"base": {}, "own": {}, "linear": {}}
        with self.daemon("singles") as served:
            for task, folder in self.adapters.items():
                served.cli("import-adapter", f"own-{task}", folder, "--base", "base")
                served.wait(f"/v1/models/own-{task}")
                losses["base"][task] = served.loss("base", self.tokens[task])
                losses["own"][task] = served.loss(f"own-{task}", self.tokens[task])
            for group in groups:
                if len(group) < 2:
                    continue
                name = f"linear-{group[0]}"
                folder = adapters.combine_linear(
                    self.args.base_folder, [self.adapters[task] for task in group],
                    self.fresh(name))
                served.cli("import-adapter", name, folder, "--base", "base")
                served.wait(f"/v1/models/{name}")
                for task in group:
                    losses["linear"][task] = served.loss(name, self.tokens[task])
        return losses


def groups_of(pool: dict[str, Any]) -> list[list[str]]:
    """Tasks that share a member."""
    return [member["tasks"] for member in pool["members"]]


def gain_kept(losses: dict[str, dict[str, float]], found: dict[str, float], of: list[str]
              ) -> float:
    """Mean over tasks of (base - found) / (base - own); 0 for one that nothing answers for."""
    base, own = losses["base"], losses["own"]
    gains = [(base[task] - found.get(task, base[task])) / (base[task] - own[task]) for task in of]
    return sum(gains) / max(1, len(gains))


def table(study: Study, losses: dict[str, dict[str, float]], pools: dict[str, Any]) -> str:
    """As Markdown: a row a task, then what each pool holds."""
    head = ["task", "base", "own adapter", *(f"pool: {name}" for name in pools),
            "`linear`, groups of the OPCM pool"]
    rows = [head, ["---"] * len(head)]
    for task in study.args.tasks:
        row = [task, f"{losses['base'][task]:.3f}", f"{losses['own'][task]:.3f}"]
        for found in pools.values():
            shared = next((g for g in groups_of(found["pool"]) if task in g), None)
            row.append(f"{found['losses'][task]:.3f} (of {len(shared)})" if shared else
                       "refused" if task in found["refused"] else "put out")
        row.append(f"{losses['linear'][task]:.3f}" if task in losses["linear"] else "alone")
        rows.append(row)
    sharing = [t for group in groups_of(pools["OPCM"]["pool"]) if len(group) > 1 for t in group]
    for name, of in (("share of the gain kept", study.args.tasks),
                     ("... of the tasks that share an adapter there", sharing)):
        rows.append([name, "0", "1", *(
            f"{gain_kept(losses, found, of):.2f}" for found in (
                *(pool["losses"] for pool in pools.values()), losses["own"] | losses["linear"]))])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    for name, found in pools.items():
        pool = found["pool"]
        lines.append(f"\n{name}: {len(pool['tasks'])} of {len(study.args.tasks)} tasks by "
                     f"{len(pool['members'])} adapters ("
                     + "; ".join(" + ".join(group) for group in groups_of(pool))
                     + f"); {pool['bytes']} bytes at the end, {found['most_bytes']} at most, of "
                     f"{pool['budget_bytes']}; an adapter has {found['adapter_bytes']}")
    return "\n".join(lines) + "\n"


def main() -> int:
    args = parse_arguments()
    start = time.monotonic()
    study = Study(args)
    trained = time.monotonic()
    pools, reached = {}, {}
    for name, options in POOLS.items():
        print(f"pool: {name}", flush=True)
        with study.daemon(f"pool-{name}") as served:
            pools[name] = study.fill(served, options)
            if name == "OPCM":
                reached = study.reach(served, pools[name]["pool"])
    losses = study.singles(groups_of(pools["OPCM"]["pool"]))
    minutes = [(trained - start) / 60, (time.monotonic() - trained) / 60]
    result = {"seed": args.seed, "steps": args.steps, "minutes": minutes, "losses": losses,
              "pools": pools, "reached": reached}
    (args.work / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    text = table(study, losses, pools)
    (args.work / "table.md").write_text(text)
    print(text)
    print(f"POOL/TASK beside its exported member: {reached['peft']:.2g} by PEFT in float32, "
          f"{reached['device']:.2g} from another daemon (largest difference of a log-probability)")
    return 0 if reached["device"] == 0 and reached["peft"] < 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
