"""Judges model folders with the Python safetensors library and transformers.

copy A B OUT  A and B hold the same tensors; writes them to OUT/model.safetensors
load A...     transformers loads each folder, and finds every weight in it
"""

import glob
import json
import os
import sys


def tensors_of(folder):
    from safetensors.torch import load_file

    found = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        part = load_file(path)
        assert not found.keys() & part.keys(), "a tensor is in two shards"
        found.update(part)
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index, encoding="utf-8") as f:
            parsed = json.load(f)
        assert set(parsed["weight_map"]) == set(found)
        total = sum(t.numel() * t.element_size() for t in found.values())
        assert parsed["metadata"]["total_size"] == total
    return found


def copy(a, b, out):
    import torch
    from safetensors.torch import save_file

    left, right = tensors_of(a), tensors_of(b)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name
    os.mkdir(out)
    save_file(left, os.path.join(out, "model.safetensors"))
    with open(os.path.join(a, "config.json"), encoding="utf-8") as f:
        config = f.read()
    with open(os.path.join(out, "config.json"), "w", encoding="utf-8") as f:
        f.write(config)


def load(*folders):
    import torch
    from transformers import AutoModelForCausalLM

    for folder in folders:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, torch_dtype="auto"
        )
        for kind, names in report.items():
            assert not names, (kind, names)
        state = model.state_dict()
        for name, tensor in tensors_of(folder).items():
            assert torch.equal(state[name], tensor), name


if __name__ == "__main__":
    {"copy": copy, "load": load}[sys.argv[1]](*sys.argv[2:])
