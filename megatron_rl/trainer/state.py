"""Everything the next step depends on, saved and restored symmetrically."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.algorithms import AlgorithmState
from megatron_rl.checkpoint import roles as checkpoint
from megatron_rl.config.schema import CheckpointConfig
from megatron_rl.data.prompts import PromptSource
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.worker import Answer
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.sample import RolloutSource, SampledBatch
from megatron_rl.types import Outcome, PromptBatch, Rollouts, SamplingParameters

TYPES = (PromptBatch, Rollouts, SamplingParameters, Outcome, Metrics, Answer)
"""Classes of the values in a state; a checkpoint that holds others is not read."""


@dataclass
class Best:
    """Hold the best measurements of ``checkpoint.best`` as (step, value), the best first.

    ``waited`` counts the measurements running that were no better than the best before them.
    """

    kept: list[tuple[int, float]] = field(default_factory=list)
    waited: int = 0

    def measured(self, step: int, value: float, config: CheckpointConfig) -> bool:
        """Take note of a measurement; say whether it is among the ``keep_best`` best."""
        sign = 1.0 if config.best_is == "highest" else -1.0
        better = not self.kept or sign * value > sign * self.kept[0][1]
        self.waited = 0 if better else self.waited + 1
        ranked = sorted([*self.kept, (step, value)], key=lambda kept: (-sign * kept[1], kept[0]))
        self.kept = ranked[: config.keep_best]
        return (step, value) in self.kept


@dataclass(frozen=True)
class Held:
    """Hold the metrics of a ``step`` whose weights answer the ``sets`` beside the next one."""

    step: int
    sets: tuple[str, ...]
    metrics: Metrics


@dataclass
class TrainerState:
    """Hold the position of a run: steps done, the prompt source's place, and what the algorithm carries.

    ``queue`` holds what is sampled and not yet learned from, ``source`` what is begun and not yet complete;
    a restore fills both in place.
    """

    prompts: PromptSource
    algorithm: AlgorithmState
    seed: int
    source: RolloutSource
    queue: list[SampledBatch] = field(default_factory=list)
    step: int = 0
    best: Best = field(default_factory=lambda: Best())
    held: Held | None = None

    def save(
        self, path: Path, roles: Roles, settings: CheckpointConfig, *, layout: str, beside: bool
    ) -> checkpoint.Saving:
        """Write a checkpoint; see `checkpoint.save`. Collective over the world."""
        steps = [step for step, _ in self.best.kept]
        with roles.learners_resident():
            return checkpoint.save(
                path,
                _parts(roles),
                self.state_dict(roles),
                settings.keep,
                steps,
                layout=layout,
                beside=beside,
            )

    def restore(self, path: Path, roles: Roles, *, trusted: bool = False) -> str | None:
        """Continue from a checkpoint of any layout; see `checkpoint.load`. Collective over the world.

        Return what `load_state_dict` does.
        """
        with roles.learners_resident():
            state = checkpoint.load(path, _parts(roles), TYPES, trusted=trusted)
        return self.load_state_dict(state, roles)

    def load_state_dict(self, state: Mapping[str, Any], roles: Roles) -> str | None:
        """Continue from what `state_dict` returned; return the warning of `PromptSource.load_state_dict`."""
        self.step = int(state["step"])
        self.algorithm = AlgorithmState.from_state_dict(state["algorithm"])
        warning = self.prompts.load_state_dict(state["prompts"])
        roles.hybrid_engine.version = int(state["policy_version"])
        self.source.load_state_dict(state["rollouts"])
        self.queue[:] = self.source.still_wanted([SampledBatch(**item) for item in state["queue"]])
        self.best = Best(**state["best"])
        held = state.get("held")  # none in checkpoints of before there was one
        self.held = None if held is None else Held(**held)
        return warning

    def state_dict(self, roles: Roles) -> dict[str, Any]:
        """Return the plain values that are equal on every rank."""
        return {
            "step": self.step,
            "seed": self.seed,
            "algorithm": self.algorithm.state_dict(),
            "prompts": self.prompts.state_dict(),
            "policy_version": roles.hybrid_engine.version,
            "queue": [vars(item) for item in self.queue],
            "rollouts": self.source.state_dict(),
            "best": vars(self.best),
            "held": None if self.held is None else vars(self.held),
        }


def _parts(roles: Roles) -> dict[str, checkpoint.Part]:
    return {name: checkpoint.Part(role.model, role.optimizer) for name, role in roles.learners.items()}
