"""Write, check and train tiny runs of `combinations`, and run the commands that read them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.campaign import kills, runs
from tests.campaign.campaign import HELD, Result
from tests.campaign.features import ENVIRONMENT, REWARDS

PATIENCE = 420.0
"""Seconds that a command may take on a busy machine."""
ASKED_TO_STOP = "was asked to stop (SIGTERM)"
CLEAR_ENDS = {
    "no token of this step's responses is left to train on": "models answer at random, and filters",
    "are longer than the limit": "`check` does not tokenise data",
    "on a host without accelerator": "`check` may run on another machine",
}
"""Message with which a run may end although `check` said READY -> the reason."""


def write(config: Mapping[str, Any], folder: Path, work: Path) -> Path:
    """Write a run's configuration, environment and reward functions; return the configuration's path."""

    folder.mkdir(parents=True, exist_ok=True)
    # Relative paths of outputs belong to the run's folder.
    checkpoint = config["checkpoint"]
    if "megatron" in checkpoint:
        config = {
            **config,
            "checkpoint": {
                **checkpoint,
                "megatron": str(folder / checkpoint["megatron"]),
            },
        }

    code_folder = folder.parent  # one folder for all runs of a case, since errors name the file
    (code_folder / "environment.py").write_text(ENVIRONMENT)
    (code_folder / "rewards.py").write_text(REWARDS)
    text = yaml.safe_dump(
        runs.with_absolute_paths(config, runs.material(work), code_folder) | {"run_dir": str(folder / "run")}
    )
    (folder / "config.yaml").write_text(text)
    return folder / "config.yaml"


def check(config: Path, ranks: int) -> tuple[int, str]:
    """Check a configuration; return the exit code and the JSON output, or else the error output."""
    command = ["check", str(config), "--world-size", str(ranks), "--json"]
    code, output, errors = run_command(command, config.parent / "check.json")
    return code, output or errors


def errors_of(output: str) -> list[dict[str, Any]]:
    """Return the errors of a check's JSON output, or [] for any other output."""
    if not output.startswith("{"):
        return []
    return json.loads(output)["errors"]


def error_summary(output: str) -> str:
    """Return a check's errors in one line, or the end of any other output."""
    lines = [f"{error['where']}: {error['message']}" for error in errors_of(output)]
    return "; ".join(lines) or output[-2000:]


def train(
    config: Path,
    ranks: int,
    *arguments: str,
    command: str = "train",
    stop: bool = False,
) -> Result | None:
    """Run a command, ``train`` by default; return None on success, or else the problem.

    With ``stop`` the run receives SIGTERM after its first step.
    """
    environment = {"CAMPAIGN_PORT": "9", "CAMPAIGN_LAUNCH": "1"}  # no listener

    # No restarts by torchrun: a failure has to be reported, not repaired.
    launcher = runs.launch(
        config,
        ranks,
        *arguments,
        command=command,
        restarts=0,
        env=environment,
    )
    try:
        if stop:
            _stop(launcher, config.parent / "run/metrics.jsonl")
        code = launcher.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return Result("hang", kills.tail(config.parent))
    finally:
        # Ranks that outlive torchrun are a problem of their own, whatever the exit code.
        remaining = runs.descendants(launcher) if launcher.poll() is not None else []
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait()
        # Ranks that survive torchrun would disturb the next case; the result reports them.
        for process in runs.descendants(launcher):
            process.kill()

    output = kills.tail(config.parent)
    known_end = next((message for message in CLEAR_ENDS if message in output), None)
    if code and known_end is not None:
        return Result(HELD, known_end)
    if code and not (stop and ASKED_TO_STOP in (config.parent / "output").read_text()):
        return Result("accepted", f"READY, and `{command}` ended with {code}\n{output}")
    if remaining:
        return Result("left over", f"{remaining}")
    return None


def _stop(launcher: subprocess.Popen[bytes], metrics: Path) -> None:
    """Send SIGTERM to a run after its first step, unless it ends before."""
    deadline = time.monotonic() + PATIENCE
    while not metrics.exists() or not metrics.read_text().strip():
        if launcher.poll() is not None or time.monotonic() > deadline:
            return
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)


def run_command(arguments: Sequence[str], log: Path) -> tuple[int, str, str]:
    """Run a command in a forked process, so that its threads do not stay in this one.

    Returns the exit code (-1: no end in time), the output, which is also in ``log``, and the error output.
    """
    errors = log.with_suffix(".errors")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # File descriptors rather than sys.stdout, to capture output of libraries and children too.
            for descriptor, file in ((1, log), (2, errors)):
                os.dup2(
                    os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
                    descriptor,
                )
            from megatron_rl.cli.main import main

            code = main(list(arguments))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    code = kills.wait_for(child, PATIENCE)
    if code is None:
        code = -1
    return code, log.read_text(), errors.read_text(errors="replace")
