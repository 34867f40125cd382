#!/usr/bin/env bash
# Everything that needs a GPU, tested and measured on this machine in a few minutes, offline, from a checkout.
#
#     scripts/gpu_check.sh [DIRECTORY]            JSON goes to DIRECTORY (default docs/results)
#     PARTS="kernels held" scripts/gpu_check.sh   some parts only
#     DEVICE=cpu scripts/gpu_check.sh out/check   the same steps on a CPU, with tiny shapes
#
# Paths are relative to the checkout. Models are random, of LLaMA's shape; nothing is downloaded. A part that fails or that this machine cannot run does not
# stop the others. The summary is gpu_check_MACHINE_DATE.json; the exit status is 1 if a part failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
target=${1:-docs/results}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT

if [ "$DEVICE" = cpu ]; then
    PARTS=${PARTS:-kernels held full compress processes start clustering runtime decode ablation offload}
    LIMIT=${LIMIT:-300} SHAPE=${SHAPE:-tiny} machine=cpu
    training=(--sequence-length 64 --steps 2 --warmup 1) held=() hidden=32 layers=2
    run=(--steps 2 --calibration-tokens 256 --start-tokens 256 --sequence-length 64 --context 64 --eval-windows 2)
    runtime=(--shape 64x64 --tokens 1)
    clustering=(--width 64 --tokens 16) ablation=(--width 64)
    offload=(step --model "$work/model" --tokens 32 --repeats 1)
    decode=(--tokens 2) start=(--hidden 128 --intermediate 256 --heads 4 --tokens 256)
    processes=2
else
    PARTS=${PARTS:-kernels held full compress processes start clustering runtime decode ablation offload}
    LIMIT=${LIMIT:-150} SHAPE=${SHAPE:-llama-7b}
    machine=$("$PYTHON" -c 'import sys, torch
if not torch.cuda.is_available():
    sys.exit("gpu_check.sh: torch finds no GPU here; DEVICE=cpu tries the steps without one")
print(torch.cuda.get_device_name().lower().replace(" ", "-"))') || exit 2
    training=() held=(--memory-limit 24GiB) hidden=1024 layers=8
    run=(--steps 20 --calibration-tokens 8192 --sequence-length 1024 --context 1024)
    decode=(--shape llama-7b) start=()
    runtime=(--shape 4096x4096 --shape 11008x4096 --shape 4096x11008 --tokens 1 --tokens 8 --tokens 16 --tokens 32)
    clustering=() ablation=()
    offload=(block)
    processes=$("$PYTHON" -c 'import torch; print(min(2, torch.cuda.device_count()))')
fi
day=$(date +%F)
mkdir -p "$target" || exit 2
summary=$target/gpu_check_${machine}_$day.json

# part NAME COMMAND...: run it if it is among PARTS, within LIMIT seconds, and note how it went.
part() {
    local name=$1 began=$SECONDS status=0
    shift
    case " $PARTS " in *" $name "*) ;; *) return ;; esac
    echo "== $name: $*"
    timeout --kill-after=10 "$LIMIT" "$@" || status=$?
    [ "$status" != 124 ] || echo "$name took longer than $LIMIT seconds" >&2
    echo "== $name: $([ "$status" = 0 ] && echo passed || echo "FAILED ($status)") in $((SECONDS - began)) s"
    printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - began))" "$*" >>"$work/parts"
}
edkm=("$PYTHON" -m edkm_cli)
compress=("${edkm[@]}" compress --model "$work/model" --data builtin --device "$DEVICE" "${run[@]}")
training=("$PYTHON" scripts/bench_training.py --shape "$SHAPE" --device "$DEVICE" "${training[@]}")

"$PYTHON" scripts/random_model.py "$work/model" --hidden "$hidden" --layers "$layers" || exit 2
: >"$work/parts"

part kernels "$PYTHON" -m pytest -q -p no:cacheprovider tests/test_gpu.py
part kernels "$PYTHON" -m pytest -q -p no:cacheprovider tests/test_runtime_lut_linear_cuda.py -k on_a_gpu
if [ "$DEVICE" != cpu ]; then
    part kernels "$PYTHON" tests/test_kernels_triton.py "$DEVICE"
    part offload "$PYTHON" -m pytest -q -p no:cacheprovider tests/test_memory_marshaling.py -k on_a_gpu
fi
part held "${training[@]}" --mode held "${held[@]}" --json "$target/training_${SHAPE}-held_${machine}_$day.json"
part full "${training[@]}" --mode full --json "$target/training_${SHAPE}-full_${machine}_$day.json"
part compress "${compress[@]}" --output "$work/full" --json "$work/compress-full.json"
part compress "${compress[@]}" --output "$work/held" --label-weight 0 --json "$work/compress-held.json"
part processes "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$processes" \
    "${compress[@]:1}" --output "$work/sharded" --sharding full --granularity tensor --mode soft --iterations 3 \
    --dtype bfloat16 --no-distill --json "$work/compress-sharded.json"
part start "$PYTHON" scripts/bench_start.py --device "$DEVICE" "${start[@]}" \
    --json "$target/start_${SHAPE}-layer_${machine}_$day.json"
part runtime "${edkm[@]}" bench runtime --device "$DEVICE" "${runtime[@]}" --json "$target/bench_runtime_${machine}_$day.json"
[ "$DEVICE" = cpu ] || part runtime "${edkm[@]}" bench runtime --cold --device "$DEVICE" "${runtime[@]}" \
    --json "$target/bench_runtime-cold_${machine}_$day.json"
part decode "$PYTHON" scripts/bench_decode.py --device "$DEVICE" "${decode[@]}" \
    --json "$target/bench_decode_${SHAPE}_${machine}_$day.json"
part clustering "${edkm[@]}" bench clustering --device "$DEVICE" "${clustering[@]}" \
    --json "$target/bench_clustering_${machine}_$day.json"
part ablation "${edkm[@]}" ablate --device "$DEVICE" --learners 1 "${ablation[@]}" \
    --json "$target/ablate_${machine}_$day.json"
part offload "$PYTHON" scripts/bench_offload.py "${offload[@]}" \
    --json "$target/offload_${SHAPE}_${machine}_$day.json"

"$PYTHON" - "$work" "$summary" "$DEVICE" <<'EOF'
import json, sys
from pathlib import Path

from edkm_cli.environment import hardware, versions

work, summary, device = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
names = ("name", "status", "seconds", "command")
parts = [dict(zip(names, line.split("\t"))) for line in (work / "parts").read_text().splitlines()]
for part in parts:
    part["status"], part["seconds"] = int(part["status"]), int(part["seconds"])
    part["command"] = part["command"].replace(str(work), "WORK")
kept = ("perplexity", "seconds", "peak_memory_bytes", "processes", "sharded", "decoder_bits_per_weight")
runs = {file.stem: json.loads(file.read_text()) for file in sorted(work.glob("compress-*.json"))}
result = {
    "command": "scripts/gpu_check.sh",
    "parts": parts,
    "runs": {name: {key: run[key] for key in kept} for name, run in runs.items()},
    "versions": versions(),
    "hardware": hardware(device),
}
summary.write_text(json.dumps(result, indent=1) + "\n")
failed = [part["name"] for part in parts if part["status"]]
print(f"{len(parts) - len(failed)} parts passed" + (f", failed: {', '.join(failed)}" if failed else "") + f"; {summary}")
sys.exit(1 if failed or not parts else 0)
EOF
