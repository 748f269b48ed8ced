"""What the tests of whole runs share."""

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
    """Make the quickstart's model and data once."""
    return small_data.make(tmp_path_factory.mktemp("material"))


@pytest.fixture
def forked_torchrun(fork: Callable[..., Launch], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run a module on two ranks of torchrun and return its exit code and what was said.

    torchrun and its ranks are forked, which spares the imports; its process id lies in ``tmp_path/torchrun``.
    """

    def run(*words: object, timeout: float = 300.0, env: dict[str, str] | None = None) -> tuple[int, str]:
        how = ("--standalone", "--nproc-per-node", 2, "-m")
        output = fork(TORCHRUN, 1, tmp_path / "torchrun", *how, *words, timeout=timeout, env=env).output
        code = re.search(r"exit code of torchrun: (-?\d+)", output)
        assert code, output
        return int(code[1]), output

    return run
