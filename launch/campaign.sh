#!/usr/bin/env bash
# Test the guarantees of a run on random cases of a seed. Takes minutes to hours; an interrupted campaign resumes.
#
#   launch/campaign.sh [KIND|all] [--count N] [--seed S] [--out DIR]
#
# kills          runs that are killed repeatedly equal the uninterrupted run to the last bit
# damages        a restart names damaged checkpoints and resumes from the newest intact one
# inputs         invalid configurations and data end in a clear error, or train if check says READY
# rewards        hostile reward functions, and their attacks on the machine, as this user and as another one
# leaks          thousands of steps do not accumulate memory, files, threads or processes
# layouts        one step of every family in every layout of four ranks equals that of one rank, tensor by tensor
# fused_layouts  the same with the stand-in of Transformer Engine's layers
# examples       each of launch/examples runs by its command
# simulations    check predicts the memory of the shipped configurations of large jobs
# combinations   features together: a run that check calls READY trains, resumes, and continues in other layouts
# matrices       the tests of every family, layout, engine and plan of which launch/test.sh runs representatives
#
# The code is in tests/campaign. Exit code 1: a guarantee was broken.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ ! -x "$root/.venv/bin/python" ]; then
    echo "campaign: no .venv in $root; fix: run launch/setup.sh" >&2
    exit 2
fi
export PYTHONPATH="$root" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$root/.venv/bin/python" -m tests.campaign.campaign "$@"
