"""Write checkpoints of a run or a stage: one at a time, some beside the steps, the last for any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_rl.checkpoint.folders import first
from megatron_rl.checkpoint.megatron_lm import (
    checkpoint_arguments,
    iteration_folder,
    save_megatron,
)
from megatron_rl.checkpoint.roles import Saving
from megatron_rl.config.checkpoint_meta import ANY, checkpoint_path, read_meta, reads_anywhere
from megatron_rl.config.schema import CheckpointConfig, RunConfig
from megatron_rl.distributed.exchange import gather_objects
from megatron_rl.durable import recover_replaced
from megatron_rl.megatron.residency import Use
from megatron_rl.metrics import Metrics
from megatron_rl.roles.model_role import ModelRole
from megatron_rl.trainer.job import Job


def save_for_megatron(config: RunConfig, actor: ModelRole, steps: int) -> None:
    """Write the actor's weights after ``steps`` for Megatron-LM, where that is asked for.

    Collective over the world.
    """
    settings = config.checkpoint
    if settings.megatron is not None:
        arguments, begun = checkpoint_arguments(config.model.path)
        with actor.resident(Use.READ):
            save_megatron(settings.megatron, actor.model, arguments, begun + steps, settings.keep)


def complete_for_megatron(config: RunConfig, actor: ModelRole, steps: int) -> None:
    """Write the Megatron-LM checkpoint after ``steps`` where a kill came between it and the run's own.

    Without this, a run that is killed after the checkpoint of its last step would never write it: no later
    step does. Collective over the world.
    """
    folder = config.checkpoint.megatron
    if folder is None:
        return
    _, begun = checkpoint_arguments(config.model.path)

    def exists() -> bool:
        recover_replaced(Path(folder))
        return iteration_folder(folder, begun + steps).is_dir()

    if not first(exists):
        save_for_megatron(config, actor, steps)


class Checkpoints:
    """Hold the checkpoint that is being written to ``folder``, and know the one begun last.

    ``write(path, layout, beside)`` is `checkpoint.save` of what is to be kept.
    """

    def __init__(
        self, folder: Path, settings: CheckpointConfig, write: Callable[[Path, str, bool], Saving]
    ) -> None:
        self.saved: tuple[int, str] | None = None
        """The step whose checkpoint this process has begun last, and how optimizers lie in it."""
        self._folder, self._settings, self._write = folder, settings, write
        self._saving: Saving | None = None
        self._written = Metrics()

    def save_now_and_then(self, step: int) -> None:
        """Write a checkpoint of the present step as the settings say, or begin to.

        Collective over the world.
        """
        self.save(step, self._settings.optimizer_layout, beside=self._settings.asynchronous)

    def save_for_good(self, step: int) -> Path:
        """Have a checkpoint of the present step that any layout reads, and return its place.

        Collective over the world.
        """
        layout = self._settings.optimizer_layout
        if self.saved not in ((step, layout), (step, ANY)):
            self.save(step, layout)
        if self.saved != (step, ANY):
            self.save(
                step, ANY
            )  # there may not be the memory, nor the time, for a gather: the other is complete
        self.complete()
        return checkpoint_path(self._folder, step)

    def write_anew(self, path: Path | None, step: int, job: Job) -> None:
        """Write a checkpoint for any layout if that is the setting and the one at ``path`` is not.

        Collective over the world.
        """
        if path is None or self._settings.optimizer_layout != ANY or reads_anywhere(read_meta(path)):
            return
        with job.phases("checkpoint"):
            self.save(step, ANY)
        job.say(f"step {step}: its checkpoint is written anew, for any layout")

    def save(self, step: int, layout: str, *, beside: bool = False) -> None:
        """Write a checkpoint of the present step, or begin to. Collective over the world."""
        self.complete()
        self._saving = self._write(checkpoint_path(self._folder, step), layout, beside)
        if not beside:
            self.complete()
        self.saved = (step, layout)

    def complete(self) -> None:
        """Wait for the checkpoint that is being written, if any. Collective over the world."""
        if self._saving is not None:
            self._saving.finish()
            self._written += Metrics({}, {"time/checkpoint_write": self._saving.seconds})
            self._saving = None

    def complete_what_is_written(self) -> Metrics:
        """Complete a checkpoint that all ranks have written; return the times of those that became complete.

        Collective over the world.
        """
        if self._saving is not None and all(gather_objects(self._saving.written)):
            self.complete()
        written, self._written = self._written, Metrics()
        return written
