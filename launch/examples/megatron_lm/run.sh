#!/usr/bin/env bash
# From a Megatron-LM checkpoint and back, on 2 processes.
#
#   launch/examples/megatron_lm/run.sh [key=value …]      overrides of run.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
CALLED_BY=launch bash launch/setup.sh
if [ ! -f runs/quickstart-data/train.jsonl ]; then
    .venv/bin/python -m megatron_rl.data.quickstart runs/quickstart-data
fi
here=runs/examples/megatron_lm
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ ! -d "$here/pretrained" ]; then # in place of a checkpoint of pretrain_gpt.py: the quickstart's warm-up on one process
    .venv/bin/python -m megatron_rl train configs/quickstart.yaml world_size=1 actor.layout.tensor=1 \
        actor.layout.pipeline=1 rollout.tensor=1 steps=1 actor.optimizer.warmup_steps=1 \
        "run_dir=$here/warm" "checkpoint.megatron=$here/pretrained"
fi
NPROC=2 bash launch/local.sh launch/examples/megatron_lm/run.yaml "$@"
echo "continue with pretrain_gpt.py --load $here/trained --use-checkpoint-args --finetune"
