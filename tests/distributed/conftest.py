"""Fixtures of the tests of complete runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import small_data
from tests.conftest import Launch

TORCHRUN = Path(__file__).parent / "workers/forked_torchrun.py"


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Path:
    """Create the quickstart's model and data once per session."""
    return small_data.make(tmp_path_factory.mktemp("material"))


@pytest.fixture
def forked_torchrun(fork: Callable[..., Launch], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run a module on two ranks of torchrun; return its exit code and its output.

    torchrun and its ranks are forked, which saves the imports; its process ID goes to ``tmp_path/torchrun``.
    """

    def run(*arguments: object, timeout: float = 300.0, env: dict[str, str] | None = None) -> tuple[int, str]:
        options = ("--standalone", "--nproc-per-node", 2, "-m")
        output = fork(
            TORCHRUN, 1, tmp_path / "torchrun", *options, *arguments, timeout=timeout, env=env
        ).output
        code = re.search(r"exit code of torchrun: (-?\d+)", output)
        assert code, output
        return int(code[1]), output

    return run
