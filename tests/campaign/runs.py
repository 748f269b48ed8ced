"""The tiny runs that the campaign kills, damages and repeats: settings, launch, and what they leave."""

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
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INCOMPLETE = (".part", ".partial", ".old", ".removed", ".incomplete")
"""How names end that only what was cut off has."""

FEW = "sft_few.jsonl"
"""A few of the quickstart's demonstrations: each rank reads all of them at each start."""

DATA = (".jsonl", ".parquet", ".saved")
"""How the names of data sets end, which lie beside the model."""
BESIDE: set[int] = set()
"""Processes of this one that runs only talk to: nothing that they have started."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_OPTIMIZER = {"learning_rate": 1e-3, "warmup_steps": 2}
_STAGE = {"checkpoint_every": 2, "optimizer": _OPTIMIZER}
_SFT = {"data": FEW, "steps": 5, "rows_per_step": 8, **_STAGE}
_JUDGE = {"data": "pairs.jsonl", "steps": 4, "pairs_per_step": 4, **_STAGE}
_COMMON: dict[str, Any] = {
    "steps": 6,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 8},
    "reward": {"function": "megatron_rl.rewards.arithmetic:exact_match", "timeout": 120.0},
    "algorithm": {"name": "grpo", "kl": {"name": "loss", "coef": 0.1}},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 2},
    "actor": {"optimizer": _OPTIMIZER},
    "rollout": {"engine": "torch", "max_response_tokens": 6},
    "evaluation": {"every": 2, "sets": {"held_out": {"data": "eval.jsonl", "max_prompts": 8}}},
    "checkpoint": {"every": 2, "keep": 2},
    "sft": _SFT,
}
_PARTIAL = {"max_response_tokens": 24, "oversample": 0.75, "round_tokens": 4, "partial": True}
_VLLM = {"engine": "vllm", "tensor": 1}
RUNS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "alone": (1, {"checkpoint": {"every": 1, "keep": 3}}),
    "colocated": (
        2,
        {
            "actor": {"layout": {"pipeline": 2}},
            "checkpoint": {"every": 1, "keep": 1, "optimizer_layout": "same", "asynchronous": True},
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
            "algorithm": {"name": "ppo", "kl": {"name": "reward", "coef": 0.05}},
            "critic": {"optimizer": _OPTIMIZER, "warmup_steps": 1},
            "reward": {"models": {"judge": {"weight": 0.5, "training": _JUDGE}}},
            "actor": {"layout": {"tensor": 2}},
        },
    ),
    "vllm": (2, {"actor": {"layout": {"tensor": 2}}, "rollout": {**_VLLM, "tensor": 2}}),
    "vllm apart": (
        2,
        {
            "actor": {"layout": {"ranks": [0]}},
            "rollout": {"ranks": [1], **_VLLM, **_PARTIAL},
            "asynchrony": {"steps_ahead": 1},
        },
    ),
    "four": (4, {"actor": {"layout": {"tensor": 2, "pipeline": 2}}, "rollout": {**_VLLM, "tensor": 2}}),
    "four apart": (
        4,
        {
            "algorithm": {"name": "ppo", "kl": {"name": "reward", "coef": 0.05}},
            "actor": {"layout": {"ranks": [0, 1], "pipeline": 2}},
            "critic": {"layout": {"ranks": [2]}, "optimizer": _OPTIMIZER},
            "rollout": {"ranks": [2, 3], "tensor": 1, **_PARTIAL},
        },
    ),
}
"""Ranks and changes of each run."""


def material(work: Path) -> Path:
    """Return the folder of the model and the data that the runs share, made once."""
    folder = work / "material"
    if not (folder / "made").exists():
        for module in ("megatron_rl.data.quickstart", "tests.campaign.forms"):
            command = [sys.executable, "-m", module, str(folder)]
            subprocess.run(command, cwd=ROOT, env=record.environment(), check=True, capture_output=True)
        (folder / "made").touch()
    if not (folder / FEW).exists():
        small_data.shorten(folder / "sft.jsonl", folder / FEW)
    return folder


def write(name: str, folder: Path, work: Path, **changes: Any) -> Path:
    """Write the configuration of a run below ``folder`` and return the file."""
    config = merged(merged(_COMMON, RUNS[name][1]), changes)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**placed(config, material(work)), "run_dir": str(folder / "run")}))
    return file


def placed(value: Any, data: Path, code: Path = ROOT) -> Any:
    """Return settings with the places of the model, of data and of Python files, which ``code`` holds."""
    if isinstance(value, Mapping):
        return {key: placed(inner, data, code) for key, inner in value.items()}
    if value == "model" or str(value).endswith(DATA):
        return str(data / value)
    return str(code / value) if isinstance(value, str) and ".py:" in value else value


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings with the values of ``changes`` in the place of those of ``base``."""
    both = {key: (base.get(key), value) for key, value in changes.items()}
    inner = {
        key: merged(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else new
        for key, (old, new) in both.items()
    }
    return {**base, **inner}


def launch(
    config: Path,
    ranks: int,
    *words: str,
    command: str = "train",
    forked: bool = True,
    restarts: int = 100,
    env: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start torchrun on a run, or what ``command`` does with ``words`` behind its configuration.

    What it says is appended to ``output`` beside the configuration.
    """
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", str(restarts)]
    line += ["--nproc-per-node", str(ranks), str(RANK), command, str(config), *words]
    temporary = config.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    inherited = {name: value for name, value in record.environment().items() if name not in LAUNCHER_NAMES}
    environment = {**inherited, "TMPDIR": str(temporary), **env}
    adopt_orphans()
    if forked:
        preload()
    with (config.parent / "output").open("ab") as output:
        start = Forked if forked else subprocess.Popen
        return start(line, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def descendants(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return what lives of what this process has started beside ``launcher``, directly or not."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid == launcher.pid or process.pid in BESIDE:
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, 0)
    return alive


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents are gone, so that none is lost from sight."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have this process killed when the one that forked it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def recording(run: Path) -> dict[str, Any]:
    """Return all that a run left behind that another run of the same seed leaves too, in another process."""
    file = run.parent / "recording.json"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            file.write_text(json.dumps(record.recording(run) | {"tensorboard": _scalars(run)}))
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"what {run} left behind cannot be read")
    return json.loads(file.read_text())


def _scalars(run: Path) -> dict[str, Any]:
    """Return what TensorBoard shows of a run, curve by curve, without what is measured on the machine."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = {}
    for folder in sorted(path for path in (run / "tensorboard").iterdir() if path.is_dir()):
        reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        reader.Reload()
        for tag in reader.Tags()["scalars"]:
            if not tag.startswith(record.MEASURED):
                points = [[event.step, event.value] for event in reader.Scalars(tag)]
                curves.setdefault(folder.name, {})[tag] = points
    return curves


@cache
def code_digest() -> str:
    """Return a digest of the package: numbers of another state of it are not compared."""
    state = hashlib.sha256()
    for file in sorted((ROOT / "megatron_rl").rglob("*.py")):
        state.update(file.read_bytes())
    return state.hexdigest()[:12]
