"""Run the shipped examples by their one command, and check their last step."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.load import load_config
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.metrics import read_metrics
from tests.campaign.campaign import HELD, Case, Result
from tests.golden import record

EXAMPLES = record.ROOT / "launch/examples"
PATIENCE = 3 * 3600
"""Seconds that an example may take on a busy machine."""


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield the examples in order of their names; the seed has no effect."""
    commands = sorted(EXAMPLES.glob("*/run.sh"))[:count]
    yield from (Case(path.parent.name, path.parent.name, {}) for path in commands)


def try_case(case: Case, work: Path) -> Result:
    """Run one example; its output goes to ``work``."""
    folder = EXAMPLES / case.name
    with (work / f"{case.name}.log").open("w") as log:
        # Examples may download models, as they do for a user.
        environment = {
            **os.environ,
            **record.environment(),
            "HF_HUB_OFFLINE": "0",
        }

        command = subprocess.Popen(
            ["bash", str(folder / "run.sh")],
            cwd=record.ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = command.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(command.pid, signal.SIGTERM)
            command.wait()
            return Result("hang", f"no end after {PATIENCE} s: {log.name}")

    if status:
        return Result("lost", f"exit code {status}: {log.name}")

    # The run has to reach its last step; the accuracies are reported, not checked.
    for file in folder.glob("*.yaml"):
        config = load_config(file)
        lines = read_metrics(RunFolder(record.ROOT / config.run_dir).metrics)
        if not lines or lines[-1]["step"] != config.steps:
            return Result(
                "lost",
                f"{config.run_dir} does not end with step {config.steps}",
            )
        metric = "eval/held_out/accuracy"
        accuracy = [line[metric] for line in lines if metric in line]
        return Result(
            HELD,
            f"held-out accuracy {accuracy[0]:.3f} → {accuracy[-1]:.3f}",
            {"runs": 1},
        )
    return Result(HELD)
