"""The arguments of tests/bench.sh that end before anything is built."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "bench.sh"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["/bin/bash", SCRIPT, *arguments], capture_output=True, text=True,
                          timeout=60, check=False)


@pytest.mark.parametrize("arguments", [["--only"], ["--only", ""], ["--only", "--quick"]])
def test_only_without_a_value_is_refused(arguments):
    done = bench(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bench: --only lacks its value")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--quick", "--help"]])
def test_help_is_the_usage(arguments):
    done = bench(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: tests/bench.sh [--only ")
