"""Which of ThreadSanitizer's reports tests/sanitizers/run.sh fails for, and what it tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "sanitizers"
SCRIPT = FOLDER / "reports.py"
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
    ("data race", ("memcpy", "<null> (libtorch_cpu.so"), 0),
    ("data race", ("<null> (libgomp.so.1", "memcmp"), 1),
    ("lock-order-inversion (potential deadlock)", ("<null> (librocksdb.so.7.8", "lock"), 1),
])
def test_a_race_counts_unless_a_library_of_others_is_in_it(
        tmp_path: Path, title: str, inner: tuple[str, str], code: int) -> None:
    (tmp_path / "report.1").write_text(report(title, inner))
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], text=True, capture_output=True)
    assert done.returncode == code, done.stdout
    assert ("spool.cc" in done.stdout) == bool(code)


# Reads what its caller wrote, and is read by it; with RACE one thread writes after the other ended.
REGION = """
#include <omp.h>
#include <unistd.h>
int given, taken[2], race;
int main() {
  given = 1;
#pragma omp parallel num_threads(2)
  {
    const int thread = omp_get_thread_num();
    taken[thread] = given;
    if (RACE && thread == LAST) usleep(100000);
    if (RACE) race = thread;
  }
  given = taken[0] + taken[1];
}
"""


@pytest.mark.parametrize("race", [0, 1])
@pytest.mark.parametrize("last", [0, 1])
def test_a_parallel_region_is_ordered_to_its_caller_alone(
        tmp_path: Path, race: int, last: int) -> None:
    source, program, joins = tmp_path / "region.cc", tmp_path / "region", tmp_path / "joins.so"
    source.write_text(REGION)
    subprocess.run(["g++", "-std=c++20", "-fPIC", "-shared", "-o", joins,
                    FOLDER / "openmp_joins.cc"], check=True)
    subprocess.run(["g++", "-fopenmp", "-fsanitize=thread", "-g1", f"-DRACE={race}",
                    f"-DLAST={last}", "-o", program, source], check=True)
    done = subprocess.run([program], env=os.environ | {"LD_PRELOAD": str(joins)}, text=True,
                          capture_output=True)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel places memory where ThreadSanitizer wants its own")
    assert done.stderr.count("WARNING: ThreadSanitizer: data race") == race, done.stderr
    assert (done.returncode != 0) == bool(race)
