"""Rules on the order in which a run samples and trains.

They concern sampling ahead of training (``asynchrony.steps_ahead``), the open order (``rollout.order``),
over-sampling, and responses that are sampled over several steps (``rollout.partial``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.check.engine.servers import check_engine_servers
from megatron_rl.config.derive import ROUNDS_PER_RESPONSE, versions_between_syncs
from megatron_rl.config.engines import engines_with
from megatron_rl.config.field_types import format_ranges
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import CLOSED, KEEP, OPEN
from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout


def check_sampling_order(
    config: RunConfig, layouts: Mapping[str, ParallelLayout], algorithm: Algorithm | None = None
) -> list[UserError]:
    """Return the errors for rollout servers, and for the order of sampling and training."""
    return [
        *check_engine_servers(config.rollout),
        *_open_order_errors(config),
        *_kept_cache_errors(config),
        *_uniform_share_errors(config),
        *_rollout_rank_errors(config, layouts),
        *_staleness_errors(config),
        *_partial_errors(config),
        *_oversample_errors(config, algorithm),
    ]


def _open_order_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the error for the open order without the settings that it requires.

    In the open order a step trains on the responses that finish first, while others stay in flight.
    """
    if config.rollout.order == CLOSED:
        return

    requirements = {
        "asynchrony.steps_ahead=1": config.asynchrony.steps_ahead > 0,
        "rollout.partial=true": config.rollout.partial,
        "rollout.oversample=1": config.rollout.oversample > 0,
    }

    error = UserError(
        "the open order requires more groups in flight than a step uses, and responses that span steps",
        where="rollout.order",
        expected="with open: separate rollout ranks that sample ahead, over-sampling, and partial responses",
        got=OPEN,
        fix="rollout.order=closed",
    )

    yield from _unmet_requirements(requirements, error)


def _kept_cache_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the error for ``rollout.on_update: keep`` without the settings that it requires.

    With ``keep``, unfinished requests keep their key-value cache when the weights are updated.
    """
    rollout = config.rollout
    if rollout.on_update != KEEP:
        return

    # With `rollout.order: open`, a step trains on the responses that finish first. The engine still has
    # unfinished requests when it gets the new weights. With `closed` it has none.
    requirements = {
        "rollout.order=open": rollout.order == OPEN,
        engines_with(keeps_cache=True): rollout.capabilities.keeps_cache,
        # If `hybrid_engine.every` is more than 1, the engine has older weights than the actor between two
        # syncs. An evaluation then loads the actor's weights into the engine, and afterwards the older
        # weights again. `keep` does not support a change back to older weights.
        "hybrid_engine.every=1": config.hybrid_engine.every == 1,
        "rollout.environment=null": rollout.environment is None,
        "rollout.vllm.async_scheduling=false": not rollout.vllm.get("async_scheduling"),
    }

    error = UserError(
        "requests cannot keep their cache in the engine while weights are updated",
        where="rollout.on_update",
        expected=f"with keep: {', '.join(requirements)}",
        got=KEEP,
        fix="rollout.on_update=recompute",
    )

    yield from _unmet_requirements(requirements, error)


def _unmet_requirements(requirements: Mapping[str, bool], error: UserError) -> Iterator[UserError]:
    """Yield ``error`` with the unmet requirements added to ``got`` and ``fix``; nothing if all are met.

    ``requirements`` maps a setting, such as ``rollout.order=open``, to whether the configuration has it.
    ``error.got`` is the configured value. ``error.fix`` is a fix without these settings.
    """
    unmet_settings = [setting for setting, is_met in requirements.items() if not is_met]
    if unmet_settings:
        got = f"{error.got} without {', '.join(unmet_settings)}"
        fix = f"set {' '.join(unmet_settings)}, or {error.fix}"
        yield replace(error, got=got, fix=fix)


def _uniform_share_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the error for ``data.uniform_share`` below 1 if ranks sample ahead of training.

    A prompt is uniform if its last responses all had the same reward, for example if all passed. An epoch
    draws only the fraction ``data.uniform_share`` of the uniform prompts. Ranks that sample ahead
    (``asynchrony.steps_ahead``) do not get the rewards, so they cannot draw prompts by reward.
    """
    steps_ahead = config.asynchrony.steps_ahead
    if config.data.uniform_share < 1 and steps_ahead > 0:
        yield UserError(
            "ranks that sample ahead have no rewards to draw prompts by",
            where="data.uniform_share",
            expected="1, or asynchrony.steps_ahead=0",
            got=f"{config.data.uniform_share:g}, and asynchrony.steps_ahead={steps_ahead}",
            fix="remove data.uniform_share, or set asynchrony.steps_ahead=0",
        )


def _rollout_rank_errors(config: RunConfig, layouts: Mapping[str, ParallelLayout]) -> Iterator[UserError]:
    """Yield the errors for a rollout that samples ahead on the ranks of other roles, or on rank 0."""
    rollout = layouts.get("rollout")
    if config.asynchrony.steps_ahead < 1 or rollout is None:
        return

    # The rollout generates while the other roles train, so they must not share ranks.
    overlaps: list[str] = []
    for role, layout in layouts.items():
        ranks = tuple(rank for rank in layout.ranks if rank in rollout.ranks)
        if role != "rollout" and ranks:
            overlaps.append(f"{role} has {format_ranges(ranks)} too")

    if overlaps:
        yield UserError(
            "the rollout cannot sample ahead on ranks that other roles use",
            where="asynchrony.steps_ahead",
            expected="0, or rollout ranks that no other role has",
            got="; ".join(overlaps),
            fix="set placement=standalone, or disjoint rollout.ranks and layout ranks",
        )
    elif 0 in rollout.ranks:
        yield UserError(
            "rank 0, which writes the run folder, would only sample",
            where="rollout.ranks",
            expected="ranks without 0, when the rollout samples ahead",
            got=format_ranges(rollout.ranks),
            fix="give rank 0 to the actor",
        )


def _staleness_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the error for a ``max_staleness`` (policy versions) that every response would exceed."""
    # Smallest staleness that responses can have: one policy version per step that they are sampled ahead.
    max_staleness = config.asynchrony.max_staleness
    min_staleness = config.asynchrony.steps_ahead
    reasons = ["asynchrony.steps_ahead"]
    if config.rollout.partial:
        # A response that is carried over from the previous step is one version older.
        min_staleness += 1
        reasons.append("one more if rollout.partial carries responses over")
    if config.hybrid_engine.every != 1:
        min_staleness += versions_between_syncs(config)
        reasons.append("the versions between two syncs (hybrid_engine.every)")
    expected = f"at least {min_staleness}: {', and '.join(reasons)}"

    if max_staleness is not None and max_staleness < min_staleness:
        yield UserError(
            "every response would be older than allowed",
            where="asynchrony.max_staleness",
            expected=expected,
            got=str(max_staleness),
            fix=f"set asynchrony.max_staleness={min_staleness} or more, or remove it",
        )


def _partial_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the error for ``rollout.partial`` without over-sampling.

    Without over-sampling a step waits for all of its responses, so none is partial. The rule applies only to
    the closed order, in which a step ends its sampling before it trains.
    """
    rollout = config.rollout
    if rollout.order == CLOSED and rollout.partial and rollout.oversample == 0:
        yield UserError(
            "`rollout.partial` has no effect: a step without over-sampling waits for all of its responses",
            where="rollout.partial",
            expected="rollout.oversample above 0",
            got="true with rollout.oversample=0",
            fix="set rollout.oversample=0.25, or rollout.partial=false",
        )


def _oversample_errors(config: RunConfig, algorithm: Algorithm | None) -> Iterator[UserError]:
    """Yield the errors for settings that cannot be combined with over-sampling."""
    rollout = config.rollout
    if rollout.oversample == 0:
        return

    # Over-sampling only helps if a round can leave responses unfinished.
    max_tokens = rollout.response_limit
    round_tokens = rollout.round_tokens
    if rollout.order == CLOSED and round_tokens is not None and round_tokens >= max_tokens:
        yield UserError(
            "every response would end in its first round, so that over-sampling has no effect",
            where="rollout.round_tokens",
            expected=f"less than rollout.max_response_tokens ({max_tokens})",
            got=str(round_tokens),
            fix=f"set rollout.round_tokens={max(1, max_tokens // ROUNDS_PER_RESPONSE)}, or remove it",
        )

    if algorithm is not None and algorithm.needs_greedy_baseline:
        yield UserError(
            "over-sampled prompts have no greedy response, which the algorithm's baseline needs",
            where="rollout.oversample",
            expected=f"0 with algorithm {config.algorithm.name}",
            got=f"{rollout.oversample:g}",
            fix="set rollout.oversample=0, or choose an algorithm without a greedy baseline",
        )
