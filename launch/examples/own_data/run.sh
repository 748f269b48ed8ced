#!/usr/bin/env bash
# Train on your own records, with other field names and a sampling profile per task, on 2 processes.
#
#   launch/examples/own_data/run.sh [key=value …]      overrides of run.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
CALLED_BY=launch bash launch/setup.sh
if [ ! -f runs/quickstart-data/train.jsonl ]; then
    .venv/bin/python -m megatron_rl.data.quickstart runs/quickstart-data
fi
.venv/bin/python launch/examples/own_data/make.py runs/examples/own_data/data
NPROC=2 exec bash launch/local.sh launch/examples/own_data/run.yaml "$@"
