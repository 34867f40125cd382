#!/usr/bin/env bash
# Install the project with the tested versions. Arguments go to pip, for example: scripts/install.sh -e ".[dev]"
# On a machine without an NVIDIA GPU the pinned torch can be fetched without its CUDA packages, of which pip would bring
# gigabytes: set EDKM_TORCH_INDEX to a wheel index with CPU builds, which it is then taken from.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONWARNINGS="ignore:Editable installation" # setuptools' advice on the names of directories
options=(--disable-pip-version-check --quiet)
# A new environment has the pip that came with Python, which may take twice as long to find versions that fit together.
"$PYTHON" -m pip install "${options[@]}" --upgrade pip "setuptools>=77" wheel
options+=(--constraint constraints.txt)
if [[ -n ${EDKM_TORCH_INDEX:-} ]]; then
  "$PYTHON" -m pip install "${options[@]}" --index-url "$EDKM_TORCH_INDEX" torch
fi
"$PYTHON" -m pip install "${options[@]}" --no-build-isolation "$@"
