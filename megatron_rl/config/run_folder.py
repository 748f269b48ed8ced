"""Paths of a run below its folder, and the state that a restart resumes from; importable without torch."""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from megatron_rl.durable import publish_folder, write_text

# Subfolder of a run folder with a folder for each stage, which has its own checkpoints.
STAGES = "stages"


class RunFolder:
    """Paths of all files and folders of a run, below the run folder ``path``.

    A training stage before RL, such as SFT, publishes its model directory atomically, so the directory exists
    only if the stage has ended.

    Example: ``RunFolder("runs/first").checkpoints`` is ``Path("runs/first/checkpoints")``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

        # Configuration, and the times and settings of each start.
        self.config = self.path / "config.yaml"
        self.first_start = self.path / "first_start"
        self.starts = self.path / "starts.json"

        # Metrics and samples.
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.rollouts = self.path / "rollouts"

        # Checkpoints and Hugging Face models.
        self.checkpoints = self.path / "checkpoints"
        self.stages = self.path / STAGES
        self.reward_models = self.path / "reward_models"
        self.model = self.path / "hf"

        # Logs, tokenized data, copies of the user's code, and the report.
        self.rank_logs = self.path / "rank_logs"
        self.flight_records = self.path / "flight_recorder"
        self.tokens = self.path / "tokens"
        self.code = self.path / "code"
        self.curve = self.path / "learning_curve.png"
        self.report = self.path / "report.html"

    def stage_metrics(self, stage: str) -> Path:
        """Return the metrics file of a stage, with a line per step."""
        return self.path / f"{stage}.jsonl"

    def stages_with_metrics(self) -> list[str]:
        """Return the stages that have a metrics file, ``sft`` first."""
        names = [path.stem for path in self.path.glob("*.jsonl") if path != self.metrics]
        # A name with a dot is a file that `set_aside` renamed.
        stages = [name for name in names if "." not in name]
        return sorted(stages, key=lambda name: (name != "sft", name))

    def stage_checkpoints(self, stage: str) -> Path:
        """Return the directory of the checkpoints from which a training stage, such as ``sft``, resumes."""
        return self.stages / stage / "checkpoints"

    def stage_model(self, stage: str) -> Path:
        """Return the directory of the Hugging Face checkpoint that a training stage of the actor writes."""
        return self.stages / stage / "hf"

    def reward_model(self, name: str) -> Path:
        """Return the Hugging Face checkpoint that the training of a reward model writes."""
        return self.reward_models / name

    def megatron_model(self, role: str) -> Path:
        """Return the model folder of a role whose weights are in a Megatron checkpoint.

        The folder contains a pointer to that checkpoint.
        """
        return self.path / "megatron" / role

    def rank_log(self, rank: int) -> Path:
        """Return the file for the output of the process of ``rank``."""
        return self.rank_logs / f"rank_{rank}.log"

    def directories(self) -> tuple[Path, ...]:
        """Return the run folder and its subfolders that a run creates at its start."""
        return self.path, self.tensorboard, self.rollouts, self.checkpoints, self.rank_logs

    def create(self) -> RunFolder:
        """Create the run folder and its subfolders unless they exist; return this object."""
        for directory in self.directories():
            directory.mkdir(parents=True, exist_ok=True)
        return self

    def has_begun(self) -> bool:
        """Return whether the folder contains any state that a restart would resume from."""
        return any(folder.is_dir() and any(folder.iterdir()) for folder in (self.checkpoints, self.stages))

    def start_over(self) -> None:
        """Rename checkpoints and models of an earlier run, so that this run does not resume from them."""
        for directory in (self.stages, self.reward_models, self.checkpoints):
            set_aside(directory)
        self.checkpoints.mkdir(exist_ok=True)

    def publish_model(self, model: Path) -> None:
        """Publish a stage's model as the run's model, by hard links if the file system supports them."""

        def link_or_copy(source: str, target: str) -> None:
            """Create a hard link to a file; copy the file if the file system does not support links."""
            try:
                os.link(source, target)
            except OSError:
                shutil.copy2(source, target)

        incomplete = self.model.with_name(self.model.name + ".incomplete")
        shutil.rmtree(incomplete, ignore_errors=True)
        shutil.copytree(model, incomplete, copy_function=link_or_copy)
        publish_folder(incomplete, self.model)

    def read_first_start(self) -> datetime | None:
        """Return the time of the run's first start; None if no valid time is stored."""
        with suppress(OSError, ValueError):
            return datetime.fromisoformat(self.first_start.read_text(encoding="utf-8").strip())
        return None

    def store_first_start(self, proposed_time: datetime) -> datetime:
        """Store ``proposed_time`` as the time of the first start if none is stored; return the stored time.

        All processes that share the folder return the same time.
        """
        temporary = self.first_start.with_name(
            f"{self.first_start.name}.{socket.gethostname()}.{os.getpid()}"
        )
        temporary.write_text(proposed_time.isoformat(), encoding="utf-8")

        # Creating a hard link is atomic and fails if the name exists, so the first process sets the time.
        with suppress(OSError):  # the name is taken, or the file system has no links
            os.link(temporary, self.first_start)
        if self.read_first_start() is None:
            os.replace(temporary, self.first_start)
        temporary.unlink(missing_ok=True)
        return self.read_first_start() or proposed_time

    def write_first_start(self, time: datetime) -> None:
        """Replace the stored time of the first start."""
        write_text(self.first_start, time.isoformat())

    def write_config(self, text: str) -> None:
        """Store the text of the resolved configuration."""
        write_text(self.config, text)


def folder_of_checkpoint(checkpoint: Path) -> RunFolder | None:
    """Return the nearest parent of a checkpoint that has a config.yaml, or None outside of a run folder."""
    for parent in checkpoint.resolve().parents:
        folder = RunFolder(parent)
        if folder.config.is_file():
            return folder
    return None


def set_aside(path: Path) -> Path | None:
    """Rename a non-empty file or directory to the first free ``NAME.1``, ``NAME.2`` …; return that path.

    If ``path`` does not exist or is empty, return None and rename nothing.
    """
    if not path.exists():
        return None
    if path.is_dir():
        is_empty = not any(path.iterdir())
    else:
        is_empty = path.stat().st_size == 0
    if is_empty:
        return None

    number = 1
    target = path.with_name(f"{path.stem}.{number}{path.suffix}")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.stem}.{number}{path.suffix}")
    return path.rename(target)
