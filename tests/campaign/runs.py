"""Tiny runs of the campaign: their configurations, their launch, and the recording of their results."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests import small_data
from tests.campaign.forked import Forked, preload
from tests.golden import record

ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("rank.py")
LAUNCHER_NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
INCOMPLETE = (".part", ".partial", ".old", ".removed", ".incomplete")
"""Suffixes of files that an interrupted write leaves."""

FEW = "sft_few.jsonl"
"""A few of the quickstart's demonstrations: each rank reads all of them at each start."""

DATA = (".jsonl", ".parquet", ".saved")
"""Suffixes of data sets, whose paths are relative to the data folder."""
HELPER_PROCESSES: set[int] = set()
"""Child processes that do not belong to a run, such as servers."""

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OPTIMIZER = {"learning_rate": 1e-3, "warmup_steps": 2}
_STAGE = {"checkpoint_every": 2, "optimizer": _OPTIMIZER}
_SFT = {"data": FEW, "steps": 5, "rows_per_step": 8, **_STAGE}
_JUDGE = {"data": "pairs.jsonl", "steps": 4, "pairs_per_step": 4, **_STAGE}
_COMMON: dict[str, Any] = {
    "steps": 6,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 8},
    "reward": {
        "function": "megatron_rl.rewards.arithmetic:exact_match",
        "timeout": 120.0,
    },
    "algorithm": {"name": "grpo", "kl": {"name": "loss", "coef": 0.1}},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 2},
    "actor": {"optimizer": _OPTIMIZER},
    "rollout": {"engine": "torch", "max_response_tokens": 6},
    "evaluation": {
        "every": 2,
        "sets": {"held_out": {"data": "eval.jsonl", "max_prompts": 8}},
    },
    "checkpoint": {"every": 2, "keep": 2},
    "sft": _SFT,
}
_PARTIAL = {
    "max_response_tokens": 24,
    "oversample": 0.75,
    "round_tokens": 4,
    "partial": True,
}
_VLLM = {"engine": "vllm", "tensor": 1}
RUNS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "alone": (1, {"checkpoint": {"every": 1, "keep": 3}}),
    "colocated": (
        2,
        {
            "actor": {"layout": {"pipeline": 2}},
            "checkpoint": {
                "every": 1,
                "keep": 1,
                "optimizer_layout": "same",
                "asynchronous": True,
            },
        },
    ),
    "ahead": (
        2,
        {
            "actor": {"layout": {"ranks": [0]}},
            "rollout": {"ranks": [1], **_PARTIAL},
            "asynchrony": {"steps_ahead": 1},
        },
    ),
    "judged": (
        2,
        {
            "algorithm": {
                "name": "ppo",
                "kl": {"name": "reward", "coef": 0.05},
            },
            "critic": {"optimizer": _OPTIMIZER, "warmup_steps": 1},
            "reward": {"models": {"judge": {"weight": 0.5, "training": _JUDGE}}},
            "actor": {"layout": {"tensor": 2}},
        },
    ),
    "vllm": (
        2,
        {"actor": {"layout": {"tensor": 2}}, "rollout": {**_VLLM, "tensor": 2}},
    ),
    "vllm apart": (
        2,
        {
            "actor": {"layout": {"ranks": [0]}},
            "rollout": {"ranks": [1], **_VLLM, **_PARTIAL},
            "asynchrony": {"steps_ahead": 1},
        },
    ),
    "four": (
        4,
        {
            "actor": {"layout": {"tensor": 2, "pipeline": 2}},
            "rollout": {**_VLLM, "tensor": 2},
        },
    ),
    "four apart": (
        4,
        {
            "algorithm": {
                "name": "ppo",
                "kl": {"name": "reward", "coef": 0.05},
            },
            "actor": {"layout": {"ranks": [0, 1], "pipeline": 2}},
            "critic": {"layout": {"ranks": [2]}, "optimizer": _OPTIMIZER},
            "rollout": {"ranks": [2, 3], "tensor": 1, **_PARTIAL},
        },
    ),
}
"""Name of a run -> its ranks and its changes of `_COMMON`."""


def material(work: Path) -> Path:
    """Return the folder of the runs' model and data; it is created once."""
    folder = work / "material"
    if not (folder / "made").exists():
        for module in ("megatron_rl.data.quickstart", "tests.campaign.forms"):
            command = [sys.executable, "-m", module, str(folder)]
            subprocess.run(
                command,
                cwd=ROOT,
                env=record.environment(),
                check=True,
                capture_output=True,
            )
        # The marker comes last: an interrupted creation is repeated.
        (folder / "made").touch()
    if not (folder / FEW).exists():
        small_data.shorten(folder / "sft.jsonl", folder / FEW)
    return folder


def write(name: str, folder: Path, work: Path, **changes: Any) -> Path:
    """Write the configuration of a run in ``folder`` and return its path."""
    config = merged(merged(_COMMON, RUNS[name][1]), changes)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                **with_absolute_paths(config, material(work)),
                "run_dir": str(folder / "run"),
            }
        )
    )
    return file


def with_absolute_paths(value: Any, data: Path, code: Path = ROOT) -> Any:
    """Return settings with absolute paths of the model, data and Python files; the latter are in ``code``."""
    if isinstance(value, Mapping):
        return {key: with_absolute_paths(nested_value, data, code) for key, nested_value in value.items()}
    if value == "model" or str(value).endswith(DATA):
        return str(data / value)
    if isinstance(value, str) and ".py:" in value:
        return str(code / value)
    return value


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``changes``, merged in nested mappings."""
    pairs = {key: (base.get(key), value) for key, value in changes.items()}
    merged_values = {
        key: merged(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else new
        for key, (old, new) in pairs.items()
    }
    return {**base, **merged_values}


def launch(
    config: Path,
    ranks: int,
    *arguments: str,
    command: str = "train",
    forked: bool = True,
    restarts: int = 100,
    env: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start torchrun with ``command`` on a configuration, with further arguments.

    Its output is appended to ``output`` beside the configuration.
    """
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts",
        str(restarts),
    ]
    line += [
        "--nproc-per-node",
        str(ranks),
        str(RANK),
        command,
        str(config),
        *arguments,
    ]
    temporary = config.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    # Temporary files of a run go to a folder of its own, where leftovers are found.
    inherited = {name: value for name, value in record.environment().items() if name not in LAUNCHER_NAMES}
    environment = {**inherited, "TMPDIR": str(temporary), **env}

    # Ranks of a killed torchrun become children of this process.
    adopt_orphans()
    if forked:
        preload()

    with (config.parent / "output").open("ab") as output:
        start = Forked if forked else subprocess.Popen
        return start(
            line,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def descendants(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the running descendants of this process, without ``launcher`` and `HELPER_PROCESSES`."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid == launcher.pid or process.pid in HELPER_PROCESSES:
                continue
            # Zombies of adopted processes are reaped, since nobody else waits for them.
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, 0)
    return alive


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that they are still found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def recording(run: Path) -> dict[str, Any]:
    """Return the reproducible results of a run, read in a process of its own."""
    file = run.parent / "recording.json"
    # Readers of Parquet and TensorBoard may start threads, which a process that forks ranks must not have.
    child = os.fork()
    if child == 0:
        code = 1
        try:
            file.write_text(json.dumps(record.recording(run) | {"tensorboard": _scalars(run)}))
            code = 0
        finally:
            os._exit(code)

    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"the results of {run} cannot be read")
    return json.loads(file.read_text())


def _scalars(run: Path) -> dict[str, Any]:
    """Return a run's TensorBoard curves, without metrics that are measured on the machine."""
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    curves = {}
    for folder in sorted(path for path in (run / "tensorboard").iterdir() if path.is_dir()):
        # Size 0 reads every point.
        reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        reader.Reload()
        for tag in reader.Tags()["scalars"]:
            if not tag.startswith(record.MEASURED):
                points = [[event.step, event.value] for event in reader.Scalars(tag)]
                curves.setdefault(folder.name, {})[tag] = points
    return curves


@cache
def code_digest() -> str:
    """Return a digest of the package's code, since results of different code are not compared."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "megatron_rl").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
