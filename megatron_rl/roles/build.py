"""Make the roles of a run from its resolved configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.algorithms import Algorithm
from megatron_rl.algorithms.lookup import scoring_reason
from megatron_rl.checkpoint.megatron_lm import load_optimizer
from megatron_rl.config.adapters import is_initial_actor, own_base_reason, separate_adapters
from megatron_rl.config.derive import longest_row
from megatron_rl.config.placement import role_layout, role_layouts, sleeping_ranks
from megatron_rl.config.roles import (
    ACTOR,
    ADAPTED,
    CRITIC,
    MODEL_ROLES,
    NUMBER,
    REWARD_MODELS,
    RoleSpec,
    role_of,
    role_sections,
    spec_of,
)
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import ActorConfig, CriticConfig
from megatron_rl.config.stage_plan import StagePlan, present_model, stage_plans
from megatron_rl.data.chat_format import ChatFormats
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import communicator
from megatron_rl.hf.peft import add_adapters, note_base
from megatron_rl.hybrid_engine.servers import ServedWeights, make_generator
from megatron_rl.hybrid_engine.sync import HybridEngine
from megatron_rl.megatron.lora import share_base
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.optimizer import Optimizer, wrap
from megatron_rl.megatron.residency import Use
from megatron_rl.roles.model_role import ModelRole
from megatron_rl.roles.policy import add_lora, build_policy, stored_at
from megatron_rl.roles.reward import RewardModel, RewardRole
from megatron_rl.roles.rollout import RolloutRole
from megatron_rl.rollout.engines.base import make_engine
from megatron_rl.rollout.engines.servers.client import ServerGenerator
from megatron_rl.rollout.engines.vllm import make_tool_parser
from megatron_rl.shapes.lora import AdaptedModel
from megatron_rl.shapes.pretrained import read_pretrained


@dataclass
class Roles:
    """Roles of one run on this rank.

    ``scorers`` are the roles beside the actor that infer in the score phase, by name and in the order of the
    table. ``scoring_pass`` says whether the actor scores a batch before it learns from it, see
    `scoring_reason`.
    """

    actor: ModelRole
    rollout: RolloutRole
    hybrid_engine: HybridEngine | ServedWeights
    reward: RewardRole
    scorers: Mapping[str, ModelRole] = field(default_factory=dict)
    reward_models: tuple[RewardModel, ...] = ()
    scoring_pass: bool = True

    @property
    def critic(self) -> ModelRole | None:
        """Return the role that learns values, None where the algorithm has none."""
        return self.scorers.get(CRITIC.name)

    @property
    def one_judge(self) -> bool:
        """Say whether the reward of a row is what one scorer says of it."""
        return not self.reward_models and self.reward.scorers == 1

    @property
    def learners(self) -> dict[str, ModelRole]:
        """Return the roles whose weights and optimizers are the state of a run, by name."""
        others = {name: role for name, role in self.scorers.items() if spec_of(name).trains}
        return {ACTOR.name: self.actor, **others}

    @property
    def models(self) -> list[ModelRole]:
        """Return every role with a Megatron model."""
        return [self.actor, *self.scorers.values(), *(model.role for model in self.reward_models)]

    @contextmanager
    def learners_resident(self) -> Iterator[None]:
        """Have the learning roles' state on the device, to save or restore it."""
        with ExitStack() as stack:
            for role in self.learners.values():
                stack.enter_context(role.resident(Use.STATE))
            yield

    def close(self) -> None:
        """Release the engine and the processes of rewards and environments."""
        self.reward.close()
        self.rollout.close()


def build_roles(
    config: RunConfig,
    algorithm: Algorithm,
    tokenizer: Any,
    *,
    templated: bool = False,
    actor: ModelRole | None = None,
    say: Callable[[str], None] = print,
) -> Roles:
    """Build every role with its starting weights; the engine's come with the first sync.

    ``config`` is resolved: nothing is left to derive. ``templated`` says whether prompts went through the
    tokenizer's chat template. ``actor`` is one that is there already. ``say`` prints a line where the user
    reads it. Collective over the world.
    """
    reward = RewardRole(config.reward, tokenizer)
    adapters = separate_adapters(config)
    rollout = _build_rollout(config, tokenizer, templated, _records(config, "rollout"), adapters)
    actor = actor or build_actor(config, updates=_updates(config))
    scorers = build_scorers(config, algorithm, actor)
    models = tuple(build_reward_model(config, name) for name in config.reward.models)
    engine = _hybrid_engine(config, actor, rollout, adapters is not None, say)
    scoring_pass = scoring_reason(config, algorithm) is not None
    roles = Roles(actor, rollout, engine, reward, scorers, models, scoring_pass)
    for role in roles.models:
        role.residency.leave()
    return roles


def adopted_actor(config: RunConfig, model: ParallelModel, optimizer: Optimizer) -> ModelRole:
    """Return the actor whose model and optimizer a training script has set up."""
    return ModelRole(
        ACTOR.name,
        model.groups.layout,
        model,
        tokens_per_microbatch=_token_budget(config),
        outputs=ACTOR.outputs,
        optimizer=optimizer,
        prefix=ACTOR.metric_prefix,
    )


def build_frozen_roles(
    config: RunConfig, tokenizer: Any, *, path: str | None, templated: bool = False
) -> Roles:
    """Build what evaluation needs: the policy at ``path`` without an optimizer, engine and reward.

    Without a path it is built to hold a checkpoint of the run. Collective over the world.
    """
    reward = RewardRole(config.reward, tokenizer)
    adapters = separate_adapters(config) if path is None else None
    rollout = _build_rollout(config, tokenizer, templated, adapters=adapters)
    layout = role_layout(config.actor.layout, "actor.layout")
    model = build_policy(config, layout, path=path or present_model(config), trainable=False)
    if path is None:
        add_lora(config, model, trainable=False)
    actor = ModelRole(
        ACTOR.name, layout, model, tokens_per_microbatch=_token_budget(config), outputs=ACTOR.outputs
    )
    models = tuple(build_reward_model(config, name) for name in config.reward.models)
    engine = _hybrid_engine(config, actor, rollout, adapters is not None)
    return Roles(actor, rollout, engine, reward, reward_models=models)


def _hybrid_engine(
    config: RunConfig,
    actor: ModelRole,
    rollout: RolloutRole,
    apart: bool,
    say: Callable[[str], None] = print,
) -> HybridEngine | ServedWeights:
    settings, engine, resident = config.hybrid_engine, rollout.engine, partial(actor.resident, Use.READ)
    if not config.rollout.capabilities.in_process:
        assert engine is None or isinstance(engine, ServerGenerator)
        return ServedWeights(actor.model, actor.layout.ranks, engine, config, resident, say)
    assert not isinstance(engine, ServerGenerator)
    return HybridEngine(
        actor.model,
        engine,
        staging_bytes=settings.staging_bytes,
        verify=settings.verify,
        resident=resident,
        separate_adapters=apart,
        adapters=engine.adapters if engine is not None else None,
        sleeps=device.rank() in sleeping_ranks(role_layouts(config, device.world_size())),
    )


def _records(config: RunConfig, replay: str) -> tuple[int, int] | None:
    """Return the model's layers and experts per token where ``replay`` is the run's, None elsewhere."""
    if config.actor.routing_replay != replay:
        return None
    shape = read_pretrained(Path(config.model.path) / "config.json").shape
    return shape.layers, shape.experts_per_token


def _build_rollout(
    config: RunConfig,
    tokenizer: Any,
    templated: bool,
    records: tuple[int, int] | None = None,
    adapters: AdaptedModel | None = None,
) -> RolloutRole:
    layouts = role_layouts(config, device.world_size())
    layout, environment = layouts["rollout"].checked(), config.rollout.environment
    for ranks in (layout.ranks, *layout.groups("tensor")):
        communicator(ranks)
    chat = parse = None
    if environment is not None:
        chat = ChatFormats(tokenizer, templated)
        parse = make_tool_parser(environment.tool_parser, tokenizer)
    in_process = config.rollout.capabilities.in_process
    if not in_process:
        engine = make_generator(config, layout)
    else:
        engine = make_engine(
            config.model.path,
            config.rollout,
            layout=layout,
            rank=device.rank(),
            dtype=config.model.dtype,
            seed=config.seed,
            max_model_len=longest_row(config),
            records=records,
            adapters=adapters,
        )
        if engine is not None and device.rank() in sleeping_ranks(layouts):
            engine.sleep()
    most = config.rollout.max_in_flight
    return RolloutRole(layout, engine, device.rank(), environment, chat, records, most, parse, in_process)


def build_learner(config: RunConfig, plan: StagePlan) -> ModelRole:
    """Build the role that a stage trains, without an optimizer. Collective over the world."""
    if plan.role == ACTOR.section:
        return build_actor(config, updates=None)
    return build_reward_model(config, plan.role.removeprefix(f"{REWARD_MODELS.section}.")).role


def build_actor(config: RunConfig, *, updates: int | None) -> ModelRole:
    """Build the actor with an optimizer for ``updates`` steps, without one where it is None.

    It starts from the Hugging Face checkpoint of the model, or of its last stage that has ended. Collective
    over the world.
    """
    layout = role_layout(config.actor.layout, "actor.layout")
    recompute = config.actor.recompute
    model = build_policy(config, layout, path=present_model(config), recompute=recompute, trainable=True)
    add_lora(config, model, trainable=True)
    if model is not None:
        model.watch_routing()
        if config.actor.freeze_router:
            model.freeze_routers()
    optimizer = None if updates is None else _optimizer(model, config.actor, updates)
    if optimizer is not None and config.model.resume_optimizer:
        load_optimizer(optimizer, config.model.path)
    return ModelRole(
        ACTOR.name,
        layout,
        model,
        tokens_per_microbatch=_token_budget(config),
        outputs=ACTOR.outputs,
        optimizer=optimizer,
        prefix=ACTOR.metric_prefix,
        offload=config.actor.offload,
        records=None if updates is None else _records(config, "update"),
    )


def build_scorers(config: RunConfig, algorithm: Algorithm, actor: ModelRole) -> dict[str, ModelRole]:
    """Build the roles beside the actor that infer in the score phase, by name.

    These are the ones that the algorithm needs, and those without such a need that the configuration states.
    Collective over the world.
    """
    scorers: dict[str, ModelRole] = {}
    for spec in MODEL_ROLES:
        if spec is ACTOR or spec.phase != ACTOR.phase:
            continue

        if spec.need is None or spec.needed(algorithm):
            for path in spec.sections(config):
                scorers[role_of(path)] = _build_scorer(config, spec, path, actor)
    return scorers


def _build_scorer(config: RunConfig, spec: RoleSpec, path: str, actor: ModelRole) -> ModelRole:
    """Build the role whose section is at ``path``, with an optimizer where it learns in the step.

    It shares weights with the actor where the table lets it, and both have the same: the whole model, the
    actor's adapters switched off, or the base beneath adapters of its own. Collective over the world.
    """
    section: Any = role_sections(config)[path]
    assert section.layout is not None
    layout = role_layout(section.layout, f"{path}.layout")

    initial = is_initial_actor(config, path)
    if initial:
        model = actor.model
    else:
        model = build_policy(
            config,
            layout,
            path=section.path,
            recompute=getattr(section, "recompute", "none"),
            head="value" if spec.head == NUMBER else "lm",
            trainable=spec.trains,
        )

    shares_base = spec.shares == ADAPTED and own_base_reason(config, path) is None
    lora = getattr(section, "lora", None)
    if lora is not None and model is not None:
        add_adapters(model, lora, config.seed, trainable=True)
        note_base(model, stored_at(config, section.path))
        if shares_base and actor.model is not None:
            share_base(model, actor.model)

    return ModelRole(
        role_of(path),
        layout,
        model,
        tokens_per_microbatch=_token_budget(config),
        outputs=spec.outputs,
        optimizer=_optimizer(model, section, _updates(config)) if spec.trains else None,
        prefix=spec.metric_prefix,
        offload=section.offload,
        base_of=actor if initial else None,
        over=actor if shares_base else None,
    )


def build_reward_model(config: RunConfig, name: str) -> RewardModel:
    """Build a reward model as it scores, or as its stage begins. Collective over the world."""
    section = config.reward.models[name]
    assert section.layout is not None
    where = f"{REWARD_MODELS.section}.{name}"
    layout = role_layout(section.layout, f"{where}.layout")
    path, trainable = section.path, section.training is not None
    for plan in stage_plans(config):
        if plan.role == where and plan.ended:
            path, trainable = str(plan.model), False
    model = build_policy(config, layout, path=path, head="value", trainable=trainable)
    if trainable and section.lora is not None and model is not None:
        add_adapters(model, section.lora, config.seed, trainable=True)
        note_base(model, stored_at(config, path))
    role = ModelRole(
        where,
        layout,
        model,
        tokens_per_microbatch=_token_budget(config),
        outputs=(name,),
        prefix=REWARD_MODELS.metric_prefix,
        offload=section.offload,
    )
    return RewardModel(name, section.weight, role)


def _optimizer(
    model: ParallelModel | None, section: ActorConfig | CriticConfig, updates: int
) -> Optimizer | None:
    if model is None:
        return None
    wrap(model, section.optimizer.distributed, section.ddp)
    return Optimizer(model, section.optimizer, updates)


def _updates(config: RunConfig) -> int:
    return config.steps * config.batch.optimizer_steps * config.batch.epochs


def _token_budget(config: RunConfig) -> int:
    budget = config.batch.tokens_per_microbatch
    assert budget is not None
    return budget
