#!/usr/bin/env bash
# Compare the log-probs of three engines on SmolLM2-135M-Instruct, then train it with GRPO, on two CPU cores.
#
#   launch/examples/smollm2/run.sh [key=value …]      overrides of grpo.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
CALLED_BY=launch bash launch/setup.sh
here=launch/examples/smollm2
python=.venv/bin/python
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
bash "$here/model.sh"
for dtype in float32 bfloat16; do
    "$python" -m torch.distributed.run --standalone --nproc-per-node 1 "$here/agree.py" "$here/grpo.yaml" \
        world_size=1 "run_dir=runs/smollm2/agree-$dtype" "model.dtype=$dtype"
done
exec "$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_rl train "$here/grpo.yaml" "$@"
