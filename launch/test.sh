#!/usr/bin/env bash
# Set up, run the static checks, then every test that needs no GPU.
#
#   launch/test.sh [--fast] [pytest arguments]    e.g. launch/test.sh tests/unit -k metrics; -n 0: in one process
#
# --fast: leave out the tests that start ranks, those with the marker `slow`, and the static checks, for between
# two edits.
#
# There are two legs, Python 3.12 with Megatron-Core 0.19 and Python 3.11 with 0.16.1. All tests run on the one of
# .venv. With OTHER_LEG=yes unit tests and one file of ranks follow on the other, in an environment of its own.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh --dev || exit 1

versions() { # environment
    "$1/bin/python" -c 'import sys, importlib.metadata as m; print("Python %d.%d, Megatron-Core" % sys.version_info[:2], m.version("megatron-core"))'
}
# The interpreter of a version: on PATH, or among pyenv's, whose shims refuse those that are not chosen.
interpreter() { # version
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/"python$1"; do
        if "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1; then echo "$candidate"; return; fi
    done
}
# Files in their order: what starts ranks comes last; see Schedule in tests/conftest.py.
run_tests() { # environment, pytest arguments
    local python="$1/bin/python"; shift
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$python" -m pytest -n "$processes" --no-loadscope-reorder "$@"
}

whole=no
if [ $# -eq 0 ]; then whole=yes; fi
lint=0
processes=3  # for two cores: a process waits a tenth of its time
if [ "${1:-}" = --fast ]; then
    shift
    # All of tests/distributed starts ranks: its modules need not even be imported.
    set -- -m "not starts_ranks and not slow" --ignore tests/distributed "$@"
else
    bash launch/lint.sh
    lint=$?
fi
run_tests .venv "$@"
tests=$?
verdict="$(versions .venv): $([ "$tests" -eq 0 ] && echo passed || echo FAILED)"

other=0
if [ "$whole" = yes ] && [ "${OTHER_LEG:-no}" = yes ]; then
    number="$(.venv/bin/python -c 'import sys; print("3.11" if sys.version_info >= (3, 12) else "3.12")')"
    environment=".venv-py${number/./}"
    found="$(interpreter "$number")"
    if [ -z "$found" ]; then
        verdict="$verdict; Python $number: NOT RUN, no interpreter python$number"
    else
        VENV="$PWD/$environment" PYTHON="$found" bash launch/setup.sh --dev --cpu &&
            run_tests "$environment" -n 2 -m "not starts_ranks" tests/unit &&
            run_tests "$environment" -n 0 tests/distributed/test_step.py
        other=$?
        verdict="$verdict; $(versions "$environment"), unit tests and one file of ranks: $([ "$other" -eq 0 ] && echo passed || echo FAILED)"
    fi
fi

echo "test: $verdict" >&2
if [ "$lint" -ne 0 ]; then echo "test: the static checks failed (see the top of this output)" >&2; fi
if [ "$tests" -ne 0 ]; then exit "$tests"; fi
if [ "$other" -ne 0 ]; then exit "$other"; fi
exit "$lint"
