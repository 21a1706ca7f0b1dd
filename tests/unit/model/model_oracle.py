#!/usr/bin/env python3
"""Writes the models and expected values of the model tests, computed by transformers on the CPU.

    model_oracle.py tiny OUT_DIR             random small Llamas, one folder per case
    model_oracle.py smollm2 OUT_DIR [BASE]   one case over a real base model folder; BASE may be
                                             in the environment variable STOCKPOT_SMOLLM2

A case is a folder:

    base/     the base as a Hugging Face folder, in the case's dtype
    tuned/    the same architecture with every weight moved, norms, biases and embeddings too
    golden/   config.json {} and model.safetensors with
      prompt [T] I32
      X.logits   [T, V] F32   transformers in float32 (weights upcast, eager attention)
      X.logits64 [T, V] F64   the same in float64 (base only)
      X.hidden_norm [T] F32   ||h_t||_2 of the input of the vocabulary projection
      X.head_norm [V] F32     ||W_v||_2 of its rows
      X.greedy [64] I32       continuation of the prompt, lowest id wins ties
    for X in
      base     the base
      dense    the fine-tuned model
      onebit   block linears W_base + alpha * sign(W_tuned - W_base), alpha = mean |delta| per row
               in float32, sign(0) = +1; everything else as in the fine-tuned model

Everything is seeded: two runs write the same bytes.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: do not spin on a busy machine

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

GREEDY_TOKENS = 64
# Between the two best logits of a greedy step, at least: 20 times what another order of sums
# changes (3e-6 in the small models, 1e-4 in the real one).
MIN_MARGIN = {"tiny": 6e-5, "smollm2": 2e-3}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

TINY = dict(
    vocab_size=199, num_hidden_layers=3, max_position_embeddings=256, initializer_range=0.12)
LLAMA3_ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64)  # short: all three branches are met
CASES = {
    "mha_tied_f32": (torch.float32, dict(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4,
        tie_word_embeddings=True)),
    "gqa_untied_bf16": (torch.bfloat16, dict(
        hidden_size=48, intermediate_size=72, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False)),
    "mqa_headdim_f16": (torch.float16, dict(
        hidden_size=60, intermediate_size=97, num_attention_heads=6, num_key_value_heads=1,
        head_dim=14, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "llama3_bias_bf16": (torch.bfloat16, dict(
        hidden_size=64, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False, attention_bias=True, mlp_bias=True, rope_theta=50000.0,
        rope_scaling=LLAMA3_ROPE)),
}


def randomise(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Norms and biases start at 1 and 0 in transformers: move them, so that a mistake shows."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
        elif name.endswith(".bias"):
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


def tuned_from(base: LlamaForCausalLM, generator: torch.Generator, dtype: torch.dtype,
               scale: float) -> LlamaForCausalLM:
    """Every parameter moved by `scale` of its own spread, some elements left alone (sign(0))."""
    tuned = copy.deepcopy(base)
    for parameter in tuned.parameters():
        spread = parameter.data.float().std() if parameter.numel() > 1 else 1.0
        noise = torch.randn(parameter.shape, generator=generator) * spread * scale
        noise[torch.rand(parameter.shape, generator=generator) < 0.1] = 0.0
        parameter.data = (parameter.data.float() + noise).to(dtype)
    return tuned


def is_block_linear(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in PROJECTIONS


def load_float32(folder: Path) -> LlamaForCausalLM:
    """The saved weights, upcast on loading: model.to(dtype) would round the rotary table too."""
    return LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager").eval()


def one_bit(base: LlamaForCausalLM, tuned: LlamaForCausalLM) -> LlamaForCausalLM:
    result = copy.deepcopy(tuned)
    of_base = dict(base.named_parameters())
    for name, parameter in result.named_parameters():
        if not is_block_linear(name):
            continue
        weight = of_base[name].data
        delta = parameter.data - weight
        alpha = delta.double().abs().mean(dim=1, keepdim=True).float()
        parameter.data = weight + alpha * torch.where(delta >= 0, 1.0, -1.0)
    return result


@torch.no_grad()
def expected(model: LlamaForCausalLM, prompt: torch.Tensor, name: str,
             min_margin: float) -> dict[str, torch.Tensor]:
    hidden = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    step = model(prompt[None], use_cache=True)
    hook.remove()
    greedy = []
    logits = step.logits[0]
    while len(greedy) < GREEDY_TOKENS:
        best = step.logits[0, -1].topk(2)
        margin = float(best.values[0] - best.values[1])
        if margin < min_margin:
            raise SystemExit(f"{name}: token {len(greedy)} hangs on {margin:.1e}, another "
                             "order of sums may turn it: choose another seed or prompt")
        token = int(best.indices[0])
        greedy.append(token)
        step = model(torch.tensor([[token]]), past_key_values=step.past_key_values, use_cache=True)
    return {
        f"{name}.logits": logits.contiguous(),
        f"{name}.hidden_norm": hidden[0][0].norm(dim=1),
        f"{name}.head_norm": model.lm_head.weight.norm(dim=1),
        f"{name}.greedy": torch.tensor(greedy, dtype=torch.int32),
    }


@torch.no_grad()
def write_golden(folder: Path, prompt: torch.Tensor, min_margin: float) -> None:
    base = load_float32(folder / "base")
    tuned = load_float32(folder / "tuned")
    golden = {"prompt": prompt.int()}
    golden |= expected(base, prompt, "base", min_margin)
    golden |= expected(tuned, prompt, "dense", min_margin)
    golden |= expected(one_bit(base, tuned), prompt, "onebit", min_margin)
    golden["base.logits64"] = base.double()(prompt[None]).logits[0].contiguous()
    (folder / "golden").mkdir(parents=True)
    (folder / "golden" / "config.json").write_text("{}\n")
    save_file(golden, str(folder / "golden" / "model.safetensors"))


def write_tiny(out: Path) -> None:
    for index, (name, (dtype, options)) in enumerate(CASES.items()):
        torch.manual_seed(100 + index)
        generator = torch.Generator().manual_seed(200 + index)
        config = LlamaConfig(**(TINY | options), attn_implementation="eager")
        base = LlamaForCausalLM(config)
        randomise(base, generator)
        base = base.to(dtype)
        base.generation_config.eos_token_id = [2, 7]
        tuned = tuned_from(base, generator, dtype, scale=0.2)
        base.save_pretrained(out / name / "base", safe_serialization=True)
        tuned.save_pretrained(out / name / "tuned", safe_serialization=True)
        prompt = torch.randint(0, config.vocab_size, (90,), generator=generator)
        write_golden(out / name, prompt, MIN_MARGIN["tiny"])


PROMPT = (
    "The first steam engines were built to pump water out of mines. In 1712 Thomas Newcomen "
    "made one that worked, and it wasted most of its heat. James Watt, who repaired a model of it, "
    "saw why and added a separate condenser. A little later, engines")


def write_smollm2(out: Path, folder: Path) -> None:
    generator = torch.Generator().manual_seed(300)
    case = out / "smollm2"
    case.mkdir()
    (case / "base").symlink_to(folder.resolve())
    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tuned_from(base, generator, torch.bfloat16, scale=0.02).save_pretrained(
        case / "tuned", safe_serialization=True)
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids[0]
    write_golden(case, prompt, MIN_MARGIN["smollm2"])


def main() -> int:
    if len(sys.argv) < 3 or sys.argv[1] not in ("tiny", "smollm2"):
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(sys.argv[2])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if sys.argv[1] == "tiny":
        torch.set_num_threads(1)  # the matrices are too small to share
        write_tiny(out)
    else:
        base = Path(sys.argv[3] if len(sys.argv) > 3 else os.environ.get("STOCKPOT_SMOLLM2", ""))
        if not (base / "config.json").is_file():
            print(f"no model folder at '{base}': make one with\n"
                  "  python examples/base_model/convert_smollm2.py DIR\n"
                  "and configure with -DSTOCKPOT_SMOLLM2=DIR, or set STOCKPOT_SMOLLM2=DIR in the "
                  "environment", file=sys.stderr)
            return 1
        write_smollm2(out, base)
    (out / "cases.json").write_text(json.dumps(sorted(p.name for p in out.iterdir() if p.is_dir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
