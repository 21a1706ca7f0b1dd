#!/usr/bin/env python3
"""Real consecutive checkpoints for history_bench: the loop of examples/finetune_python.

    python tests/bench/make_history.py --base-folder SMOLLM2_FOLDER DIR

Trains SmolLM2-135M in fp32 with AdamW and writes the folders base and, every few steps,
step_NNNN.weights (rounded to bf16, as the example pushes them) and step_NNNN.optimizer (both
moments in fp32), each a config.json and a model.safetensors.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "finetune_python"
sys.path.insert(0, str(EXAMPLE))
import corpus  # noqa: E402
import finetune  # noqa: E402


def write(folder: Path, config: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(config, folder / "config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("directory", type=Path)
    add("--base-folder", type=Path, required=True)
    add("--steps", type=int, default=16)
    add("--every", type=int, default=4)
    add("--length", type=int, default=256)
    add("--batch", type=int, default=2)
    args = parser.parse_args()
    config = args.base_folder / "config.json"
    write(args.directory / "base", config, load_file(args.base_folder / "model.safetensors"))
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.base_folder)
    model = AutoModelForCausalLM.from_pretrained(args.base_folder, dtype=torch.float32)
    model.train()
    model.get_input_embeddings().weight.requires_grad_(False)
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(names, lr=2e-4, weight_decay=0.0)
    data = finetune.batches(corpus.training_blocks(tokenizer, args.length), args.batch, 0)
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = finetune.learning_rate_at(step, args.steps, 2e-4)
        ids = next(data)
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(names), finetune.GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}/{args.steps}  loss {loss.item():.4f}", file=sys.stderr, flush=True)
        if step % args.every:
            continue
        weights = {name: p.detach().to(torch.bfloat16) for p, name in names.items()}
        write(args.directory / f"step_{step:04d}.weights", config, weights)
        moments = {f"{kind}/{names[p]}": state[kind] for p, state in optimizer.state.items()
                   for kind in ("exp_avg", "exp_avg_sq")}
        write(args.directory / f"step_{step:04d}.optimizer", config, moments)


if __name__ == "__main__":
    main()
