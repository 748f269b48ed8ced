#!/usr/bin/env bash
# Compare the numbers of two revisions to the last bit, over six tiny runs of each.
#
#   launch/golden.sh record DIR [--only NAME]   with the code of this checkout; some minutes on two cores
#   launch/golden.sh compare DIR_A DIR_B        exit code 1: numbers differ; 3: only names of metrics
#
# Record the old revision (for example in a worktree) and the new one on the same machine, since other processors
# may round differently. tests/golden/renamed.yaml, if it exists, maps old names of metrics to new ones.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
command="${1:-}"
case "$command" in
    record|compare) shift ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
# Without launch/setup.sh: in a worktree .venv may be a link to the main checkout's, which must not change.
if [ ! -x "$root/.venv/bin/python" ]; then
    echo "golden: no .venv in $root; fix: run launch/setup.sh" >&2
    exit 2
fi
export PYTHONPATH="$root" OMP_NUM_THREADS=1
exec "$root/.venv/bin/python" "$root/tests/golden/$command.py" "$@"
