#!/usr/bin/env bash
# Sync the weights of your own Megatron model into vLLM without this project's trainer: in one job, then in two.
#
#   launch/examples/hybrid_engine/run.sh [CHECKPOINT]      a Hugging Face directory of a Qwen3 model
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
CALLED_BY=launch bash launch/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
for example in "2 colocated" "3 separate"; do
    read -r processes name <<<"$example"
    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$processes" \
        "launch/examples/hybrid_engine/$name.py" "$@"
done
