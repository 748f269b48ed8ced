#!/usr/bin/env bash
# Train a reward model, then PPO with critic and reference against it, on 4 processes.
#
#   launch/examples/ppo_reward_model/run.sh [key=value …]      overrides of run.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
CALLED_BY=launch bash launch/setup.sh
if [ ! -f runs/quickstart-data/train.jsonl ]; then
    .venv/bin/python -m megatron_rl.data.quickstart runs/quickstart-data
fi
NPROC=4 exec bash launch/local.sh launch/examples/ppo_reward_model/run.yaml "$@"
