"""Loads the tasks' JSONL files from this folder, wherever lm_eval was started."""

from pathlib import Path
from typing import Any

import datasets

FOLDER = Path(__file__).resolve().parent


def load(file: str, **_: Any) -> dict[str, datasets.Dataset]:
    """One split, "test"."""
    return {"test": datasets.Dataset.from_json(str(FOLDER / file))}
