#!/usr/bin/env bash
# Set up, run the static checks, then every test that needs no GPU.
#
#   launch/test.sh [--fast] [pytest arguments]    e.g. launch/test.sh tests/unit -k metrics; -n 0: in one process
#
# --fast: leave out the tests that start ranks, those with the marker `slow`, and the static checks: three
# minutes on two free cores, for between two edits.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh --dev || exit 1

lint=0
if [ "${1:-}" = --fast ]; then
    shift
    set -- -m "not starts_ranks and not slow" "$@"
else
    bash launch/lint.sh
    lint=$?
fi
# Files in their order: what starts ranks comes last; see Schedule in tests/conftest.py.
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" .venv/bin/python -m pytest -n 2 --no-loadscope-reorder "$@"
tests=$?
if [ "$lint" -ne 0 ]; then echo "test: the static checks failed (see the top of this output)" >&2; fi
if [ "$tests" -ne 0 ]; then exit "$tests"; fi
exit "$lint"
