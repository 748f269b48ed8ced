#!/usr/bin/env bash
# Train on this machine alone: one process per GPU, or NPROC processes.
#
#   [NPROC=4] launch/local.sh CONFIG [key=value …]
#   [NPROC=4] launch/local.sh SCRIPT.py [arguments]      a dataflow of your own, see docs/tutorials/dataflow.md
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: [NPROC=N] launch/local.sh CONFIG [key=value …]" >&2
    exit 2
fi
config="$(realpath "$1")"
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
CALLED_BY=launch bash launch/setup.sh

gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"
processes="${NPROC:-$gpus}"
if [ "$processes" -lt 1 ]; then
    echo "local: no GPU found; set the number of processes to run on the CPU: NPROC=4 launch/local.sh …" >&2
    exit 2
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# torchrun exits with 1 on every failure. Checking first lets invalid input exit with 2, as `train` does.
program=(-m megatron_rl train "$config")
if [[ "$config" == *.py ]]; then
    program=("$config")
elif ! report="$(.venv/bin/python -m megatron_rl check "$config" --world-size "$processes" "$@" 2>&1)"; then
    printf '%s\n' "$report" >&2
    exit 2
fi
# Rendezvous in a file and a store of rank 0 on localhost: torchrun's own store listens on every interface.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# The file is named, since torchrun warns of a choice that nobody made without it.
rendezvous="$(mktemp)"
exec .venv/bin/python -m torch.distributed.run --rdzv-backend c10d --rdzv-conf store_type=file \
    --rdzv-endpoint "$rendezvous" --local-addr localhost --nproc-per-node "$processes" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    "${program[@]}" "$@"
