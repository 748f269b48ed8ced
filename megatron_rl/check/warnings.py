"""Warnings on settings that are valid but probably a mistake, or that this project has never run with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.algorithms.advantages import Vapo
from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.lookup import scoring_pass_reason
from megatron_rl.check.model.megatron_settings import is_off, untestable_fields
from megatron_rl.check.stages import unused_setting_warnings
from megatron_rl.config.derive import BatchPlan, versions_between_syncs
from megatron_rl.config.field_types import format_ranges
from megatron_rl.config.placement import megatron_sections
from megatron_rl.config.roles import MODEL_ROLES, learner_sections, teacher_of_task
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.config.setting import sections_of
from megatron_rl.config.stage_plan import stage_plans
from megatron_rl.errors import UserError
from megatron_rl.shapes.hardware import load_constants
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.memory import rollout_parameters
from megatron_rl.shapes.model import DTYPE_BYTES, ModelShape

_HIGH_LEARNING_RATE = 1e-3
"""Learning rate above which reinforcement learning gets a warning; 1e-6 to 1e-4 are usual."""

_TRIED_MEGATRON = """
    apply_rope_fusion attention_dropout attention_softmax_in_fp32 bias_activation_fusion bias_dropout_fusion
    gradient_accumulation_fusion hidden_dropout moe_grouped_gemm moe_input_jitter_eps moe_router_dtype
    moe_token_dispatcher_type num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    recompute_method"""
_TRIED_DDP = "bucket_size check_for_nan_in_grad grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather"
_TRIED_OPTIMIZER = "adam_eps decoupled_weight_decay sgd_momentum use_precision_aware_optimizer"
_TRIED_VLLM = """
    async_scheduling block_size disable_log_stats enable_chunked_prefill enable_expert_parallel
    enable_prefix_caching enforce_eager kv_cache_memory_bytes max_num_batched_tokens max_num_seqs
    scheduling_policy"""
TRIED: Mapping[str, frozenset[str]] = {
    "megatron": frozenset(_TRIED_MEGATRON.split()),
    "ddp": frozenset(_TRIED_DDP.split()),
    "optimizer.megatron": frozenset(_TRIED_OPTIMIZER.split()),
    "rollout.vllm": frozenset(_TRIED_VLLM.split()),
}
"""Kind of section -> fields that tests or campaigns have run with values other than the defaults."""


def check_warnings(
    config: RunConfig,
    world_size: int,
    layouts: Mapping[str, ParallelLayout],
    batch: BatchPlan | None,
    shape: ModelShape | None,
    algorithm: Algorithm | None,
    record_count: int | None,
) -> list[UserError]:
    """Return the warnings about a configuration without errors.

    ``batch`` is only set for a job with reinforcement learning. ``record_count`` is the number of training
    records and ``shape`` the shape of the actor's model. Both may be None: warnings that need them are then
    skipped.
    """
    warnings: list[UserError] = []

    # Warnings of reinforcement learning.
    if batch is not None:
        warnings += _sampling_warnings(config, algorithm)
        warnings += _batch_warnings(config, batch, record_count)
        warnings += _setup_warnings(config)
        warnings += _timeout_warnings(config)
        if algorithm is not None:
            warnings += _replay_warnings(config, algorithm)
            warnings += _older_policy_warnings(config, algorithm)

    # Warnings of every job.
    warnings += _schedule_warnings(config)
    warnings += _determinism_warnings(config)
    warnings += unused_setting_warnings(config)
    warnings += _idle_rank_warnings(world_size, layouts)
    warnings += _network_warnings(config, layouts, shape)
    if algorithm is not None:
        warnings += _unneeded_role_warnings(config, algorithm)
        warnings += _unused_server_warnings(config, algorithm)
        warnings += _task_teacher_warnings(config, algorithm)
    warnings += untried_setting_warnings(config)
    return warnings


def _sampling_warnings(config: RunConfig, algorithm: Algorithm | None) -> Iterator[UserError]:
    """Yield warnings about samples that carry no information for the advantage or for an evaluation."""
    # Group baselines need several samples of a prompt.
    advantage = None
    if algorithm is not None:
        advantage = algorithm.advantage
    has_single_sample = config.batch.samples_per_prompt == 1
    if has_single_sample and advantage is not None and advantage.compares_samples:
        yield UserError(
            f"{config.algorithm.name} compares samples of one prompt, and there is only one",
            where="batch.samples_per_prompt",
            expected="2 or more",
            got="1",
            fix="set it to 8 or more, or choose an algorithm without groups",
        )

    # VAPO's lambda for a response of l tokens is 1 - 1 / (alpha l), or 0 if alpha l <= 1. The suggested alpha
    # gives a lambda of 0.95 for the longest response.
    max_tokens = config.rollout.response_limit
    suggested_alpha = 20 / max_tokens
    if isinstance(advantage, Vapo) and advantage.alpha * max_tokens <= 1:
        yield UserError(
            "VAPO's lambda is 0 for every response: the policy learns only from the critic's errors",
            where="algorithm.advantage",
            expected=f"alpha above {1 / max_tokens:.3g}: lambda is 1 - 1 / (alpha * response length)",
            got=f"alpha {advantage.alpha:g} with responses of at most {max_tokens} tokens",
            fix=f"set algorithm.advantage={{alpha: {suggested_alpha:.2g}}}",
        )

    # All greedy samples of a prompt are identical.
    for name, evaluation_set in config.evaluation.sets.items():
        if evaluation_set.samples > 1 and evaluation_set.temperature == 0:
            path = f"evaluation.sets.{name}"
            yield UserError(
                "greedy evaluation gives the same answer every time",
                where=f"{path}.samples",
                got=f"{evaluation_set.samples} samples at temperature 0",
                fix=f"set {path}.samples=1, or a temperature above 0",
            )


def _determinism_warnings(config: RunConfig) -> Iterator[UserError]:
    """Yield the warning about settings that can make a resumed run differ despite ``deterministic``."""
    if not config.deterministic:
        return
    if config.rollout.order == "open":
        yield UserError(
            "with rollout.order=open, a step trains on the responses that finish first, so a resumed run "
            "may differ",
            where="rollout.order",
            expected="closed, with deterministic: true",
            got="open",
            fix="set rollout.order=closed, or deterministic=false",
        )


def _batch_warnings(config: RunConfig, batch: BatchPlan, record_count: int | None) -> Iterator[UserError]:
    """Yield warnings about a batch that leaves ranks without work, or that is larger than the data."""
    # Each mini-batch is one optimizer step. If mini-batches have different numbers of prompts, a prompt in a
    # small mini-batch has a larger weight.
    min_prompts, max_prompts = batch.prompts_per_minibatch
    if min_prompts != max_prompts:
        yield UserError(
            "optimizer steps get different numbers of prompts",
            where="batch.optimizer_steps",
            expected=f"a divisor of {batch.prompts}",
            got=f"{batch.prompts} prompts over {batch.optimizer_steps} optimizer steps: {min_prompts} or "
            f"{max_prompts} each",
            fix="choose a divisor of prompts_per_step",
        )

    # A data-parallel rank without rows waits for the other ranks.
    min_rows = batch.rows_per_minibatch[0]
    if min_rows < batch.actor_data:
        yield UserError(
            "some data-parallel ranks have no row in a mini-batch and wait",
            where="batch.prompts_per_step",
            expected=f"{batch.actor_data} rows or more in a mini-batch",
            got=f"{min_rows} rows over {batch.actor_data} data-parallel copies",
            fix="raise prompts_per_step, lower optimizer_steps, or use more tensor or pipeline parallelism",
        )
    if batch.rows < batch.replicas:
        yield UserError(
            "some rollout replicas have nothing to generate",
            where="batch.prompts_per_step",
            got=f"{batch.rows} rows for {batch.replicas} replicas",
            fix="raise prompts_per_step or samples_per_prompt, or raise rollout.tensor",
        )

    if record_count is not None and record_count < config.batch.prompts_per_step:
        yield UserError(
            "a step takes more prompts than the training data has",
            where="batch.prompts_per_step",
            got=f"{config.batch.prompts_per_step} prompts per step, {record_count} records",
            fix="lower prompts_per_step, or add data: prompts would repeat within a step",
        )


def _schedule_warnings(config: RunConfig) -> Iterator[UserError]:
    """Yield warnings about learning rates that never finish warming up, or that do not decay."""
    # Optimizer steps of the job, and of each stage. They are None for a stage with `epochs`, whose length
    # depends on the data.
    optimizer_steps = config.steps * config.batch.optimizer_steps * config.batch.epochs
    stage_steps = {f"{plan.where}.optimizer": plan.settings.steps for plan in stage_plans(config)}
    for path, optimizer in sections_of(config, OptimizerConfig):
        step_count = stage_steps.get(path, optimizer_steps)
        if step_count is not None and optimizer.warmup_steps > step_count > 0:
            yield UserError(
                "the learning rate is still warming up when the run ends",
                where=f"{path}.warmup_steps",
                expected=f"at most the {step_count} optimizer steps of the run",
                got=str(optimizer.warmup_steps),
                fix="lower warmup_steps or raise steps; a short first try may stay as it is",
            )

        learning_rate = optimizer.learning_rate
        if optimizer.decay != "constant" and optimizer.minimum_learning_rate in (None, learning_rate):
            yield UserError(
                "the learning rate has a decay, but its final value is its initial value",
                where=f"{path}.minimum_learning_rate",
                got=f"decay {optimizer.decay} from {learning_rate:g} to {learning_rate:g}",
                fix=f"set {path}.minimum_learning_rate=0, or {path}.decay=constant",
            )


def _replay_warnings(config: RunConfig, algorithm: Algorithm) -> Iterator[UserError]:
    """Yield the warning about ``routing_replay: update`` with one optimizer step per batch.

    ``update`` replays the routing of the forward pass that computes old log-probs. With one optimizer step
    there is no such pass.
    """
    if config.actor.routing_replay == "update" and scoring_pass_reason(config, algorithm) is None:
        yield UserError(
            "`actor.routing_replay: update` has no effect: with one optimizer step per batch, no "
            "separate forward pass computes old log-probs",
            where="actor.routing_replay",
            expected="several optimizer steps per batch",
            got="update, with one optimizer step per batch",
            fix="remove it, or set actor.routing_replay=rollout",
        )


def _older_policy_warnings(config: RunConfig, algorithm: Algorithm) -> Iterator[UserError]:
    """Yield the warning about responses from older weights if the loss does not correct for their age."""
    correction = algorithm.correction
    is_corrected = correction.is_active or correction.bypass or algorithm.policy_loss.follows_rollout
    if config.hybrid_engine.every == 1 or is_corrected:
        return

    yield UserError(
        "responses are sampled from older weights, and the loss treats them as samples of the newest",
        where="hybrid_engine.every",
        expected="1, or importance weights in algorithm.correction",
        got=f"{config.hybrid_engine.every}: up to {versions_between_syncs(config)} versions older, "
        "not corrected",
        fix="set algorithm.correction={level: token}, or hybrid_engine.every=1; "
        "an offline algorithm may stay as it is",
    )


def _setup_warnings(config: RunConfig) -> Iterator[UserError]:
    """Yield warnings about a run's setup: a high learning rate, an unknown GPU, no evaluation."""
    learning_rate = config.actor.optimizer.learning_rate
    if learning_rate > _HIGH_LEARNING_RATE:
        yield UserError(
            "the learning rate is high for reinforcement learning",
            where="actor.optimizer.learning_rate",
            got=f"{learning_rate:g}",
            fix="1e-6 is usual for billions of parameters, up to 1e-4 for very small models",
        )

    # `plan` needs the constants of the GPU, such as its bandwidth.
    if config.gpu is not None:
        try:
            load_constants().gpu(config.gpu)
        except UserError as error:
            yield UserError(
                f"`plan` has no constants for the GPU {config.gpu!r}",
                where="gpu",
                expected=error.expected,
                got=config.gpu,
                fix=error.fix or "name another",
            )

    # Without evaluation, overfitting to the reward goes unnoticed.
    if not config.evaluation.sets:
        yield UserError(
            "nothing is evaluated: there is no held-out data",
            where="evaluation.sets",
            got="nothing",
            fix="set evaluation.sets.held_out to a data set that is not trained on",
        )


def _timeout_warnings(config: RunConfig) -> Iterator[UserError]:
    """Yield warnings about timeouts of code and servers that exceed the limit of the hang detector."""
    reward = config.reward
    seconds_by_key: dict[str, float] = {}

    # Longest wait for each function and server, in seconds.
    if config.reward_functions:
        seconds_by_key["reward.timeout"] = reward.timeout
    if reward.code is not None:
        seconds_by_key["reward.code.timeout"] = reward.code.timeout
    servers = {
        "reward.http": reward.http,
        "reward.judge": reward.judge,
        "teacher_server": config.teacher_server,
    }
    for section, server in servers.items():
        if server is not None:
            seconds_by_key[f"{section}.timeout"] = server.timeout
            seconds_by_key[f"{section}.longest_wait"] = server.longest_wait
            if server.rate is not None:
                seconds_by_key[f"{section}.rate"] = 1 / server.rate

    # The time between two requests is the inverse of the rate: a higher rate shortens it.
    for path, seconds in seconds_by_key.items():
        if seconds < config.rank_timeout:
            continue
        got = f"{seconds:g} s"
        fix = f"lower {path}, or set rank_timeout above it"
        if path.endswith("rate"):
            got += " between two requests"
            fix = f"raise {path}"
        yield UserError(
            f"{path} allows a wait that ends the job: no rank makes progress meanwhile",
            where=path,
            expected=f"less than rank_timeout, {config.rank_timeout:g} s",
            got=got,
            fix=fix,
        )


def _idle_rank_warnings(world_size: int, layouts: Mapping[str, ParallelLayout]) -> Iterator[UserError]:
    """Yield the warning about ranks without a role."""
    occupied_ranks = {rank for layout in layouts.values() for rank in layout.ranks}
    idle_ranks = tuple(rank for rank in range(world_size) if rank not in occupied_ranks)
    if idle_ranks:
        yield UserError(
            f"{len(idle_ranks)} of {world_size} ranks have no role and do nothing",
            where="world_size",
            got=f"idle: {format_ranges(idle_ranks)}",
            fix="give these ranks to a role, or start fewer processes",
        )


def _network_warnings(
    config: RunConfig, layouts: Mapping[str, ParallelLayout], shape: ModelShape | None
) -> Iterator[UserError]:
    """Yield warnings about tensor-parallel groups that span nodes."""
    for role, layout in layouts.items():
        if layout.tensor <= config.gpus_per_node:
            continue

        fix = "keep tensor within a node and use pipeline parallelism between nodes"
        if role == "rollout":
            if _replica_exceeds_node(config, shape):
                continue
            # A replica has no pipeline, so only its tensor size can change.
            fix = f"set {layout.path}.tensor={config.gpus_per_node} if one node has room for the weights"
        yield UserError(
            f"tensor parallelism of the {role} spans nodes, between which the network is slow",
            where=f"{layout.path}.tensor",
            expected=f"at most {config.gpus_per_node}",
            got=f"tensor {layout.tensor} on nodes of {config.gpus_per_node} GPUs",
            fix=fix,
        )


def _replica_exceeds_node(config: RunConfig, shape: ModelShape | None) -> bool:
    """Return whether a rollout replica's weights exceed the memory of one node's GPUs.

    Returns False if the model's shape or the memory of a GPU is unknown.
    """
    if shape is None or config.gpu_memory_gib is None:
        return False
    weight_bytes = rollout_parameters(shape, config.gpus_per_node) * DTYPE_BYTES[config.model.dtype]
    return weight_bytes > config.rollout.memory_fraction * config.gpu_memory_gib * 2**30


def _unneeded_role_warnings(config: RunConfig, algorithm: Algorithm) -> Iterator[UserError]:
    """Yield a warning for each configured role that the algorithm does not need."""
    for spec in MODEL_ROLES:
        if spec.need is None or spec.is_needed_by(algorithm):
            continue
        reason = spec.need.missing_reason.format(advantage=type(algorithm.advantage).__name__)
        for path in spec.sections(config):
            yield UserError(
                spec.need.unused_warning,
                where=path,
                got=f"algorithm {config.algorithm.name} {reason}",
                fix=f"remove `{path}`, or {spec.need.fix_hint}",
            )


def _unused_server_warnings(config: RunConfig, algorithm: Algorithm) -> Iterator[UserError]:
    """Yield a warning for a teacher's server that the algorithm does not use."""
    if config.teacher_server is not None and not algorithm.needs_teacher:
        yield UserError(
            "the teacher's server gets no requests, since the algorithm does not use it",
            where="teacher_server",
            got=f"algorithm {config.algorithm.name} without a distillation",
            fix="remove `teacher_server`, or set algorithm.distillation=reverse_kl",
        )


def _task_teacher_warnings(config: RunConfig, algorithm: Algorithm) -> Iterator[UserError]:
    """Yield the warning about teachers of specific tasks without a default teacher for all other tasks."""
    has_other_teacher = config.teacher is not None or config.teacher_server is not None
    if config.teachers and algorithm.needs_teacher and not has_other_teacher:
        yield UserError(
            "a response of a task without a teacher ends the run",
            where="teachers",
            expected="a teacher for each task of the data",
            got=f"only teachers for {', '.join(sorted(teacher_of_task(config)))}",
            fix="set teacher.path for all other tasks, if there are any",
        )


def untried_setting_warnings(config: RunConfig) -> Iterator[UserError]:
    """Yield warnings about pass-through fields that this machine cannot test, or that no run has used.

    A section such as ``actor.megatron`` accepts nearly every field of the installed version. Only the fields
    in `TRIED` have been used in runs of this project with values other than the defaults.
    """
    # Sections whose fields are passed to Megatron or vLLM: path of the section -> (key in `TRIED`, settings).
    sections: dict[str, tuple[str, Mapping[str, Any] | None]] = {}
    for path, settings in megatron_sections(config).items():
        sections[path] = ("megatron", settings)
    for path, section in learner_sections(config).items():
        sections[f"{path}.ddp"] = ("ddp", section.ddp)
        sections[f"{path}.optimizer.megatron"] = ("optimizer.megatron", section.optimizer.megatron)
    sections["rollout.vllm"] = ("rollout.vllm", config.rollout.vllm)

    for path, (field_kind, settings) in sections.items():
        # Fields that need a package or a GPU that this machine lacks. `check` lets Megatron validate its
        # settings in a separate process, but without these fields.
        unmet_need_by_field: dict[str, str] = {}
        if field_kind != "rollout.vllm":
            unmet_need_by_field = untestable_fields(settings or {})
        for need in dict.fromkeys(unmet_need_by_field.values()):
            fields_of_need = [name for name in unmet_need_by_field if unmet_need_by_field[name] == need]
            yield UserError(
                f"{', '.join(fields_of_need)} of `{path}`: untried here, needs {need}",
                where=f"{path}.{fields_of_need[0]}",
                expected=f"{need} on the machine of the run, where `train` validates the field first",
                got=f"a machine without {need}",
                fix="check again on a machine of the run",
            )

        untried_fields: dict[str, Any] = {}
        for name, field_value in (settings or {}).items():
            is_tried = name in TRIED[field_kind] or name in unmet_need_by_field
            if not is_tried and not is_off(field_value):
                untried_fields[name] = field_value
        if not untried_fields:
            continue

        first_field = next(iter(untried_fields))
        package = "vLLM" if field_kind == "rollout.vllm" else "Megatron-Core"
        yield UserError(
            f"{', '.join(untried_fields)} of `{path}`: passed to {package} unchanged, and never tried here",
            where=f"{path}.{first_field}",
            expected=f"fields that runs of this project have used: {', '.join(sorted(TRIED[field_kind]))}",
            got=", ".join(f"{name}: {value}" for name, value in untried_fields.items()),
            fix="compare a few steps with and without it: kl/rollout, policy/grad_norm and seconds",
        )
