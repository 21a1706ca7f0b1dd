#!/usr/bin/env bash
# Writes src/stockpot/rpc from thrift/stockpot.thrift. The result is checked in, so that installing
# the package needs no Thrift compiler; tests/python proves that it is up to date.
#   generate_rpc.sh [OUT_DIR]   default: src/stockpot/rpc beside this script
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/src/stockpot/rpc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Not py:enum: what 0.17 makes of it reads names where everybody writes numbers.
thrift -strict -gen py -out "$work" "$here/../../thrift/stockpot.thrift"
mkdir -p "$out"
cp "$work"/stockpot/rpc/*.py "$out"/
