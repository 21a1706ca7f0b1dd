#!/usr/bin/env bash
# Measures the ratios of BENCHMARKS.md side by side and writes build/bench.json: a list of
# {name, value, goal, limit, better, sizes, machine}. Prints a table as it goes.
#   tests/bench.sh [--only PATTERN] [--quick]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
cmake/setup.sh >&2
STOCKPOT_PYTHON=$(cmake/setup.sh --print-python)
export STOCKPOT_PYTHON HF_HUB_OFFLINE=1
# A second clone of the same sources compiles nothing again.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
cmake --preset release >/dev/null
cmake --build --preset release --target kernels_bench store_bench stockpotd stockpot >&2
export STOCKPOT_BIN_DIR=$root/build/release/bin
export PYTHONPATH=$root:$root/trainer_hooks/python/src
base=$(examples/base_model/fetch.sh)

lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
build/release/bin/kernels_bench "$@" | tee -a "$lines" >&2
mkdir -p build/bench-data
build/release/bin/store_bench --dir build/bench-data "$@" | tee -a "$lines" >&2
rm -rf build/bench-data
"$STOCKPOT_PYTHON" tests/bench/path_bench.py --base "$base" "$@" | tee -a "$lines" >&2
"$STOCKPOT_PYTHON" - "$lines" <<'PY'
import json
import sys

rows = [json.loads(line) for line in open(sys.argv[1]) if line.startswith("{")]
json.dump(rows, open("build/bench.json", "w"), indent=1)
for row in rows:
    good = row["value"] <= row["goal"] if row["better"] == "lower" else row["value"] >= row["goal"]
    print(f"{row['name']:24} {row['value']:10.3f}  goal {row['goal']:<8}"
          f"{'' if good else '  SHORT'}  {row['sizes']}")
PY
