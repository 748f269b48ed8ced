"""Which sequences a replica works on, and what its engine is asked for next.

Every unfinished sequence of a round just has a number of tokens that it may still get. A replica admits
sequences while it has room, submits a request for each that waits for tokens, steps its engine, appends what
comes back, and so on until nothing is left to do or the round is to stop.

A round stops in one of two orders:

* closed: token rounds. Each unfinished sequence gets up to ``token_round`` tokens; then all replicas look at
  which groups are finished, and go on until there are enough. Lengths alone decide, so that a run repeats.
* open: ``stop_when``. The round ends between two engine steps, by the clock, once the learners wait for it
  and enough groups are finished.

Which replica samples a group changes none of its tokens.
"""

from __future__ import annotations

import sys
from collections import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_rl.distributed.exchange import ReplicaGroup, broadcast_object, store_increment, store_value
from megatron_rl.progress import advance
from megatron_rl.rollout.collate import NewTokens, RoutingShape, collect_new_tokens
from megatron_rl.rollout.engines.base import Generator
from megatron_rl.rollout.types import Completion, GenerationRequest, Sequence, SequenceGroup
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import FINISH_FAILED, FINISH_LENGTH

OnFinished = Callable[[int, SequenceGroup], None]
"""Called with the index of a group in its round, and the group, once all its sequences are finished."""


@dataclass(frozen=True)
class GenerationRound:
    """The groups that one step samples, the same value on every rank.

    Example:
        Two groups of a step's three in flight are enough, and the first must be among them::

            GenerationRound(groups, required=(True, False, False), wanted=2, version=7, token_round=512)
    """

    groups: tuple[SequenceGroup, ...]
    """Running and finished groups, in the order in which they were started."""

    required: tuple[bool, ...]
    """Which groups must finish in this round: waiting for them any longer would make them too old."""

    wanted: int
    """How many groups the learner takes."""

    version: int
    """Version of the weights that sample, 0 or more: `OBSERVED` marks tokens that no weights sampled."""

    token_round: int | None = None
    """Tokens per sequence after which the closed order looks at which groups are finished; None for a single
    token round that ends with its last sequence."""

    rendezvous: int | None = None
    """Number of the `Rendezvous` that ends the round, of the open order alone."""

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"a round by weights of version {self.version}: there are none yet")

    @cached_property
    def unfinished(self) -> list[tuple[int, Sequence]]:
        """Return (index of its group, sequence) of each sequence that was unfinished when the round began."""
        return [
            (index, sequence)
            for index, group in enumerate(self.groups)
            for sequence in group.sequences
            if not sequence.is_finished
        ]


def is_enough(finished: Iterable[bool], required: abc.Sequence[bool], wanted: int) -> bool:
    """Return whether ``wanted`` groups are finished, and every required one.

    Example:
        >>> is_enough([True, True, False], [False, False, True], 2)
        False
    """
    finished = list(finished)
    return sum(finished) >= wanted and all(
        done for done, must in zip(finished, required, strict=True) if must
    )


class Rendezvous:
    """End of an open round: the learners wait for it, and enough of its groups are finished.

    Both are counted in the job's store and only grow. So replicas may see the end at different steps, but
    they cannot disagree on it.
    """

    def __init__(self, generation_round: GenerationRound, learners: int) -> None:
        self._round, self._learners = generation_round, learners
        open_groups = {index for index, _ in generation_round.unfinished}
        finished_before = len(generation_round.groups) - len(open_groups)
        self._wanted = generation_round.wanted - finished_before
        self._required = sum(generation_round.required[index] for index in open_groups)

    def count_finished(self, group: int) -> None:
        """Count a group that has finished."""
        number = self._round.rendezvous
        store_increment(f"finished by rendezvous {number}")
        if self._round.required[group]:
            store_increment(f"required and finished by rendezvous {number}")

    def is_over(self) -> bool:
        """Return whether the round ends now."""
        number = self._round.rendezvous
        return (
            store_value(f"waiting for rendezvous {number}") >= self._learners
            and store_value(f"finished by rendezvous {number}") >= self._wanted
            and store_value(f"required and finished by rendezvous {number}") >= self._required
        )


def await_rendezvous(number: int) -> None:
    """Count this rank, which learns, among those that wait for the replicas."""
    store_increment(f"waiting for rendezvous {number}")


class Admitted(NamedTuple):
    """A sequence that a replica has admitted.

    ``position`` is its place in `GenerationRound.unfinished`, ``group`` the index of its group, and ``start``
    its number of tokens after the prompt at that time. ``sequence`` is the replica's own copy.
    """

    position: int
    group: int
    start: int
    sequence: Sequence


class ReplicaQueue:
    """The order in which one replica admits the sequences of a round, group after group.

    A replica begins with its share of as many groups as all ``replicas`` have room for; it draws each further
    one from the job's queue when it has room for its first sequence. So none has room to spare while there is
    work, or waits for work that a slower one holds; and a round that has room at once is dealt out alike in
    every run.

    ``next_ticket`` gives the next number of the job's queue, from 0 on, to one replica each. ``cached_on``
    has the replica, by seed, whose engine keeps the cache of a sequence: its group goes there.
    """

    def __init__(
        self,
        generation_round: GenerationRound,
        max_in_flight: int,
        max_model_len: int | None,
        next_ticket: Callable[[], int] = lambda: 0,
        replica: int = 0,
        replicas: int = 1,
        cached_on: Mapping[int, int] | None = None,
    ) -> None:
        self.round, self.max_in_flight = generation_round, max_in_flight
        self._max_model_len, self._next_ticket = max_model_len, next_ticket
        self._positions: dict[int, list[int]] = {}
        cached: dict[int, int] = {}
        for position, (group, sequence) in enumerate(generation_round.unfinished):
            self._positions.setdefault(group, []).append(position)
            if cached_on and sequence.seed in cached_on:
                cached[group] = cached_on[sequence.seed]

        queued = [group for group in self._positions if group not in cached]
        samples = max((len(group.sequences) for group in generation_round.groups), default=1)
        # Replicas with caches begin with those, however many there are: all other groups are drawn.
        dealt = 0 if cached else max(1, max_in_flight // max(samples, 1)) * replicas
        remembered = [group for group, home in cached.items() if home == replica]
        self._first = [*remembered, *queued[:dealt][replica::replicas]]
        self._queue = queued[dealt:]
        self._admitting: list[Admitted] = []
        self._in_progress: dict[int, list[Admitted]] = {}

    def pop(self) -> Admitted | None:
        """Return the next sequence of the replica's current group, or of the next one; None at the end.

        All sequences of a group are copied when its first is admitted.
        """
        if not self._admitting:
            group = self._next_group()
            if group is None:
                return None
            self._admitting = [self._admitted(position) for position in self._positions[group]]
            self._in_progress[group] = list(self._admitting)
        return self._admitting.pop(0)

    def pop_finished(self) -> list[tuple[int, SequenceGroup]]:
        """Remove and return the groups that are finished here, with their index in the round."""
        done = [
            index
            for index, members in self._in_progress.items()
            if all(one.sequence.is_finished for one in members)
        ]
        return [(index, self._with_copies(index, self._in_progress.pop(index))) for index in done]

    def _with_copies(self, index: int, members: abc.Sequence[Admitted]) -> SequenceGroup:
        """Return a group of the round with the replica's copies in the place of its own sequences."""
        copies = {id(self.round.unfinished[one.position][1]): one.sequence for one in members}
        group = self.round.groups[index]
        sequences = [copies.get(id(sequence), sequence) for sequence in group.sequences]
        return SequenceGroup(group.prompt, sequences)

    def _next_group(self) -> int | None:
        if self._first:
            return self._first.pop(0)
        number = self._next_ticket() if self._queue else 0
        if number >= len(self._queue):
            self._queue = []
            return None
        return self._queue[number]

    def _admitted(self, position: int) -> Admitted:
        group, sequence = self.round.unfinished[position]
        copy = sequence.copy()
        copy.finished_in = 0
        start = len(copy.tokens)
        if response_room(copy, self._max_model_len) < 1 and not start:
            copy.finish_reason = FINISH_FAILED
        return Admitted(position, group, start, copy)


def response_room(sequence: Sequence, max_model_len: int | None) -> int:
    """Return how many tokens there may be after the sequence's prompt."""
    room = sequence.sampling.max_response_tokens if sequence.prompt else 0
    return room if max_model_len is None else min(room, max_model_len - len(sequence.prompt))


class SchedulerOutput(NamedTuple):
    """What the engine of a replica is asked next; the same on all its ranks."""

    requests: tuple[GenerationRequest, ...] = ()
    """Requests to submit; their number is the sequence's position in `ReplicaScheduler.admitted`."""

    aborts: tuple[int, ...] = ()
    """Numbers of open requests to drop, before the new ones are submitted."""


class ReplicaScheduler:
    """Sampling of one replica, one engine step at a time; each sequence is one response to its prompt.

    Collective over the replica's ``ranks``. With ``is_led`` its first rank alone schedules, and broadcasts
    what the engine is asked; without, all ranks schedule alike and need no message per engine step, which
    only holds while nothing but the engine's answers decides. ``stop_when`` ends the round between two engine
    steps.
    """

    def __init__(
        self,
        engine: Generator,
        queue: ReplicaQueue,
        *,
        stop_when: Callable[[], bool] | None = None,
        ranks: tuple[int, ...] = (0,),
        is_led: bool = False,
        is_leader: bool = True,
    ) -> None:
        self.engine, self.queue = engine, queue
        self.admitted: list[Admitted] = []
        self._stop_when = stop_when
        self._ranks, self._is_led, self._schedules = ranks, is_led, is_leader or not is_led
        self._version = queue.round.version
        self._token_round: int | None = None
        self._pending: list[int] = []
        self._running = 0

    def run_token_round(self, tokens: int | None, after_step: Callable[[], None] = lambda: None) -> None:
        """Add up to ``tokens`` tokens to every sequence; call ``after_step`` behind each engine step."""
        with self.engine.sampling():
            self.start_token_round(tokens)
            while self.step():
                advance("engine steps")
                after_step()
            completions = self.engine.interrupt()
            if self._schedules:
                self._append_interrupted(completions)

    def start_token_round(self, tokens: int | None) -> None:
        """Let every unfinished sequence, and every one that is admitted from now on, have so many tokens."""
        self._token_round = tokens
        self._pending = [number for number, one in enumerate(self.admitted) if not one.sequence.is_finished]

    def step(self) -> bool:
        """Submit what is due and make one engine step; return False at the end of the token round."""
        output = self._schedule_or_stop() if self._schedules else None
        if self._is_led:
            output = broadcast_object(output, self._ranks)
        if output is None:
            return False

        for number in output.aborts:
            self.engine.abort(number)
        for request in output.requests:
            self.engine.submit(request)
        completions = self.engine.step()
        if self._schedules:
            self.update(completions)
        return True

    def _schedule_or_stop(self) -> SchedulerOutput | None:
        if self._stop_when is not None and self._stop_when():
            return None
        return self.schedule()

    def schedule(self) -> SchedulerOutput | None:
        """Return what to ask of the engine now, None where no sequence waits for anything."""
        self._pending += self.admit(self._running + len(self._pending))
        requests = tuple(self.request(number, self._token_round) for number in self._pending)
        self._running += len(requests)
        self._pending = []
        return SchedulerOutput(requests) if self._running else None

    def update(self, completions: abc.Sequence[Completion]) -> None:
        """Append what the engine sampled."""
        self._running -= len(completions)
        for completion in completions:
            sequence = self.admitted[completion.number].sequence
            sequence.append_sampled(completion, self._version)
            if completion.finish_reason != FINISH_LENGTH or self.room(sequence) < 1:
                sequence.finish_reason = completion.finish_reason

    def admit(self, in_flight: int) -> list[int]:
        """Admit sequences while there is room beside ``in_flight`` others; return the numbers of unfinished
        ones.

        One that has no room for a response is finished at once.
        """
        unfinished = []
        while in_flight + len(unfinished) < self.queue.max_in_flight:
            number = self._admit_next()
            if number is None:
                break
            if not self.admitted[number].sequence.is_finished:
                unfinished.append(number)
        return unfinished

    def admit_rest(self) -> None:
        """Admit what no replica has, so that every sequence has one replica that reports it."""
        while self._admit_next() is not None:
            pass

    def _admit_next(self) -> int | None:
        admitted = self.queue.pop()
        if admitted is None:
            return None
        self.admitted.append(admitted)
        return len(self.admitted) - 1

    def room(self, sequence: Sequence) -> int:
        """Return how many tokens may still follow."""
        return response_room(sequence, self.engine.max_model_len) - len(sequence.tokens)

    def request(self, number: int, limit: int | None) -> GenerationRequest:
        """Return the request for at most ``limit`` further tokens of the sequence ``number``."""
        sequence = self.admitted[number].sequence
        room = self.room(sequence)
        return GenerationRequest(
            number,
            (sequence.prompt + sequence.tokens).tolist(),
            sequence.sampling,
            room if limit is None else min(room, limit),
            sequence.seed,
            len(sequence.tokens),
        )

    def finished(self) -> list[tuple[int, SequenceGroup]]:
        """Return the groups that have finished since the last call, with their index in the round."""
        return self.queue.pop_finished()

    def new_prompts(self) -> dict[int, list[int]]:
        """Return the prompts that differ from the record's, by the sequence's position in the round."""
        return {}

    def new_tokens(self, routing: RoutingShape | None) -> NewTokens:
        """Return what this replica has added to the sequences that it admitted."""
        return collect_new_tokens(
            [one.position for one in self.admitted],
            [one.sequence for one in self.admitted],
            [one.start for one in self.admitted],
            self.new_prompts(),
            routing,
        )

    def close(self) -> None:
        """Release what belongs to sequences that go on in another step."""

    def _append_interrupted(self, completions: abc.Sequence[Completion]) -> None:
        """Append what was sampled of the requests that were open when the round ended."""
        for completion in completions:
            sequence = self.admitted[completion.number].sequence
            if not sequence.is_finished:
                sequence.append_sampled(completion, self._version)
        self._running = 0


def sample_round(
    engine: Generator,
    layout: ParallelLayout,
    rank: int,
    generation_round: GenerationRound,
    *,
    next_ticket: Callable[[], int],
    make_scheduler: Callable[[Generator, ReplicaQueue], ReplicaScheduler] = ReplicaScheduler,
    routing: RoutingShape | None = None,
    max_in_flight: int | None = None,
    on_finished: OnFinished | None = None,
) -> NewTokens:
    """Continue the unfinished sequences of a round until enough of its groups are finished.

    ``next_ticket`` and ``max_in_flight`` are as in `ReplicaQueue`, the latter by default what the engine
    works on at once. ``on_finished`` is called on the first rank of a replica, while other groups go on.
    Collective over the ranks of ``layout``, whose communicator must exist.
    """
    replicas, place = ReplicaGroup(layout.ranks), layout.coordinates(rank)
    is_output_rank = place.tensor == 0
    queue = ReplicaQueue(
        generation_round,
        engine.most_rows if max_in_flight is None else max_in_flight,
        engine.max_model_len,
        next_ticket,
        place.data,
        layout.data,
        _cached_on(engine, layout, replicas) if generation_round.rendezvous is not None else None,
    )
    scheduler = make_scheduler(engine, queue)

    def report_finished() -> None:
        if on_finished is not None and is_output_rank:
            for index, group in scheduler.finished():
                on_finished(index, group)

    if generation_round.token_round is None:
        _run_once(scheduler, generation_round, report_finished)
    else:
        _run_token_rounds(scheduler, generation_round, replicas, is_output_rank, report_finished)
    scheduler.close()
    scheduler.admit_rest()
    if generation_round.token_round is None:
        for admitted in scheduler.admitted:
            admitted.sequence.finished_in = 1

    # The other ranks of a replica have the same tokens, or none where it is led.
    return scheduler.new_tokens(routing) if is_output_rank else collect_new_tokens([], [], [], {}, routing)


def _run_once(
    scheduler: ReplicaScheduler, generation_round: GenerationRound, report_finished: Callable[[], None]
) -> None:
    """Sample until every sequence is finished or, in the open order, the round is over."""
    if generation_round.rendezvous is None and _enough(generation_round, {}):
        return
    scheduler.run_token_round(None, report_finished)


def _run_token_rounds(
    scheduler: ReplicaScheduler,
    generation_round: GenerationRound,
    replicas: ReplicaGroup,
    is_output_rank: bool,
    report_finished: Callable[[], None],
) -> None:
    """Sample token rounds until enough groups are finished on all replicas together."""
    finished_in: dict[int, int] = {}
    number = 0
    while not _enough(generation_round, finished_in):
        number += 1
        scheduler.run_token_round(generation_round.token_round, report_finished)
        newly = [
            one for one in scheduler.admitted if one.position not in finished_in and one.sequence.is_finished
        ]
        for one in newly:
            one.sequence.finished_in = number
        positions = [one.position for one in newly] if is_output_rank else []
        for finished in replicas.gather_objects(positions):
            finished_in |= dict.fromkeys(finished, number)


def _enough(generation_round: GenerationRound, finished_in: Mapping[int, int]) -> bool:
    finished = [True] * len(generation_round.groups)
    for position, (group, _) in enumerate(generation_round.unfinished):
        if position not in finished_in:
            finished[group] = False
    return is_enough(finished, generation_round.required, generation_round.wanted)


def _cached_on(engine: Generator, layout: ParallelLayout, replicas: ReplicaGroup) -> dict[int, int]:
    """Return, by seed, the replica whose engine keeps the cache of an interrupted sequence. Collective."""
    cached: dict[int, int] = {}
    for rank, seeds in zip(layout.ranks, replicas.gather_objects(tuple(engine.kept)), strict=True):
        cached |= dict.fromkeys(seeds, layout.coordinates(rank).data)
    return cached


def draw_ticket(name: str, layout: ParallelLayout, rank: int, is_led: bool) -> int:
    """Return the next number of the job's queue ``name``, drawn by the first rank of a replica.

    The other ranks receive it, unless the replica ``is_led``: then only its first rank admits sequences.
    """
    place = layout.coordinates(rank)
    number = store_increment(name) if place.tensor == 0 else sys.maxsize
    return number if is_led else broadcast_object(number, layout.groups("tensor")[place.data])
