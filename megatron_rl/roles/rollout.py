"""The role that samples a round of sequences, on as many engine replicas as its ranks make."""

from __future__ import annotations

from functools import partial

from megatron_rl.config.sections.rollout import EnvironmentConfig
from megatron_rl.data.chat_format import ChatFormats
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import ReplicaGroup, broadcast_object, store_increment
from megatron_rl.environments.hosts import Hosts
from megatron_rl.rollout.collate import NewTokens, RoutingShape, collect_new_tokens
from megatron_rl.rollout.engines.base import Engine, Generator, ToolParser
from megatron_rl.rollout.engines.servers.client import ServerGenerator
from megatron_rl.rollout.multi_turn import MultiTurnScheduler
from megatron_rl.rollout.scheduler import (
    GenerationRound,
    OnFinished,
    Rendezvous,
    ReplicaQueue,
    ReplicaScheduler,
    await_rendezvous,
    draw_ticket,
    sample_round,
)
from megatron_rl.rollout.types import SequenceGroup
from megatron_rl.shapes.layout import ParallelLayout


class RolloutRole:
    """Sampling on engine replicas; ``engine`` is None on ranks outside the role's ``layout``.

    ``layout.tensor`` is the engine's tensor parallelism and ``layout.data`` the number of replicas. With an
    ``environment`` the first rank of each replica runs its processes, ``chat`` says how it is spoken to, and
    ``parse`` finds calls of tools. ``max_in_flight`` sequences are sampled at once on a replica, as many as
    its engine works on unless given. ``routing`` is the shape of the experts that the engine reports. On
    ranks that send requests to servers ``in_process`` is False, on all ranks alike.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        engine: Engine | ServerGenerator | None,
        rank: int,
        environment: EnvironmentConfig | None = None,
        chat: ChatFormats | None = None,
        routing: RoutingShape | None = None,
        max_in_flight: int | None = None,
        parse: ToolParser | None = None,
        in_process: bool = True,
    ) -> None:
        self.layout, self.engine, self.rank = layout, engine, rank
        self.environment, self._chat, self._parse = environment, chat, parse
        self._routing, self._max_in_flight = routing, max_in_flight
        self._in_process = in_process
        self._hosts: Hosts | None = None
        if environment is not None and engine is not None and layout.coordinates(rank).tensor == 0:
            self._hosts = Hosts(environment)

    def infer(self, generation_round: GenerationRound, on_finished: OnFinished | None = None) -> NewTokens:
        """Sample a round; return this rank's new tokens. Collective over the role's ranks.

        A round of the open order goes on until every rank without an engine waits in `gather`.
        """
        if self.engine is None:
            return collect_new_tokens([], [], [], {}, self._routing)

        # Every round has a queue of its own in the job's store, whose name all ranks of the role must know.
        is_first = self.rank == self.layout.ranks[0]
        queue = broadcast_object(store_increment("rounds") if is_first else 0, self.layout.ranks)
        rendezvous = None
        if generation_round.rendezvous is not None:
            rendezvous = Rendezvous(generation_round, device.world_size() - len(self.layout.ranks))

        def report(index: int, group: SequenceGroup) -> None:
            if on_finished is not None:
                on_finished(index, group)
            if rendezvous is not None:
                rendezvous.count_finished(index)

        # Environments and the clock differ between the ranks of a replica, so that its first rank leads them.
        is_led = self.environment is not None or rendezvous is not None
        new_tokens = sample_round(
            self.engine,
            self.layout,
            self.rank,
            generation_round,
            next_ticket=partial(draw_ticket, f"of round {queue}", self.layout, self.rank, is_led),
            make_scheduler=partial(self._scheduler, rendezvous, is_led),
            routing=self._routing,
            max_in_flight=self._max_in_flight,
            on_finished=None if on_finished is None and rendezvous is None else report,
        )
        if not self._in_process:
            assert isinstance(self.engine, ServerGenerator)
            new_tokens = new_tokens._replace(resubmitted=self.engine.resubmitted())
        return new_tokens

    def gather(
        self, new_tokens: NewTokens, members: ReplicaGroup, generation_round: GenerationRound
    ) -> NewTokens:
        """Return what all replicas added to a round, the same value on every member.

        Collective over the members.
        """
        if generation_round.rendezvous is not None and self.engine is None:
            await_rendezvous(generation_round.rendezvous)
        shard = members.gather_rows(new_tokens.shard)
        outcomes, prompts, resubmitted = {}, {}, 0
        if self.environment is not None or not self._in_process:
            extras = (new_tokens.outcomes, new_tokens.prompts, new_tokens.resubmitted)
            for own_outcomes, own_prompts, count in members.gather_objects(extras):
                outcomes |= own_outcomes
                prompts |= own_prompts
                resubmitted += count
        experts = None if new_tokens.experts is None else members.gather_rows(new_tokens.experts)
        return NewTokens(shard, outcomes, prompts, experts, resubmitted)

    def _scheduler(
        self, rendezvous: Rendezvous | None, is_led: bool, engine: Generator, queue: ReplicaQueue
    ) -> ReplicaScheduler:
        replica = self.layout.coordinates(self.rank)
        ranks = self.layout.groups("tensor")[replica.data]
        stop_when = None if rendezvous is None else rendezvous.is_over
        if self._hosts is not None:
            assert self._chat is not None
            return MultiTurnScheduler(
                engine, queue, self._hosts, self._chat, self._parse, stop_when=stop_when, ranks=ranks
            )
        return ReplicaScheduler(
            engine, queue, stop_when=stop_when, ranks=ranks, is_led=is_led, is_leader=replica.tensor == 0
        )

    @property
    def not_enforced(self) -> tuple[str, ...]:
        """Return in words what of the environments' limits this machine does not enforce."""
        return () if self._hosts is None else self._hosts.missing

    def close(self) -> None:
        """Release the engine and the environments' processes."""
        if self._hosts is not None:
            self._hosts.close()
        if self.engine is not None:
            self.engine.close()
