#!/usr/bin/env bash
# Unit tests under AddressSanitizer with UBSan, or under ThreadSanitizer: builds and runs those that
# tests.txt names. A report fails; of ThreadSanitizer's those that reports.py lets through.
#   tests/sanitizers/run.sh asan|tsan             all of them
#   tests/sanitizers/run.sh asan|tsan NAME...     these, of the list or not
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
preset=${1:?asan or tsan}
shift
[ "$preset" = asan ] || [ "$preset" = tsan ] || { echo "run.sh: '$preset' is neither asan nor tsan" >&2; exit 2; }
tests=("$@")
if [ ${#tests[@]} -eq 0 ]; then
  mapfile -t tests < <(grep -v '^#' tests/sanitizers/tests.txt | grep -w "$preset" | cut -d ' ' -f 1)
fi
STOCKPOT_PYTHON=$(cmake/setup.sh --print-python)
export STOCKPOT_PYTHON CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
cmake --preset "$preset" -DSTOCKPOT_CUDA=OFF >/dev/null
cmake --build --preset "$preset" -j "${JOBS:-$(nproc)}" --target "${tests[@]}"
names=$(IFS='|'; echo "${tests[*]}")
if [ "$preset" = asan ]; then
  exec ctest --preset asan -R "^($names)\$"
fi
logs=$root/build/tsan/reports
rm -rf "$logs"
mkdir -p "$logs"
TSAN_OPTIONS="log_path=$logs/report exitcode=0 history_size=7 second_deadlock_stack=1" \
  ctest --preset tsan -R "^($names)\$"
"$STOCKPOT_PYTHON" tests/sanitizers/reports.py "$logs"
