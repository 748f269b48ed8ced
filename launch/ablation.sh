#!/usr/bin/env bash
# What packing, filters, adaptive lengths and sampling profiles change, each added to the one before: three seeds
# of five configurations. Tables, picture and numbers are written to runs/ablation; an interrupted call resumes.
#
#   launch/ablation.sh [--quick] [--only NAME,…] [--seeds 1-3] [--folder DIR] [--record] [key=value …]
#
# The code is in benchmarks/ablation.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
CALLED_BY=launch bash launch/setup.sh
exec .venv/bin/python benchmarks/ablation.py "$@"
