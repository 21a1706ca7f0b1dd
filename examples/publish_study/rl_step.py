#!/usr/bin/env python3
"""A few policy-gradient steps on SmolLM2-135M with a tiny learning rate; pushes the last step.

As in reinforcement learning of language models, most bf16 weights do not change at all.

    PYTHONPATH=trainer_hooks/python/src python examples/publish_study/rl_step.py \\
        --base-folder SMOLLM2_FOLDER --base smollm2 --server 127.0.0.1:7070

The reward of a sampled continuation is its share of characters that are lower-case letters; its
advantage is the reward less the mean of its group, over the group's deviation (GRPO, arXiv
2402.03300, without the clipped ratio: every sample is used once). Weights are fp32 while training
and rounded to bf16 in the checkpoint, the base's type.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from stockpot import CheckpointHook, RunConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = ["The capital of France is", "To sort a list in Python,", "Water boils when",
           "My favourite book tells of", "In the morning the sailors", "A good teacher always"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-folder", type=Path, required=True, metavar="DIR")
    add("--base", default="smollm2", help="its name in Stockpot (default: %(default)s)")
    add("--server", required=True, metavar="ADDRESS", help="of stockpotd: host:port or unix:/path")
    add("--run", default="rl", help="name of the run (default: %(default)s)")
    add("--steps", type=int, default=6, help="(default: %(default)s)")
    add("--samples", type=int, default=8, help="of a prompt's group (default: %(default)s)")
    add("--length", type=int, default=32, help="tokens sampled (default: %(default)s)")
    add("--learning-rate", type=float, default=1e-6, help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    return parser.parse_args()


def reward(text: str) -> float:
    """Share of lower-case letters."""
    return sum(character.islower() for character in text) / max(1, len(text))


def main() -> int:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.base_folder)
    model = AutoModelForCausalLM.from_pretrained(args.base_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    with CheckpointHook(args.server, args.run, args.base, every=args.steps,
                        files=args.base_folder, cast_to=torch.bfloat16, when_full="wait",
                        config=RunConfig(merge_every=0, publish="request")) as hook:
        for step in range(1, args.steps + 1):
            prompt = tokenizer(PROMPTS[step % len(PROMPTS)], return_tensors="pt")["input_ids"]
            with torch.no_grad():
                ids = model.generate(prompt.expand(args.samples, -1), do_sample=True,
                                     max_new_tokens=args.length, min_new_tokens=args.length,
                                     pad_token_id=tokenizer.eos_token_id)
            answers = ids[:, prompt.shape[1]:]
            rewards = torch.tensor([reward(text) for text in tokenizer.batch_decode(answers)])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            logits = model(ids).logits[:, prompt.shape[1] - 1:-1]
            chosen = torch.log_softmax(logits, -1).gather(-1, answers[..., None])[..., 0]
            loss = -(advantages[:, None] * chosen).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            print(f"step {step}/{args.steps}  reward {rewards.mean():.3f}", flush=True)
            hook.on_step(step, model, metrics={"loss": loss.item(),
                                               "reward": rewards.mean().item()})
    return 0 if hook.stats.committed == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
