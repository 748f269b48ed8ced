"""An engine is a folder and one line in a table: two that are added to a copy of the package train."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatron_rl
from megatron_rl.metrics import read_metrics
from tests.conftest import Launcher, RankServer, free_port

PACKAGE = Path(megatron_rl.__file__).parent
MADE_UP = Path(__file__).resolve().parents[1] / "made_up_engines"
TABLE = "config/engines.py"
HEAD = "ENGINES: dict[str, EngineSpec] = {\n"
SECONDS = 400.0
pytestmark = pytest.mark.starts_ranks


CAPABILITIES = {"prefix": "in_process=True, partial=True", "letters": ""}
"""Engine -> its capabilities in the table: one engine in the ranks, and one behind a server."""


def add_engine(package: Path, name: str, capabilities: str) -> None:
    """Add an engine's folder and its line in the table to a copy of the package."""
    shutil.copytree(MADE_UP / name, package / "rollout/engines" / name)
    before = (package / TABLE).read_text()
    module = f"megatron_rl.rollout.engines.{name}"
    line = f'    "{name}": EngineSpec("{module}", EngineCapabilities({capabilities})),\n'
    (package / TABLE).write_text(before.replace(HEAD, HEAD + line))

    changes = difflib.ndiff(before.splitlines(), (package / TABLE).read_text().splitlines())
    assert [line[0] for line in changes if line[0] != " "] == ["+"]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Fork ranks from a process that has imported a copy of the package with both engines."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(PACKAGE, tree / "megatron_rl", ignore=shutil.ignore_patterns("__pycache__"))
    for name, capabilities in CAPABILITIES.items():
        add_engine(tree / "megatron_rl", name, capabilities)
    with RankServer(tree / "server", tree) as fork:
        yield fork


def write_config(folder: Path, material: Path, rollout: dict[str, Any]) -> Path:
    (folder / "reward.py").write_text("def score(*, response, **_):\n    return len(response) % 3\n")
    config = {
        "run_dir": str(folder / "run"),
        "steps": 3,
        "model": {"path": str(material / "model"), "dtype": "float32"},
        "data": {"train": str(material / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": f"{folder}/reward.py:score", "timeout": 300},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "actor": {"optimizer": {"learning_rate": 1e-2}},
        "rollout": {"max_response_tokens": 12, **rollout},
        # Weights of one update before differ by more.
        "mismatch": {"stop": 1e-4},
        "algorithm": {"name": "grpo"},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def check(fork: Launcher, file: Path, *overrides: str) -> str:
    """Return what `check` prints."""
    words = ("check", file, "--world-size", 2, *overrides)
    result = fork("megatron_rl", 1, *words, module=True, check=False)
    assert result.returncode in (0, 2), result.stderr
    return result.output


def train(fork: Launcher, file: Path, ranks: int) -> list[dict[str, float]]:
    """Train and return the metrics of each step."""
    fork("megatron_rl", ranks, "train", file, module=True, timeout=SECONDS)
    return read_metrics(file.parent / "run/metrics.jsonl")


def assert_learned_on_policy(steps: list[dict[str, float]]) -> None:
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["mismatch/abs_diff"] < 1e-4 for step in steps), "sampled from the actor's own weights"
    assert all(step["policy/grad_norm"] > 0 for step in steps[:2])


def test_an_engine_in_the_ranks_is_a_folder_and_a_line(
    launch: Launcher, material: Path, tmp_path: Path
) -> None:
    file = write_config(tmp_path, material, {"engine": "prefix"})
    lacking = ("rollout.tensor=2", "rollout.top_p=0.9", "actor.lora.rank=4", "actor.lora.sync=adapter")
    assert "READY: no errors" in check(launch, file)
    refused = check(launch, file, *lacking)
    steps = train(launch, file, ranks=2)
    assert "the prefix engine does not shard the model" in refused
    assert "rollout.engine=prefix does not return the tokens that a filter keeps" in refused
    assert "`actor.lora.sync: adapter` requires" in refused
    assert_learned_on_policy(steps)


@pytest.fixture
def letters(material: Path):
    """Serve the model; yield the address."""
    port = free_port()
    words = [sys.executable, str(MADE_UP / "letter_server.py"), str(material / "model"), str(port), "20"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(words, env=environment)
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + SECONDS
    while server.poll() is None and time.monotonic() < until:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/weights", b"{}"), timeout=5).close()
            break
        except OSError:
            time.sleep(0.2)
    yield url
    server.kill()
    server.wait()


def test_a_server_of_another_kind_is_a_folder_and_a_line(
    launch: Launcher, letters: str, material: Path, tmp_path: Path
) -> None:
    file = write_config(tmp_path, material, {"engine": "letters", "server": {"urls": [letters]}})
    report = check(launch, file)
    refused = check(launch, file, "rollout.order=open", "rollout.server.urls=[]")
    steps = train(launch, file, ranks=1)
    assert "READY: no errors" in report and "SERVERS" in report and "WEIGHT SYNC" not in report
    assert "do not answer now" not in report
    assert "rollout.engine=letters answers whole requests, which the open order interrupts" in refused
    assert "is empty or names a server twice" in refused
    assert_learned_on_policy(steps)
    assert all(step["rollout/servers"] == 1 and step["rollout/sampled_again"] == 0 for step in steps)
