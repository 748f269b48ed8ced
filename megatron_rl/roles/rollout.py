"""The role that samples episodes, on as many engine replicas as its ranks make."""

from __future__ import annotations

from megatron_rl.config.sections.rollout import EnvironmentConfig
from megatron_rl.data.chat_format import ChatFormat
from megatron_rl.environments.hosts import Hosts
from megatron_rl.parallel.exchange import Members, share, ticket
from megatron_rl.rollout.conversations import Conversations
from megatron_rl.rollout.engine import Engine, ToolParser
from megatron_rl.rollout.episodes import Added, Sweep, added_rows
from megatron_rl.rollout.replica import OnComplete, sample
from megatron_rl.rollout.turns import Groups, Led, SingleTurns, Turns
from megatron_rl.shapes.layout import ParallelLayout


class RolloutRole:
    """Deal episodes out to engine replicas; ``engine`` is None on ranks outside the role's ``layout``.

    ``layout.tensor`` is the engine's tensor parallelism and ``layout.data`` the number of replicas. With an
    ``environment`` the first rank of each replica runs its processes, ``chat`` says how it is spoken to, and
    ``parse`` finds calls of tools.
    ``most`` episodes are in flight on a replica, as many as its engine works on unless given.
    ``records`` are the layers, and experts per token, of an engine that says which these were.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        engine: Engine | None,
        rank: int,
        environment: EnvironmentConfig | None = None,
        chat: ChatFormat | None = None,
        records: tuple[int, int] | None = None,
        most: int | None = None,
        parse: ToolParser | None = None,
    ) -> None:
        self.layout, self.engine, self.rank = layout, engine, rank
        self.environment, self._chat, self._parse = environment, chat, parse
        self._records, self._most, self._queue = records, most, 0
        self._hosts: Hosts | None = None
        if environment is not None and engine is not None and layout.coordinates(rank).tensor == 0:
            self._hosts = Hosts(environment)

    def infer(self, sweep: Sweep, on_complete: OnComplete | None = None) -> Added:
        """Continue what is in flight; see `sample`. Collective over the role's ranks."""
        if self.engine is None:
            return added_rows([], [], [], self._records)
        first = self.rank == self.layout.ranks[0]
        self._queue = share(ticket("sweeps") if first else 0, self.layout.ranks)
        return sample(
            self.engine,
            self.layout,
            self.rank,
            sweep,
            self._take,
            self._turns,
            self._records,
            self._most,
            on_complete,
        )

    def _take(self) -> int:
        """Return the sweep's next ticket, drawn by the first rank of a replica."""
        replica = self.layout.coordinates(self.rank)
        number = ticket(f"of sweep {self._queue}") if replica.tensor == 0 else 0
        if self.environment is not None:  # the first rank alone leads the rows
            return number
        return share(number, self.layout.groups("tensor")[replica.data])

    def gather(self, added: Added, members: Members) -> Added:
        """Return what all replicas added, the same value on every member. Collective over the members."""
        shard, outcomes, prompts = members.gather_rows(added.shard), {}, {}
        if self.environment is not None:
            for ended, opened in members.gather_objects((added.outcomes, added.prompts)):
                outcomes |= ended
                prompts |= opened
        experts = None if added.experts is None else members.gather_rows(added.experts)
        return Added(shard, outcomes, prompts, experts)

    def _turns(self, groups: Groups) -> Turns:
        if self.environment is None:
            return SingleTurns(groups)
        leader = None
        if self._hosts is not None:
            assert self._chat is not None
            assert self.engine is not None
            leader = Conversations(self._hosts, self._chat, groups, self._parse, self.engine.max_model_len)
        replica = self.layout.coordinates(self.rank).data
        return Led(leader, self.layout.groups("tensor")[replica])

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
