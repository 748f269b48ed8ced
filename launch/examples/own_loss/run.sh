#!/usr/bin/env bash
# Train with your own policy loss and its settings, on 2 processes.
#
#   launch/examples/own_loss/run.sh [key=value …]      overrides of run.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
CALLED_BY=launch bash launch/setup.sh
if [ ! -f runs/quickstart-data/train.jsonl ]; then
    .venv/bin/python -m megatron_rl.data.quickstart runs/quickstart-data
fi
NPROC=2 exec bash launch/local.sh launch/examples/own_loss/run.yaml "$@"
