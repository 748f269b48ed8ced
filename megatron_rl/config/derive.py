"""What follows from a configuration and a number of processes: filled-in values and batch arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.config.adapters import with_adapters
from megatron_rl.config.placement import APART, layout_sections, placed, role_layout, with_best_rank_order
from megatron_rl.config.roles import MODEL_ROLES, NUMBER, spec_at, with_role_sections
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.models import LayoutConfig
from megatron_rl.config.sections.rewards import RewardModelConfig
from megatron_rl.config.sections.rollout import AsynchronyConfig, MismatchConfig, RolloutConfig
from megatron_rl.config.sections.stages import PreferenceConfig
from megatron_rl.config.setting import with_value
from megatron_rl.config.stage_plan import stage_plans, starting_model
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

MICROBATCHES_PER_STAGE = 4
"""Micro-batches per pipeline stage that a derived token budget aims for: the pipeline idles
(stages - 1) / (micro-batches + stages - 1) of the time, below 20 % at this number."""
ROUNDS_PER_RESPONSE = 8
"""Rounds that a derived length of a round cuts the longest response into."""
CARRIED_STEPS = 2
"""Steps for which a response may be carried unless the configuration says another number."""
MICROBATCH_TOKENS = 16384
"""Upper end of a derived token budget, unless one row is longer."""

MISMATCH: Mapping[str, tuple[float, float, str]] = {
    "float32": (1e-4, 1e-2, "kernels of trainer and engine round differently: by 8e-6 on a 135M model"),
    "bfloat16": (
        0.1,
        0.5,
        "bfloat16 has 8 bits of mantissa: on a 135M model trainer and engine differ by 0.02 to 0.04",
    ),
}
"""dtype -> warn, stop, reason; mean absolute log-prob difference per response token."""


@dataclass(frozen=True)
class BatchPlan:
    """Hold the arithmetic of one step, from prompts to micro-batches.

    A pair is (fewest, most) where a number does not divide evenly. ``longest_row`` and the token counts
    are upper bounds: prompts and responses at their limits. Replicas sample all ``prompts_in_flight`` of a
    step, of which it takes ``prompts``.
    """

    prompts: int
    samples: int
    rows: int
    prompts_in_flight: int
    optimizer_steps: int
    epochs: int
    prompts_per_minibatch: tuple[int, int]
    rows_per_minibatch: tuple[int, int]
    actor_data: int
    rows_per_actor_rank: tuple[int, int]
    replicas: int
    rows_per_replica: tuple[int, int]
    longest_row: int
    tokens_per_step: int
    tokens_per_microbatch: int
    rows_per_microbatch: int
    microbatches: int

    @property
    def updates(self) -> int:
        """Return the optimizer steps that one training step makes."""
        return self.optimizer_steps * self.epochs


@dataclass(frozen=True)
class Resolved:
    """Hold a configuration with derived values filled in, and for each the reason."""

    config: RunConfig
    reasons: Mapping[str, str]


def spread(total: int, parts: int) -> tuple[int, int]:
    """Return the smallest and largest share of ``total`` dealt out evenly to ``parts``."""
    return total // parts, -(-total // parts)


def smallest_world(config: RunConfig) -> int:
    """Return the smallest number of processes that every role's sizes divide."""
    layouts = [layout for layout in layout_sections(config).values() if layout is not None]
    sizes, named = [], [0]
    for layout in layouts:
        if layout.ranks is None:
            sizes.append(layout.tensor * layout.pipeline * layout.context)
            sizes.append(layout.expert * (layout.expert_tensor or 1) * layout.pipeline)
        else:
            named.extend(rank + 1 for rank in layout.ranks)
    if config.rollout.ranks is None:
        sizes.append(config.rollout.tensor)
    else:
        named.extend(rank + 1 for rank in config.rollout.ranks)
    unit = math.lcm(*(max(1, size) for size in sizes)) * (2 if config.placement in APART else 1)
    return unit * max(1, -(-max(named) // unit)) if sizes else max(1, max(named))


def longest_row(config: RunConfig) -> int:
    """Return the most tokens that prompt and response may have together, over all sampling profiles."""
    responses = [config.rollout.max_response_tokens]
    for profile in config.rollout.sampling_profiles.values():
        value = profile.get("max_response_tokens")
        if isinstance(value, int) and not isinstance(value, bool):
            responses.append(value)
    return config.data.max_prompt_tokens + max(responses)


def longest_trained_row(config: RunConfig) -> int:
    """Return the most tokens that a row may have wherever the job learns from rows."""
    limits = [plan.settings.max_row_tokens or longest_row(config) for plan in stage_plans(config)]
    return max([longest_row(config), *limits] if config.job == TRAIN else limits or [longest_row(config)])


def token_budget(config: RunConfig, layout: ParallelLayout) -> tuple[int, str]:
    """Return the derived tokens per micro-batch and the reason in words, for a learner with a layout."""
    longest = longest_trained_row(config)
    batch = config.batch
    rows = spread(batch.prompts_per_step * batch.samples_per_prompt, batch.optimizer_steps)[1]
    if config.job != TRAIN:
        sizes = [plan.settings.per_step * len(plan.settings.RESPONSES) for plan in stage_plans(config)]
        rows = max(sizes, default=rows)
    stages = layout.pipeline
    wanted = MICROBATCHES_PER_STAGE * stages if stages > 1 else 1
    share = -(-spread(rows, layout.data)[1] * longest // wanted)
    budget = max(longest, min(share, MICROBATCH_TOKENS))
    if budget == longest:
        return budget, f"the longest row has {longest} tokens"
    if budget == share and stages > 1:
        return budget, f"{wanted} micro-batches keep {stages} pipeline stages busy"
    if budget == share:
        return budget, "a mini-batch fits in one micro-batch"
    return budget, f"at most {MICROBATCH_TOKENS} tokens at once, and never less than the longest row"


def batch_plan(config: RunConfig, layouts: Mapping[str, ParallelLayout]) -> BatchPlan:
    """Return the batch arithmetic of a consistent configuration with its token budget filled in."""
    batch, actor, rollout = config.batch, layouts["actor"], layouts["rollout"]
    rows = batch.prompts_per_step * batch.samples_per_prompt
    flight = config.rollout.prompts_in_flight(batch.prompts_per_step)
    prompts = spread(batch.prompts_per_step, batch.optimizer_steps)
    per_minibatch = (prompts[0] * batch.samples_per_prompt, prompts[1] * batch.samples_per_prompt)
    per_rank = (per_minibatch[0] // actor.data, -(-per_minibatch[1] // actor.data))
    longest = longest_row(config)
    budget = batch.tokens_per_microbatch or token_budget(config, actor)[0]
    fit = max(1, budget // longest)
    return BatchPlan(
        prompts=batch.prompts_per_step,
        samples=batch.samples_per_prompt,
        rows=rows,
        prompts_in_flight=flight,
        optimizer_steps=batch.optimizer_steps,
        epochs=batch.epochs,
        prompts_per_minibatch=prompts,
        rows_per_minibatch=per_minibatch,
        actor_data=actor.data,
        rows_per_actor_rank=per_rank,
        replicas=rollout.data,
        rows_per_replica=spread(flight * batch.samples_per_prompt, rollout.data),
        longest_row=longest,
        tokens_per_step=rows * longest,
        tokens_per_microbatch=budget,
        rows_per_microbatch=fit,
        microbatches=-(-per_rank[1] // fit),
    )


def with_needed_roles(config: RunConfig, algorithm: Any, reasons: dict[str, str]) -> RunConfig:
    """Return ``config`` with default sections of the roles that ``algorithm`` calls for."""
    for spec in MODEL_ROLES:
        if spec.need is None or not spec.needed(algorithm) or spec.sections(config):
            continue

        reasons[f"{spec.section}.path"] = spec.need.reason.format(name=config.algorithm.name)
        config = with_value(config, spec.section, spec.section_class())
    return config


def resolve(
    config: RunConfig, world_size: int, algorithm: Any = None, shape: ModelShape | None = None
) -> Resolved:
    """Fill in every value that the configuration leaves to derivation.

    ``algorithm`` is the run's algorithm where it is known; it may call for a reference or a critic.
    ``shape`` is that of the actor's model, which decides the best order of the rollout's ranks.
    """
    reasons: dict[str, str] = {}
    if config.world_size is None:
        reasons["world_size"] = "number of processes of this job"
    config = with_needed_roles(config, algorithm, reasons)
    config = _place(config, world_size, shape, reasons)
    config = _start(config, reasons)
    config = _learning(config, reasons)
    config = with_adapters(config, shape, reasons)
    model = config.model
    if model.attention is None:
        attention, reasons["model.attention"] = default_attention()
        model = replace(model, attention=attention)
    batch = config.batch
    if batch.tokens_per_microbatch is None:
        layout = role_layout(config.actor.layout, "actor.layout")
        budget, reasons["batch.tokens_per_microbatch"] = token_budget(config, layout)
        batch = replace(batch, tokens_per_microbatch=budget)
    mismatch = _mismatch(config.mismatch, model.dtype, reasons)
    rollout, asynchrony = _sampling_order(config, reasons)
    filled = replace(
        config,
        world_size=world_size,
        model=model,
        sft=_stage(config.sft, "sft", config, reasons),
        preference=_preference(_stage(config.preference, "preference", config, reasons), reasons),
        batch=batch,
        mismatch=mismatch,
        rollout=rollout,
        asynchrony=asynchrony,
    )
    return Resolved(filled, reasons)


def _start(config: RunConfig, reasons: dict[str, str]) -> RunConfig:
    """Let roles without a model of their own start from what reinforcement learning starts from."""
    path, what = starting_model(config), "model.path"
    if config.preference is not None:
        what = "model.path after the training on preferences (preference)"
    elif config.sft is not None:
        what = "model.path after the supervised warm-up (sft)"

    def start(where: str, section: Any) -> Any:
        if where == "actor" or section.path is not None:
            return section
        head = ", with a new head" if spec_at(where).head == NUMBER else ""
        before = reasons.get(f"{where}.path")
        reasons[f"{where}.path"] = "; ".join(filter(None, [before, f"the starting model: {what}{head}"]))
        return replace(section, path=path)

    return with_role_sections(config, start)


def _place(
    config: RunConfig, world_size: int, shape: ModelShape | None, reasons: dict[str, str]
) -> RunConfig:
    """Name every role's ranks and fill its layout in."""
    everyone = f"every rank of the job (0-{world_size - 1})" if world_size > 1 else "the only rank of the job"
    why = everyone if config.placement not in APART else f"placement {config.placement}"
    stated = layout_sections(config)
    free = config.rollout.ranks is None
    config = placed(config, world_size)
    if free:
        reasons["rollout.ranks"] = why
    if free and shape is not None and config.job == TRAIN:
        config, reason = with_best_rank_order(config, shape)
        reasons["rollout.ranks"] += f", in {reason}"
    actor = config.actor.layout.ranks

    def fill(role: str, section: Any) -> Any:
        path, layout = f"{role}.layout", section.layout
        before = stated[path]
        if before is None:
            reasons[path] = "the actor's" if layout.ranks == actor else f"the actor's sizes; {why}"
            before = layout
        elif before.ranks is None:
            reasons[f"{path}.ranks"] = why
        return replace(section, layout=_layout(before, layout, path, reasons))

    return with_role_sections(config, fill)


def _layout(stated: LayoutConfig, layout: LayoutConfig, path: str, reasons: dict[str, str]) -> LayoutConfig:
    filled = role_layout(layout, path)
    if path not in reasons and stated.expert_tensor is None:
        reasons[f"{path}.expert_tensor"] = "experts are whole unless asked otherwise"
    if path not in reasons and stated.sequence_parallel is None:
        on = layout.tensor > 1
        reasons[f"{path}.sequence_parallel"] = f"{'on' if on else 'off'}: tensor is {layout.tensor}"
    return replace(
        layout,
        expert_tensor=filled.expert_tensor,
        sequence_parallel=filled.sequence_parallel,
    )


def _learning(config: RunConfig, reasons: dict[str, str]) -> RunConfig:
    """Fill in what optimizers leave open, of the roles and of the training of reward models."""

    def fill(path: str, section: Any) -> Any:
        if isinstance(section, RewardModelConfig):
            training = _stage(section.training, f"{path}.training", config, reasons)
            return replace(section, training=training)
        if not spec_at(path).trains:
            return section
        return replace(section, optimizer=_optimizer(section.optimizer, f"{path}.optimizer", reasons))

    return with_role_sections(config, fill)


def _stage(settings: Any, where: str, config: RunConfig, reasons: dict[str, str]) -> Any:
    """Fill in what a stage takes over from the run; None stays None."""
    if settings is None:
        return None
    if settings.checkpoint_every is None:
        reasons[f"{where}.checkpoint_every"] = "checkpoint.every"
        settings = replace(settings, checkpoint_every=config.checkpoint.every)
    if settings.max_row_tokens is None:
        reasons[f"{where}.max_row_tokens"] = "data.max_prompt_tokens + rollout.max_response_tokens"
        settings = replace(settings, max_row_tokens=longest_row(config))
    return replace(settings, optimizer=_optimizer(settings.optimizer, f"{where}.optimizer", reasons))


def _optimizer(optimizer: Any, path: str, reasons: dict[str, str]) -> Any:
    if optimizer.minimum_learning_rate is not None:
        return optimizer
    reasons[f"{path}.minimum_learning_rate"] = "equal to learning_rate"
    return replace(optimizer, minimum_learning_rate=optimizer.learning_rate)


def has_transformer_engine() -> bool:
    """Say whether Transformer Engine is installed whole, with its extension of PyTorch; nothing is imported.

    ``pip install transformer_engine`` alone leaves the extension out.
    """
    package = find_spec("transformer_engine")
    folders = [Path(folder) for folder in (package and package.submodule_search_locations) or ()]
    places = [place for folder in folders for place in (folder, folder / "wheel_lib", folder.parent)]
    extended = any(True for place in places for _ in place.glob("transformer_engine_torch*.so"))
    return extended and any((folder / "pytorch").is_dir() for folder in folders)


def default_attention() -> tuple[str, str]:
    """Return the implementation of attention that a run takes where none is stated, and the reason."""
    if has_transformer_engine():
        return "transformer_engine", "Transformer Engine is installed"
    return "torch", "Transformer Engine is not installed"


def _preference(preference: PreferenceConfig | None, reasons: dict[str, str]) -> PreferenceConfig | None:
    """Fill in the strength that the loss's paper takes."""
    if preference is None or preference.beta is not None:
        return preference
    simpo = preference.loss == "simpo"
    reasons["preference.beta"] = "SimPO's, arXiv:2405.14734" if simpo else "DPO's, arXiv:2305.18290"
    return replace(preference, beta=2.0 if simpo else 0.1)


def _mismatch(mismatch: MismatchConfig, dtype: str, reasons: dict[str, str]) -> MismatchConfig:
    warn, stop, reason = MISMATCH.get(dtype, MISMATCH["bfloat16"])
    if mismatch.warn is None:
        # A stated stop below the usual warning must not make the two contradict each other.
        warn = warn if mismatch.stop is None else min(warn, mismatch.stop)
        reasons["mismatch.warn"] = reason
        mismatch = replace(mismatch, warn=warn)
    if mismatch.stop is None:
        assert mismatch.warn is not None
        reasons["mismatch.stop"] = reason
        mismatch = replace(mismatch, stop=max(stop, mismatch.warn))
    return mismatch


def _sampling_order(config: RunConfig, reasons: dict[str, str]) -> tuple[RolloutConfig, AsynchronyConfig]:
    """Fill in how long a round of over-sampling is, and how old a learned token may be."""
    rollout, asynchrony = config.rollout, config.asynchrony
    if rollout.round_tokens is None:
        reasons["rollout.round_tokens"] = f"1/{ROUNDS_PER_RESPONSE} of rollout.max_response_tokens"
        rollout = replace(rollout, round_tokens=max(1, rollout.max_response_tokens // ROUNDS_PER_RESPONSE))
    if asynchrony.max_staleness is None:
        bound, reason = asynchrony.steps_ahead, "asynchrony.steps_ahead"
        if rollout.partial:
            bound, reason = bound + CARRIED_STEPS, f"{reason}, and {CARRIED_STEPS} for rollout.partial"
        reasons["asynchrony.max_staleness"] = reason
        asynchrony = replace(asynchrony, max_staleness=bound)
    return rollout, asynchrony
