#!/bin/sh
# ResNet-50 on ImageNet with torchrun.
#
#   examples/torchrun_imagenet.sh DATA [OPTION ...]
#
# One machine with one process for each GPU (or set PROCESSES). For several machines, start the same on each with
#
#   NODES=4 MAIN=first-machine:29500 examples/torchrun_imagenet.sh DATA [OPTION ...]
#
# where MAIN is one of them. DATA and --out must be folders that all machines see.
# A process that is killed is started again, with all others, from the last checkpoint.
set -eu

data=${1:?"Usage: $0 DATA [OPTION ...]"}
shift

if [ -z "${PROCESSES:-}" ]; then
    PROCESSES=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
    [ "$PROCESSES" -gt 0 ] || PROCESSES=1
fi

if [ "${NODES:-1}" -eq 1 ]; then
    set -- --standalone --nproc-per-node "$PROCESSES" --max-restarts 3 \
        -m experiments.imagenet --data "$data" "$@"
else
    # A store of its own for each restart: in a shared one, processes find addresses of those that were killed.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    set -- --nnodes "$NODES" --nproc-per-node "$PROCESSES" --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint "${MAIN:?"MAIN=host:port of one of the machines"}" --rdzv-id "${RUN:-imagenet}" \
        -m experiments.imagenet --data "$data" "$@"
fi

# The experiments are in this clone, not in the installed library.
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec torchrun "$@"
