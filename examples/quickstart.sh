#!/usr/bin/env bash
# The whole path on a fresh Debian 12 machine: installs what is missing, builds, imports SmolLM2-135M as
# the base, fine-tunes it with a real training loop whose checkpoints arrive over Thrift, merges and
# publishes them, and asks the endpoint for the held-out loss of base, full checkpoint and 1-bit variants.
#   examples/quickstart.sh [--steps N] [--data DIR] [--keep]
# --keep leaves the daemon running at the end, to look around with `stockpot` and curl.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
steps=48
keep=0
data=
while [ $# -gt 0 ]; do
  case $1 in
    --steps) steps=$2; shift 2 ;;
    --data) data=$2; shift 2 ;;
    --keep) keep=1; shift ;;
    *) echo "usage: examples/quickstart.sh [--steps N] [--data DIR] [--keep]" >&2; exit 2 ;;
  esac
done
started=$SECONDS
say() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - started)); }

say "install what is missing"
cmake/setup.sh
python=$(cmake/setup.sh --print-python)
export STOCKPOT_PYTHON=$python HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

say "build"
# A second clone of the same sources compiles nothing again.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
cmake --preset release -DSTOCKPOT_TESTS=OFF -B build/quickstart >build-quickstart.log 2>&1 ||
  { cat build-quickstart.log; exit 1; }
rm -f build-quickstart.log
cmake --build build/quickstart --target stockpot stockpotd
"$python" -m pip install --quiet --no-deps --no-build-isolation -e trainer_hooks/python
export PATH=$root/build/quickstart/bin:$PATH
built=$SECONDS

say "base model: SmolLM2-135M-Instruct as a Hugging Face folder"
base=$(examples/base_model/fetch.sh)

[ -n "$data" ] || data=$(mktemp -d "${TMPDIR:-/tmp}/stockpot-quickstart.XXXXXX")
mkdir -p "$data"
say "daemon, data in $data"
stockpotd --data "$data" --base smollm2 --http 127.0.0.1:0 --thrift 127.0.0.1:0 \
  >"$data/daemon.log" 2>&1 &
daemon=$!
stop() {
  status=$?
  if [ "$keep" = 1 ] && [ "$status" = 0 ]; then
    echo "The daemon runs on (pid $daemon): STOCKPOT_SERVER=$STOCKPOT_SERVER stockpot status"
    return
  fi
  kill "$daemon" 2>/dev/null || true
  wait "$daemon" 2>/dev/null || true
  [ "$status" = 0 ] || { echo "--- last lines of the daemon's log"; tail -n 30 "$data/daemon.log"; }
}
trap stop EXIT
for _ in $(seq 100); do
  [ -s "$data/addresses.json" ] && break
  kill -0 "$daemon" 2>/dev/null || { echo "the daemon did not start" >&2; exit 1; }
  sleep 0.2
done
address() { "$python" -c "import json,sys; print(json.load(open('$data/addresses.json'))['$1'])"; }
STOCKPOT_SERVER=$(address thrift)
export STOCKPOT_SERVER
endpoint=http://$(address http)

say "import the base"
stockpot import-base smollm2 "$base"

say "fine-tune: $steps steps, a checkpoint every $((steps / 4)), a merge at half and at the end"
"$python" examples/finetune_python/finetune.py --base-folder "$base" --base smollm2 --run quickstart \
  --server "$STOCKPOT_SERVER" --steps "$steps" --push-every $((steps / 4)) \
  --merge-every $((steps / 2)) --heldout-out "$data/heldout.jsonl"

say "publish the last full checkpoint as it is, to compare"
stockpot publish "quickstart@$steps" --codec dense

say "wait for the last merge and its variant"
while stockpot jobs --json | grep -qE '"state": *"(queued|running)"'; do sleep 1; done

say "lineage, with the bytes of each variant against the full checkpoint"
stockpot log quickstart
stockpot routes

say "held-out loss through the endpoint"
"$python" examples/evaluate/heldout_loss.py --endpoint "$endpoint" --text "$data/heldout.jsonl" \
  --base smollm2 --require-better quickstart@latest \
  smollm2 "quickstart@$steps.full" $(for i in 1 2 3 4; do echo "quickstart@$((steps / 4 * i))"; done) \
  "quickstart@$steps.merge" quickstart@latest

say "done: $((SECONDS - built)) s after the build"
