"""State of a run between two steps, and the schedule of its checkpoints.

Distributed checkpoints store the roles' tensors. All other state is one dictionary of plain values and host
tensors that is equal on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.algorithms import AlgorithmState
from megatron_rl.checkpoint import roles as checkpoint
from megatron_rl.checkpoint.folders import compute_on_first_rank
from megatron_rl.checkpoint.megatron_lm import (
    checkpoint_arguments,
    iteration_folder,
    save_megatron,
)
from megatron_rl.config.checkpoint_meta import (
    ANY,
    checkpoint_path,
    fits_any_layout,
    is_gathered,
    read_meta,
)
from megatron_rl.config.schema import CheckpointConfig, RunConfig
from megatron_rl.config.token_budget import TokenBudget
from megatron_rl.data.mixture import MixedPrompts, TrainingPrompts
from megatron_rl.distributed.exchange import gather_objects
from megatron_rl.durable import recover_replaced
from megatron_rl.megatron.residency import ResidencyLevel
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.worker import Answer
from megatron_rl.roles.build import Roles
from megatron_rl.roles.model_role import ModelRole
from megatron_rl.trainer.health import RuleState
from megatron_rl.trainer.job import Job
from megatron_rl.trainer.sample import RolloutSource, SampledBatch
from megatron_rl.types import (
    LogitRules,
    Outcome,
    PromptBatch,
    Rollouts,
    SamplingParameters,
)

STATE_TYPES = (
    PromptBatch,
    Rollouts,
    SamplingParameters,
    LogitRules,
    Outcome,
    Metrics,
    Answer,
)
"""Classes that a checkpoint's state may contain; a checkpoint with other classes is refused."""


ROLLOUT_WEIGHTS = "rollout"
"""Name in a checkpoint of the weights that responses are sampled from, if they are older than the actor's."""


@dataclass
class Best:
    """Best measurements of the metric `checkpoint.best`.

    Example: with ``keep_best: 2``, accuracies are 0.5, 0.7 and 0.6 at steps 10, 20 and 30. Then ``kept`` is
    ``[(20, 0.7), (30, 0.6)]``. ``waited`` is 1, since one measurement followed the best one.
    """

    kept: list[tuple[int, float]] = field(default_factory=list)
    """(step, value) of the best measurements, the best first; their checkpoints are retained."""
    waited: int = 0
    """Number of measurements since the best one."""

    def record(self, step: int, value: float, config: CheckpointConfig) -> bool:
        """Record a measurement; return whether it is among the best `checkpoint.keep_best` measurements."""
        sign = 1.0 if config.best_is == "highest" else -1.0
        is_new_best = not self.kept or sign * value > sign * self.kept[0][1]
        self.waited = 0 if is_new_best else self.waited + 1

        # Of equal values the earlier step ranks first, so that a plateau does not replace checkpoints.
        ranked_measurements = sorted(
            [*self.kept, (step, value)],
            key=lambda measurement: (-sign * measurement[1], measurement[0]),
        )
        self.kept = ranked_measurements[: config.keep_best]
        return (step, value) in self.kept


@dataclass(frozen=True)
class DeferredEvaluation:
    """Evaluation of a step's weights that is deferred to the next step, which samples with these weights."""

    step: int
    """Step whose weights are evaluated."""
    sets: tuple[str, ...]
    """Names of the evaluation sets."""
    metrics: Metrics
    """Metrics of the step, which are written together with the evaluation's metrics."""


@dataclass
class TrainerState:
    """State of a run between steps: everything on which the next step depends, except the roles' tensors."""

    prompts: TrainingPrompts
    """Training prompts, with the current position in the data."""
    algorithm: AlgorithmState
    """State of the algorithm between steps."""
    seed: int
    """Seed of the run."""
    source: RolloutSource
    """Source of responses, with the groups that have not been trained on."""
    queue: list[SampledBatch] = field(default_factory=list)
    """Sampled batches that have not been trained on; the same list object as in `AheadBatches`."""
    step: int = 0
    """Number of completed steps."""
    best: Best = field(default_factory=Best)
    """Best measurements of `checkpoint.best` so far."""
    deferred: DeferredEvaluation | None = None
    """Evaluation of the last step if it has not run yet, otherwise None."""
    health: dict[str, RuleState] = field(default_factory=dict)
    """Name of a health rule -> its state; only the main rank updates and saves it."""
    budget: TokenBudget | None = None
    """Budget of tokens per micro-batch with `batch.memory_target`, otherwise None."""

    def save(
        self,
        path: Path,
        roles: Roles,
        settings: CheckpointConfig,
        *,
        optimizer_format: str,
        in_background: bool,
    ) -> checkpoint.PendingCheckpoint:
        """Save a checkpoint of the roles and this state into the folder ``path``.

        ``optimizer_format`` is `ANY` or `SAME`. `ANY` saves complete optimizer states, which every parallel
        layout can load. `SAME` saves the optimizer shards of the current layout. With ``in_background``,
        tensors are written while training continues; the caller must call `PendingCheckpoint.finish`.
        Collective over the world.
        """
        # Retain the checkpoints of the best steps in addition to the newest ones.
        best_steps = [step for step, _ in self.best.kept]
        trained_roles = _trained_roles(roles)

        # With `hybrid_engine.every` above 1, the next step may sample from older weights than the actor's.
        if roles.hybrid_engine.rollout_version != roles.hybrid_engine.version:
            trained_roles[ROLLOUT_WEIGHTS] = _rollout_weights(roles)

        with roles.keep_trained_roles_resident():
            return checkpoint.save_checkpoint(
                path,
                trained_roles,
                self.state_dict(roles),
                settings.keep,
                best_steps,
                optimizer_format=optimizer_format,
                in_background=in_background,
            )

    def restore(
        self,
        path: Path,
        roles: Roles,
        *,
        trusted: bool = False,
    ) -> str | None:
        """Restore roles and state from a checkpoint that was saved with any parallel layout.

        Returns a warning if the training data has changed, otherwise None. ``trusted``: whether the
        checkpoint may contain code. Collective over the world.
        """
        trained_roles = _trained_roles(roles)
        rollout_policy = roles.hybrid_engine.rollout_policy
        has_rollout_weights = compute_on_first_rank(lambda: ROLLOUT_WEIGHTS in read_meta(path)["roles"])
        restores_rollout_weights = has_rollout_weights and rollout_policy.every != 1
        with roles.keep_trained_roles_resident():
            if restores_rollout_weights:
                # Allocate the copy of the rollout policy's weights, into which the load then writes.
                rollout_policy.capture_weights(roles.hybrid_engine.version)
                trained_roles[ROLLOUT_WEIGHTS] = _rollout_weights(roles)
            state = checkpoint.load_checkpoint(path, trained_roles, STATE_TYPES, trusted=trusted)

        # Without stored rollout weights, the next responses are sampled from the actor's weights.
        rollout_policy.version = None
        if restores_rollout_weights:
            rollout_policy.version = int(state["rollout_version"])
        return self.load_state_dict(state, roles)

    def load_state_dict(self, state: Mapping[str, Any], roles: Roles) -> str | None:
        """Restore the result of `state_dict`; return a warning if the training data has changed, or None.

        ``source`` and ``queue`` are changed in place, since the batch source has references to them.
        """
        self.step = int(state["step"])
        self.algorithm = AlgorithmState.from_state_dict(state["algorithm"])
        warning = self.prompts.load_state_dict(state["prompts"])

        # Restore the version before the groups: it determines which groups are too old.
        roles.hybrid_engine.version = int(state["policy_version"])
        self.source.load_state_dict(state["rollouts"])
        queued_batches = [SampledBatch(**batch_fields) for batch_fields in state["queue"]]
        self.queue[:] = self.source.select_trainable(queued_batches)
        if isinstance(self.prompts, MixedPrompts):
            self._set_sources(self.prompts)
        self.best = Best(**state["best"])

        # Checkpoints of older versions lack the keys "held" and "health".
        deferred_fields = state.get("held")
        self.deferred = None
        if deferred_fields is not None:
            self.deferred = DeferredEvaluation(**deferred_fields)
        self.health = {name: RuleState(**values) for name, values in state.get("health", {}).items()}
        if self.budget is not None:
            self.budget = self.budget.restore(state.get("token_budget"))
        return warning

    def _set_sources(self, prompts: MixedPrompts) -> None:
        """Set each restored prompt's data source, which selects the prompt's reward function."""
        buffer = self.source.buffer
        for group in (*buffer.waiting, *buffer.started):
            group.prompt = prompts.with_sources(group.prompt)
        self.queue[:] = [replace(batch, prompts=prompts.with_sources(batch.prompts)) for batch in self.queue]

    def state_dict(self, roles: Roles) -> dict[str, Any]:
        """Return the state as plain values and host tensors, equal on all ranks except for ``health``."""
        # Existing checkpoints have these keys: a change requires a new STATE_FORMAT.
        state = {
            "step": self.step,
            "seed": self.seed,
            "algorithm": self.algorithm.state_dict(),
            "prompts": self.prompts.state_dict(),
            "policy_version": roles.hybrid_engine.version,
            "rollout_version": roles.hybrid_engine.rollout_version,
            "queue": [vars(batch) for batch in self.queue],
            "rollouts": self.source.state_dict(),
            "best": vars(self.best),
            "held": None if self.deferred is None else vars(self.deferred),
            "health": {name: asdict(rule_state) for name, rule_state in self.health.items()},
        }
        if self.budget is not None:
            state["token_budget"] = self.budget.state_dict()
        return state


def _trained_roles(roles: Roles) -> dict[str, checkpoint.TrainedRole]:
    """Return the model and optimizer of each role that checkpoints of the run contain, by role name."""
    return {
        name: checkpoint.TrainedRole(role.model, role.optimizer) for name, role in roles.trained_roles.items()
    }


def _rollout_weights(roles: Roles) -> checkpoint.TrainedRole:
    """Return the rollout policy's weights as a role that checkpoints can save and restore."""
    return checkpoint.TrainedRole(roles.actor.model, None, roles.hybrid_engine.rollout_policy.swap_into_model)


class Checkpoints:
    """Writer of the checkpoints of a run or a stage into ``folder``; it writes at most one at a time.

    ``write(path, optimizer_format, in_background)`` must call `checkpoint.save_checkpoint` with the current
    state. The optimizer format is `ANY` (complete optimizer states, which every parallel layout can load) or
    `SAME` (the optimizer shards of the current layout). With ``in_background``, training continues while the
    tensors are written.
    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig,
        write: Callable[[Path, str, bool], checkpoint.PendingCheckpoint],
    ) -> None:
        self.last_saved: tuple[int, str] | None = None
        """Step and optimizer format of the last checkpoint that this process started to save."""
        self._folder = folder
        assert settings.optimizer_layout is not None, "the configuration is resolved"
        self._optimizer_format = settings.optimizer_layout
        self._asynchronous = settings.asynchronous
        self._write = write
        self._pending: checkpoint.PendingCheckpoint | None = None
        self._write_times = Metrics()

    def save_periodic(self, step: int) -> None:
        """Save the current step with the optimizer format that `checkpoint.optimizer_layout` configures.

        With `checkpoint.asynchronous`, the checkpoint is written in the background. Collective over the
        world.
        """
        self.save(step, self._optimizer_format, in_background=self._asynchronous)

    def save_final(self, step: int) -> Path:
        """Save the current step so that it can be restored with every parallel layout.

        Returns the checkpoint's path. Collective over the world.
        """
        # First save the step with the configured optimizer format, unless this process has already saved it.
        if self.last_saved not in ((step, self._optimizer_format), (step, ANY)):
            self.save(step, self._optimizer_format)
        self.wait_for_pending()

        # Optimizer shards without an index can only be restored with the same parallel layout. In this case
        # save again with complete optimizer states (`ANY`). If the second save fails for lack of memory or
        # time, the first checkpoint still exists.
        path = checkpoint_path(self._folder, step)
        if not compute_on_first_rank(lambda: fits_any_layout(read_meta(path))):
            self.save(step, ANY)
        return path

    def rewrite_for_any_layout(self, path: Path | None, step: int, job: Job) -> None:
        """Save the restored step again with complete optimizer states, which every parallel layout can load.

        Does nothing if the checkpoint already contains complete states, if `checkpoint.optimizer_layout` is
        not `ANY`, or if no checkpoint was restored. ``path``: the restored checkpoint, or None. Collective
        over the world.
        """
        # Save now and not after the next step, so that a user can change the layout without training a step.
        if path is None or self._optimizer_format != ANY or is_gathered(read_meta(path)):
            return
        with job.phases("checkpoint"):
            self.save(step, ANY)
        job.print(f"step {step}: its checkpoint is rewritten for any layout")

    def save(self, step: int, optimizer_format: str, *, in_background: bool = False) -> None:
        """Save the current step; with ``in_background``, return while the tensors are being written.

        ``optimizer_format``: `ANY` for complete optimizer states, which every parallel layout can load, or
        `SAME` for the optimizer shards of the current layout. Collective over the world.
        """
        # Only one checkpoint is written at a time, so wait for the previous one.
        self.wait_for_pending()
        self._pending = self._write(checkpoint_path(self._folder, step), optimizer_format, in_background)
        if not in_background:
            self.wait_for_pending()
        self.last_saved = (step, optimizer_format)

    def wait_for_pending(self) -> None:
        """Wait for the checkpoint that is being written, if any. Collective over the world."""
        if self._pending is not None:
            self._pending.finish()
            self._write_times += Metrics.maximum("time/checkpoint_write", self._pending.seconds)
            self._pending = None

    def finish_if_written(self) -> Metrics:
        """Complete the pending checkpoint if all ranks have written it; return metrics of the write time.

        The metrics cover the checkpoints that were completed since the last call. Collective over the world.
        """
        # Do not wait: `wait_for_pending` would block until every rank has written.
        if self._pending is not None and all(gather_objects(self._pending.is_written)):
            self.wait_for_pending()

        times = self._write_times
        self._write_times = Metrics()
        return times


def save_for_megatron(config: RunConfig, actor: ModelRole, steps: int) -> None:
    """Save the actor after step ``steps`` for Megatron-LM, if `checkpoint.megatron` is set.

    Collective over the world.
    """
    settings = config.checkpoint
    if settings.megatron is None:
        return

    # If the model came from a Megatron-LM checkpoint, continue its numbering of iterations.
    arguments, first_iteration = checkpoint_arguments(config.model.path)
    with actor.resident(ResidencyLevel.READ_WEIGHTS):
        save_megatron(
            settings.megatron,
            actor.model,
            arguments,
            first_iteration + steps,
            settings.keep,
        )


def save_missing_for_megatron(config: RunConfig, actor: ModelRole, steps: int) -> None:
    """Save the Megatron-LM checkpoint of a restored step if it is missing.

    It is missing if the run was killed after the step's own checkpoint was written. If the step is the last
    one, no later step would write a Megatron-LM checkpoint. Collective over the world.
    """
    folder = config.checkpoint.megatron
    if folder is None:
        return
    _, first_iteration = checkpoint_arguments(config.model.path)

    def is_written() -> bool:
        """Return whether the step's Megatron-LM checkpoint exists.

        An interrupted replacement of the checkpoint is undone first.
        """
        recover_replaced(Path(folder))
        return iteration_folder(folder, first_iteration + steps).is_dir()

    if not compute_on_first_rank(is_written):
        save_for_megatron(config, actor, steps)
