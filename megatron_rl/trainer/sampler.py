"""Sample the prompts of a step: just those, or more of them until enough groups of responses are complete."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms import Algorithm
from megatron_rl.config.schema import RunConfig
from megatron_rl.metrics import Metrics
from megatron_rl.parallel.exchange import RowShard, gather_rows
from megatron_rl.parallel.groups import communicator
from megatron_rl.roles.build import Roles
from megatron_rl.roles.rollout import join
from megatron_rl.rollout import partial
from megatron_rl.rollout.partial import InFlight
from megatron_rl.types import UNFINISHED, PromptBatch, Rollouts


@dataclass(frozen=True)
class Sampled:
    """Hold the responses to ``prompts``, the same value on every rank; ``greedy`` has one row per prompt."""

    prompts: PromptBatch
    rollouts: Rollouts
    greedy: Rollouts | None
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True)
class Sampling:
    """Hold what this rank's engine has sampled, before it is gathered.

    Of over-sampling, ``flight`` is what was continued, and ``must`` says which of its groups are not to wait.
    """

    prompts: PromptBatch
    shard: RowShard
    greedy: RowShard | None
    flight: InFlight | None = None
    must: tuple[bool, ...] = ()
    wanted: int = 0
    version: int = 0


class Sampler:
    """Give the responses to a wanted number of prompts, and hold what was begun beyond them.

    With ``rollout.oversample`` that fraction of further prompts is sampled beside the wanted ones, and the
    step takes the groups that are complete first, counted in rounds of ``rollout.round_tokens`` tokens per
    response. With ``rollout.partial`` the others are continued in the next step by its newer weights; a group
    whose oldest token would otherwise get older than ``asynchrony.max_staleness`` is waited for instead.
    Without, the others are discarded and their prompts come first in the next step; prompts with short
    responses are then learned from more often.

    ``draw(n)`` gives the next n prompts. ``carried``, ``waiting`` and ``informative`` (groups that taught
    something, groups sampled) are state of the run. Making one is collective over the world.
    """

    def __init__(
        self, config: RunConfig, roles: Roles, algorithm: Algorithm, draw: Callable[[int], PromptBatch]
    ) -> None:
        self.config, self.roles, self.algorithm, self.draw = config, roles, algorithm, draw
        self.carried: InFlight | None = None
        self.waiting: PromptBatch | None = None
        self.informative = (0, 0)
        communicator(roles.rollout.layout.ranks)

    def start(self, wanted: int, seed: int) -> Sampling:
        """Sample on the ranks of the rollout; others return at once. Collective over the rollout's ranks."""
        samples, rollout = self.config.batch.samples_per_prompt, self.roles.rollout
        if not self.config.rollout.oversample:
            prompts = self._prompts(wanted)
            shard = rollout.infer(prompts, samples, seed=seed)
            baseline = self.algorithm.needs_greedy_baseline
            return Sampling(prompts, shard, rollout.infer(_greedy(prompts), seed=seed) if baseline else None)
        version = self.roles.hybrid_engine.version
        flight = self._flight(wanted, seed, version)
        ahead, bound = self.config.asynchrony.steps_ahead, self.config.asynchrony.max_staleness
        tokens = self.config.rollout.round_tokens
        assert tokens is not None and bound is not None
        must = (False,) * len(flight.prompts)
        if self.config.rollout.partial:
            must = partial.must_end(flight, version, ahead=ahead, bound=bound)
        shard = rollout.advance(flight, must, wanted, tokens)
        return Sampling(flight.prompts, shard, None, flight, must, wanted, version)

    def finish(self, sampling: Sampling) -> Sampled:
        """Gather what was sampled and keep what is not given away. Collective over the world."""
        shard = gather_rows(sampling.shard)
        if sampling.flight is None:
            greedy = None if sampling.greedy is None else join(gather_rows(sampling.greedy), 1)
            return Sampled(sampling.prompts, join(shard, self.config.batch.samples_per_prompt), greedy)
        flight, turns = _continued(sampling.flight, shard, sampling.version)
        taken = partial.choose(turns, sampling.must, sampling.wanted)
        left = flight.groups(sorted(set(range(len(flight.prompts))) - set(taken)))
        given = flight.groups(taken)
        metrics = Metrics.of({
            "rollout/rounds": float(shard.values["turn"].max()) if len(shard.rows) else 0.0,
            "rollout/partial_fraction": partial_fraction(given.rollouts),
        })  # fmt: skip
        if self.config.rollout.partial:
            self.carried = left
            metrics += Metrics.of({
                "rollout/carried": float(len(left.prompts)),
                "rollout/carried_tokens": float(left.response_tokens()),
            })  # fmt: skip
        else:
            self._give_back(left.prompts)
            metrics += Metrics.of({
                "rollout/discarded_prompts": float(len(left.prompts)),
                "rollout/discarded_tokens": float(left.response_tokens()),
            })  # fmt: skip
        return Sampled(given.prompts, given.rollouts, None, metrics)

    def _flight(self, wanted: int, seed: int, version: int) -> InFlight:
        """Return what was carried with as many new prompts as are to be in flight beside it."""
        total = in_flight(wanted, self.config.rollout.oversample)
        parts = [] if self.carried is None or not len(self.carried.prompts) else [self.carried]
        more = total - sum(len(part.prompts) for part in parts)
        if more > 0:
            samples = self.config.batch.samples_per_prompt
            parts.append(partial.begin(self._prompts(more), samples, seed, version))
        self.carried = None
        return partial.join(parts)

    def _prompts(self, count: int) -> PromptBatch:
        """Return ``count`` prompts: those that came back first, then new ones."""
        back, self.waiting = self.waiting, None
        if back is None or not len(back):
            return self.draw(count)
        if len(back) > count:
            self.waiting = back.rows(range(count, len(back)))
        first = back.rows(range(min(count, len(back))))
        return (
            PromptBatch.concatenate([first, self.draw(count - len(first))]) if len(first) < count else first
        )

    def _give_back(self, prompts: PromptBatch) -> None:
        self.waiting = prompts if self.waiting is None else PromptBatch.concatenate([prompts, self.waiting])

    def state_dict(self) -> dict[str, Any]:
        """Return what is begun, what waits, and what is known of informative groups."""
        return {"carried": self.carried, "waiting": self.waiting, "informative": self.informative}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; under settings that cannot continue a response its prompt starts anew."""
        self.carried, self.waiting = state["carried"], state["waiting"]
        self.informative = tuple(state["informative"])
        if self.carried is None:
            return
        same = self.carried.samples in (0, self.config.batch.samples_per_prompt)
        if not (self.config.rollout.partial and same):
            self._give_back(self.carried.prompts)
            self.carried = None


def in_flight(wanted: int, oversample: float) -> int:
    """Return how many prompts are sampled at once for ``wanted`` complete groups.

    Example:
        >>> in_flight(8, 0.3)
        11
    """
    return wanted + math.ceil(wanted * oversample - 1e-9)


def partial_fraction(rollouts: Rollouts) -> float:
    """Return the share of rows with tokens of more than one version of the weights."""
    if rollouts.token_versions is None or not len(rollouts):
        return 0.0
    mask = rollouts.response_mask
    newest = -partial.oldest_versions(-rollouts.token_versions, mask, rollouts.lengths, 0)
    return float((newest > rollouts.policy_version).float().mean())


def _continued(flight: InFlight, shard: RowShard, version: int) -> tuple[InFlight, list[int | None]]:
    """Return ``flight`` with the gathered tokens, and for each group the round in which it ended."""
    rows = torch.tensor(flight.open_rows(), dtype=torch.long)

    def whole(values: Tensor, default: Tensor) -> Tensor:
        return default.clone().index_copy_(0, rows, values)

    none = torch.zeros(len(flight.rollouts), dtype=torch.long)
    reasons = whole(shard.values["finish_reason"], flight.rollouts.finish_reason)
    added, turns = whole(shard.lengths, none), whole(shard.values["turn"], none)
    tokens, log_probs = shard.tokens["tokens"], shard.tokens["log_probs"]
    flight = partial.extended(flight, added, tokens, log_probs, reasons, version)
    groups = len(flight.prompts)
    last = turns.view(groups, -1).amax(dim=1).tolist()
    going = (reasons == UNFINISHED).view(groups, -1).any(dim=1).tolist()
    return flight, [None if more else turn for turn, more in zip(last, going, strict=True)]


def _greedy(prompts: PromptBatch) -> PromptBatch:
    """Return the prompts with greedy decoding."""
    sampling = tuple(one._replace(temperature=0.0, top_p=1.0, top_k=0) for one in prompts.sampling)
    return replace(prompts, sampling=sampling)
