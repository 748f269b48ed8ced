"""Rules of servers that sample, of sampling ahead, and of responses that are carried into later steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.check.engine.servers import check_engine_servers
from megatron_rl.config.derive import ROUNDS_PER_RESPONSE
from megatron_rl.config.engines import engines_with
from megatron_rl.config.field_types import format_ranges
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import CLOSED, KEEP, OPEN
from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout


def check_asynchrony(
    config: RunConfig, layouts: Mapping[str, ParallelLayout], algorithm: Algorithm | None = None
) -> list[UserError]:
    """Return the errors of where and in which order a run samples and learns."""
    return [
        *check_engine_servers(config.rollout),
        *_check_open(config),
        *_check_kept(config),
        *_check_ahead(config, layouts),
        *_check_staleness(config),
        *_check_oversample(config, algorithm),
    ]


def _check_open(config: RunConfig) -> Iterator[UserError]:
    """Yield the error of an open order without what it rests on."""
    if config.rollout.order == CLOSED:
        return
    needs = {
        "asynchrony.steps_ahead=1": config.asynchrony.steps_ahead > 0,
        "rollout.partial=true": config.rollout.partial,
        "rollout.oversample=1": config.rollout.oversample > 0,
    }
    error = UserError(
        "nothing can be complete before the rest of its step, and the rest go on",
        where="rollout.order",
        expected="with open: rollout ranks of their own that sample ahead, more groups in flight than a "
        "step takes, and responses that go on",
        got=OPEN,
        fix="rollout.order=closed",
    )
    yield from _lacking(needs, error)


def _check_kept(config: RunConfig) -> Iterator[UserError]:
    """Yield the error of a cache that would be kept where no request stays in the engine."""
    rollout = config.rollout
    if rollout.on_update != KEEP:
        return
    needs = {
        "rollout.order=open": rollout.order == OPEN,
        engines_with(keeps_cache=True): rollout.capabilities.keeps_cache,
        "rollout.environment=null": rollout.environment is None,
        "rollout.vllm.async_scheduling=false": not rollout.vllm.get("async_scheduling"),
    }
    error = UserError(
        "no request can stay in the engine with its cache while weights arrive",
        where="rollout.on_update",
        expected="with keep: vLLM in the open order, one step at a time, and no environment",
        got=KEEP,
        fix="rollout.on_update=recompute",
    )
    yield from _lacking(needs, error)


def _lacking(needs: Mapping[str, bool], error: UserError) -> Iterator[UserError]:
    """Yield the error of a choice with the settings that it lacks, none where it has all that it needs."""
    lacks = [setting for setting, met in needs.items() if not met]
    if lacks:
        got, fix = f"{error.got} without {', '.join(lacks)}", f"set {' '.join(lacks)}, or {error.fix}"
        yield replace(error, got=got, fix=fix)


def _check_ahead(config: RunConfig, layouts: Mapping[str, ParallelLayout]) -> Iterator[UserError]:
    """Yield the errors of ranks that would both sample ahead and learn."""
    rollout = layouts.get("rollout")
    if config.asynchrony.steps_ahead < 1 or rollout is None:
        return
    shared = {
        role: tuple(rank for rank in layout.ranks if rank in rollout.ranks)
        for role, layout in layouts.items()
        if role != "rollout"
    }
    if any(shared.values()):
        words = [f"{role} has {format_ranges(ranks)} too" for role, ranks in shared.items() if ranks]
        yield UserError(
            "the rollout cannot sample ahead on ranks that other roles use",
            where="asynchrony.steps_ahead",
            expected="0, or rollout ranks that no other role has",
            got="; ".join(words),
            fix="set placement=standalone, or name rollout.ranks and the layouts' ranks apart",
        )
        return
    if 0 in rollout.ranks:
        yield UserError(
            "rank 0, which writes the run folder, would only sample",
            where="rollout.ranks",
            expected="ranks without 0, when the rollout samples ahead",
            got=format_ranges(rollout.ranks),
            fix="give rank 0 to the actor",
        )


def _check_staleness(config: RunConfig) -> Iterator[UserError]:
    """Yield the error of a bound that the order of the steps breaks."""
    bound, ahead = config.asynchrony.max_staleness, config.asynchrony.steps_ahead
    least = ahead + 1 if config.rollout.partial else ahead
    if bound is None or bound >= least:
        return
    yield UserError(
        "every response would be older than allowed",
        where="asynchrony.max_staleness",
        expected=f"at least {least}: asynchrony.steps_ahead"
        + (", and one more for rollout.partial to carry any" if config.rollout.partial else ""),
        got=str(bound),
        fix=f"set asynchrony.max_staleness={least} or more, or remove it",
    )


def _check_oversample(config: RunConfig, algorithm: Algorithm | None) -> Iterator[UserError]:
    """Yield the errors of settings that over-sampling needs or cannot have beside it."""
    rollout = config.rollout
    if rollout.order == CLOSED and rollout.partial and rollout.oversample == 0:
        yield UserError(
            "no response would be left to continue: a step without over-sampling waits for all it began",
            where="rollout.partial",
            expected="rollout.oversample above 0",
            got="true with rollout.oversample=0",
            fix="set rollout.oversample=0.25, or rollout.partial=false",
        )
    if rollout.oversample == 0:
        return
    rounds = rollout.round_tokens if rollout.order == CLOSED else None
    longest = rollout.max_response_tokens
    if rounds is not None and rounds >= longest:
        yield UserError(
            "every response would end in its first round, and nothing be gained by over-sampling",
            where="rollout.round_tokens",
            expected=f"less than rollout.max_response_tokens ({longest})",
            got=str(rounds),
            fix=f"set rollout.round_tokens={max(1, longest // ROUNDS_PER_RESPONSE)}, or remove it",
        )
    if algorithm is not None and algorithm.needs_greedy_baseline:
        yield UserError(
            "a greedy response to each prompt is not sampled beside over-sampled ones",
            where="rollout.oversample",
            expected=f"0 with algorithm {config.algorithm.name}",
            got=f"{rollout.oversample:g}",
            fix="set rollout.oversample=0, or choose an algorithm without a greedy baseline",
        )
