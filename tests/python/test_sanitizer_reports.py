"""Which of ThreadSanitizer's reports tests/sanitizers/run.sh fails for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "sanitizers" / "reports.py"
ACCESS = """  {kind} of size 8 at 0x7b04 by thread T{thread}:
    #0 {inner} (libtsan.so.2+0x1)
    #1 stockpot::Spool::Add() ../../trainer_hooks/cpp/spool.cc:151 (hook_test+0x2)
"""


def report(title: str, inner: tuple[str, str]) -> str:
    line = "=" * 18
    accesses = [ACCESS.format(kind="Write", thread=1, inner=inner[0]),
                ACCESS.format(kind="Previous read", thread=2, inner=inner[1])]
    warning = f"WARNING: ThreadSanitizer: {title} (pid=1)\n"
    return f"{line}\n{warning}" + "\n".join(accesses) + f"\n  Location is heap\n{line}\n"


@pytest.mark.parametrize(("title", "inner", "code"), [
    ("data race", ("memcpy", "memcmp"), 1),
    ("data race", ("memcpy", "<null> (librocksdb.so.7.8"), 0),
    ("data race", ("<null> (libgomp-a34b.so.1", "memcmp"), 0),
    ("lock-order-inversion (potential deadlock)", ("<null> (librocksdb.so.7.8", "lock"), 1),
])
def test_a_race_counts_unless_a_library_of_others_is_in_it(
        tmp_path: Path, title: str, inner: tuple[str, str], code: int) -> None:
    (tmp_path / "report.1").write_text(report(title, inner))
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], text=True, capture_output=True)
    assert done.returncode == code, done.stdout
    assert ("spool.cc" in done.stdout) == bool(code)
