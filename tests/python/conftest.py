"""Fixtures of the Python tests. The daemon is the real one (see tests/daemon.py).

STOCKPOT_SMOLLM2: a folder that examples/base_model/convert_smollm2.py wrote; unset: it is made.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
for folder in ("", "trainer_hooks/python/src", "examples/finetune_python", "examples/evaluate"):
    sys.path.insert(0, str(REPOSITORY / folder))

from stockpot import Client  # noqa: E402

from tests import tiny_llama  # noqa: E402
from tests.daemon import Daemon, running  # noqa: E402


def poll(condition: Callable[[], object], timeout_s: float) -> None:
    """Waits until condition() is true; fails after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.01)


@pytest.fixture
def seed() -> int:
    """A fresh seed, printed when the test fails; STOCKPOT_SEED repeats one."""
    value = int(os.environ.get("STOCKPOT_SEED", random.SystemRandom().randrange(2**31)))
    print(f"seed {value}: STOCKPOT_SEED={value} repeats it")
    torch.manual_seed(value)
    random.seed(value)
    return value


@pytest.fixture
def tiny_base(tmp_path: Path) -> Path:
    """A folder with a random Llama."""
    tiny_llama.make(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def daemon(tmp_path: Path, tiny_base: Path) -> Iterator[Daemon]:
    """A running daemon that has imported and serves the base "tiny"."""
    (tmp_path / "data").mkdir()
    with running(tmp_path / "data", "tiny") as instance:
        instance.cli("import-base", "tiny", tiny_base)
        yield instance


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.thrift) as instance:
        yield instance


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as the examples convert it."""
    given = os.environ.get("STOCKPOT_SMOLLM2")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("base") / "smollm2"
    script = REPOSITORY / "examples/base_model/convert_smollm2.py"
    subprocess.run([sys.executable, script, folder], check=True)
    return folder
