#!/usr/bin/env bash
# Simulate two nodes of 2 processes with two torchruns on this machine, which rendezvous at a port.
#
#   launch/examples/several_nodes/run.sh [key=value …]      overrides of run.yaml
#
# On a cluster: sbatch --nodes 8 launch/slurm.sbatch CONFIG, or kubectl apply -f launch/kubernetes.yaml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
CALLED_BY=launch bash launch/setup.sh
if [ ! -f runs/quickstart-data/train.jsonl ]; then
    .venv/bin/python -m megatron_rl.data.quickstart runs/quickstart-data
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
port="${PORT:-29577}"
node() { # overrides
    .venv/bin/python -m torch.distributed.run --nnodes 2 --nproc-per-node 2 \
        --rdzv-backend c10d --rdzv-id several_nodes --rdzv-endpoint "127.0.0.1:$port" \
        -m megatron_rl train launch/examples/several_nodes/run.yaml "$@"
}
node "$@" &
other=$!
trap 'kill "$other" 2>/dev/null || true' EXIT
node "$@"
wait "$other"
