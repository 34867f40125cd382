#!/usr/bin/env bash
# LLaMA-7B to 3 bits on two nodes under SLURM, a packed replica on each of their GPUs.
# Not measured on a GPU yet; tested on CPUs with tiny models.
#
#     sbatch scripts/llama_7b_slurm.sh            from the checkout, on a file system that all nodes see
#
# Arguments go to `edkm compress`. Ten minutes before the time is up, or when the job is preempted, SLURM sends SIGTERM:
# the run saves its state, the job goes back into the queue, and started again goes on from there. A job that crashed
# goes on in the same way when it is submitted again.
#SBATCH --job-name=edkm-llama-7b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=edkm-llama-7b-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
PYTHON=${PYTHON:-python3}
CONFIG=${CONFIG:-configs/llama_7b_8gpu.yaml}
MODEL=${MODEL:-llama-7b}
OUTPUT=${OUTPUT:-out/$(basename "$CONFIG" .yaml)-slurm}
PROCESSES=${PROCESSES:-8} # on each node
BATCH_SIZE=${BATCH_SIZE:-1} # sequences a process: on two nodes a step has twice the tokens that one node has
DEVICE=${DEVICE:-cuda}
EVAL_DATA=${EVAL_DATA:-wikitext2}
CONTEXT=${CONTEXT:-2048}

cores=$((${SLURM_CPUS_PER_TASK:-8} / PROCESSES))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}
# On SIGTERM torchrun kills the processes after 30 seconds; saving a checkpoint of full fine-tuning takes minutes. Before
# torch 2.12 this has no effect, and what is lost are the steps since the last checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-540}

nodes=$SLURM_JOB_NUM_NODES
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
case " $* " in *" --output"* | *" -o"*) echo "say OUTPUT=DIR in place of --output" >&2 && exit 2 ;; esac
run=(--config "$CONFIG" --model "$MODEL" --output "$OUTPUT" --device "$DEVICE" --batch-size "$BATCH_SIZE" "$@")
planned=()
[ "$DEVICE" = cpu ] || planned=(--gpus "$((nodes * PROCESSES))")

"$PYTHON" -m edkm_cli compress "${run[@]}" --dry-run "${planned[@]}"

stopping=
step=
trap 'stopping=yes; kill -TERM "$step" 2>/dev/null' TERM
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-8}" --kill-on-bad-exit=0 "$PYTHON" -m torch.distributed.run \
    --nnodes "$nodes" --nproc-per-node "$PROCESSES" \
    --rdzv-backend c10d --rdzv-endpoint "$first_node:$port" --rdzv-id "$SLURM_JOB_ID" \
    -m edkm_cli compress "${run[@]}" --resume &
step=$!
status=0
wait "$step" || status=$?
if [ -n "$stopping" ]; then # the signal ended the wait, not the run
    status=0
    wait "$step" || status=$?
fi
if [ -n "$stopping" ] && [ "$status" != 0 ]; then
    echo "stopped before the end; the job goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
[ "$status" = 0 ] || exit "$status"

srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-8}" --nodes=1 --ntasks=1 "$PYTHON" -m edkm_cli eval "$OUTPUT" \
    --data "$EVAL_DATA" --context "$CONTEXT" --device "$DEVICE" --json "$OUTPUT-eval.json"
