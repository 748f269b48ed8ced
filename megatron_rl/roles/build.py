"""Construction of a run's roles from its resolved configuration.

`build_model_role` builds every role that has a Megatron model, from the role's entry in the table of
`config.roles` and its section of the configuration. `build_roles` adds the rollout engine, the weight sync
and the rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algorithms import Algorithm
from megatron_rl.algorithms.lookup import scoring_pass_reason
from megatron_rl.checkpoint.megatron_lm import (
    checkpoint_arguments,
    load_optimizer,
)
from megatron_rl.config.adapters import (
    adapters_of,
    is_initial_actor,
    separate_base_reason,
    separately_synced_adapters,
)
from megatron_rl.config.derive import longest_row
from megatron_rl.config.hub import model_source
from megatron_rl.config.placement import (
    megatron_settings,
    role_layout,
    role_layouts,
    sleeping_ranks,
)
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
    spec_at,
    spec_of,
)
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import LoraConfig
from megatron_rl.config.stage_plan import (
    StagePlan,
    current_model,
    stage_plans,
    starting_model,
)
from megatron_rl.data.chat_format import ChatFormats
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups, create_communicators
from megatron_rl.hf.peft import add_adapters, record_base_checksum
from megatron_rl.hf.weights import load_weights
from megatron_rl.hybrid_engine.servers import ServedWeights, make_generator
from megatron_rl.hybrid_engine.sync import HybridEngine
from megatron_rl.megatron.log_probs import TopTokens
from megatron_rl.megatron.lora import share_base
from megatron_rl.megatron.model import ParallelModel, build_model
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.megatron.optimizer import Optimizer, wrap_in_ddp
from megatron_rl.megatron.provider import Provider, load_provider
from megatron_rl.megatron.residency import ResidencyLevel
from megatron_rl.roles.model_role import ModelRole
from megatron_rl.roles.reward import RewardModel, RewardRole
from megatron_rl.roles.rollout import RolloutRole
from megatron_rl.roles.served_teacher import ServedTeacher
from megatron_rl.rollout.engines.base import make_engine
from megatron_rl.rollout.engines.servers import ServerGenerator
from megatron_rl.rollout.engines.vllm import make_tool_parser
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import AdaptedModel
from megatron_rl.shapes.pretrained import read_pretrained


@dataclass
class Roles:
    """Roles of one run on this rank.

    Example: GRPO with a KL penalty has ``forward_roles={"reference": ...}`` and no ``reward_models``; PPO has
    ``forward_roles={"critic": ..., "reference": ...}``.
    """

    actor: ModelRole
    """Role of the policy that is trained."""
    rollout: RolloutRole
    """Role of the engine that samples responses."""
    hybrid_engine: HybridEngine | ServedWeights
    """Weight sync from the actor to the engine."""
    reward: RewardRole
    """Role that computes rewards outside the training process."""
    forward_roles: Mapping[str, ModelRole] = field(default_factory=dict)
    """Name -> role that runs a forward pass before the updates of a step, except the actor, in the order of
    `config.roles`."""
    reward_models: tuple[RewardModel, ...] = ()
    """Frozen models that compute rewards."""
    served_teacher: ServedTeacher | None = None
    """Teacher behind a server, which computes log-probs in the score phase."""
    scoring_pass: bool = True
    """Whether the actor runs a forward pass before the first update of a step, see `scoring_pass_reason`."""

    @property
    def critic(self) -> ModelRole | None:
        """Return the role with the value model, or None if the algorithm has no critic."""
        return self.forward_roles.get(CRITIC.name)

    @property
    def has_single_scorer(self) -> bool:
        """Return whether all rewards come from a single scorer, so that no weighted sum is needed."""
        return not self.reward_models and self.reward.scorer_count == 1

    @property
    def trained_roles(self) -> dict[str, ModelRole]:
        """Return the trained roles by name: checkpoints store their weights and optimizers."""
        trained_forward_roles = {
            name: role for name, role in self.forward_roles.items() if spec_of(name).trains
        }
        return {ACTOR.name: self.actor, **trained_forward_roles}

    @property
    def models(self) -> list[ModelRole]:
        """Return every role with a Megatron model.

        The roles are the actor, the roles that run a forward pass before the updates (critic, reference,
        teachers), and the reward models.
        """
        return [
            self.actor,
            *self.forward_roles.values(),
            *(model.role for model in self.reward_models),
        ]

    @contextmanager
    def keep_trained_roles_resident(self) -> Iterator[None]:
        """Keep weights and optimizer states of the trained roles in device memory inside the block.

        Use it to save and restore checkpoints.
        """
        with ExitStack() as stack:
            for role in self.trained_roles.values():
                stack.enter_context(role.resident(ResidencyLevel.WEIGHTS_AND_OPTIMIZER))
            yield

    def close(self) -> None:
        """Close the teacher's client and the engine, and end the reward and environment processes."""
        if self.served_teacher is not None:
            self.served_teacher.close()
        self.reward.close()
        self.rollout.close()


def build_roles(
    config: RunConfig,
    algorithm: Algorithm,
    tokenizer: Any,
    *,
    templated: bool = False,
    actor: ModelRole | None = None,
    log: Callable[[str], None] = print,
    show_part: Callable[[str], None] | None = None,
) -> Roles:
    """Build every role of a resolved configuration; the engine receives its weights at the first sync.

    ``templated``: whether prompts were rendered with the tokenizer's chat template.
    ``actor``: existing actor; None builds the actor.
    ``log``: function that prints a line on the console.
    ``show_part``: function that prints the name of the part that is built next, or None.

    Collective over the world.
    """
    show_part = show_part or _ignore_part_name
    reward = RewardRole(
        config.reward,
        tokenizer,
        source_functions=config.data.source_rewards,
        filters=config.rollout.filters,
        learns_from_rewards=algorithm.needs_rewards,
    )
    adapters = separately_synced_adapters(config)

    # Build the engine first and put it to sleep: engine and models need not fit in device memory together.
    routing_shape = _routing_shape(config, "rollout")
    show_part(f"engine {config.rollout.engine}")
    rollout = _build_rollout(config, tokenizer, templated, routing_shape, adapters)
    if actor is None:
        show_part(f"actor from {model_source(config.model.path)}")
        actor = build_actor(config, updates=_update_count(config))
    actor.squared_probs = algorithm.needs_squared_probs
    show_part("other roles")
    forward_roles = build_forward_roles(config, algorithm, actor)
    reward_models = tuple(build_reward_model(config, name) for name in config.reward.models)
    show_part("plan of the weight sync")
    hybrid_engine = _build_weight_sync(config, actor, rollout, adapters is not None, log)

    needs_scoring_pass = scoring_pass_reason(config, algorithm) is not None
    roles = Roles(
        actor,
        rollout,
        hybrid_engine,
        reward,
        forward_roles,
        reward_models,
        _build_served_teacher(config, algorithm),
        needs_scoring_pass,
    )

    # Move the models of roles with ``offload`` to host memory, until a phase needs them.
    for role in roles.models:
        role.residency.offload_all()
    return roles


def _build_served_teacher(config: RunConfig, algorithm: Algorithm) -> ServedTeacher | None:
    """Build the client of a teacher's server; return None for a run without such a server."""
    if config.teacher_server is None or not algorithm.needs_teacher:
        return None
    top_tokens = _make_top_tokens(config, algorithm.distillation.top_tokens)
    return ServedTeacher(config.teacher_server, top_tokens, longest_row(config))


def _make_top_tokens(config: RunConfig, num_tokens: int) -> TopTokens | None:
    """Return the request for the ``num_tokens`` most likely tokens of each distribution, or None for 0."""
    if not num_tokens:
        return None
    # Select only tokens of the actor's vocabulary: a teacher's embedding may have further rows.
    actor_shape = read_pretrained(Path(config.model.path) / "config.json").shape
    return TopTokens(num_tokens, actor_shape.vocab)


def _ignore_part_name(name: str) -> None:
    """Do nothing; default of ``show_part`` in `build_roles`."""


def build_frozen_roles(
    config: RunConfig,
    tokenizer: Any,
    *,
    path: str | None,
    templated: bool = False,
) -> Roles:
    """Build the roles that evaluation needs: a policy without an optimizer, the engine and the rewards.

    ``path``: Hugging Face model of the policy; None builds a policy into which a checkpoint of the run can be
    loaded. ``templated``: whether prompts are rendered with the tokenizer's chat template.

    Collective over the world.
    """
    reward = RewardRole(config.reward, tokenizer)

    # The adapters of a Hugging Face model are merged, so the engine receives no separate adapters.
    adapters = None
    if path is None:
        adapters = separately_synced_adapters(config)
    rollout = _build_rollout(config, tokenizer, templated, adapters=adapters)

    layout = role_layout(config.actor.layout, "actor.layout")
    model = build_frozen_policy(config, layout, path)
    actor = ModelRole(
        ACTOR.name,
        layout,
        model,
        tokens_per_microbatch=_tokens_per_microbatch(config),
        outputs=ACTOR.outputs,
    )

    reward_models = tuple(build_reward_model(config, name) for name in config.reward.models)
    hybrid_engine = _build_weight_sync(config, actor, rollout, adapters is not None)
    return Roles(actor, rollout, hybrid_engine, reward, reward_models=reward_models)


def build_actor(config: RunConfig, *, updates: int | None) -> ModelRole:
    """Build the actor from the model of its last completed stage, or from `model.path` without such a stage.

    ``updates``: number of optimizer steps of the learning-rate schedule; None builds no optimizer.

    Collective over the world.
    """
    return build_model_role(config, ACTOR, ACTOR.section, updates=updates)


def build_forward_roles(config: RunConfig, algorithm: Algorithm, actor: ModelRole) -> dict[str, ModelRole]:
    """Build the roles that run a forward pass before a step's updates, except the actor: name -> role.

    These are the roles that the algorithm needs, such as a critic, and configured roles that are independent
    of the algorithm, such as teachers. Collective over the world.
    """
    # Build them in the same order on every rank: building a model creates communicators, which is collective.
    forward_roles: dict[str, ModelRole] = {}
    for spec in MODEL_ROLES:
        if spec is ACTOR or spec.phase != ACTOR.phase:
            continue

        if spec.need is None or spec.is_needed_by(algorithm):
            top_tokens = 0
            if spec.top_outputs:
                top_tokens = algorithm.distillation.top_tokens
            for path in spec.sections(config):
                forward_roles[role_of(path)] = build_model_role(
                    config,
                    spec,
                    path,
                    updates=_update_count(config),
                    actor=actor,
                    top_tokens=top_tokens,
                )
    return forward_roles


def build_reward_model(config: RunConfig, name: str) -> RewardModel:
    """Build the reward model `reward.models.NAME`, which is frozen in RL steps.

    Collective over the world.
    """
    section = config.reward.models[name]
    role = build_model_role(
        config,
        REWARD_MODELS,
        f"{REWARD_MODELS.section}.{name}",
        updates=None,
    )
    return RewardModel(name, section.weight, role)


def build_learner(config: RunConfig, plan: StagePlan) -> ModelRole:
    """Build the role that a training stage before RL trains, such as the actor for SFT.

    The role has no optimizer: the training stage creates the optimizer. Collective over the world.
    """
    return build_model_role(config, spec_at(plan.role), plan.role, updates=None)


def build_model_role(
    config: RunConfig,
    spec: RoleSpec,
    path: str,
    *,
    updates: int | None,
    actor: ModelRole | None = None,
    top_tokens: int = 0,
) -> ModelRole:
    """Build the role that ``spec`` describes, from the section of the configuration at ``path``.

    ``updates``: number of optimizer steps of the learning-rate schedule; None builds no optimizer. Ignored
        for a role that training steps do not update.
    ``actor``: actor whose weights the role may share, or None. Weights are shared if ``spec`` allows it and
        both roles start from equal weights. The role then uses the actor's model with the actor's adapters
        disabled, or the actor's base weights with separate adapters.
    ``top_tokens``: number of most likely tokens that the role returns for each distribution, or 0.

    Collective over the world.
    """
    # Find the role's section and layout, and the model that it starts from.
    section: Any = role_sections(config)[path]
    assert section.layout is not None
    layout = role_layout(section.layout, f"{path}.layout")
    model_path, trainable = _find_starting_model(config, spec, path, section)

    # A role can share weights with the actor in two ways. Both require the actor's layout.
    shares_model_with: ModelRole | None = None
    base_owner: ModelRole | None = None
    if is_initial_actor(config, path):
        shares_model_with = actor
    if spec.shares == ADAPTED and separate_base_reason(config, path) is None:
        base_owner = actor

    if shares_model_with is not None:
        model = shares_model_with.model
    else:
        head = "lm"
        if spec.head == NUMBER:
            head = "value"
        model = build_pretrained(
            config,
            layout,
            path=model_path,
            recompute=getattr(section, "recompute", "none"),
            head=head,
            trainable=trainable,
        )
        if model is not None and trainable:
            _attach_adapters(config, model, _adapter_settings(config, spec, section), model_path)

    # Share and freeze weights before the optimizer is built: it includes all parameters with gradients.
    if base_owner is not None and base_owner.model is not None and model is not None:
        share_base(model, base_owner.model)
    if spec is ACTOR and model is not None:
        model.watch_routing()
        if config.actor.freeze_router:
            model.freeze_routers()

    # DDP allocates gradient buffers, and the optimizer allocates states. Build both only for a role that
    # training steps update.
    optimizer = None
    if model is not None and spec.trains and updates is not None:
        wrap_in_ddp(model, section.optimizer.distributed, section.ddp)
        optimizer = Optimizer(model, section.optimizer, updates)
        if spec is ACTOR and config.model.resume_optimizer:
            load_optimizer(optimizer, config.model.path)

    # With `actor.routing_replay: update`, the actor's forward pass before the updates records the experts of
    # each token.
    routing_shape = None
    if spec is ACTOR and updates is not None:
        routing_shape = _routing_shape(config, "update")

    # A role without output columns in the table, such as a teacher, has one column with the role's name.
    outputs = spec.outputs
    if not outputs:
        outputs = (path.removeprefix(f"{spec.section}."),)
    return ModelRole(
        path,
        layout,
        model,
        tokens_per_microbatch=_tokens_per_microbatch(config),
        outputs=outputs,
        top_tokens=_make_top_tokens(config, top_tokens),
        top_outputs=spec.top_outputs,
        optimizer=optimizer,
        metric_prefix=spec.metric_prefix,
        offload=section.offload,
        routing_shape=routing_shape,
        shares_model_with=shares_model_with,
        shares_base_with=base_owner,
        measures_memory=config.batch.memory_target is not None,
    )


def adopt_actor(config: RunConfig, model: ParallelModel, optimizer: Optimizer) -> ModelRole:
    """Return an actor role for a model and an optimizer that a Megatron training script has built."""
    return ModelRole(
        ACTOR.name,
        model.groups.layout,
        model,
        tokens_per_microbatch=_tokens_per_microbatch(config),
        outputs=ACTOR.outputs,
        optimizer=optimizer,
        metric_prefix=ACTOR.metric_prefix,
    )


def _find_starting_model(
    config: RunConfig, spec: RoleSpec, path: str, section: Any
) -> tuple[str | None, bool]:
    """Return the path of the Hugging Face model that a role starts from, and whether the role is trainable.

    Returns None as the path if no training stage before RL has written a model, and the role's section names
    no model.
    """
    if spec is ACTOR:
        return current_model(config), True
    if spec is not REWARD_MODELS:
        return section.path, spec.trains

    # A reward model is trained only by a stage before RL. It is frozen after the stage has written it.
    for plan in stage_plans(config):
        if plan.role == path and plan.has_ended:
            return str(plan.model), False
    return section.path, section.training is not None


def _adapter_settings(config: RunConfig, spec: RoleSpec, section: Any) -> LoraConfig | None:
    """Return the settings of the LoRA adapters to attach to a role's model, or None without adapters.

    ``lora.path`` are adapters from which training starts. If the actor has completed a training stage before
    RL, such as SFT, the stage has merged these adapters into the actor's weights. The actor then gets new
    adapters, which start from zero.
    """
    lora = getattr(section, "lora", None)
    if lora is not None and spec is ACTOR and current_model(config) != config.model.path:
        return replace(lora, path=None)
    return lora


def _attach_adapters(
    config: RunConfig,
    model: ParallelModel,
    lora: LoraConfig | None,
    path: str | None,
    *,
    trainable: bool = True,
) -> None:
    """Attach adapters to a model that starts from ``path``; do nothing without ``lora`` settings.

    Collective over the model's ranks.
    """
    if lora is not None:
        add_adapters(model, lora, config.seed, trainable=trainable)
        record_base_checksum(model, weights_folder(config, path))


def build_frozen_policy(config: RunConfig, layout: ParallelLayout, path: str | None) -> ParallelModel | None:
    """Build a policy that is not trained; return None on ranks outside the layout.

    ``path``: Hugging Face model to load. None builds a model into which a checkpoint of the run can be
    loaded; it has the actor's adapters, if these are configured.

    Collective over the world.
    """
    model = build_pretrained(config, layout, path=path or current_model(config), trainable=False)

    # A checkpoint of a run with adapters is loaded into a model with adapters.
    if path is None and model is not None:
        lora = _adapter_settings(config, ACTOR, config.actor)
        _attach_adapters(config, model, lora, current_model(config), trainable=False)
    return model


def build_pretrained(
    config: RunConfig,
    layout: ParallelLayout,
    *,
    path: str | None = None,
    recompute: str = "none",
    head: str = "lm",
    trainable: bool,
) -> ParallelModel | None:
    """Build a model on ``layout`` and load its Hugging Face weights; return None on ranks outside the layout.

    ``path``: folder of the Hugging Face model, or None for `model.path`.
    ``recompute``: activation recomputation, as in the configuration.
    ``head``: ``lm`` for a policy, ``value`` for a critic or a reward model.

    Collective over the world.
    """
    # Create the groups on all ranks of the job, since their creation is collective over the world.
    path = weights_folder(config, path)
    groups = ParallelGroups(layout)
    if not groups.is_member:
        return None

    # The user's ``actor.megatron`` settings override settings that are derived from the layout.
    _, overrides = megatron_settings(config, layout)
    model = build_model(
        read_hf_config(path),
        groups,
        dtype=getattr(torch, config.model.dtype),
        recompute=recompute,
        overrides=overrides,
        attention=config.model.attention,
        head=head,
        trainable=trainable,
        seed=config.seed,
        provider=_load_model_provider(config, path),
        replays_routing=config.actor.routing_replay != "none",
        adapted=bool(adapters_of(config)),
    )
    load_weights(model, path)
    return model


def weights_folder(config: RunConfig, path: str | None) -> str:
    """Return the folder with a role's initial weights: ``path``, or `model.path` for None.

    The actor's training stages before RL, such as SFT, write the model from which RL starts. If ``path`` is
    this model and the stages have not written it yet, the result is `model.path`. The trainer loads the
    stages' model into the role after the stages.
    """
    if path is None or (path == starting_model(config) and not Path(path).is_dir()):
        return config.model.path
    return path


def _load_model_provider(config: RunConfig, path: str) -> Provider | None:
    """Return the user's model code (`model.provider`) for the model at ``path``, or None.

    Returns None if `model.provider` is not set. Also returns None if the shape of the model differs from
    `model.path`, for example for a smaller reward model. Such a model is built with Megatron's GPTModel.
    """
    if config.model.provider is None:
        return None

    # Compare the shapes without name, head and tied embeddings: the user's code supports all variants.
    comparable_shapes = []
    for folder in (config.model.path, path):
        shape = read_pretrained(Path(folder) / "config.json").shape
        comparable_shapes.append(replace(shape, name="", scalar_head=False, tied=False))
    if comparable_shapes[0] != comparable_shapes[1]:
        return None

    arguments, _ = checkpoint_arguments(config.model.path)
    return load_provider(config.model.provider, config.model.weights, arguments)


def _build_weight_sync(
    config: RunConfig,
    actor: ModelRole,
    rollout: RolloutRole,
    has_separate_adapters: bool,
    log: Callable[[str], None] = print,
) -> HybridEngine | ServedWeights:
    """Build the object that syncs the actor's weights to the engine.

    It is a `HybridEngine` for an engine in the job's processes, and `ServedWeights` for servers.
    ``has_separate_adapters``: whether a sync sends the adapters without base weights.
    """
    # A sync only reads the weights: gradients and optimizer states may stay in host memory.
    engine = rollout.engine
    resident = partial(actor.resident, ResidencyLevel.READ_WEIGHTS)
    if not config.rollout.capabilities.in_process:
        assert engine is None or isinstance(engine, ServerGenerator)
        return ServedWeights(actor.model, actor.layout.ranks, engine, config, resident, log)

    assert not isinstance(engine, ServerGenerator)
    engine_adapters = None
    if engine is not None:
        engine_adapters = engine.adapters

    # If another role uses a rank of this engine, the engine releases its memory between rollouts.
    is_engine_offloaded = device.rank() in sleeping_ranks(role_layouts(config, device.world_size()))
    return HybridEngine(
        actor.model,
        engine,
        staging_bytes=config.hybrid_engine.staging_bytes,
        verify=config.hybrid_engine.verify,
        resident=resident,
        separate_adapters=has_separate_adapters,
        adapters=engine_adapters,
        sleeps=is_engine_offloaded,
        every=config.hybrid_engine.every,
    )


def _routing_shape(config: RunConfig, replay_mode: str) -> tuple[int, int] | None:
    """Return the shape of a token's routing, or None if `actor.routing_replay` is not ``replay_mode``.

    The shape is (layers, experts per token).
    """
    if config.actor.routing_replay != replay_mode:
        return None

    shape = read_pretrained(Path(config.model.path) / "config.json").shape
    return shape.layers, shape.experts_per_token


def _build_rollout(
    config: RunConfig,
    tokenizer: Any,
    templated: bool,
    routing_shape: tuple[int, int] | None = None,
    adapters: AdaptedModel | None = None,
) -> RolloutRole:
    """Build the rollout role, with the engine or the client of the servers on the role's ranks.

    ``routing_shape``: (layers, experts per token) if the engine returns the routing of each token, or None.
    ``adapters``: LoRA adapters that the engine receives separately from the weights, or None.

    Collective over the world.
    """
    layouts = role_layouts(config, device.world_size())
    layout = layouts["rollout"].checked()

    # Creating a communicator is collective over the world, so all ranks do it here.
    create_communicators([layout.ranks])
    create_communicators(layout.groups("tensor"))

    # Rollouts with an environment need the model's chat format and the format of its tool calls.
    environment = config.rollout.environment
    chat_formats = None
    parse_tool_calls = None
    if environment is not None:
        chat_formats = ChatFormats(tokenizer, templated)
        parse_tool_calls = make_tool_parser(environment.tool_parser, tokenizer)

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
            routing_shape=routing_shape,
            adapters=adapters,
        )
        # Release the engine's device memory for the roles on the same ranks, which are built next.
        if engine is not None and device.rank() in sleeping_ranks(layouts):
            engine.sleep()

    return RolloutRole(
        layout,
        engine,
        device.rank(),
        environment,
        chat_formats,
        routing_shape,
        config.rollout.max_in_flight,
        parse_tool_calls,
        in_process,
    )


def _update_count(config: RunConfig) -> int:
    """Return the number of optimizer steps of the run, over all its steps and epochs."""
    return config.steps * config.batch.optimizer_steps * config.batch.epochs


def _tokens_per_microbatch(config: RunConfig) -> int:
    """Return the maximum number of tokens in a micro-batch, which every resolved configuration sets."""
    budget = config.batch.tokens_per_microbatch
    assert budget is not None
    return budget
