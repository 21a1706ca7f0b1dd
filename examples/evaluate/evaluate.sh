#!/usr/bin/env bash
# Scores a served model with lm-evaluation-harness, unmodified, on the tasks of tasks/.
#   evaluate.sh ENDPOINT MODEL TOKENIZER_DIR [lm_eval arguments ...]
#   evaluate.sh http://127.0.0.1:8080 pydocs@latest "$(examples/base_model/fetch.sh)"
# TOKENIZER_DIR: a Hugging Face folder with the model's tokenizer (the base's). Uses python3 of PATH,
# or STOCKPOT_PYTHON.
set -euo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
endpoint=${1%/} model=$2 tokenizer=$3
shift 3
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "${STOCKPOT_PYTHON:-python3}" -m lm_eval --model local-completions \
  --model_args "model=$model,base_url=$endpoint/v1/completions,tokenizer=$tokenizer,tokenizer_backend=huggingface" \
  --include_path "$here/tasks" --tasks stockpot --batch_size 4 "$@"
