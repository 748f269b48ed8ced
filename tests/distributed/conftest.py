"""What the tests of whole runs share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Path:
    """Make the quickstart's model and data once."""
    folder = tmp_path_factory.mktemp("material")
    command = [sys.executable, "-m", "megatron_rl.data.quickstart", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return folder
