#!/usr/bin/env bash
# From an empty checkout to a trained model: install, create a tiny model and its data, warm it up and train it with
# GRPO: on 4, 2 or 1 GPUs, as many as this machine has, or on 4 processes without a GPU. Report, curve and Hugging Face
# checkpoint are written to runs/quickstart.
#
#   [NPROC=2] launch/quickstart.sh [key=value …]      overrides of configs/quickstart.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"
case "$gpus" in
    1) processes=1 ;;
    2 | 3) processes=2 ;;
    *) processes=4 ;; # without a GPU, too
esac
processes="${NPROC:-$processes}"
# configs/quickstart.yaml has the layouts of 4 processes.
case "$processes" in
    4) layouts=() ;;
    2) layouts=(world_size=2 actor.layout.pipeline=1) ;;
    1) layouts=(world_size=1 actor.layout.tensor=1 actor.layout.pipeline=1 rollout.tensor=1) ;;
    *)
        echo "quickstart: there is no layout for this number of processes" >&2
        echo "  expected: NPROC of 1, 2 or 4" >&2
        echo "  got:      $processes" >&2
        echo "  fix:      NPROC=4 launch/quickstart.sh" >&2
        exit 2
        ;;
esac
CALLED_BY=launch bash launch/setup.sh

# Read by the OpenMP runtime when torch is loaded: one thread per process.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

.venv/bin/python -m megatron_rl.data.quickstart runs/quickstart-data
# torchrun exits with 1 on every failure. Checking first lets invalid input exit with 2, as `train` does.
if ! report="$(.venv/bin/python -m megatron_rl check configs/quickstart.yaml --world-size "$processes" \
    "${layouts[@]}" "$@" 2>&1)"; then
    printf '%s\n' "$report" >&2
    exit 2
fi
# Rendezvous in a file and a store of rank 0 on localhost: torchrun's own store listens on every interface.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# The file is named, since torchrun warns of a choice that nobody made without it.
rendezvous="$(mktemp)"
exec .venv/bin/python -m torch.distributed.run --rdzv-backend c10d --rdzv-conf store_type=file \
    --rdzv-endpoint "$rendezvous" --local-addr localhost --nproc-per-node "$processes" \
    -m megatron_rl train configs/quickstart.yaml "${layouts[@]}" "$@"
