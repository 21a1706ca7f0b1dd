"""The package as it is shipped: generated code up to date, installable, importable alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.python.conftest import REPOSITORY

PACKAGE = REPOSITORY / "trainer_hooks" / "python"


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    subprocess.run([PACKAGE / "generate_rpc.sh", tmp_path], check=True)
    checked_in = PACKAGE / "src/stockpot/rpc"
    names = sorted(path.name for path in tmp_path.glob("*.py"))
    assert names == sorted(path.name for path in checked_in.glob("*.py"))
    for name in names:
        assert (tmp_path / name).read_text() == (checked_in / name).read_text(), (
            f"{name}: run trainer_hooks/python/generate_rpc.sh")


def test_installs_with_pip_and_imports_alone(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--target", tmp_path, PACKAGE], check=True)
    assert (tmp_path / "stockpot/py.typed").exists()
    # Without transformers: importing it costs seconds, and plain loops may not have it.
    code = ("import sys, stockpot; assert stockpot.__file__.startswith(sys.argv[1]), "
            "stockpot.__file__; assert 'transformers' not in sys.modules; "
            "stockpot.CheckpointHook; print(stockpot.__version__)")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, text=True,
                          capture_output=True, env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout.strip() == "0.1.0"
