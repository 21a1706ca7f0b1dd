#!/usr/bin/env python3
"""Fine-tunes all block weights of SmolLM2-135M on real text and pushes checkpoints as it goes.

    PYTHONPATH=trainer_hooks/python/src python examples/finetune_python/finetune.py \\
        --base-folder SMOLLM2_FOLDER --base smollm2 --server 127.0.0.1:7070

A plain PyTorch loop; the three lines that Stockpot needs are the ones with `hook`. Training is in
fp32 (bf16 matrix products are slow on CPUs without AVX512-BF16); the checkpoints are rounded to
bf16 while they are copied, the base's type, so that a tensor that did not change is recognised as
the base's and takes no space.

The embeddings (tied to the head: 28 of 135 million parameters) are frozen by default. If they are
trained, almost all of their bf16 values change, and a published variant has to store them whole:
57 MB beside 14 MB of sign bits for everything else. --train-embeddings trains them.

Prints one line a step: training loss, tokens a second, and, when the step was pushed, held-out loss
and how long the push held up training. Exit status: 0, or 1 if a checkpoint was not stored.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import corpus
import torch
from stockpot import CheckpointHook, Client, RunConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

HELDOUT_PASSAGES_IN_LOOP = 12  # about 2,300 tokens: a few seconds on two cores
WARMUP_STEPS = 5
GRADIENT_NORM = 1.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-folder", type=Path, required=True, metavar="DIR",
        help="the base as a Hugging Face folder (examples/base_model/fetch.sh prints it)")
    add("--base", default="smollm2", help="its name in Stockpot (default: %(default)s)")
    add("--server", required=True, metavar="ADDRESS", help="of stockpotd: host:port or unix:/path")
    add("--run", default="pydocs", help="name of the run (default: %(default)s)")
    add("--steps", type=int, default=48, help="optimizer steps (default: %(default)s)")
    add("--push-every", type=int, default=12, help="push every n-th step (default: %(default)s)")
    add("--merge-every", type=int, default=24, help="merge every n-th step (default: %(default)s)")
    add("--publish", default="every", choices=["every", "merges", "best", "request"],
        help="what is published (default: %(default)s)")
    add("--batch", type=int, default=2, help="sequences a step (default: %(default)s)")
    add("--length", type=int, default=256, help="tokens a sequence (default: %(default)s)")
    add("--learning-rate", type=float, default=2e-4, help="(default: %(default)s)")
    add("--train-embeddings", action="store_true", help="train embeddings and head as well")
    add("--calibration", type=int, default=6, metavar="N",
        help="training texts on which the scales of 1-bit variants are found; 0: the mean of the "
        "update (default: %(default)s)")
    add("--heldout-out", type=Path, metavar="FILE", help="write the held-out passages there")
    add("--threads", type=int, default=torch.get_num_threads(),
        help="of PyTorch; fewer than the cores if the daemon works on them too (default: all)")
    add("--seed", type=int, default=0, help="of the order of the text (default: %(default)s)")
    return parser.parse_args()


def batches(blocks: torch.Tensor, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless random batches, [batch, length]; every block once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(blocks), generator=generator)
        for begin in range(0, len(order) - batch + 1, batch):
            yield blocks[order[begin:begin + batch]]


@torch.no_grad()
def heldout_loss(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase,
                 passages: list[dict[str, str]]) -> float:
    """Mean negative log-likelihood of a token (natural log), over all tokens but each first."""
    total, count = 0.0, 0
    for passage in passages:
        ids = torch.tensor([tokenizer(passage["text"])["input_ids"]])
        total += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


def learning_rate_at(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step <= WARMUP_STEPS:
        return peak * step / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(args: argparse.Namespace, hook: CheckpointHook) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.base_folder)
    model = AutoModelForCausalLM.from_pretrained(args.base_folder, dtype=torch.float32)
    model.train()  # Llama has no dropout: training and evaluation compute the same
    model.get_input_embeddings().weight.requires_grad_(args.train_embeddings)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0.0)
    passages = corpus.heldout_passages()[:HELDOUT_PASSAGES_IN_LOOP]
    data = batches(corpus.training_blocks(tokenizer, args.length), args.batch, args.seed)
    print(f"training {sum(p.numel() for p in trained) / 1e6:.1f} million parameters; held-out loss "
          f"of the base: {heldout_loss(model, tokenizer, passages):.4f}", flush=True)

    for step in range(1, args.steps + 1):
        start = time.monotonic()
        ids = next(data)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, args.steps, args.learning_rate)
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        speed = ids.numel() / (time.monotonic() - start)
        line = f"step {step}/{args.steps}  loss {loss.item():.4f}  {speed:.0f} tokens/s"
        if step % args.push_every == 0:
            heldout = heldout_loss(model, tokenizer, passages)
            pushed = hook.on_step(step, model,
                                  metrics={"loss": heldout, "train_loss": loss.item()})
            stall_ms = 1000 * hook.stats.last_stall_s
            line += f"  held-out {heldout:.4f}  " + (
                f"pushed, stall {stall_ms:.0f} ms" if pushed else "not pushed")
        print(line, flush=True)


def main() -> int:
    args = parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("stockpot").setLevel(logging.INFO)
    if args.heldout_out:
        corpus.write_jsonl(args.heldout_out, corpus.heldout_passages())
    config = RunConfig(merge_every=args.merge_every, publish=args.publish, best_metric="loss")
    tags = {"example": "finetune_python"}
    if args.calibration:
        texts = corpus.calibration_texts(args.calibration)
        with Client(args.server) as client:
            client.create_run(args.run, args.base, config, tags)
            client.lineage.set_calibration(
                args.run, {f"train-{i}": text for i, text in enumerate(texts)}, "finetune.py")
    hook = CheckpointHook(
        args.server, args.run, args.base, every=args.push_every, files=args.base_folder,
        config=config, tags=tags, cast_to=torch.bfloat16, when_full="wait")
    with hook:
        train(args, hook)
    stats = hook.stats
    print(f"{stats.committed} of {args.steps // args.push_every} checkpoints stored "
          f"({stats.sent_bytes / 1e6:.0f} MB sent of {stats.staged_bytes / 1e6:.0f} MB), "
          f"training waited {1000 * stats.total_stall_s:.0f} ms for them")
    return 0 if stats.committed == args.steps // args.push_every else 1


if __name__ == "__main__":
    sys.exit(main())
