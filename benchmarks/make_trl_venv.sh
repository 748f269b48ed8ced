#!/usr/bin/env bash
# Create benchmarks/.venv-trl, the environment of TRL for step_time.py, unless it is up to date.
#
#   benchmarks/make_trl_venv.sh
#   PYTHON=…   interpreter of the environment (default: .venv's, else python3.11)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="$here/.venv-trl"
lock="$here/requirements-trl.txt"
python="$venv/bin/python"

say() { echo "make_trl_venv: $*" >&2; }
fail() { # what is wrong / expected / got / fix, one line each
    printf 'make_trl_venv: %s\n' "$1" >&2; shift
    printf '  %s\n' "$@" >&2
    exit 1
}
if command -v flock >/dev/null; then
    exec 9<"${BASH_SOURCE[0]}"
    flock 9
fi

stamp="$({ echo "$venv"; cat "$lock"; } | sha256sum | cut -d' ' -f1)"
if [ -f "$venv/.installed" ] && [ "$(cat "$venv/.installed")" = "$stamp" ]; then exit 0; fi

interpreter="${PYTHON:-}"
if [ -z "$interpreter" ]; then
    interpreter="$here/../.venv/bin/python"
    [ -x "$interpreter" ] || interpreter="$(command -v python3.11 || command -v python3)"
fi
"$interpreter" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || fail \
    "no usable Python" "expected: Python 3.11 or newer with venv" "got: $interpreter" "fix: set PYTHON"
"$interpreter" -m venv --clear "$venv"
pip_install() { "$python" -m pip install -qq --no-compile --disable-pip-version-check --no-deps "$@"; }

torch="$(grep '^torch==' "$lock")"
say "installing $torch and the rest of $(basename "$lock") (about a minute)"
if ! pip_install "$torch" 2>"$venv/torch.log"; then
    say "$torch is not on the configured package index; trying PyTorch's CPU index"
    pip_install --extra-index-url https://download.pytorch.org/whl/cpu "$torch" || {
        cat "$venv/torch.log" >&2
        fail "could not install $torch" "expected: a wheel for $("$python" --version) on Linux x86_64" \
            "got: no index has one (above)" "fix: put the wheel into a folder and set PIP_FIND_LINKS to it"
    }
fi
rm -f "$venv/torch.log"
pip_install -r "$lock" || fail "could not install $lock" \
    "expected: every package of it on the configured index, at that version" \
    "got: pip's message above" "fix: check the network and 'pip config list'"
OMP_NUM_THREADS=1 "$python" -W ignore -c '
import torch
assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build"
from trl import GRPOConfig, GRPOTrainer' || fail "the environment does not import" \
    "expected: trl beside torch for the CPU" "got: the message above" "fix: rm -rf $venv and run this again"
echo "$stamp" >"$venv/.installed"
say "done: $venv"
