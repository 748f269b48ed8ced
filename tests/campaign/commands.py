"""Commands of the package on a tiny run of `combinations`: written, checked, trained, read."""

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
ASKED_TO_STOP = "was asked to stop (SIGTERM)"
CLEAR_ENDS = {
    "no token of this step's responses is left to learn from": "models answer at random, and filters",
    "are longer than the limit": "`check` tokenises nothing",
    "on a host without accelerator": "`check` may be asked on another machine",
}
"""What a run may end with all the same that `check` called READY, and why."""


def write(config: Mapping[str, Any], folder: Path, work: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = config["checkpoint"]
    if "megatron" in checkpoint:
        config = {**config, "checkpoint": {**checkpoint, "megatron": str(folder / checkpoint["megatron"])}}
    code = folder.parent  # one for all of a case's runs: errors name the file
    (code / "environment.py").write_text(ENVIRONMENT)
    (code / "rewards.py").write_text(REWARDS)
    text = yaml.safe_dump(runs.placed(config, runs.material(work), code) | {"run_dir": str(folder / "run")})
    (folder / "config.yaml").write_text(text)
    return folder / "config.yaml"


def checked(config: Path, ranks: int) -> tuple[int, str]:
    """Check a configuration; return the exit code and what it said as JSON, or its last words."""
    words = ["check", str(config), "--world-size", str(ranks), "--json"]
    code, said, errors = commanded(words, config.parent / "check.json")
    return code, said or errors


def errors_of(shown: str) -> list[dict[str, Any]]:
    """Return the errors of a check, none where it said something else."""
    return json.loads(shown)["errors"] if shown.startswith("{") else []


def told(shown: str) -> str:
    """Return the errors of a check in one line, or what it said instead."""
    told = [f"{error['where']}: {error['message']}" for error in errors_of(shown)]
    return "; ".join(told) or shown[-2000:]


def train(config: Path, ranks: int, *words: str, command: str = "train", stop: bool = False) -> Result | None:
    """Train, or run another command, and return what went wrong, None where nothing did.

    With ``stop`` it is asked to stop once it has taken a step.
    """
    environment = {"CAMPAIGN_PORT": "9", "CAMPAIGN_LAUNCH": "1"}  # nobody listens to its phases
    launcher = runs.launch(config, ranks, *words, command=command, restarts=0, env=environment)
    try:
        if stop:
            _stop(launcher, config.parent / "run/metrics.jsonl")
        code = launcher.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return Result("hang", kills.tail(config.parent))
    finally:
        left = runs.descendants(launcher) if launcher.poll() is not None else []
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait()
        for process in runs.descendants(launcher):
            process.kill()
    told = kills.tail(config.parent)
    clear = next((words for words in CLEAR_ENDS if words in told), None)
    if code and clear is not None:
        return Result(HELD, clear)
    if code and not (stop and ASKED_TO_STOP in (config.parent / "output").read_text()):
        return Result("accepted", f"READY, and `{command}` ended with {code}\n{told}")
    return Result("left over", f"{left}") if left else None


def _stop(launcher: subprocess.Popen[bytes], metrics: Path) -> None:
    """Ask a run to stop when it has taken a step; one that ends before is not asked."""
    until = time.monotonic() + PATIENCE
    while not metrics.exists() or not metrics.read_text().strip():
        if launcher.poll() is not None or time.monotonic() > until:
            return
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)


def commanded(words: Sequence[str], log: Path) -> tuple[int, str, str]:
    """Run a command in a process that is forked, so that no thread of it stays in this one.

    Returns its exit code, what it printed, which is in ``log`` too, and what it said beside that.
    """
    errors = log.with_suffix(".errors")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for number, file in ((1, log), (2, errors)):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            from megatron_rl.cli.main import main

            code = main(list(words))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = kills.wait_for(child, PATIENCE)
    return -1 if code is None else code, log.read_text(), errors.read_text(errors="replace")
