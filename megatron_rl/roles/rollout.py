"""The role that samples episodes, on as many engine replicas as its ranks make.

A replica begins with its share of as many groups as all replicas have room for, and draws each further one
from the job's queue when there is room for its first row; the others begin as further rows end. So none has
room to spare while there is work, or waits for work that a slower one holds. A sweep that has room at once is
dealt out alike in every run. Which replica samples a group changes none of its tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from megatron_rl.config.sections.rollout import EnvironmentConfig
from megatron_rl.data.chat_format import ChatFormats
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import ReplicaGroup, broadcast_object, store_increment, store_value
from megatron_rl.environments.hosts import Hosts
from megatron_rl.rollout.conversations import Conversations
from megatron_rl.rollout.engine import Engine, Sampler, ToolParser
from megatron_rl.rollout.episodes import Added, Episodes, Sweep, added_rows, extended, is_enough
from megatron_rl.rollout.server import ServerSampler
from megatron_rl.rollout.turns import Groups, Led, Row, SingleTurns, Turns, Until, drive
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import FINISH_FAILED, UNFINISHED, split_rows

OnComplete = Callable[[int, Episodes], None]
"""Takes the place of a group in its sweep, and the group, whose episodes have all ended."""


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
        self._queue = broadcast_object(store_increment("sweeps") if first else 0, self.layout.ranks)
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
        number = store_increment(f"of sweep {self._queue}") if replica.tensor == 0 else sys.maxsize
        return number if led else broadcast_object(number, self.layout.groups("tensor")[replica.data])

    def gather(self, added: Added, members: ReplicaGroup, rendezvous: int | None = None) -> Added:
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


class Rendezvous:
    """Say when an open sweep is over: its learners wait for it, and enough of its groups have ended.

    Both are counted in the job's store and only grow: replicas see it at different steps and cannot disagree.
    """

    def __init__(self, sweep: Sweep, learners: int) -> None:
        self._sweep, self._learners = sweep, learners
        open_groups = {row // sweep.flight.samples for row in sweep.flight.open_rows()}
        self._wanted = sweep.wanted - (len(sweep.flight.prompts) - len(open_groups))
        self._must = sum(sweep.must[group] for group in open_groups)

    def ended(self, group: int) -> None:
        """Count a group that has ended."""
        store_increment(f"ended by rendezvous {self._sweep.rendezvous}")
        if self._sweep.must[group]:
            store_increment(f"due and ended by rendezvous {self._sweep.rendezvous}")

    def over(self) -> bool:
        """Say whether the sweep is over."""
        number = self._sweep.rendezvous
        return (
            store_value(f"waiting for rendezvous {number}") >= self._learners
            and store_value(f"ended by rendezvous {number}") >= self._wanted
            and store_value(f"due and ended by rendezvous {number}") >= self._must
        )


def await_rendezvous(number: int) -> None:
    """Have the replicas know that this rank, which learns, waits for them."""
    store_increment(f"waiting for rendezvous {number}")


class Dealt:
    """Hold the rows of ``flight`` that a replica has begun, and begin more of them.

    The replica is the ``place``-th of ``replicas``; it has up to ``most`` rows in flight.
    ``take`` gives the next ticket of the job, 0 at first, to one replica each. ``homes`` says by seed which
    replica's engine has rows in its cache: it goes on with them, and all other groups are in the queue.
    ``numbers`` says which of ``flight.open_rows()`` each of ``rows`` is.
    """

    def __init__(
        self,
        flight: Episodes,
        most: int,
        max_model_len: int | None,
        take: Callable[[], int] = lambda: 0,
        place: int = 0,
        replicas: int = 1,
        homes: Mapping[int, int] | None = None,
    ) -> None:
        self.prompts = flight.prompts
        self.rows: list[Row] = []
        self.numbers: list[int] = []
        self._flight, self._most, self._max_model_len, self._take = flight, most, max_model_len, take
        self._groups: dict[int, list[int]] = {}
        self._going: dict[int, list[Row]] = {}
        self._waiting: list[tuple[int, Row]] = []
        self._open = flight.open_rows()
        for number, row in enumerate(self._open):
            self._groups.setdefault(row // flight.samples, []).append(number)
        seeds, known = flight.seeds.tolist(), {}
        for row in self._open:
            if homes and seeds[row] in homes:
                known[row // flight.samples] = homes[seeds[row]]
        waiting = [group for group in self._groups if group not in known]
        filled = 0 if known else max(1, most // max(flight.samples, 1)) * replicas
        remembered = [group for group, home in known.items() if home == place]
        self._first, self._queue = [*remembered, *waiting[:filled][place::replicas]], waiting[filled:]

    def more(self, busy: int) -> list[int]:
        """Begin further rows while there is room beside ``busy`` ones; return their places."""
        begun = len(self.rows)
        while busy < self._most:
            row = self._begin()
            if row is None:
                break
            busy += row.finish_reason == UNFINISHED
        return list(range(begun, len(self.rows)))

    def complete(self, version: int) -> list[tuple[int, Episodes]]:
        """Return the groups whose rows have all ended since the last call, sampled by ``version``."""
        ended = [
            group
            for group, rows in self._going.items()
            if all(row.finish_reason != UNFINISHED for row in rows)
        ]
        result = []
        for group in ended:
            rows = self._going.pop(group)
            added = added_rows(list(range(len(rows))), rows, [0] * len(rows))
            result.append((group, extended(self._flight.groups([group]), added, version)))
        return result

    def rest(self) -> None:
        """Begin what no replica has begun, so that each row has one that answers for it."""
        while self._begin() is not None:
            pass

    def _begin(self) -> Row | None:
        """Return the next row of the replica's last group, or else of another one, now one of ``rows``."""
        if not self._waiting:
            group = self._next()
            if group is None:
                return None
            numbers = self._groups[group]
            rows = rows_of(self._flight, [self._open[number] for number in numbers], self._max_model_len)
            self._going[group] = rows
            self._waiting = list(zip(numbers, rows, strict=True))
        number, row = self._waiting.pop(0)
        self.numbers.append(number)
        self.rows.append(row)
        return row

    def _next(self) -> int | None:
        if self._first:
            return self._first.pop(0)
        number = self._take() if self._queue else 0
        if number >= len(self._queue):
            self._queue = []
            return None
        return self._queue[number]


def rows_of(flight: Episodes, numbers: Sequence[int], max_model_len: int | None) -> list[Row]:
    """Return the episodes ``numbers`` of one group to be continued; one without room to begin has failed."""
    group = numbers[0] // flight.samples
    chosen, sampling = flight.rollouts.rows(numbers), flight.prompts.sampling[group]
    result = []
    for seed, tokens, mask, log_probs in zip(
        flight.seeds[list(numbers)].tolist(),
        split_rows(chosen.tokens, chosen.lengths),
        split_rows(chosen.response_mask, chosen.lengths),
        split_rows(chosen.rollout_log_probs, chosen.lengths),
        strict=True,
    ):
        start = int(mask.int().argmax()) if mask.any() else len(tokens)
        text, old, by_policy, values = (
            part.tolist() for part in (tokens[:start], tokens[start:], mask[start:], log_probs[start:])
        )
        room = sampling.max_response_tokens if text else 0
        if max_model_len is not None:
            room = min(room, max_model_len - len(text))
        row = Row(text, sampling, seed, group, room, old, by_policy, values, [()] * len(old), len(old))
        row.finish_reason = UNFINISHED if room > 0 or row.before else FINISH_FAILED
        result.append(row)
    return result


def sample(
    engine: Sampler,
    layout: ParallelLayout,
    rank: int,
    sweep: Sweep,
    take: Callable[[], int],
    turns_of: Callable[[Dealt], Turns],
    records: tuple[int, int] | None = None,
    most: int | None = None,
    on_complete: OnComplete | None = None,
) -> Added:
    """Continue open rows, in rounds of ``sweep.tokens`` tokens each, until the sweep's groups have ended.

    Row i of the answer is what was added to ``flight.open_rows()[i]``. Which groups end in a round depends on
    how long their responses are, not on time, ranks or replicas; but an open sweep has one round, which ends
    when the turns do, and with it some rows have not. ``take`` gives the sweep's tickets, see
    `Dealt`, and ``turns_of`` leads the rows; ``records`` as in `added_rows`; ``most`` rows are in flight on a
    replica, as many as the engine works on unless given. The first rank of a replica tells ``on_complete`` of
    every group that has ended, while others go on. Collective over the layout's ranks, whose communicator
    must exist.
    """
    members, replica = ReplicaGroup(layout.ranks), layout.coordinates(rank)
    most = engine.most_rows if most is None else most
    homes: dict[int, int] = {}
    if sweep.rendezvous is not None:
        for member, seeds in zip(layout.ranks, members.gather_objects(tuple(engine.kept)), strict=True):
            homes |= dict.fromkeys(seeds, layout.coordinates(member).data)
    dealt = Dealt(sweep.flight, most, engine.max_model_len, take, replica.data, layout.data, homes)
    turns, rows = turns_of(dealt), sweep.flight.open_rows()
    rounds: dict[int, int] = {}
    number = 0

    def tell() -> None:
        if on_complete is not None and replica.tensor == 0:
            for group, episodes in dealt.complete(sweep.version):
                on_complete(group, episodes)

    def enough() -> bool:
        return is_enough(_ended(sweep.flight, rows, rounds), sweep.must, sweep.wanted)

    while (sweep.rendezvous is not None and not number) or not enough():
        number += 1
        drive(engine, turns, sweep.tokens, tell)
        if sweep.tokens is None:
            rounds = dict.fromkeys(range(len(rows)), number)
            continue
        ended = [
            index
            for index, row in zip(dealt.numbers, dealt.rows, strict=True)
            if index not in rounds and row.finish_reason != UNFINISHED
        ]
        for indices in members.gather_objects(ended if replica.tensor == 0 else []):
            rounds |= dict.fromkeys(indices, number)
    turns.close()
    dealt.rest()
    if replica.tensor:
        return added_rows([], [], [], records)
    return added_rows(dealt.numbers, dealt.rows, [rounds.get(index, 0) for index in dealt.numbers], records)


def _ended(flight: Episodes, rows: Sequence[int], turns: dict[int, int]) -> list[bool]:
    """Say of each group whether all its rows ended; ``turns`` knows those of ``rows`` that did."""
    ended = [True] * len(flight.prompts)
    for index, row in enumerate(rows):
        if index not in turns:
            ended[row // flight.samples] = False
    return ended
