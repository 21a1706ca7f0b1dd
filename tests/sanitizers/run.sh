#!/usr/bin/env bash
# Tests under AddressSanitizer with UBSan, or under ThreadSanitizer: builds and runs those that
# tests.txt names. A report fails; of ThreadSanitizer's those that reports.py lets through.
#   tests/sanitizers/run.sh asan|tsan             all of them
#   tests/sanitizers/run.sh asan|tsan NAME...     these, of the list or not
# NAME: an entry of CTest, or a file of pytest's that loads the operators for Python.
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
programs=() scripts=()
for test in "${tests[@]}"; do
  if [[ $test = *.py ]]; then scripts+=("$test"); else programs+=("$test"); fi
done
STOCKPOT_PYTHON=$(cmake/setup.sh --print-python)
export STOCKPOT_PYTHON CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
cmake --preset "$preset" -DSTOCKPOT_CUDA=OFF >/dev/null
cmake --build --preset "$preset" -j "${JOBS:-$(nproc)}" \
  --target "${programs[@]}" ${scripts[0]:+stockpot_torch_ops}

preload=
logs=$root/build/tsan/reports
if [ "$preset" = tsan ]; then
  preload=$root/build/tsan/openmp_joins.so
  g++ -std=c++20 -O1 -g1 -fPIC -shared -o "$preload" tests/sanitizers/openmp_joins.cc
  rm -rf "$logs"
  mkdir -p "$logs"
  export TSAN_OPTIONS="log_path=$logs/report exitcode=0 history_size=7 second_deadlock_stack=1"
fi
failed=0
if [ ${#programs[@]} -gt 0 ]; then
  names=$(IFS='|'; echo "${programs[*]}")
  LD_PRELOAD=$preload ctest --preset "$preset" --no-tests=error -R "^($names)\$" || failed=1
fi
if [ ${#scripts[@]} -gt 0 ]; then
  # The interpreter is not instrumented: the runtime comes first, and the library whose throw it
  # wraps with it. What Python keeps to its end is no leak. pytest leaves the reports their stderr.
  LD_PRELOAD="$(g++ -print-file-name="lib$preset.so") $(g++ -print-file-name=libstdc++.so) $preload" \
    ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1:strict_string_checks=1 \
    UBSAN_OPTIONS=print_stacktrace=1 STOCKPOT_LIB_DIR=$root/build/$preset/lib \
    "$STOCKPOT_PYTHON" -m pytest -q --capture=sys "${scripts[@]}" || failed=1
fi
if [ "$preset" = tsan ]; then
  "$STOCKPOT_PYTHON" tests/sanitizers/reports.py "$logs" || failed=1
fi
exit $failed
