#!/usr/bin/env bash
# Train with the lines of a script, on 2 processes.
#
#   launch/examples/dataflow/run.sh grpo|online_dpo|best_of_n|ppo [key=value …]      overrides of run.yaml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
script="launch/examples/dataflow/${1:-grpo}.py"
if [ ! -f "$script" ]; then sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; fi
CALLED_BY=launch bash launch/setup.sh
if [ ! -f runs/quickstart-data/train.jsonl ]; then
    .venv/bin/python -m megatron_rl.data.quickstart runs/quickstart-data
fi
# The package of this checkout: Python looks for imports next to the script.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
NPROC=2 exec bash launch/local.sh "$script" "${@:2}"
