"""BitDelta's own files (FasterDecoding/BitDelta, save_diff) become Stockpot variant files.

    python -m stockpot.bitdelta_import diff.pt BASE_FOLDER OUT.safetensors --base DIGEST

Such a file is a pickle of a dict. A compressed layer MODULE has
    MODULE.mask   int32 [d_in / 32, d_out]: bit j of word w in column o is 1 where the element
                  (o, 32 * w + j) of the delta is >= 0
    MODULE.coeff  a scalar: W = W_base + coeff * (+1 or -1)
and whatever else training touched (embeddings, norms, head) is there whole under its own name. It
is read with torch.load(weights_only=True), here and never in the daemon. DIGEST is the base's in
the daemon (`stockpot show NAME`); the daemon checks it, and the variant, when it is imported.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from stockpot import chunks
from stockpot.dtypes import name_of
from stockpot.errors import ErrorCode, StockpotError
from stockpot.variant_file import BaseWeights, bytes_of


def convert(diff: str | Path, base_folder: str | Path, out: str | Path, base_digest: str,
            config_files: dict[str, bytes] | None = None) -> None:
    """Writes `out`. StockpotError names what does not fit the base."""
    tuned = torch.load(str(diff), map_location="cpu", weights_only=True)
    base = BaseWeights(base_folder)
    held: dict[str, torch.Tensor] = {}
    entries, digests = [], {}
    for name in base.names():
        origin = base.read(name)
        entry = {"dtype": name_of(origin.dtype), "name": name, "shape": list(origin.shape)}
        content = chunks.tree_digest(chunks.part_of(bytes_of(origin)).chunks).hex()
        module = name.removesuffix(".weight")
        if f"{module}.mask" in tuned:
            parts = _one_bit(module, tuned.pop(f"{module}.mask"), tuned.pop(f"{module}.coeff"),
                             origin)
            entry["codec"], digests[name] = "bitdelta", content
        elif name in tuned and not torch.equal(tuned[name].to(origin.dtype), origin):
            parts = {"data": tuned.pop(name).detach().to(origin.dtype).contiguous()}
            entry["codec"], entry["shape"] = "raw", list(parts["data"].shape)
        else:
            tuned.pop(name, None)
            parts = {}
            entry["codec"], entry["content"], digests[name] = "base", content, content
        if parts:
            entry["parts"] = {role: _part(part) for role, part in parts.items()}
        held |= {name if role == "data" else f"{name}.{role}": p for role, p in parts.items()}
        entries.append(entry)
    if tuned:
        raise StockpotError(ErrorCode.INVALID_ARGUMENT,
                            f"{diff} has {sorted(tuned)[0]!r}, which is no tensor of the base")
    files = {}
    for name, contents in (config_files or {}).items():
        held[f"file:{name}"] = torch.frombuffer(bytearray(contents), dtype=torch.uint8)
        files[name] = _part(held[f"file:{name}"])
    manifest = {"attributes": {"codec": "bitdelta"}, "base": base_digest, "files": files,
                "format": 1, "kind": "variant", "tensors": entries}
    save_file(held, str(out), {
        "format": "pt", "stockpot.format": "variant 1", "stockpot.base": base_digest,
        "stockpot.base_tensors": json.dumps(digests),
        "stockpot.manifest": json.dumps(manifest, sort_keys=True, separators=(",", ":"),
                                        ensure_ascii=False)})


def _one_bit(module: str, mask: torch.Tensor, coeff: torch.Tensor, origin: torch.Tensor,
             ) -> dict[str, torch.Tensor]:
    d_out, d_in = origin.shape
    if mask.dtype != torch.int32 or mask.shape != (d_in // 32, d_out) or d_in % 32:
        raise StockpotError(
            ErrorCode.INVALID_ARGUMENT,
            f"{module}.mask is {mask.dtype} {list(mask.shape)}: for a base of {[d_out, d_in]} it "
            f"must be int32 {[d_in // 32, d_out]}")
    # Little-endian words of a row are its canonical bytes, least significant bit first.
    signs = mask.T.contiguous().view(torch.uint8)
    return {"alpha": coeff.detach().float().reshape(1).expand(d_out).contiguous(), "signs": signs}


def _part(tensor: torch.Tensor) -> dict[str, object]:
    part = chunks.part_of(bytes_of(tensor))
    return {"bytes": part.bytes, "chunks": [chunk.hex() for chunk in part.chunks]}


def main() -> None:
    parser = argparse.ArgumentParser(description="BitDelta's diff.pt to a Stockpot variant file")
    parser.add_argument("diff", type=Path)
    parser.add_argument("base_folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", required=True, help="digest of the base in the daemon")
    parser.add_argument("--files", type=Path,
                        help="folder whose config and tokenizer files the variant ships")
    options = parser.parse_args()
    shipped = {}
    if options.files:
        shipped = {path.name: path.read_bytes() for path in sorted(options.files.iterdir())
                   if path.suffix in (".json", ".jinja") and "index" not in path.name}
    convert(options.diff, options.base_folder, options.out, options.base, shipped)


if __name__ == "__main__":
    main()
