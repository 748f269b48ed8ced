"""The role that samples episodes, on as many engine replicas as its ranks make."""

from __future__ import annotations

import sys
from functools import partial

from megatron_rl.config.sections.rollout import EnvironmentConfig
from megatron_rl.data.chat_format import ChatFormats
from megatron_rl.environments.hosts import Hosts
from megatron_rl.parallel import device
from megatron_rl.parallel.exchange import Members, share, ticket
from megatron_rl.rollout.conversations import Conversations
from megatron_rl.rollout.engine import Engine, ToolParser
from megatron_rl.rollout.episodes import Added, Episodes, Sweep, added_rows
from megatron_rl.rollout.replica import OnComplete, Rendezvous, await_rendezvous, sample
from megatron_rl.rollout.server import ServerSampler
from megatron_rl.rollout.turns import Groups, Led, SingleTurns, Turns, Until
from megatron_rl.shapes.layout import ParallelLayout


class RolloutRole:
    """Deal episodes out to engine replicas; ``engine`` is None on ranks outside the role's ``layout``.

    ``layout.tensor`` is the engine's tensor parallelism and ``layout.data`` the number of replicas. With an
    ``environment`` the first rank of each replica runs its processes, ``chat`` says how it is spoken to, and
    ``parse`` finds calls of tools.
    ``most`` episodes are in flight on a replica, as many as its engine works on unless given.
    ``records`` are the layers, and experts per token, of an engine that says which these were. ``served``
    says that engines are samplers at servers, on all ranks alike.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        engine: Engine | ServerSampler | None,
        rank: int,
        environment: EnvironmentConfig | None = None,
        chat: ChatFormats | None = None,
        records: tuple[int, int] | None = None,
        most: int | None = None,
        parse: ToolParser | None = None,
        served: bool = False,
    ) -> None:
        self.layout, self.engine, self.rank = layout, engine, rank
        self.environment, self._chat, self._parse = environment, chat, parse
        self._records, self._most, self._queue = records, most, 0
        self._served = served
        self._hosts: Hosts | None = None
        if environment is not None and engine is not None and layout.coordinates(rank).tensor == 0:
            self._hosts = Hosts(environment)

    def infer(self, sweep: Sweep, on_complete: OnComplete | None = None) -> Added:
        """Continue what is in flight; see `sample`. Collective over the role's ranks.

        An open sweep goes on until every rank without an engine waits in `gather`.
        """
        if self.engine is None:
            return added_rows([], [], [], self._records)
        first = self.rank == self.layout.ranks[0]
        self._queue = share(ticket("sweeps") if first else 0, self.layout.ranks)
        rendezvous = None
        if sweep.rendezvous is not None:
            rendezvous = Rendezvous(sweep, device.world_size() - len(self.layout.ranks))

        def ended(group: int, episodes: Episodes) -> None:
            if on_complete is not None:
                on_complete(group, episodes)
            if rendezvous is not None:
                rendezvous.ended(group)

        led = self.environment is not None or rendezvous is not None
        added = sample(
            self.engine,
            self.layout,
            self.rank,
            sweep,
            partial(self._take, led),
            partial(self._turns, rendezvous),
            self._records,
            self._most,
            None if on_complete is None and rendezvous is None else ended,
        )
        if isinstance(self.engine, ServerSampler):
            added = added._replace(sampled_again=self.engine.sampled_again())
        return added

    def _take(self, led: bool) -> int:
        """Return the sweep's next ticket, drawn by a replica's first rank, which with ``led`` is alone."""
        replica = self.layout.coordinates(self.rank)
        number = ticket(f"of sweep {self._queue}") if replica.tensor == 0 else sys.maxsize
        return number if led else share(number, self.layout.groups("tensor")[replica.data])

    def gather(self, added: Added, members: Members, rendezvous: int | None = None) -> Added:
        """Return what all replicas added to a sweep, the same value on every member.

        Collective over the members.
        """
        if rendezvous is not None and self.engine is None:
            await_rendezvous(rendezvous)
        shard, outcomes, prompts = members.gather_rows(added.shard), {}, {}
        again = 0
        if self.environment is not None or self._served:
            told = members.gather_objects((added.outcomes, added.prompts, added.sampled_again))
            for ended, opened, count in told:
                outcomes |= ended
                prompts |= opened
                again += count
        experts = None if added.experts is None else members.gather_rows(added.experts)
        return Added(shard, outcomes, prompts, experts, again)

    def _turns(self, rendezvous: Rendezvous | None, groups: Groups) -> Turns:
        replica, leader = self.layout.coordinates(self.rank), None
        if self._hosts is not None:
            assert self._chat is not None
            assert self.engine is not None
            leader = Conversations(self._hosts, self._chat, groups, self._parse, self.engine.max_model_len)
        elif self.environment is None:
            if rendezvous is None:
                return SingleTurns(groups)
            leader = SingleTurns(groups) if replica.tensor == 0 else None
        if rendezvous is not None and leader is not None:
            leader = Until(leader, rendezvous.over)
        return Led(leader, self.layout.groups("tensor")[replica.data])

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
