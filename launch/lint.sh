#!/usr/bin/env bash
# Every static check: ruff, its formatter, pyright, and the import contracts. Fails if any of them does.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh --dev || exit 1

failed=()
check() { # name, command
    local name="$1"; shift
    echo "== $name"
    "$@" || failed+=("$name")
}
check "ruff check" .venv/bin/python -m ruff check
check "ruff format" .venv/bin/python -m ruff format --check
check "pyright" .venv/bin/python -m pyright --pythonpath .venv/bin/python
# By module, since a script in .venv/bin names the interpreter by a path that moving the checkout breaks.
check "lint-imports" .venv/bin/python -c "from importlinter.cli import lint_imports_command as run; run()" --no-logo
if [ ${#failed[@]} -gt 0 ]; then
    echo "lint: failed: ${failed[*]}" >&2
    exit 1
fi
echo "lint: all checks pass"
