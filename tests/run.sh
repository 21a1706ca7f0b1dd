#!/usr/bin/env bash
# All tests, on a fresh Debian 12 machine too: installs what is missing, builds, makes the real base
# model, runs CTest, pytest and the fuzzers (60 s each). Idempotent; later runs build only what
# changed.
#   tests/run.sh            everything
#   tests/run.sh -R store   arguments go to ctest; pytest and fuzzers are left out then
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
started=$SECONDS
say() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - started)); }

say "setup"
cmake/setup.sh
python=$(cmake/setup.sh --print-python)
export STOCKPOT_PYTHON=$python

say "build"
# A second clone of the same sources compiles nothing again.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
cmake --preset release >build.log 2>&1 || { cat build.log; exit 1; }
rm -f build.log
cmake --build --preset release
say "base model"
STOCKPOT_SMOLLM2=$(examples/base_model/fetch.sh)
export STOCKPOT_SMOLLM2
export STOCKPOT_BIN_DIR=$root/build/release/bin
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false STOCKPOT_HOSTILE_SECONDS=60

say "ctest"
failed=0
# One at a time where tests measure or use both cores; the label says so. The rest two at a time.
ctest --preset release -j 2 "$@" || failed=1
if [ $# -eq 0 ]; then
  say "pytest"
  "$python" -m pip install --quiet --no-deps --no-build-isolation -e trainer_hooks/python
  "$python" -m ruff check trainer_hooks/python examples tests || failed=1
  "$python" -m pytest -q -x --timeout 900 tests/python tests/integration tests/crash || failed=1
  say "fuzzers"
  tests/fuzz/run.sh 60 || failed=1
fi
say "done"
exit $failed
