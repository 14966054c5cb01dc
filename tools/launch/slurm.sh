#!/usr/bin/env bash
#SBATCH --job-name=sbkit
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
# Train on the nodes of a SLURM job. Two minutes before its time is up, the job saves a checkpoint,
# ends, and queues itself again. It does the same if a store stays unavailable. From the root of the checkout:
#
#   sbatch --nodes=2 --gpus-per-node=8 --cpus-per-gpu=8 --time=12:00:00 \
#       tools/launch/slurm.sh hparams/ctc.yaml [--setting=value ...]
#
# `scancel --signal=USR1 --batch JOB` does this at any time.
set -euo pipefail

cd -- "$SLURM_SUBMIT_DIR" # SLURM runs a copy of this file in another folder

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
endpoint=$first:$((10000 + SLURM_JOB_ID % 20000))

# One task per node has all cores of the job there, and starts a process for each GPU. When a task
# fails, --kill-on-bad-exit ends the others.
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    tools/launch/several_nodes.sh "$SLURM_JOB_NUM_NODES" "$endpoint" "$SLURM_JOB_ID" "$@" &
step=$!

asked=
trap 'trap "" USR1; asked=yes; kill -USR1 "$step" || true' USR1 # srun passes it on to every node

code=0
wait "$step" || code=$? # the signal interrupts it
if [ -n "$asked" ]; then
    code=0
    wait "$step" || code=$?
fi
# After exit code 1 the same command may succeed later; the limit ends a job that always fails.
if [ "$code" != 0 ] && [ -n "$asked" ] || { [ "$code" = 1 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
