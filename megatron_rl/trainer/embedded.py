"""Steps of reinforcement learning inside a user's Megatron training script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.algorithms import algorithm_of, initial_state
from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load
from megatron_rl.config.placement import role_layout
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.mixture import load_training_prompts
from megatron_rl.data.token_files import TokenFiles
from megatron_rl.data.tokenizing import load_tokenizer
from megatron_rl.distributed import device
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.megatron.adoption import (
    adopt_model,
    parallel_sizes,
    require_megatron_setup,
)
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.megatron.optimizer import Optimizer
from megatron_rl.roles.build import adopt_actor, build_roles
from megatron_rl.trainer.loop import (
    Phases,
    SameStepBatches,
    gather_step_metrics,
    train_step,
)
from megatron_rl.trainer.rewards import source_metrics
from megatron_rl.trainer.sample import RolloutSource
from megatron_rl.trainer.state import TrainerState


class EmbeddedTrainer:
    """Reinforcement learning on the model of a Megatron training script, one step per call.

    ``config``: YAML file with data, reward, rollout, algorithm and batch. The folder `model.path` provides
        config.json and the tokenizer. The file's layout, precision and optimizer of the actor are ignored.
    ``model``: DDP chunks, as Megatron-LM's setup_model_and_optimizer returns them.
    ``optimizer``, ``scheduler``: optimizer and learning-rate scheduler from the same function.
    ``increment``: argument of ``scheduler.step`` after each optimizer step.
    ``overrides``: settings such as ``batch.prompts_per_step=8``, which replace settings of the file.

    Training starts from the current weights of ``model``. The script is responsible for layout, optimizer,
    timers and checkpoints, in which it must include `state_dict`. Raises UserErrors for settings that the
    script's model does not support. Construction and `step` are collective over the world.
    """

    def __init__(
        self,
        config: str | Path,
        model: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        *,
        increment: int = 1,
        overrides: Iterable[str] = (),
    ) -> None:
        # The script has already initialised the process groups: `initialize` only selects this rank's device.
        device.initialize()
        require_megatron_setup(model, optimizer, scheduler)
        self.config = _load_checked_config(config, model, overrides)
        self.algorithm = algorithm_of(self.config)

        tokenizer: Any = load_tokenizer(self.config.model.path)
        prompts, _ = load_training_prompts(self.config, tokenizer, TokenFiles(None, print))

        # The actor wraps the script's model and optimizer; all other roles are built here. The wrapped
        # optimizer calls ``scheduler.step(increment)`` after each of its steps.
        parallel_model = adopt_model(model, read_hf_config(self.config.model.path))
        adopted_optimizer = Optimizer.from_script(parallel_model, optimizer, scheduler, increment)
        actor = adopt_actor(self.config, parallel_model, adopted_optimizer)
        self.roles = build_roles(
            self.config,
            self.algorithm,
            tokenizer,
            templated=prompts.templated,
            actor=actor,
        )

        # All ranks of the script both sample and train, so batches are never sampled ahead.
        source = RolloutSource(self.config, self.roles, self.algorithm, prompts.next_batch)
        self._batches = SameStepBatches(
            self.config,
            self.roles,
            self.algorithm,
            source,
            prompts,
        )
        self.state = TrainerState(prompts, initial_state(self.algorithm), self.config.seed, source)
        self._phases = Phases()

    def step(self) -> dict[str, float]:
        """Run one step: sample, compute rewards, update the weights; return metrics, equal on all ranks."""
        # Error messages and the hang detector's report contain the step number in ``phases``.
        state = self.state
        phases = self._phases
        phases.step = state.step + 1
        state.prompts.begin_step(phases.step)
        result = train_step(
            self._batches,
            self.roles,
            self.algorithm,
            state.algorithm,
            self.config,
            phases.step,
            phases,
        )
        assert result is not None, "every rank of a training script trains"

        state.step = phases.step
        state.algorithm = result.algorithm_state
        metrics = gather_step_metrics(result, phases.metrics()) + source_metrics(result.batch, state.prompts)
        return metrics.values()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save with the script's model, optimizer, schedule and RNG state.

        It contains the step, the position in the data, the algorithm's state, and responses that are
        unfinished or not trained on yet. It is small and equal on all ranks, so that one rank can save it.
        """
        return self.state.state_dict(self.roles)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`; the script restores model and optimizer of the same step."""
        self.state.load_state_dict(state, self.roles)

    def close(self) -> None:
        """Release the engine and end the reward processes."""
        self.roles.close()


def _load_checked_config(config: str | Path, model: Sequence[Any], overrides: Iterable[str]) -> RunConfig:
    """Return the resolved configuration, with the layout and dtype of the script's model.

    Raises UserErrors for settings that are invalid or not supported here.
    """
    # Override the file: memory estimate and checks must use the layout and dtype of the script's model.
    model_overrides = [f"actor.layout.{name}={size}" for name, size in parallel_sizes(model).items()]
    model_overrides.append(f"model.dtype={str(model[0].config.params_dtype).removeprefix('torch.')}")

    report = check_config(
        load(config, [*overrides, *model_overrides]),
        device.world_size(),
        training=True,
    )
    checked_config = report.valid()
    _reject_unsupported(checked_config)
    return checked_config


def _reject_unsupported(config: RunConfig) -> None:
    """Raise UserErrors for settings that are not supported with the model of a training script."""
    actor = config.actor
    ranks = role_layout(actor.layout, "actor.layout").ranks

    # Key -> whether the setting differs from its default.
    unsupported_settings = {
        "actor.lora": actor.lora,
        "actor.offload": actor.offload,
        "actor.freeze_router": actor.freeze_router,
        "actor.routing_replay": actor.routing_replay != "none",
        "actor.layout.ranks": ranks != tuple(range(device.world_size())),
        "asynchrony.steps_ahead": config.asynchrony.steps_ahead,
        # The script's checkpoints would lack the weights that the rollout samples from.
        "hybrid_engine.every": config.hybrid_engine.every != 1,
        "model.provider": config.model.provider,
        # The script's checkpoints would lack the critic's weights.
        "critic": algorithm_of(config).needs_critic,
        "sft": config.sft,
        "preference": config.preference,
    }

    errors = [_unsupported_error(key) for key, is_set in unsupported_settings.items() if is_set]
    if errors:
        raise UserErrors(errors)


def _unsupported_error(key: str) -> UserError:
    """Return the error of a setting that is not supported with a training script's model."""
    expected = "its default"
    if key == "actor.layout.ranks":
        expected = "every rank of the script"
    advice = f"remove {key}"
    if key == "critic":
        advice = "choose an algorithm without a critic"
    return UserError(
        f"training a script's own model does not support {key}",
        where=key,
        expected=expected,
        got="another value",
        fix=f"{advice}, or train with `megatron-rl train`",
    )
