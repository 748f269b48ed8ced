"""The ``compare`` command: compare the settings, results and curves of runs.

The results of runs that differ only in their seed are shown as mean and spread.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.cli.common import require_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of ``compare`` to its parser."""
    parser.add_argument(
        "runs",
        metavar="RUN_DIR",
        nargs="+",
        help="run folders; runs that differ only in their seed form one column",
    )
    parser.add_argument(
        "--out", metavar="DIR", default=".", help="folder for compare.html and compare.md (default: this one)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the comparison of the runs, and print its tables; return the exit code."""
    folders = [Path(name) for name in arguments.runs]
    for folder in folders:
        require_directory(folder, "RUN_DIR")

    from megatron_rl.trainer import compare

    out = Path(arguments.out)
    print(compare.write_comparison(folders, out))
    print(f"wrote {out / 'compare.html'} and {out / 'compare.md'}")
    return 0
