#!/bin/bash
# Trains on several nodes of a Slurm cluster; the first argument is the run's folder, on a disk that all nodes see:
#
#   sbatch examples/slurm.sh runs/reviews textenv/Reviews-v0 --num-envs 64 --total-steps 1000000
#
# The same line starts the run and resumes it: after a process has ended, after a node has (the job is queued again), and
# in a new job after the time is over. These are three jobs in advance, one after the other:
#
#   for i in 1 2 3; do sbatch --dependency=singleton --job-name=reviews examples/slurm.sh runs/reviews …; done

#SBATCH --job-name=algos
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail
run=${1:?give the folder of the run, then the arguments of algos train}
shift

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ${SLURM_GPUS_ON_NODE:-$SLURM_CPUS_PER_TASK}))
# A new meeting place for each restart: that of the last one still has the addresses of processes that have ended.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# One process for each GPU; without GPUs, for each core.
srun torchrun \
    --nnodes="$SLURM_NNODES" \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-$SLURM_CPUS_PER_TASK}" \
    --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head:${PORT:-29500}" \
    --max-restarts=3 \
    -m algos train "$@" --run-dir "$run" --resume "$run" --checkpoint-every "${CHECKPOINT_EVERY:-100000}"
