#!/usr/bin/env python3
"""Compares what lm-evaluation-harness computes through the endpoint with its own `hf` model.

    python examples/evaluate/compare_with_hf.py --endpoint http://127.0.0.1:8080 \\
        --model smollm2 --weights SMOLLM2_FOLDER

Both sides score the same tasks; WEIGHTS is the Hugging Face folder of the very weights that MODEL
answers from (the base's folder, or one that `stockpot export` wrote), computed in float32. Exit
status 1 if a log-likelihood differs by more than --tolerance, or a greedy flag or a generated text
differs at all.
"""

from __future__ import annotations

import argparse
import sys

import lm_eval_tasks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--endpoint", required=True, metavar="URL")
    add("--model", required=True, help="served name")
    add("--weights", required=True, metavar="DIR", help="the same weights for transformers")
    add("--tolerance", type=float, default=1e-3, help="of a log-likelihood (default: %(default)s)")
    args = parser.parse_args()

    served = lm_eval_tasks.run(
        "local-completions",
        lm_eval_tasks.endpoint_args(args.endpoint, args.model, args.weights))
    local = lm_eval_tasks.run(
        "hf", {"pretrained": args.weights, "dtype": "float32", "device": "cpu"})

    ours, theirs = map(lm_eval_tasks.log_likelihoods, (served, local))
    if not ours or ours.keys() != theirs.keys():
        print("the two runs have different items", file=sys.stderr)
        return 1
    worst, worst_item, flags, requests = 0.0, "", 0, 0
    for item, pairs in ours.items():
        for (value, greedy), (their_value, their_greedy) in zip(pairs, theirs[item], strict=True):
            requests += 1
            flags += greedy != their_greedy
            if not abs(value - their_value) <= worst:  # NaN counts as worst
                worst, worst_item = abs(value - their_value), item
    texts, their_texts = map(lm_eval_tasks.generations, (served, local))
    same_texts = sum(text == their_texts[item] for item, text in texts.items())
    print(f"{len(ours)} items, {requests} log-likelihoods: largest difference {worst:.2e} "
          f"({worst_item}), {flags} greedy flags differ; "
          f"{same_texts} of {len(texts)} generations are the same")
    for task, values in served["results"].items():
        if task == lm_eval_tasks.GROUP:  # a heading
            continue
        theirs_here = local["results"][task]
        print(f"  {task}: " + ", ".join(
            f"{name.split(',')[0]} {value:.4f} (hf {theirs_here[name]:.4f})"
            for name, value in values.items()
            if isinstance(value, float) and "stderr" not in name))
    return 0 if worst <= args.tolerance and flags == 0 and same_texts == len(texts) else 1


if __name__ == "__main__":
    sys.exit(main())
