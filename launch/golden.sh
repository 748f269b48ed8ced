#!/usr/bin/env bash
# Say whether two revisions compute the same numbers, to the last bit: six tiny but real runs of each.
#
#   launch/golden.sh record DIR [--only NAME]   with the code of this checkout; some minutes on two cores
#   launch/golden.sh compare DIR_A DIR_B        exit code 1: numbers differ; 3: only names of metrics do
#
# Record the old revision (a worktree of it will do) and the new one on the same machine: another processor may
# round otherwise. tests/golden/renamed.yaml, where it exists, maps old names of metrics to new ones.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
command="${1:-}"
case "$command" in
    record|compare) shift ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
# Not launch/setup.sh: in a worktree .venv may be a link to that of the main checkout, which is to stay as it is.
if [ ! -x "$root/.venv/bin/python" ]; then
    echo "golden: no .venv in $root; fix: run launch/setup.sh" >&2
    exit 2
fi
export PYTHONPATH="$root" OMP_NUM_THREADS=1
exec "$root/.venv/bin/python" "$root/tests/golden/$command.py" "$@"
