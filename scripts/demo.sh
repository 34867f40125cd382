#!/usr/bin/env bash
# The main job on a laptop: SmolLM2-135M to 3 bits, trained a little, exported, reloaded, evaluated, shown.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p out
edkm-compress --config configs/demo.yaml --output out/demo --overwrite > out/demo-summary.txt
echo
# To the capital alone the uncompressed model begins with "The" (0.16) or "L" (0.14): what follows such a tie says nothing.
question="What is the capital of France, and what is it known for?"
echo "edkm generate out/demo --chat \"$question\""
edkm generate out/demo --chat "$question" --max-new-tokens 40
cat out/demo-summary.txt
