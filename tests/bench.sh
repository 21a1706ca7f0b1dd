#!/usr/bin/env bash
# Measures the ratios of BENCHMARKS.md side by side, prints them as a table with goal and limit next
# to each, and writes build/bench.json: a list of {name, value, goal, limit, better, sizes, machine}.
# Google Benchmark's JSON of the single times goes to build/bench-raw/.
#   tests/bench.sh [--only PART_OF_A_NAME] [--quick]
set -euo pipefail
usage="usage: tests/bench.sh [--only PART_OF_A_NAME] [--quick]"
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
only=
for ((i = 1; i <= $#; ++i)); do
  case ${!i} in
    --only)
      j=$((i + 1))
      only=${!j:-}
      if [[ -z $only || $only = --* ]]; then
        echo "bench: --only lacks its value, a part of a ratio's name; $usage" >&2
        exit 2
      fi
      ;;
    -h | --help)
      echo "$usage"
      exit 0
      ;;
  esac
done
cmake/setup.sh >&2
STOCKPOT_PYTHON=$(cmake/setup.sh --print-python)
export STOCKPOT_PYTHON HF_HUB_OFFLINE=1
# A second clone of the same sources compiles nothing again.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
cmake --preset bench >/dev/null

# serves SOURCE: whether a ratio that was asked for is named in it. What is not asked for is neither
# built nor started.
serves() {
  grep -qE "\"[a-z0-9_]*$only[a-z0-9_]*\"" "$1"
}

programs=()
for source in tests/bench/*_bench.cc; do
  if serves "$source"; then programs+=("$(basename "$source" .cc)"); fi
done
path=
if serves tests/bench/path_bench.py; then path=yes; fi
targets=("${programs[@]}")
if [ -n "$path" ]; then targets+=(stockpotd stockpot); fi
if [ ${#targets[@]} = 0 ]; then
  echo "bench: no ratio's name contains '$only'" >&2
  exit 2
fi
cmake --build --preset bench --target "${targets[@]}" >&2

work=build/bench-data
rm -rf "$work" build/bench-raw
mkdir -p "$work" build/bench-raw
trap 'rm -rf "$work"' EXIT
failed=()
# measure NAME COMMAND...: keeps its rows; the others are still measured when it fails.
measure() {
  local name=$1
  shift
  "$@" | tee -a "$work/lines" >&2 || failed+=("$name")
}
touch "$work/lines"
for program in "${programs[@]}"; do
  measure "$program" "build/release/bin/$program" --raw build/bench-raw --dir "$work" "$@"
done
if [ -n "$path" ]; then
  export STOCKPOT_BIN_DIR=$root/build/release/bin
  export PYTHONPATH=$root:$root/trainer_hooks/python/src
  measure path_bench "$STOCKPOT_PYTHON" tests/bench/path_bench.py \
    --base "$(examples/base_model/fetch.sh)" "$@"
fi
"$STOCKPOT_PYTHON" tests/bench/table.py "$work/lines" build/bench.json
if [ ${#failed[@]} -gt 0 ]; then
  echo "bench: failed: ${failed[*]}" >&2
  exit 1
fi
