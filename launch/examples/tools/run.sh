#!/usr/bin/env bash
# Train a policy that calls a tool and reads its result, on 2 processes.
#
#   launch/examples/tools/run.sh [key=value …]      overrides of run.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
CALLED_BY=launch bash launch/setup.sh
if [ ! -f runs/quickstart-data/train.jsonl ]; then
    .venv/bin/python -m megatron_rl.data.quickstart runs/quickstart-data
fi
.venv/bin/python launch/examples/tools/make.py runs/examples/tools/data
NPROC=2 exec bash launch/local.sh launch/examples/tools/run.yaml "$@"
