#!/usr/bin/env bash
# Whether the fuzzers find what they are for: plants one bug a target into a copy of HEAD, and fails
# where a target does not find its own within the time.
#   tests/fuzz/planted.sh [SECONDS]     60 s each
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
seconds=${1:-60}
copy=$(mktemp -d "${TMPDIR:-/tmp}/stockpot_planted_XXXXXX")
trap 'git -C "$root" worktree remove --force "$copy" 2>/dev/null || rm -rf "$copy"' EXIT
git -C "$root" worktree add --quiet --detach "$copy" HEAD

# planted NAME FILE OLD NEW: OLD stands in FILE once.
failed=0
planted() {
  local name=$1 file=$copy/$2 old=$3 new=$4 log=$copy/planted.log text
  text=$(cat "$file" && echo .)
  local rest=${text#*"$old"}
  if [ "$rest" = "$text" ] || [ "${rest#*"$old"}" != "$rest" ]; then
    echo "planted: $2 does not have '$old' once: write this bug anew" >&2
    exit 1
  fi
  text=${text/"$old"/"$new"}
  printf %s "${text%.}" >"$file"
  local begin=$SECONDS
  if "$copy/tests/fuzz/run.sh" "$seconds" "$name" >"$log" 2>&1; then
    echo "planted: $name did NOT find: $new"
    failed=1
  elif grep -q "^fuzz: $name: FINDING" "$log"; then
    echo "planted: $name found it after $(grep -oE '^stat::number_of_executed_units: *[0-9]+' "$log" |
      grep -oE '[0-9]+$') inputs, $((SECONDS - begin)) s with the build: $new"
  else
    tail -30 "$log"
    exit 1
  fi
  git -C "$copy" checkout --quiet -- .
  rm -rf "$copy/build/fuzz/corpus"
}

planted manifest store/manifest.cc 'i > 0 && !(tensors[i - 1].name < name)' 'i > tensors.size()'
planted pack store/pack_reader.cc 'status.ok() && Sha256(out) != digest' 'status.ok() && out.empty()'
planted safetensors store/safetensors.cc 'declared != header.ends[i] - entry.begin)' 'declared < 0)'
planted rpc_wire thrift/conversions.cc 'index >= kKinds.size())' 'index == kKinds.size())'
planted rpc_calls store/shard_set.cc 'claims[i - 1].rank != claims[i].rank || in_pieces' 'true'
exit $failed
