"""What is trained before the first step of reinforcement learning: the actor on responses and on preferences,
reward models on preferences.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.algorithms import PreferenceSettings, dpo_objective, sft_objective
from megatron_rl.config.derive import longest_row, warm_up_path
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.preference import PreferenceSource
from megatron_rl.data.records import load_records
from megatron_rl.data.sft import SftSource
from megatron_rl.metrics import Metrics
from megatron_rl.parallel import device
from megatron_rl.parallel.exchange import barrier, gather_metrics, gather_rows
from megatron_rl.parallel.hf.export import export
from megatron_rl.parallel.hf.weights import load_weights
from megatron_rl.parallel.optimizer import Optimizer, wrap
from megatron_rl.roles.build import Roles, trained_here, trained_reward_model
from megatron_rl.roles.reward_model import RewardModel
from megatron_rl.trainer.logging import MetricsLog, Progress, RunFolder
from megatron_rl.trainer.phases import Phases


def train_actor(
    config: RunConfig, roles: Roles, tokenizer: Any, folder: RunFolder, phases: Phases, console: Any
) -> None:
    """Train the actor on given responses, as the section ``sft`` says.

    Roles that start from the actor's model get its weights after the training, by way of a Hugging Face
    checkpoint in the run folder, where a resumed run finds them again. Collective over the world.
    """
    actor, sft = roles.actor, config.sft
    assert sft is not None
    source = SftSource(
        load_records(sft.data, setting="sft.data"),
        tokenizer,
        config.data,
        sft,
        seed=config.seed,
        max_tokens=longest_row(config),
        model_path=config.model.path,
    )
    own = actor.optimizer

    def step() -> Metrics:
        return actor.update(source.next(sft.rows_per_step), _sft_objective)

    with actor.resident():
        if actor.model is not None:
            actor.optimizer = Optimizer(actor.model, sft.optimizer, sft.steps)
        _repeat(step, sft.steps, "supervised warm-up", "sft", "policy/", folder, phases, console)
        actor.optimizer = own
        if own is not None:
            own.reload_parameters()
        _hand_on(config, roles, phases)
    roles.hybrid_engine.mark_updated()


def train_on_preferences(
    config: RunConfig, roles: Roles, tokenizer: Any, folder: RunFolder, phases: Phases, console: Any
) -> None:
    """Train the actor on pairs of responses (DPO), as the section ``preference`` says.

    The reference is the actor as it is now: it scores all pairs before it learns from the first, so there is
    no second model. Other roles start as after `train_actor`. Collective over the world.
    """
    actor, section = roles.actor, config.preference
    assert section is not None
    source = PreferenceSource(
        load_records(section.data, setting="preference.data"),
        tokenizer,
        config.data,
        section,
        seed=config.seed,
        max_tokens=longest_row(config),
        model_path=config.model.path,
        setting="preference",
    )
    settings = PreferenceSettings(
        section.loss, section.beta, section.label_smoothing, section.margin, section.sft_coef
    )
    own = actor.optimizer

    def objective(rows: Any, log_probs: Any, entropy: Any) -> Any:
        return dpo_objective(settings, rows, log_probs)

    with actor.resident():
        pairs = [source.next(section.pairs_per_step) for _ in range(section.steps)]
        if settings.kind != "simpo":
            with phases("score"):
                scores = [gather_rows(actor.infer(batch)).tokens["old_log_probs"] for batch in pairs]
            pairs = [replace(batch, ref_log_probs=score) for batch, score in zip(pairs, scores, strict=True)]
        if actor.model is not None:
            actor.optimizer = Optimizer(actor.model, section.optimizer, section.steps)
        batches = iter(pairs)
        _repeat(
            lambda: actor.update(next(batches), objective, unit=2),
            section.steps, "training on preferences", "dpo", "policy/", folder, phases, console,
        )  # fmt: skip
        actor.optimizer = own
        if own is not None:
            own.reload_parameters()
        _hand_on(config, roles, phases)
    roles.hybrid_engine.mark_updated()


def _hand_on(config: RunConfig, roles: Roles, phases: Phases) -> None:
    """Write the actor's weights down and load them into the roles that start from them."""
    target = warm_up_path(config)
    paths = {"reference": config.reference, "critic": config.critic}
    paths |= {f"reward.models.{name}": section for name, section in config.reward.models.items()}
    # A reward model that this run has trained already, before it was ended and started again, keeps that.
    trained = {model.role for model in roles.reward_models if trained_here(config, model.name)}
    heirs = [
        role
        for role in roles.models
        if role not in trained and getattr(paths.get(role.name), "path", None) == target
    ]
    if not heirs:
        return
    with phases("export"):
        if device.rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
        barrier()
        if roles.actor.model is not None:
            export(roles.actor.model, target, config.model.path)
        barrier()
    for role in heirs:
        with role.resident():
            if role.model is not None:
                load_weights(role.model, target)
            if role.optimizer is not None:
                role.optimizer.reload_parameters()


def train_reward_models(
    config: RunConfig, roles: Roles, tokenizer: Any, folder: RunFolder, phases: Phases, console: Any
) -> None:
    """Train each reward model that has a ``training`` section and was not trained in this run before.

    Leaves a Hugging Face checkpoint of each in the run folder. Collective over the world.
    """
    for model in roles.reward_models:
        if config.reward.models[model.name].training is not None and not trained_here(config, model.name):
            target = trained_reward_model(config.run_dir, model.name)
            _train_reward_model(config, model, tokenizer, target, folder, phases, console)


def _train_reward_model(
    config: RunConfig,
    model: RewardModel,
    tokenizer: Any,
    target: Path,
    folder: RunFolder,
    phases: Phases,
    console: Any,
) -> None:
    section = config.reward.models[model.name]
    training, role = section.training, model.role
    assert training is not None
    where = f"reward.models.{model.name}.training"
    source = PreferenceSource(
        load_records(training.data, setting=f"{where}.data"),
        tokenizer,
        config.data,
        training,
        seed=config.seed,
        max_tokens=longest_row(config),
        model_path=config.model.path,
        setting=where,
    )

    def step() -> Metrics:
        return model.update(source.next(training.pairs_per_step))

    name = f"reward model {model.name}"
    with role.resident():
        if role.model is not None:
            wrap(role.model, training.optimizer.distributed)
            role.optimizer = Optimizer(role.model, training.optimizer, training.steps)
        _repeat(step, training.steps, name, f"reward_{model.name}", "reward_model/", folder, phases, console)
        role.optimizer = None
        if role.model is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with phases("export"):
                export(role.model, target, config.model.path)
            role.model.freeze()
    barrier()


def _repeat(
    update: Callable[[], Metrics],
    steps: int,
    title: str,
    phase: str,
    prefix: str,
    folder: RunFolder,
    phases: Phases,
    console: Any,
) -> None:
    """Take ``steps`` updates, log their metrics under ``phase`` and show the loss."""
    main = device.rank() == 0
    log = MetricsLog(folder, steps, phase=phase, console=console) if main else None
    with Progress(title, steps, shown=main, console=console) as progress:
        for step in range(1, steps + 1):
            phases.step = step
            with phases(phase):
                metrics = update()
            values = gather_metrics(metrics + phases.metrics()).values()
            values = {name.replace(prefix, f"{phase}/"): value for name, value in values.items()}
            if log is not None:
                log.write(step, values, shown=False)
            progress.advance(note=f"loss {values[f'{phase}/loss']:.3f}")
    if log is not None:
        log.close()


def _sft_objective(rows: Any, log_probs: Any, entropy: Any) -> Any:
    return sft_objective(rows, log_probs)
