"""Training LoRA adapters with PEFT, combining them as PEFT does, and its log-probabilities."""

from __future__ import annotations

from pathlib import Path

import tasks
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

BLOCK = 128  # tokens of a training sequence
BATCH = 2
RANK = 8
LEARNING_RATE = 2e-3
MODULES = ["q_proj", "v_proj", "o_proj"]


def token_ids(base: Path, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(base)(text, verbose=False)["input_ids"]


def train(base: Path, folders: dict[str, Path], steps: int, seed: int) -> None:
    """An adapter for each task that has none yet, saved by PEFT."""
    missing = {task: folder for task, folder in folders.items()
               if not (folder / "adapter_config.json").exists()}
    if not missing:
        return
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    for task, folder in missing.items():
        torch.manual_seed(seed)
        ids = torch.tensor(token_ids(base, tasks.texts(task)[0]))
        blocks = ids[:len(ids) // BLOCK * BLOCK].view(-1, BLOCK)
        adapted = get_peft_model(
            model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=MODULES))
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad],
                                      lr=LEARNING_RATE)
        first = last = 0.0
        for step in range(steps):
            batch = blocks[torch.randint(len(blocks), (BATCH,))]
            loss = adapted(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            first, last = (loss.item() if step == 0 else first), loss.item()
        adapted.save_pretrained(folder)
        model = adapted.unload()
        print(f"{task}: {steps} steps, training loss {first:.3f} -> {last:.3f}", flush=True)


def combine_linear(base: Path, folders: list[Path], out: Path) -> Path:
    """PEFT's mean of the factors, saved as one adapter; its folder."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    names = [f"a{i}" for i in range(len(folders))]
    adapted = PeftModel.from_pretrained(model, folders[0], adapter_name=names[0])
    for name, folder in zip(names[1:], folders[1:], strict=True):
        adapted.load_adapter(folder, adapter_name=name)
    adapted.add_weighted_adapter(names, [1 / len(names)] * len(names), "mean",
                                 combination_type="linear")
    adapted.save_pretrained(out, selected_adapters=["mean"])
    return out / "mean"


@torch.no_grad()
def logprobs(base: Path, folder: Path, tokens: list[int]) -> list[float]:
    """Of every token but the first, by PEFT in float32."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, folder).float()
    found = adapted(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(found[i, token]) for i, token in enumerate(tokens[1:])]
