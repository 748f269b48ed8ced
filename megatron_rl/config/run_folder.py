"""The places of a run below its folder, and what a restart goes on from; without torch."""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from megatron_rl.durable import publish, write_text

STAGES = "stages"
"""The folder below a run's with those of its stages, each with checkpoints of its own."""


class RunFolder:
    """Name and create the places of one run below ``path``.

    A model's directory is there once it is complete: that a stage has ended is the existence of its result.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.first_start = self.path / "first_start"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self.stages = self.path / STAGES
        self.reward_models = self.path / "reward_models"
        self.model = self.path / "hf"
        self.rank_logs = self.path / "rank_logs"
        self.flight_records = self.path / "flight_recorder"
        self.tokens = self.path / "tokens"
        self.code = self.path / "code"
        self.curve = self.path / "learning_curve.png"
        self.report = self.path / "report.html"

    def stage_metrics(self, stage: str) -> Path:
        """Return the metrics of a stage, a line per step."""
        return self.path / f"{stage}.jsonl"

    def stages_measured(self) -> list[str]:
        """Return the stages whose metrics are there, the supervised one first."""
        names = [path.stem for path in self.path.glob("*.jsonl") if path != self.metrics]
        return sorted((name for name in names if "." not in name), key=lambda name: (name != "sft", name))

    def stage_checkpoints(self, stage: str) -> Path:
        """Return the directory of the checkpoints in the middle of a stage."""
        return self.stages / stage / "checkpoints"

    def stage_model(self, stage: str) -> Path:
        """Return the Hugging Face checkpoint that a stage of the actor leaves."""
        return self.stages / stage / "hf"

    def reward_model(self, name: str) -> Path:
        """Return the Hugging Face checkpoint that the training of a reward model leaves."""
        return self.reward_models / name

    def megatron_model(self, role: str) -> Path:
        """Return the folder that points to the Megatron checkpoint with a role's weights."""
        return self.path / "megatron" / role

    def rank_log(self, rank: int) -> Path:
        """Return the file that takes what the process of ``rank`` prints."""
        return self.rank_logs / f"rank_{rank}.log"

    def directories(self) -> tuple[Path, ...]:
        """Return the folder and those that a run begins with."""
        return self.path, self.tensorboard, self.rollouts, self.checkpoints, self.rank_logs

    def create(self) -> RunFolder:
        """Create the folder and its directories; what exists stays."""
        for directory in self.directories():
            directory.mkdir(parents=True, exist_ok=True)
        return self

    def has_begun(self) -> bool:
        """Return whether there is anything that a restart goes on from."""
        return any(folder.is_dir() and any(folder.iterdir()) for folder in (self.checkpoints, self.stages))

    def start_over(self) -> None:
        """Rename checkpoints and models of an earlier run, so that none is taken for this run's."""
        for directory in (self.stages, self.reward_models, self.checkpoints):
            set_aside(directory)
        self.checkpoints.mkdir(exist_ok=True)

    def publish(self, model: Path) -> None:
        """Make a stage's model the run's model, of the same files where the file system has links."""

        def link(source: str, target: str) -> None:
            try:
                os.link(source, target)
            except OSError:
                shutil.copy2(source, target)

        incomplete = self.model.with_name(self.model.name + ".incomplete")
        shutil.rmtree(incomplete, ignore_errors=True)
        shutil.copytree(model, incomplete, copy_function=link)
        publish(incomplete, self.model)

    def read_first_start(self) -> datetime | None:
        """Return when the run started first, None where its folder does not say it."""
        with suppress(OSError, ValueError):
            return datetime.fromisoformat(self.first_start.read_text(encoding="utf-8").strip())
        return None

    def keep_first_start(self, proposed: datetime) -> datetime:
        """Return when the run started first: ``proposed``, where no process has kept another time before.

        All processes that see the folder get the same.
        """
        aside = self.first_start.with_name(f"{self.first_start.name}.{socket.gethostname()}.{os.getpid()}")
        aside.write_text(proposed.isoformat(), encoding="utf-8")
        with suppress(OSError):  # it is there, or the file system has no links
            os.link(aside, self.first_start)
        if self.read_first_start() is None:
            os.replace(aside, self.first_start)
        aside.unlink(missing_ok=True)
        return self.read_first_start() or proposed

    def write_first_start(self, time: datetime) -> None:
        """Store the time in the place of another one."""
        write_text(self.first_start, time.isoformat())

    def write_config(self, text: str) -> None:
        """Store the resolved configuration."""
        write_text(self.config, text)


def folder_of_checkpoint(checkpoint: Path) -> RunFolder | None:
    """Return the run folder that a checkpoint lies in, None where no folder above it has a config.yaml."""
    folders = [RunFolder(parent) for parent in checkpoint.resolve().parents]
    return next((folder for folder in folders if folder.config.is_file()), None)


def set_aside(path: Path) -> Path | None:
    """Give a file or a directory that is not empty another name, ``NAME.1``, ``NAME.2`` …, and return it."""
    if not path.exists() or not (any(path.iterdir()) if path.is_dir() else path.stat().st_size):
        return None
    number = 1
    while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(other)
