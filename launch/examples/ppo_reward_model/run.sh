#!/usr/bin/env bash
# PPO with critic, reference and a reward model that the run trains first, on 4 processes.
#
#   launch/examples/ppo_reward_model/run.sh [key=value …]      overrides of run.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
bash launch/setup.sh
if [ ! -f runs/quickstart-data/train.jsonl ]; then
    .venv/bin/python -m megatron_rl.data.quickstart runs/quickstart-data
fi
NPROC=4 exec bash launch/local.sh launch/examples/ppo_reward_model/run.yaml "$@"
