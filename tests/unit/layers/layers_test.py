#!/usr/bin/env python3
"""Reads every #include of the tree and fails on an edge that the layering forbids.

The layers (ARCHITECTURE.md, "Map"): kernels <- store <- serve; thrift over store; hooks over the
thrift client. Run with a tree as the only argument; checks first that it finds forbidden edges.
"""

import re
import sys
import tempfile
from pathlib import Path

# Folder prefix -> prefixes it may include from, itself not listed. The longest prefix counts.
ALLOWED = {
    "kernels": [],
    "store": ["kernels"],
    "thrift": ["kernels", "store"],
    "serve/text": ["kernels"],
    "serve/model": ["kernels", "store"],
    "serve/calibrate": ["kernels", "store", "serve/model"],
    "serve/variants": ["kernels", "store", "serve/model"],
    "serve/engine": ["kernels", "store", "serve/model", "serve/variants"],
    "serve/http": ["kernels", "store", "serve/text", "serve/model", "serve/variants",
                   "serve/engine"],
    "serve/bin/cli": ["kernels", "store", "thrift"],
    "serve/bin": ["kernels", "store", "thrift", "serve"],
    "trainer_hooks/cpp": ["kernels", "store", "thrift"],
    "examples": ["kernels", "store", "thrift", "trainer_hooks/cpp"],
    "tests": ["kernels", "store", "thrift", "serve", "trainer_hooks/cpp"],
}

# Outside header -> folders that may include it (prefixes). What keeps a library in few places.
OUTSIDE = {
    r"(torch|ATen|c10)/": ["kernels/torch_ops", "store/merge_matrix",
                           "serve/calibrate/logit_loss",
                           "trainer_hooks/cpp/libtorch_adapter", "examples", "tests"],
    r"rocksdb/": ["store/catalog", "store/rocksdb_options", "store/checkpoint_store", "tests"],
    r"thrift/(T[A-Z]|protocol|transport|server|concurrency|processor|async|config)": [
        "thrift", "tests"],
    r"boost/(asio|beast)": ["serve/http", "tests"],
    r"nlohmann/": ["store", "serve", "thrift", "trainer_hooks/cpp", "examples", "tests"],
    r"(cuda|cusolver|cublas|nccl)[A-Za-z_0-9]*\.h": ["kernels", "tests/unit/kernels"],
    r"Eigen/": ["store/adapter_merge"],
    r"hwy/": ["kernels", "tests"],
    r"CLI/": ["serve/bin", "tests/bench", "examples"],
    r"spdlog/": ["serve"],
    r"toml\+\+/": ["serve/bin"],
}
OURS = ("kernels", "store", "thrift", "serve", "trainer_hooks", "tests", "examples")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
SOURCES = {".h", ".cc", ".cu", ".cuh", ".cpp", ".hpp"}


def longest_prefix(path: str, prefixes) -> str | None:
    found = [p for p in prefixes if path == p or path.startswith(p + "/")]
    return max(found, key=len, default=None)


def is_ours(root: Path, include: str) -> bool:
    return include.split("/")[0] in OURS and (root / include).exists()


def forbidden_edges(root: Path) -> list[str]:
    problems, files, edges = [], 0, 0
    for top in OURS:
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in SOURCES:
                continue
            files += 1
            name = path.relative_to(root).as_posix()
            layer = longest_prefix(name, ALLOWED)
            for include in INCLUDE.findall(path.read_text(errors="replace")):
                edges += 1
                if is_ours(root, include):
                    target = longest_prefix(include, ALLOWED)
                    allowed = [layer, *ALLOWED.get(layer, [])]
                    if longest_prefix(include, [a for a in allowed if a]) is None:
                        problems.append(f"{name} includes {include}: {layer} may not use {target}")
                    continue
                for pattern, places in OUTSIDE.items():
                    if re.match(pattern, include) and not any(name.startswith(p) for p in places):
                        problems.append(f"{name} includes <{include}>: only {places} may")
    print(f"{files} files, {edges} includes, {len(problems)} forbidden")
    if files == 0:
        problems.append(f"no source files under {root}")
    return problems


def self_test() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, text in {
            "kernels/a.h": '#include "store/b.h"\n',
            "store/b.h": '#include <torch/torch.h>\n#include "kernels/a.h"\n',
            "serve/text/c.cc": '#include "serve/http/d.h"\n',
            "serve/http/d.h": '#include "serve/text/e.h"\n',
            "serve/text/e.h": "",
        }.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        found = forbidden_edges(root)
    wanted = ["kernels/a.h includes store/b.h", "store/b.h includes <torch/torch.h>",
              "serve/text/c.cc includes serve/http/d.h"]
    if len(found) != len(wanted):
        return [f"self-test: {found}"]
    return [f"self-test: {w} not found" for w in wanted if not any(f.startswith(w) for f in found)]


if __name__ == "__main__":
    issues = self_test() + forbidden_edges(Path(sys.argv[1]).resolve())
    for issue in issues:
        print(issue, file=sys.stderr)
    sys.exit(1 if issues else 0)
