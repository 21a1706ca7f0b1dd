#!/usr/bin/env bash
# Builds fuzzers with clang (preset `fuzz`: libFuzzer, AddressSanitizer, UBSan) and runs each for a
# while, two at a time. Fails on any finding, and where clang or its runtime is missing.
#   tests/fuzz/run.sh [SECONDS [NAME...]]     60 s; NAME as in tests/fuzz/corpus
# The random numbers begin the same way every time, so that what a change meets is not chance;
# STOCKPOT_FUZZ_SEED=N begins elsewhere (0: anywhere).
# Without names: all; `records` and `config`, which no call reaches directly, share the time of one.
# What they learn stays in build/fuzz/corpus; what they find is in build/fuzz/findings, and is read
# again with `build/fuzz/bin/fuzz_NAME FILE`.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
seconds=${1:-60}
[ $# -eq 0 ] || shift

if ! echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
  clang++ -fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null 2>/dev/null; then
  echo "fuzz: clang++ with its sanitizers is missing: cmake/setup.sh installs it" \
    "(Debian packages clang and libclang-rt-14-dev)" >&2
  exit 1
fi
# Names joined by a comma share the time of one.
lots=("$@")
[ $# -gt 0 ] || lots=(rpc_calls rpc_wire manifest pack safetensors records,config)
IFS=, read -r -a names <<<"$(IFS=,; echo "${lots[*]}")"

export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
mkdir -p build
cmake --preset fuzz >build/fuzz.log 2>&1 || { cat build/fuzz.log; exit 1; }
cmake --build build/fuzz -j 2 --target "${names[@]/#/fuzz_}" >build/fuzz.log 2>&1 ||
  { tail -50 build/fuzz.log; exit 1; }
echo "fuzz: built after $SECONDS s"

# The stores of the fuzzers stand in memory where there is some: nothing there is to survive.
memory=/dev/shm
[ -w $memory ] || memory=${TMPDIR:-/tmp}
TMPDIR=$(mktemp -d "$memory/stockpot_fuzz_XXXXXX")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

fuzz_one() {
  local name=$1 seconds=$2 work=build/fuzz
  mkdir -p $work/corpus/"$name" $work/findings
  local options=(-max_total_time="$seconds" -timeout=30 -rss_limit_mb=1024 -malloc_limit_mb=256
    -max_len=16384 -seed="${STOCKPOT_FUZZ_SEED:-1}" -artifact_prefix=$work/findings/"$name"- -print_final_stats=1)
  [ ! -e tests/fuzz/"$name".dict ] || options+=(-dict=tests/fuzz/"$name".dict)
  if $work/bin/fuzz_"$name" "${options[@]}" $work/corpus/"$name" tests/fuzz/corpus/"$name" \
    >$work/"$name".log 2>&1; then
    local runs cov
    runs=$(awk '/number_of_executed_units/ {print $2}' $work/"$name".log)
    cov=$(grep -o 'cov: [0-9]*' $work/"$name".log | tail -1)
    echo "fuzz: $name: no finding in $seconds s, $runs inputs, $cov"
  else
    echo "fuzz: $name: FINDING"
    tail -60 $work/"$name".log
    return 1
  fi
}
fuzz_lot() {
  local names found=0
  IFS=, read -r -a names <<<"$1"
  for name in "${names[@]}"; do fuzz_one "$name" $((($2 + ${#names[@]} - 1) / ${#names[@]})) || found=1; done
  return $found
}
export -f fuzz_one fuzz_lot
printf '%s\n' "${lots[@]}" | xargs -P 2 -I{} bash -c 'fuzz_lot "$@"' _ {} "$seconds"
