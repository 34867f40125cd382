#!/usr/bin/env bash
# Install the project with the tested versions. Arguments go to pip, for example: scripts/install.sh -e ".[dev]"
# On a machine without an NVIDIA GPU the pinned torch is fetched first, without its CUDA packages where pip would bring
# gigabytes of them: set EDKM_TORCH_INDEX to a wheel index with CPU builds to choose another source.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
torch=$(grep '^torch==' constraints.txt)
options=(--disable-pip-version-check --quiet --constraint constraints.txt)
"$PYTHON" -m pip install --disable-pip-version-check --quiet --upgrade "setuptools>=77" wheel
"$PYTHON" -m pip install "${options[@]}" ${EDKM_TORCH_INDEX:+--index-url "$EDKM_TORCH_INDEX"} "$torch"
"$PYTHON" -m pip install "${options[@]}" --no-build-isolation "$@"
