"""LoRA adapters as PEFT saves them: in, served beside 1-bit variants, and out again."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.daemon import Daemon
from tests.integration import endpoint
from tests.integration.test_path import TOKENS, Weights, one_bit, push, torch_logprobs, tuned

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(base_folder: Path, folder: Path, seed: int, *, dtype: torch.dtype = torch.float32,
                 **config: Any) -> Path:
    """An adapter whose two factors are random, saved by PEFT."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    settings = {"r": 8, "lora_alpha": 16, "target_modules": LINEAR} | config
    peft = get_peft_model(model, LoraConfig(**settings))
    for name, parameter in peft.named_parameters():
        if ".lora_" in name:
            parameter.data = (0.1 * torch.randn_like(parameter)).to(dtype)
    peft.save_pretrained(folder)
    return folder


def peft_logprobs(base_folder: Path, adapter: Path) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    peft = PeftModel.from_pretrained(model, adapter).float()
    with torch.no_grad():
        logprobs = peft(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return [float(logprobs[i, t]) for i, t in enumerate(TOKENS[1:])]


def import_adapter(daemon: Daemon, name: str, folder: Path, base: str = "tiny") -> None:
    daemon.cli("import-adapter", name, folder, "--base", base)


def refusal(daemon: Daemon, name: str, folder: Path, base: str = "tiny") -> str:
    """What the import says that must fail."""
    done = daemon.cli("import-adapter", name, folder, "--base", base, check=False)
    assert done.returncode != 0, f"{name} was accepted"
    return done.stderr


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"]},
    "rs": {"r": 6, "lora_alpha": 3, "use_rslora": True},
    "patterns": {"rank_pattern": {"layers.0.self_attn.q_proj": 2, "down_proj": 5},
                 "alpha_pattern": {"q_proj": 7, "layers.1.mlp.up_proj": 1}},
    "bf16": {"dtype": torch.bfloat16},
    "one_layer": {"layers_to_transform": [1]},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_numbers_are_those_of_peft(daemon: Daemon, base_folder: Path, tmp_path: Path, kind: str
                                   ) -> None:
    adapter = make_adapter(base_folder, tmp_path / "adapter", len(kind), **CONFIGS[kind])
    import_adapter(daemon, kind, adapter)
    endpoint.wait_model(daemon.url, kind)
    theirs = peft_logprobs(base_folder, adapter)
    assert endpoint.prompt_logprobs(daemon.url, kind, TOKENS) == pytest.approx(theirs, abs=1e-4)
    base = endpoint.prompt_logprobs(daemon.url, "tiny", TOKENS)
    assert base != pytest.approx(theirs, abs=1e-2), "the adapter changes nothing: no test"


def test_adapters_and_variants_in_one_batch(daemon: Daemon, base_folder: Path,
                                            base_weights: Weights, tmp_path: Path) -> None:
    weights = tuned(base_weights, 3)
    push(daemon, "mixed", base_folder, {3: weights})
    for seed, name in enumerate(("mix-a", "mix-b")):
        import_adapter(daemon, name, make_adapter(base_folder, tmp_path / name, seed, r=4 + seed))
    models = ["tiny", "mixed@3", "mix-a", "mix-b"]
    for model in models:
        endpoint.wait_model(daemon.url, model)
    alone = {m: endpoint.greedy(daemon.url, m, TOKENS, 60) for m in models}
    assert endpoint.prompt_logprobs(daemon.url, "mixed@3", TOKENS) == pytest.approx(
        torch_logprobs(one_bit(base_weights, weights), base_folder, TOKENS), abs=1e-4)
    together: dict[tuple[str, int], str] = {}

    def ask(model: str, i: int) -> None:
        together[model, i] = endpoint.greedy(daemon.url, model, TOKENS, 60)

    threads = [threading.Thread(target=ask, args=(m, i)) for i in range(2) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == {(m, i): alone[m] for m in models for i in range(2)}


def test_out_again_and_after_a_restart(daemon: Daemon, base_folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(base_folder, tmp_path / "adapter", 9)
    import_adapter(daemon, "kept", adapter)
    import_adapter(daemon, "kept", adapter)  # again: it is there already
    endpoint.wait_model(daemon.url, "kept")
    before = endpoint.prompt_logprobs(daemon.url, "kept", TOKENS)
    shown = json.loads(daemon.cli("show", "kept", "--json").stdout)
    assert shown["kind"] == "adapter"
    daemon.cli("gc")
    daemon.kill()
    daemon.start()
    endpoint.wait_model(daemon.url, "kept")
    assert endpoint.prompt_logprobs(daemon.url, "kept", TOKENS) == before

    daemon.cli("export", "kept", tmp_path / "out")
    ours = load_file(tmp_path / "out" / "adapter_model.safetensors")
    theirs = load_file(adapter / "adapter_model.safetensors")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"]
    assert peft_logprobs(base_folder, tmp_path / "out") == pytest.approx(before, abs=1e-4)

    daemon.cli("unpublish", "kept")
    endpoint.wait_gone(daemon.url, "kept")
    daemon.cli("gc")
    assert json.loads(daemon.cli("show", shown["digest"], "--json").stdout)["kind"] == "adapter"
    import_adapter(daemon, "kept", adapter)
    endpoint.wait_model(daemon.url, "kept")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """By the end of a name; None removes it."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for end, value in changes.items():
        name = next(n for n in sorted(tensors) if n.endswith(end.replace("__", ".")))
        del tensors[name]
        if value is not None:
            tensors[name] = value
    save_file(tensors, path)


REFUSED: dict[str, tuple[str, Any]] = {
    "dora": ("use_dora", lambda f: edit_config(f, use_dora=True)),
    "bias": ("bias", lambda f: edit_config(f, bias="all")),
    "transposed": ("fan_in_fan_out", lambda f: edit_config(f, fan_in_fan_out=True)),
    "modules_to_save": ("modules_to_save", lambda f: edit_config(f, modules_to_save=["lm_head"])),
    "pissa": ("init_lora_weights", lambda f: edit_config(f, init_lora_weights="pissa")),
    "no_lora": ("peft_type", lambda f: edit_config(f, peft_type="LOHA")),
    "unknown_field": ("shiny_new", lambda f: edit_config(f, shiny_new={"a": 1})),
    "pattern": ("rank_pattern", lambda f: edit_config(f, rank_pattern={".*_proj": 8})),
    "rank": ("rank 8", lambda f: edit_config(f, r=4)),
    "no_alpha": ("lora_alpha", lambda f: edit_config(f, lora_alpha=None)),
    "not_json": ("JSON", lambda f: (f / "adapter_config.json").write_text("{")),
    "deep": ("JSON", lambda f: (f / "adapter_config.json").write_text(
        '{"r": ' + "[" * 100_000 + "]" * 100_000 + "}")),
    "pickle": ("adapter_model.bin", lambda f: (f / "adapter_model.safetensors").unlink()),
    "lone_factor": ("partner", lambda f: edit_tensors(f, lora_A__weight=None)),
    "shape": ("[7, 8]", lambda f: edit_tensors(f, lora_B__weight=torch.zeros(7, 8))),
    "nan": ("not finite", lambda f: edit_tensors(
        f, q_proj__lora_A__weight=torch.full((8, 64), float("nan")))),
    "integers": ("lora_A", lambda f: edit_tensors(
        f, q_proj__lora_A__weight=torch.zeros(8, 64, dtype=torch.int32))),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_understood_is_refused_by_name(daemon: Daemon, base_folder: Path,
                                                   tmp_path: Path, kind: str) -> None:
    adapter = make_adapter(base_folder, tmp_path / "adapter", 1)
    says, spoil = REFUSED[kind]
    spoil(adapter)
    routes = daemon.cli("routes", "--json").stdout
    assert says in refusal(daemon, f"bad-{kind}", adapter)
    assert daemon.cli("routes", "--json").stdout == routes
    assert endpoint.request(f"{daemon.url}/v1/models/bad-{kind}")[0] == 404


def test_other_layers_bases_and_names_are_refused(daemon: Daemon, base_folder: Path,
                                                  tmp_path: Path) -> None:
    adapter = make_adapter(base_folder, tmp_path / "adapter", 1)
    other = make_adapter(base_folder, tmp_path / "other", 2)
    import_adapter(daemon, "taken", adapter)
    embeddings = make_adapter(base_folder, tmp_path / "embeddings", 1,
                              target_modules=["embed_tokens"])
    for name, folder, base, says in (
            ("taken", other, "tiny", "taken"), ("tiny", other, "tiny", "tiny"),
            ("new", other, "nobody", "nobody"), ("new", other, "taken", "not a base"),
            ("a@b", other, "tiny", "name"), ("new", embeddings, "tiny", "embed_tokens"),
            ("new", base_folder, "tiny", "adapter_config.json")):
        assert says in refusal(daemon, name, folder, base)
    assert endpoint.prompt_logprobs(daemon.url, "taken", TOKENS) == pytest.approx(
        peft_logprobs(base_folder, adapter), abs=1e-4)
