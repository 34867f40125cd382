#!/usr/bin/env bash
# The main job on a laptop: SmolLM2-135M to 3 bits, trained a little, exported, reloaded, evaluated, shown.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p out
edkm-compress --config configs/demo.yaml --output out/demo --overwrite > out/demo-summary.txt
echo
echo 'edkm generate out/demo --chat "What is the capital of France?"'
edkm generate out/demo --chat "What is the capital of France?" --max-new-tokens 40
cat out/demo-summary.txt
