"""Scheduler of sampling: which sequences a replica works on, and which requests it submits to its engine.

Every unfinished sequence of a round just has a number of tokens that it may still get. A replica admits
sequences while it has room, submits a request for each that waits for tokens, steps its engine and appends
the completions, until no sequence waits or the round stops.

A round stops in one of two orders:

* closed: token rounds. Each unfinished sequence gets up to ``token_round`` tokens. Then all replicas gather
  which sequences finished, and continue until enough groups are. Only lengths decide, so a run is repeatable.
* open: ``stop_when``. The round ends between two engine steps, by the clock, once the learners wait for it
  and enough groups are finished.

The tokens of a group do not depend on the replica that samples it.
"""

from __future__ import annotations

import sys
from collections import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_rl.distributed.exchange import ReplicaGroup, broadcast_object, store_increment, store_value
from megatron_rl.progress import count_progress
from megatron_rl.rollout.collate import NewTokens, RoutingShape, collect_new_tokens
from megatron_rl.rollout.engines.base import Generator
from megatron_rl.rollout.types import Completion, GenerationRequest, Sequence, SequenceGroup
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import FINISH_FAILED, FINISH_LENGTH

OnFinished = Callable[[int, SequenceGroup], None]
"""Callback for a group once all its sequences are finished: (index in the round, group)."""


@dataclass(frozen=True)
class GenerationRound:
    """The groups that one step samples, equal on every rank.

    Example:
        Three groups are in flight. Two finished ones suffice, and the first must be among them::

            GenerationRound(groups, required=(True, False, False), wanted=2, version=7, token_round=512)
    """

    groups: tuple[SequenceGroup, ...]
    """Running and finished groups, in the order in which they were started."""

    required: tuple[bool, ...]
    """Whether each group must finish in this round, because it would be too old in the next."""

    wanted: int
    """Number of groups for the learner."""

    version: int
    """Version of the weights that sample, 0 or more: -1 is `OBSERVED`."""

    token_round: int | None = None
    """Tokens per sequence between two gathers of the closed order; None for a single token round, in which
    every sequence finishes."""

    rendezvous: int | None = None
    """Number of the `Rendezvous` that ends a round of the open order, None in the closed order."""

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"weights of version {self.version} cannot sample: versions begin with 0")

    @cached_property
    def unfinished(self) -> list[tuple[int, Sequence]]:
        """Return (index of its group, sequence) of each sequence that was unfinished at the start."""
        return [
            (index, sequence)
            for index, group in enumerate(self.groups)
            for sequence in group.sequences
            if not sequence.is_finished
        ]


def is_enough(
    finished: Iterable[bool],
    required: abc.Sequence[bool],
    count: int,
) -> bool:
    """Return whether ``count`` groups are finished, and all required ones among them.

    Example:
        >>> is_enough([True, True, False], [False, False, True], 2)
        False
    """
    finished = list(finished)
    if sum(finished) < count:
        return False
    pairs = zip(finished, required, strict=True)
    return all(is_finished for is_finished, is_required in pairs if is_required)


class Rendezvous:
    """End of an open round: all learners wait, and enough of its groups are finished.

    Both are counters in the job's store that only grow. Replicas may see the end at different engine steps,
    but once it has come they all see it.
    """

    def __init__(
        self,
        generation_round: GenerationRound,
        learners: int,
    ) -> None:
        self._round = generation_round
        self._learners = learners

        # Groups that were finished before the round are not counted in the store.
        unfinished = {index for index, _ in generation_round.unfinished}
        num_finished_before = len(generation_round.groups) - len(unfinished)
        self._count = generation_round.wanted - num_finished_before
        self._num_required = sum(generation_round.required[index] for index in unfinished)

    def count_finished(self, group: int) -> None:
        """Count a group that has finished. Called once per group, on the first rank of its replica."""
        number = self._round.rendezvous
        store_increment(f"finished by rendezvous {number}")
        if self._round.required[group]:
            store_increment(f"required and finished by rendezvous {number}")

    def is_over(self) -> bool:
        """Return whether the round ends now."""
        number = self._round.rendezvous
        return (
            store_value(f"waiting for rendezvous {number}") >= self._learners
            and store_value(f"finished by rendezvous {number}") >= self._count
            and store_value(f"required and finished by rendezvous {number}") >= self._num_required
        )


def await_rendezvous(number: int) -> None:
    """Count this rank, a learner, as waiting for the end of an open round."""
    store_increment(f"waiting for rendezvous {number}")


class Admitted(NamedTuple):
    """A sequence that a replica has admitted.

    Example:
        The third unfinished sequence of a round, of its second group, continued after 40 tokens::

            Admitted(position=2, group=1, start=40, sequence=Sequence(...))
    """

    position: int
    """Position in `GenerationRound.unfinished`."""

    group: int
    """Index of the sequence's group in the round."""

    start: int
    """Number of tokens of the response when the sequence was admitted."""

    sequence: Sequence
    """The replica's own copy, which gets the new tokens."""


class ReplicaQueue:
    """Order in which one replica admits the sequences of a round, group after group.

    The first groups, as many as all ``replicas`` have room for, are assigned to the replicas in turn. A
    replica draws each further group from the job's shared queue, once it has room for the group's first
    sequence. So no replica is idle while groups are queued, and none waits for a group that a slower one has
    reserved. A round with room for all groups is distributed in the same way in every run.

    ``next_queue_index`` draws from the shared queue: over all replicas it returns 0, 1, 2, … once each.
    ``cached_on`` maps seeds of sequences to the replica whose engine retains their key-value cache; their
    groups are assigned to that replica.
    """

    def __init__(
        self,
        generation_round: GenerationRound,
        max_in_flight: int,
        max_model_len: int | None,
        next_queue_index: Callable[[], int] = lambda: 0,
        replica: int = 0,
        replicas: int = 1,
        cached_on: Mapping[int, int] | None = None,
    ) -> None:
        self.round = generation_round
        self.max_in_flight = max_in_flight
        self._max_model_len = max_model_len
        self._next_queue_index = next_queue_index

        # Positions of the unfinished sequences by group, and the replicas with a cache of one.
        self._positions: dict[int, list[int]] = {}
        cached: dict[int, int] = {}
        for position, (group, sequence) in enumerate(generation_round.unfinished):
            self._positions.setdefault(group, []).append(position)
            if cached_on and sequence.seed in cached_on:
                cached[group] = cached_on[sequence.seed]

        # The first groups, which fill all replicas, are assigned in turn; the others are drawn. If any group
        # is cached, all uncached ones are drawn: a replica may be full with the groups that it has cached.
        uncached = [group for group in self._positions if group not in cached]
        group_sizes = [len(group.sequences) for group in generation_round.groups]
        samples = max(group_sizes, default=1)
        num_assigned = 0
        if not cached:
            num_assigned = max(1, max_in_flight // max(samples, 1)) * replicas
        cached_groups = [group for group, cached_replica in cached.items() if cached_replica == replica]
        uncached_groups = uncached[:num_assigned][replica::replicas]
        self._assigned = [*cached_groups, *uncached_groups]
        self._shared_queue = uncached[num_assigned:]

        # The remaining sequences of the current group, and all admitted sequences of unfinished groups.
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
            self._admitting = [self._admit(position) for position in self._positions[group]]
            self._in_progress[group] = list(self._admitting)
        return self._admitting.pop(0)

    def pop_finished(self) -> list[tuple[int, SequenceGroup]]:
        """Remove and return the groups that this replica has finished, with their index in the round."""
        finished = []
        for index, members in self._in_progress.items():
            if all(member.sequence.is_finished for member in members):
                finished.append(index)

        groups = []
        for index in finished:
            members = self._in_progress.pop(index)
            groups.append((index, self._with_copies(index, members)))
        return groups

    def _with_copies(
        self,
        index: int,
        members: abc.Sequence[Admitted],
    ) -> SequenceGroup:
        """Return a group of the round with the replica's copies in place of the admitted sequences."""
        # By identity: sequences that finished in an earlier step were not copied.
        copies = {}
        for member in members:
            _, sequence = self.round.unfinished[member.position]
            copies[id(sequence)] = member.sequence

        group = self.round.groups[index]
        sequences = [copies.get(id(sequence), sequence) for sequence in group.sequences]
        return SequenceGroup(group.prompt, sequences)

    def _next_group(self) -> int | None:
        """Return the index of the replica's next group, None if no group remains for it."""
        if self._assigned:
            return self._assigned.pop(0)

        # An empty queue is never drawn from: a draw can be a collective.
        if not self._shared_queue:
            return None

        index = self._next_queue_index()
        if index >= len(self._shared_queue):
            self._shared_queue = []
            return None
        return self._shared_queue[index]

    def _admit(self, position: int) -> Admitted:
        """Admit a copy of the sequence at ``position``; it fails at once if it has no room for a response."""
        group, sequence = self.round.unfinished[position]
        copy = sequence.copy()
        copy.finished_in = 0
        start = len(copy.tokens)
        if start == 0 and response_room(copy, self._max_model_len) < 1:
            copy.finish_reason = FINISH_FAILED
        return Admitted(position, group, start, copy)


def response_room(sequence: Sequence, max_model_len: int | None) -> int:
    """Return the maximum number of response tokens of a sequence.

    0 or less if the prompt is empty, or leaves no room in the model's context.
    """
    room = 0
    if sequence.prompt:
        room = sequence.sampling.max_response_tokens

    if max_model_len is None:
        return room
    return min(room, max_model_len - len(sequence.prompt))


class SchedulerOutput(NamedTuple):
    """Calls of a replica's engine before its next step, equal on all ranks of the replica.

    Example:
        One request, and none to drop::

            SchedulerOutput(requests=(GenerationRequest(0, [5, 6], ...),))
    """

    requests: tuple[GenerationRequest, ...] = ()
    """Requests to submit; their number is the index of the sequence in `ReplicaScheduler.admitted`."""

    aborts: tuple[int, ...] = ()
    """Numbers of open requests to abort, before the new ones are submitted."""


class ReplicaScheduler:
    """Scheduler of one replica, for sequences that are one response to their prompt.

    Collective over ``ranks``, the replica's. All of them must make the same engine calls. Either all ranks
    compute the same schedule, without a message per engine step; that needs a schedule that depends on the
    engine's completions alone. Or the replica ``is_led``: its first rank alone schedules (``is_leader``), and
    broadcasts its `SchedulerOutput`. ``stop_when`` ends the round between two engine steps.
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
        self.engine = engine
        self.queue = queue
        self.admitted: list[Admitted] = []
        self._stop_when = stop_when
        self._ranks = ranks
        self._is_led = is_led
        self._schedules = is_leader or not is_led
        self._version = queue.round.version

        # Limit of tokens per sequence in this token round, None if there is none.
        self._token_round: int | None = None
        # Indices in `admitted` of the sequences that wait for a request, and the number of open requests.
        self._pending: list[int] = []
        self._num_running = 0

    def run_token_round(
        self,
        tokens: int | None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Sample up to ``tokens`` tokens of every sequence; call ``after_step`` after each engine step."""
        with self.engine.sampling():
            self.start_token_round(tokens)
            while self.step():
                count_progress("engine steps")
                after_step()

            # Requests are open here only if `stop_when` has ended the round.
            completions = self.engine.interrupt()
            if self._schedules:
                self._append_interrupted(completions)

    def start_token_round(self, tokens: int | None) -> None:
        """Start a token round: schedule all unfinished and new sequences for at most ``tokens`` tokens."""
        self._token_round = tokens
        self._pending = []
        for number, admitted in enumerate(self.admitted):
            if not admitted.sequence.is_finished:
                self._pending.append(number)

    def step(self) -> bool:
        """Submit the scheduled requests and run one engine step; return False at the end of the round."""
        output = None
        if self._schedules:
            output = self._schedule_or_stop()
        # The other ranks of a led replica wait here for the leader's schedule, or for the end.
        if self._is_led:
            output = broadcast_object(output, self._ranks)
        if output is None:
            return False

        # The same calls in the same order on all ranks of the replica.
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
        """Return the next requests; None once no sequence waits for tokens."""
        num_in_flight = self._num_running + len(self._pending)
        self._pending += self.admit(num_in_flight)
        requests = tuple(self.request(number, self._token_round) for number in self._pending)
        self._num_running += len(requests)
        self._pending = []

        if self._num_running == 0:
            return None
        return SchedulerOutput(requests)

    def update(self, completions: abc.Sequence[Completion]) -> None:
        """Append the engine's completions to their sequences."""
        self._num_running -= len(completions)
        for completion in completions:
            sequence = self.admitted[completion.number].sequence
            sequence.append_sampled(completion, self._version)
            # At the limit of a token round, the sequence is only finished if its response has no more room.
            if completion.finish_reason != FINISH_LENGTH or self.room(sequence) < 1:
                sequence.finish_reason = completion.finish_reason

    def admit(self, num_in_flight: int) -> list[int]:
        """Admit sequences up to the in-flight limit, given ``num_in_flight``; return the unfinished ones.

        Sequences are returned as indices in ``admitted``. A sequence without room for a response is finished
        at once.
        """
        unfinished = []
        while num_in_flight + len(unfinished) < self.queue.max_in_flight:
            number = self._admit_next()
            if number is None:
                break
            if not self.admitted[number].sequence.is_finished:
                unfinished.append(number)
        return unfinished

    def admit_remaining(self) -> None:
        """Admit the groups that no replica has admitted, so that one replica reports every sequence."""
        while self._admit_next() is not None:
            pass

    def _admit_next(self) -> int | None:
        admitted = self.queue.pop()
        if admitted is None:
            return None
        self.admitted.append(admitted)
        return len(self.admitted) - 1

    def room(self, sequence: Sequence) -> int:
        """Return the number of tokens by which the response may still grow."""
        return response_room(sequence, self.engine.max_model_len) - len(sequence.tokens)

    def request(
        self,
        number: int,
        limit: int | None,
        turn_start: int = 0,
    ) -> GenerationRequest:
        """Return the request for at most ``limit`` further tokens of the sequence ``admitted[number]``.

        ``turn_start`` is the number of tokens of the response in front of its current turn.
        """
        sequence = self.admitted[number].sequence
        max_tokens = self.room(sequence)
        if limit is not None:
            max_tokens = min(max_tokens, limit)

        return GenerationRequest(
            number,
            (sequence.prompt + sequence.tokens).tolist(),
            sequence.sampling,
            max_tokens,
            sequence.seed,
            len(sequence.tokens),
            len(sequence.tokens) - turn_start,
        )

    def finished(self) -> list[tuple[int, SequenceGroup]]:
        """Return the groups that have finished since the last call, with their index in the round."""
        return self.queue.pop_finished()

    def new_prompts(self) -> dict[int, list[int]]:
        """Return the prompts that differ from the record's, by the sequence's position in the round."""
        return {}

    def new_tokens(self, routing: RoutingShape | None) -> NewTokens:
        """Return the tokens that this replica has added to the sequences that it admitted."""
        return collect_new_tokens(
            [admitted.position for admitted in self.admitted],
            [admitted.sequence for admitted in self.admitted],
            [admitted.start for admitted in self.admitted],
            self.new_prompts(),
            routing,
        )

    def close(self) -> None:
        """Release the resources of sequences that continue in another step."""

    def _append_interrupted(self, completions: abc.Sequence[Completion]) -> None:
        """Append the tokens of requests that were open at the end; their sequences stay unfinished."""
        for completion in completions:
            sequence = self.admitted[completion.number].sequence
            if not sequence.is_finished:
                sequence.append_sampled(completion, self._version)
        self._num_running = 0


def sample_round(
    engine: Generator,
    layout: ParallelLayout,
    rank: int,
    generation_round: GenerationRound,
    *,
    next_queue_index: Callable[[], int],
    make_scheduler: Callable[[Generator, ReplicaQueue], ReplicaScheduler] = ReplicaScheduler,
    routing: RoutingShape | None = None,
    max_in_flight: int | None = None,
    on_finished: OnFinished | None = None,
) -> NewTokens:
    """Continue the unfinished sequences of a round until enough of its groups are finished.

    ``next_queue_index`` and ``max_in_flight`` as for `ReplicaQueue`; ``max_in_flight`` defaults to the
    number of requests that the engine works on at once. ``on_finished`` is called on the first rank of a
    replica, while other groups continue. Collective over the ranks of ``layout``, whose communicator must
    exist.
    """
    all_ranks = ReplicaGroup(layout.ranks)
    coordinates = layout.coordinates(rank)
    is_output_rank = coordinates.tensor == 0
    is_open = generation_round.rendezvous is not None

    # In the closed order no request with tokens is interrupted, so no engine retains a cache.
    cached_on = None
    if is_open:
        cached_on = _cached_on(engine, layout, all_ranks)
    if max_in_flight is None:
        max_in_flight = engine.most_rows
    queue = ReplicaQueue(
        generation_round,
        max_in_flight,
        engine.max_model_len,
        next_queue_index,
        coordinates.data,
        layout.data,
        cached_on,
    )
    scheduler = make_scheduler(engine, queue)

    def report_finished() -> None:
        if on_finished is not None and is_output_rank:
            for index, group in scheduler.finished():
                on_finished(index, group)

    if generation_round.token_round is None:
        _run_once(scheduler, generation_round, report_finished)
    else:
        _run_token_rounds(
            scheduler,
            generation_round,
            all_ranks,
            is_output_rank,
            report_finished,
        )

    # Every sequence needs a replica that reports it, also one that no replica has begun.
    scheduler.close()
    scheduler.admit_remaining()
    if generation_round.token_round is None:
        for admitted in scheduler.admitted:
            admitted.sequence.finished_in = 1

    # The other ranks of a replica have the same tokens, or none if the replica is led.
    if not is_output_rank:
        return collect_new_tokens([], [], [], {}, routing)
    return scheduler.new_tokens(routing)


def _run_once(
    scheduler: ReplicaScheduler,
    generation_round: GenerationRound,
    report_finished: Callable[[], None],
) -> None:
    """Sample until every sequence is finished or, in the open order, the round is over."""
    # An open round runs until the learners wait, even if enough groups are finished already.
    if generation_round.rendezvous is None and _enough(generation_round, {}):
        return
    scheduler.run_token_round(None, report_finished)


def _run_token_rounds(
    scheduler: ReplicaScheduler,
    generation_round: GenerationRound,
    all_ranks: ReplicaGroup,
    is_output_rank: bool,
    report_finished: Callable[[], None],
) -> None:
    """Sample token rounds until enough groups are finished on all replicas together."""
    # Position of a sequence in the round -> token round in which it finished; equal on all ranks.
    finished_in: dict[int, int] = {}
    token_round = 0
    while not _enough(generation_round, finished_in):
        token_round += 1
        scheduler.run_token_round(generation_round.token_round, report_finished)

        newly_finished = []
        for admitted in scheduler.admitted:
            if admitted.position not in finished_in and admitted.sequence.is_finished:
                admitted.sequence.finished_in = token_round
                newly_finished.append(admitted.position)

        # Every rank needs the positions of all replicas, so that all make the same decision to continue.
        positions = newly_finished if is_output_rank else []
        for replica_positions in all_ranks.gather_objects(positions):
            finished_in |= dict.fromkeys(replica_positions, token_round)


def _enough(generation_round: GenerationRound, finished_in: Mapping[int, int]) -> bool:
    """Return whether enough groups are finished, given the positions of newly finished sequences."""
    finished = [True] * len(generation_round.groups)
    for position, (group, _) in enumerate(generation_round.unfinished):
        if position not in finished_in:
            finished[group] = False
    return is_enough(finished, generation_round.required, generation_round.wanted)


def _cached_on(
    engine: Generator,
    layout: ParallelLayout,
    all_ranks: ReplicaGroup,
) -> dict[int, int]:
    """Gather the key-value caches that engines retain: seed of the sequence -> replica of the engine.

    Collective over the ranks of ``layout``.
    """
    seeds_by_rank = all_ranks.gather_objects(tuple(engine.kept))
    cached: dict[int, int] = {}
    for rank, seeds in zip(layout.ranks, seeds_by_rank, strict=True):
        replica = layout.coordinates(rank).data
        cached |= dict.fromkeys(seeds, replica)
    return cached


def draw_queue_index(
    name: str,
    layout: ParallelLayout,
    rank: int,
    is_led: bool,
) -> int:
    """Return the next index of the job's queue ``name``; the first rank of a replica draws it.

    The other ranks receive it, unless the replica ``is_led``: then only its first rank admits sequences.
    """
    coordinates = layout.coordinates(rank)
    # The largest int is beyond the end of every queue, for ranks that do not draw.
    index = sys.maxsize
    if coordinates.tensor == 0:
        index = store_increment(name)
    if is_led:
        return index
    return broadcast_object(index, layout.groups("tensor")[coordinates.data])
