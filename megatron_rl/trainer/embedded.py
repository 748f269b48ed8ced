"""Steps of reinforcement learning inside a Megatron training script of the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.algorithms import algorithm_of, initial_state
from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load
from megatron_rl.config.placement import role_layout
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.token_files import TokenFiles
from megatron_rl.data.tokenizing import load_tokenizer
from megatron_rl.distributed import device
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.megatron.adoption import adopt_model, layout_of, require_set_up
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.megatron.optimizer import Optimizer
from megatron_rl.roles.build import adopted_actor, build_roles
from megatron_rl.trainer.loop import Phases, SameStepBatches, gather_step, train_step
from megatron_rl.trainer.sample import RolloutSource
from megatron_rl.trainer.state import TrainerState


class EmbeddedTrainer:
    """Teach the model of a Megatron training script, step by step, inside its own loop.

    ``model`` (DDP chunks), ``optimizer`` and ``scheduler`` are what Megatron-LM's setup_model_and_optimizer
    returns; the schedule goes on by ``increment`` with each optimizer step. Arguments, layout, optimizer,
    timers and checkpoints stay the script's; `state_dict` belongs into these. The YAML file at ``config``
    says the rest: data, reward, rollout, algorithm and batch; its ``model.path`` has config.json and the
    tokenizer, and what it says of the actor's layout, precision and optimizer does not count. Weights are
    those that ``model`` has.
    Raises UserErrors for what does not fit. Collective over the world, as `step` is.
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
        device.initialize()
        require_set_up(model, optimizer, scheduler)
        layout = layout_of(model)
        stated = [f"actor.layout.{name}={size}" for name, size in layout.items()]
        stated.append(f"model.dtype={str(model[0].config.params_dtype).removeprefix('torch.')}")
        report = check_config(load(config, [*overrides, *stated]), device.world_size(), training=True)
        self.config = valid = report.valid()
        _require_plain(valid)
        self.algorithm = algorithm_of(valid)
        tokenizer: Any = load_tokenizer(valid.model.path)
        prompts = load_prompts(
            valid, "data.train", valid.data.train or "", tokenizer, TokenFiles(None, print)
        )
        adopted = adopt_model(model, read_hf_config(valid.model.path))
        stepped = Optimizer.adopted(adopted, optimizer, scheduler, increment)
        actor = adopted_actor(valid, adopted, stepped)
        self.roles = build_roles(valid, self.algorithm, tokenizer, templated=prompts.templated, actor=actor)
        source = RolloutSource(valid, self.roles, self.algorithm, prompts.next)
        self._batches = SameStepBatches(valid, self.roles, self.algorithm, source)
        self.state = TrainerState(prompts, initial_state(self.algorithm), valid.seed, source)
        self._phases = Phases()

    def step(self) -> dict[str, float]:
        """Sample, judge and learn once; return the step's metrics, the same on every rank."""
        state, phases = self.state, self._phases
        phases.step = state.step + 1
        result = train_step(
            self._batches, self.roles, self.algorithm, state.algorithm, self.config, phases.step, phases
        )
        assert result is not None, "every rank of a training script learns"
        state.step, state.algorithm = phases.step, result.algorithm_state
        return gather_step(result, phases.metrics()).values()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on beside the script's model, optimizer, schedule and generators.

        That is the step, the position in the data, what the algorithm carries, and responses that are begun
        or not yet learned from. It is the same on every rank, and small: one of them saves it.
        """
        return self.state.state_dict(self.roles)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, beside the model and the optimizer of the same step."""
        self.state.load_state_dict(state, self.roles)

    def close(self) -> None:
        """Release the engine and the processes of rewards."""
        self.roles.close()


def _require_plain(config: RunConfig) -> None:
    """Raise UserErrors for what a run of its own does with an actor, and a training script's does not."""
    actor, ranks = config.actor, role_layout(config.actor.layout, "actor.layout").ranks
    refused = {
        "actor.lora": actor.lora,
        "actor.offload": actor.offload,
        "actor.freeze_router": actor.freeze_router,
        "actor.routing_replay": actor.routing_replay != "none",
        "actor.layout.ranks": ranks != tuple(range(device.world_size())),
        "asynchrony.steps_ahead": config.asynchrony.steps_ahead,
        "model.provider": config.model.provider,
        "critic": algorithm_of(config).needs_critic,  # whose weights the script's checkpoints would lack
        "sft": config.sft,
        "preference": config.preference,
    }
    errors = [
        UserError(
            f"a training script's own model is trained without {where}",
            where=where,
            expected="its default" if where != "actor.layout.ranks" else "every rank of the script",
            got="another value",
            fix=("choose an algorithm without a critic" if where == "critic" else f"remove {where}")
            + ", or train with `python -m megatron_rl train`",
        )
        for where, value in refused.items()
        if value
    ]
    if errors:
        raise UserErrors(errors)
