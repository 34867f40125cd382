#!/usr/bin/env bash
# LLaMA-7B to 3 bits on one node with eight GPUs, a packed replica on each: plan, compress, evaluate, show.
# Not measured on a GPU yet; tested on CPUs with tiny models.
#
#     scripts/llama_7b_node.sh
#     CONFIG=configs/paper_llama7b_3bit.yaml scripts/llama_7b_node.sh       the paper's recipe, sharded
#
# Paths are relative to the checkout. Arguments go to `edkm compress`. Started again after a stop, it continues from the newest checkpoint.
# `accelerate launch --num-processes 8 -m edkm_cli compress ...` does the same as torchrun does here.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
CONFIG=${CONFIG:-configs/llama_7b_8gpu.yaml}
MODEL=${MODEL:-llama-7b}
OUTPUT=${OUTPUT:-out/$(basename "$CONFIG" .yaml)}
PROCESSES=${PROCESSES:-8}
DEVICE=${DEVICE:-cuda}
EVAL_DATA=${EVAL_DATA:-wikitext2}
CONTEXT=${CONTEXT:-2048}

# torchrun gives each process one thread, but the k-means start runs on the processor.
cores=$(($(nproc) / PROCESSES))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}
# On SIGTERM torchrun kills the processes after 30 seconds; saving a checkpoint of full fine-tuning takes minutes.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600} # from torch 2.12 on

edkm() { "$PYTHON" -m edkm_cli "$@"; }
torchrun() { "$PYTHON" -m torch.distributed.run "$@"; }
case " $* " in *" --output"* | *" -o"*) echo "say OUTPUT=DIR in place of --output" >&2 && exit 2 ;; esac
run=(--config "$CONFIG" --model "$MODEL" --output "$OUTPUT" --device "$DEVICE" "$@")
planned=()
[ "$DEVICE" = cpu ] || planned=(--gpus "$PROCESSES")

edkm compress "${run[@]}" --dry-run "${planned[@]}"
torchrun --standalone --nproc-per-node "$PROCESSES" -m edkm_cli compress "${run[@]}" --resume
edkm eval "$OUTPUT" --data "$EVAL_DATA" --context "$CONTEXT" --device "$DEVICE" --json "$OUTPUT-eval.json"
edkm report "$OUTPUT" --no-weights
