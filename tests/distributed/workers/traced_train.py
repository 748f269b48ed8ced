"""Run the command line and list the files of the package that the run's second step executes.

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
    """Wrap ``step`` so that its second call is traced; objects that are created once exist by then."""
    files: set[str] = set()
    num_calls = 0

    def record_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    def traced_step(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls != 2:
            return step(*arguments, **keywords)

        # Threads that the step starts are traced too, and this thread separately.
        threading.setprofile(record_call)
        sys.setprofile(record_call)
        try:
            return step(*arguments, **keywords)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            write_package_files(files)

    return traced_step


def write_package_files(files: set[str]) -> None:
    """Write the files that belong to the package to ``TRACED_FILES``, sorted and relative to the package."""
    paths = [Path(file) for file in files]
    names = [path.relative_to(PACKAGE).as_posix() for path in paths if path.is_relative_to(PACKAGE)]
    Path(os.environ["TRACED_FILES"]).write_text("\n".join(sorted(names)))


if __name__ == "__main__":
    run.train_step = traced(run.train_step)
    sys.exit(main())
