"""Run the command line and write down which files of the package the second step of its run executed.

``TRACED_FILES`` names the file to write: one line for each, relative to the package.
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
    """Return ``step`` with its second call observed: by then everything that is made once is there."""
    files: set[str] = set()
    calls = 0

    def observe(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    def observed(*values: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != 2:
            return step(*values, **named)

        threading.setprofile(observe)
        sys.setprofile(observe)
        try:
            return step(*values, **named)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            own = {Path(file).relative_to(PACKAGE).as_posix() for file in files if inside(file)}
            Path(os.environ["TRACED_FILES"]).write_text("\n".join(sorted(own)))

    return observed


def inside(file: str) -> bool:
    """Say whether a file is one of the package's own."""
    return Path(file).is_relative_to(PACKAGE)


if __name__ == "__main__":
    run.train_step = traced(run.train_step)
    sys.exit(main())
