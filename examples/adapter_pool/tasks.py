"""Eight kinds of text that are on every machine with Stockpot's environment, each a task.

Files come from Python's standard library and from the pinned packages of requirements.txt, in an
order by the hash of their paths; every fourth one is held out.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

# Where the files of a task are: under "stdlib" or "purelib" of sysconfig.
KINDS = {
    "codec-tables": ("stdlib", "encodings/*.py"),
    "operator-headers": ("purelib", "torch/include/ATen/ops/*_ops.h"),
    "task-configs": ("purelib", "lm_eval/tasks/**/*.yaml"),
    "package-metadata": ("purelib", "*.dist-info/METADATA"),
    "type-stubs": ("purelib", "torch/**/*.pyi"),
    "licenses": ("purelib", "**/LICENSE*"),
    "cython": ("purelib", "pyarrow/**/*.px[di]"),
    "algebra-tests": ("purelib", "sympy/**/test_*.py"),
}
SKIPPED = 200  # characters at a file's beginning that may be the same in all: licenses, imports
TRAINING_FILES, TRAINING_CHARACTERS = 48, 1600  # of each file
HELDOUT_FILES, HELDOUT_CHARACTERS = 6, 500


def _order(path: Path, root: Path) -> bytes:
    return hashlib.sha256(str(path.relative_to(root)).encode()).digest()


def texts(task: str) -> tuple[str, str]:
    """Training text and held-out text of a task."""
    where, pattern = KINDS[task]
    root = Path(sysconfig.get_paths()[where])
    least = SKIPPED + HELDOUT_CHARACTERS
    files = sorted((file for file in root.glob(pattern) if file.stat().st_size >= least),
                   key=lambda file: _order(file, root))

    def parts(chosen: list[Path], characters: int) -> str:
        return "\n\n".join(file.read_text(errors="replace")[SKIPPED:][:characters]
                           for file in chosen)

    return (parts([f for i, f in enumerate(files) if i % 4][:TRAINING_FILES], TRAINING_CHARACTERS),
            parts(files[::4][:HELDOUT_FILES], HELDOUT_CHARACTERS))
