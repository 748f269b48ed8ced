#!/usr/bin/env bash
# Train a mixture of experts with expert parallelism 2 and the engine's experts replayed, on 2 processes.
#
#   launch/examples/moe/run.sh [key=value …]      overrides of run.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
CALLED_BY=launch bash launch/setup.sh
if [ ! -f runs/quickstart-data/train.jsonl ]; then
    .venv/bin/python -m megatron_rl.data.quickstart runs/quickstart-data
fi
if [ ! -f runs/examples/moe/model/config.json ]; then
    .venv/bin/python launch/examples/moe/make.py runs/quickstart-data/model runs/examples/moe/model
fi
NPROC=2 exec bash launch/local.sh launch/examples/moe/run.yaml "$@"
