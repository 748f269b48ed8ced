#!/usr/bin/env bash
# Train SmolLM2-135M-Instruct in an environment of verifiers, on two CPU cores.
#
#   launch/examples/verifiers_environment/run.sh [key=value …]      overrides of run.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
CALLED_BY=launch bash launch/setup.sh
python=.venv/bin/python
folder=runs/examples/verifiers
bash launch/examples/smollm2/model.sh
if [ ! -f "$folder/train.jsonl" ]; then
    mkdir -p "$folder"
    # Outside of .venv, which must agree with its lock file.
    "$python" -m pip install -q --target "$folder/packages" verifiers==0.1.14 reasoning-gym==0.1.25
    "$python" launch/examples/verifiers_environment/make.py "$folder" Sums
fi
NPROC=2 exec bash launch/local.sh launch/examples/verifiers_environment/run.yaml "$@"
