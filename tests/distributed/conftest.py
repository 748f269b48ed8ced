"""Fixtures of the tests of complete runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests import small_data
from tests.conftest import Launch

WORKERS = Path(__file__).parent / "workers"
TORCHRUN = WORKERS / "forked_torchrun.py"


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Path:
    """Create the quickstart's model and data once per session."""
    # Their creation takes seconds, and no test changes them.
    return small_data.make(tmp_path_factory.mktemp("material"))


@pytest.fixture
def forked_torchrun(fork: Callable[..., Launch], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run a module on two ranks of torchrun; return its exit code and its output.

    torchrun and its ranks are forked, which saves the imports. The process ID of torchrun is written to
    ``tmp_path/torchrun``.
    """

    def run(
        *arguments: object,
        timeout: float = 300.0,
        env: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        options = ("--standalone", "--nproc-per-node", 2, "-m")
        output = fork(
            TORCHRUN,
            1,
            tmp_path / "torchrun",
            *options,
            *arguments,
            timeout=timeout,
            env=env,
        ).output
        # The rank succeeds also if torchrun fails, so the exit code is read from its output.
        code = re.search(r"exit code of torchrun: (-?\d+)", output)
        assert code, output
        return int(code[1]), output

    return run


@pytest.fixture
def in_turn(fork: Callable[..., Launch], tmp_path: Path) -> Callable[..., list[str]]:
    """Run commands one after another in one launch: ``in_turn(ranks, *command_lines)``; return their outputs.

    Starting ranks takes about as long as a short run. Runs whose equality is tested, such as a resumed one
    and an uninterrupted one, have a launch each, so that nothing passes from one to the other in memory.
    """

    def run(ranks: int, *commands: Sequence[object], timeout: float = 300.0) -> list[str]:
        plan = tmp_path / "in_turn"
        plan.write_text(json.dumps([[str(argument) for argument in command] for command in commands]))
        launch = fork(
            WORKERS / "in_turn.py",
            ranks,
            plan,
            timeout=timeout,
            check=False,
        )
        outputs = [plan.with_suffix(f".{number}") for number in range(len(commands))]
        texts = [output.read_text() for output in outputs if output.exists()]
        assert launch.returncode == 0, "\n".join([launch.output, *texts])[-8000:]
        return texts

    return run
