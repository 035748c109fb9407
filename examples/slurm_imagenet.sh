#!/bin/sh
# ResNet-50 on ImageNet with Slurm: srun starts one torchrun on each node, torchrun one process for each GPU.
#
#   sbatch --nodes 64 examples/slurm_imagenet.sh DATA [OPTION ...]        in a clone, which all nodes see
#
# With 64 nodes of 6 GPUs these are the paper's 384 processes; with 256, its 1,536. DATA and --out must be folders that
# all nodes see. Submitted again, or requeued, the run goes on from its last checkpoint.
#SBATCH --job-name=imagenet
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=6
#SBATCH --cpus-per-task=42
#SBATCH --time=02:00:00
#SBATCH --requeue
set -eu

data=${1:?"Usage: sbatch $0 DATA [OPTION ...]"}
shift

main=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a node do not meet

# A store of its own for each restart: in a shared one, processes find addresses of those that were killed.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=1
# The experiments are in the clone, not in the installed library.
export PYTHONPATH="$SLURM_SUBMIT_DIR${PYTHONPATH:+:$PYTHONPATH}"

exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${PROCESSES:-6}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$main:$port" --rdzv-id "$SLURM_JOB_ID" \
    -m experiments.imagenet --data "$data" "$@"
