"""Run the command line and record which files of the package the run's second step executes.

``TRACED_FILES`` names the output file: one path per line, relative to the package.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import megatron_rl
from megatron_rl.cli.main import main
from megatron_rl.trainer import run

PACKAGE = Path(str(megatron_rl.__file__)).parent


def traced(step: Any) -> Any:
    """Return ``step`` with its second call traced; objects that are created once exist by then."""
    files: set[str] = set()
    calls = 0

    def observe(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    def observed(*values: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != 2:
            return step(*values, **keywords)

        # Threads that the step starts are traced too, and this thread separately.
        threading.setprofile(observe)
        sys.setprofile(observe)
        try:
            return step(*values, **keywords)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            package_files = {Path(file).relative_to(PACKAGE).as_posix() for file in files if inside(file)}
            Path(os.environ["TRACED_FILES"]).write_text("\n".join(sorted(package_files)))

    return observed


def inside(file: str) -> bool:
    """Return whether a file belongs to the package."""
    return Path(file).is_relative_to(PACKAGE)


if __name__ == "__main__":
    run.train_step = traced(run.train_step)
    sys.exit(main())
