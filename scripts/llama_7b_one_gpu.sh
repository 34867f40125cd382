#!/usr/bin/env bash
# LLaMA-7B to 3 bits on one GPU of 24 GB, packed while it trains: plan, compress, evaluate, show.
# Not measured on a GPU yet; tested on CPUs with tiny models.
#
#     scripts/llama_7b_one_gpu.sh
#     MODEL=meta-llama/Llama-2-7b-hf OUTPUT=out/llama-2 scripts/llama_7b_one_gpu.sh --steps 1000
#
# Paths are relative to the checkout. Arguments go to `edkm compress`. Started again after a stop, it continues from the newest checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-llama-7b}
OUTPUT=${OUTPUT:-out/llama-7b-3bit}
DEVICE=${DEVICE:-cuda}
EVAL_DATA=${EVAL_DATA:-wikitext2}
CONTEXT=${CONTEXT:-2048}

edkm() { "$PYTHON" -m edkm_cli "$@"; }
case " $* " in *" --output"* | *" -o"*) echo "say OUTPUT=DIR in place of --output" >&2 && exit 2 ;; esac
run=(--config configs/llama_7b_24gb.yaml --model "$MODEL" --output "$OUTPUT" --device "$DEVICE" "$@")

edkm compress "${run[@]}" --dry-run
edkm compress "${run[@]}" --resume
edkm eval "$OUTPUT" --data "$EVAL_DATA" --context "$CONTEXT" --device "$DEVICE" --json "$OUTPUT-eval.json"
edkm report "$OUTPUT" --no-weights
