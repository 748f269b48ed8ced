#!/usr/bin/env bash
# Hold the promises of a run against cases that a seed chooses; minutes to hours, and goes on where it was ended.
#
#   launch/campaign.sh [KIND|all] [--count N] [--seed S] [--out DIR]
#
# kills: runs that are killed again and again equal the uninterrupted one to the last bit; damages: of a newest
# checkpoint; inputs: configurations and data that the schema or a user got wrong; rewards: hostile functions, and attacks
# of theirs on the machine, as this user and as another one;
# leaks: thousands of steps; layouts: every tensor's step of every family in every product of parallel sizes on
# four ranks; fused_layouts: the same with Transformer Engine's layers, in torch; examples: each of launch/examples
# by its command; simulations: the memory that check counts for shipped configurations of large jobs; combinations:
# features that meet: what check calls READY trains, resumes, goes on in other layouts and begins other runs.
# tests/campaign/ says how. Exit code 1: a promise was broken.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ ! -x "$root/.venv/bin/python" ]; then
    echo "campaign: no .venv in $root; fix: run launch/setup.sh" >&2
    exit 2
fi
export PYTHONPATH="$root" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$root/.venv/bin/python" -m tests.campaign.campaign "$@"
