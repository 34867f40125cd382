#!/usr/bin/env bash
# What needs a GPU, offline, from a checkout: kernels and offloading tested on it, then measured. JSON goes to the
# directory given (default docs/results). Uses randomly initialised layers only, nothing is downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
target=${1:-docs/results}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$PYTHON" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "gpu_check.sh: torch finds no GPU here")'
machine=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))')
day=$(date +%F)
mkdir -p "$target"
"$PYTHON" -m pytest -q tests -m "not real_model" -k "cuda or triton"
"$PYTHON" -m edkm_cli bench clustering --device cuda --json "$target/bench_clustering_${machine}_$day.json"
"$PYTHON" -m edkm_cli ablate --device cuda --learners 1 --json "$target/ablate_${machine}_$day.json"
"$PYTHON" scripts/bench_offload.py block --json "$target/offload_llama-7b-block_${machine}_$day.json"
