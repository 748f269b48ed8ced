#!/usr/bin/env bash
# A first real run in small: a tiny model with a chat template, on sums in the form of GSM8K, on 2 processes.
#
#   launch/examples/first_run/run.sh [key=value …]      overrides of run.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
CALLED_BY=launch bash launch/setup.sh
if [ ! -f runs/examples/first_run/inputs/train.jsonl ]; then
    .venv/bin/python launch/examples/first_run/make.py runs/examples/first_run/inputs
fi
NPROC=2 exec bash launch/local.sh launch/examples/first_run/run.yaml "$@"
