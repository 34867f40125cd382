#!/usr/bin/env bash
# The C kernels on processors that are not here, emulated: aarch64 with NEON, x86-64 with AVX2 and without.
# Needs qemu-user and gcc-aarch64-linux-gnu (Debian: apt-get install qemu-user gcc-aarch64-linux-gnu). First the machine's own.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
sources="tests/processors.c edkm_cli/runtime/lut_linear.c edkm_cli/runtime/lut_narrow.c edkm_cli/runtime/lut_pairs.c edkm_cli/runtime/lut_tiles.c
edkm_cli/kernels/palette.c edkm_cli/kernels/columns.c edkm_cli/kernels/kmeans.c"
flags="-O2 -static -Wno-psabi -fno-math-errno -fno-trapping-math -Iedkm_cli/kernels"

check() { # name, compiler with its flags, emulator with its flags
    $2 $flags $sources -o "$scratch/$1" -lm
    echo -n "$1: "
    $3 "$scratch/$1" 2>/dev/null # qemu warns of features that it has not
}
check aarch64-neon "aarch64-linux-gnu-gcc" "qemu-aarch64 -cpu cortex-a72"
if [ "$(uname -m)" = x86_64 ]; then
    check native "gcc -march=native" env
    haswell="qemu-x86_64 -cpu Haswell" # whose gathers give zeros in QEMU 7.2, so not where the processor can do it
    if grep -qw avx2 /proc/cpuinfo; then haswell=env; fi
    check x86-64-avx2 "gcc -march=haswell" "$haswell"
    check x86-64 "gcc -march=x86-64" "qemu-x86_64 -cpu qemu64"
fi
