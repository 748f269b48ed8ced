"""Scheduler of generation: which sequences a replica admits, and which requests it submits to its engine.

Every unfinished sequence of a round just has a number of tokens that may still be sampled for it. A replica
admits sequences up to its in-flight limit, submits a request for each that needs tokens, steps its engine and
appends the completions, until all its sequences are finished or the round ends.

The setting `rollout.order` determines when a round ends:

* `rollout.order: closed`: the round consists of token rounds. In a token round, up to ``max_round_tokens``
  tokens are sampled for each unfinished sequence. Then the replicas gather which sequences are finished.
  Token rounds are repeated until enough groups are finished. The result depends only on the lengths of
  responses, not on time, so a run is repeatable.

* `rollout.order: open`: the round ends between two engine steps, as soon as ``stop_when`` returns true. It
  returns true when the learners (ranks without an engine) wait for the end of the round, and enough groups
  are finished. The result depends on time.

The tokens of a group do not depend on the replica that samples it.
"""

from __future__ import annotations

import sys
from collections import abc
from collections.abc import Callable, Iterable, Mapping, Set
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
"""Callback for a group whose sequences are all finished; arguments: index in the round, group."""


@dataclass(frozen=True)
class GenerationRound:
    """Groups that are sampled in one step, and the condition for the round's end; equal on every rank.

    Example:
        Three groups are in flight. The round ends when two groups including the first are finished::

            GenerationRound(groups, (True, False, False), batch_groups=2, version=7, max_round_tokens=512)
    """

    groups: tuple[SequenceGroup, ...]
    """Running and finished groups, in the order in which they were started."""

    required: tuple[bool, ...]
    """Whether each group must finish in this round, because it would be too old for training in the next."""

    batch_groups: int
    """Number of groups that must be finished for the training batch."""

    version: int
    """Version of the weights that sample, at least 0, since -1 marks observed tokens (`OBSERVED`)."""

    max_round_tokens: int | None = None
    """Maximum number of tokens that are sampled for a sequence in a token round. After each token round, the
    finished groups are counted (`rollout.order: closed`). None for a single token round without a maximum."""

    open_round_number: int | None = None
    """Number of this round among the rounds with `rollout.order: open`, which end as soon as all learners
    wait and enough groups are finished. The counters of `OpenRoundEnd` in the job's store have this number in
    their keys. None with `rollout.order: closed`, where the end does not depend on time."""

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"the version of the weights must be at least 0, got {self.version}")

    @cached_property
    def unfinished(self) -> list[tuple[int, Sequence]]:
        """Return (group index, sequence) for each sequence that is unfinished at the round's start."""
        unfinished = []
        for index, group in enumerate(self.groups):
            unfinished += [(index, sequence) for sequence in group.sequences if not sequence.is_finished]
        return unfinished


def enough_groups_finished(
    finished: Iterable[bool],
    required: abc.Sequence[bool],
    count: int,
) -> bool:
    """Return whether at least ``count`` groups are finished, including all required groups.

    Example:
        >>> enough_groups_finished([True, True, False], [False, False, True], 2)
        False
    """
    finished = list(finished)
    if sum(finished) < count:
        return False
    pairs = zip(finished, required, strict=True)
    return all(is_finished for is_finished, is_required in pairs if is_required)


class OpenRoundEnd:
    """Condition that ends a round with `rollout.order: open`: all learners wait, enough groups are finished.

    The condition compares counters in the job's store. The counters only increase, so every replica observes
    the end of the round, but replicas may observe it at different engine steps.

    ``learners``: number of learners, the ranks without an engine.
    """

    def __init__(
        self,
        generation_round: GenerationRound,
        learners: int,
    ) -> None:
        self._round = generation_round
        self._num_learners = learners

        # Groups that were finished before the round are not counted in the store.
        unfinished_groups = {index for index, _ in generation_round.unfinished}
        num_finished_before = len(generation_round.groups) - len(unfinished_groups)
        self._num_to_finish = generation_round.batch_groups - num_finished_before
        self._num_required = sum(generation_round.required[index] for index in unfinished_groups)

    def count_finished(self, group_index: int) -> None:
        """Count a finished group of the round; call it once per group, on the first rank of its replica.

        The counters are in the job's store, where all replicas read them. They are used only with
        `rollout.order: open`, where a round ends when enough groups are finished and the learners wait.
        """
        round_number = self._round.open_round_number
        store_increment(f"finished groups of open round {round_number}")
        if self._round.required[group_index]:
            store_increment(f"finished required groups of open round {round_number}")

    def is_over(self) -> bool:
        """Return whether the round can end now; the replicas then stop sampling.

        The round can end if all learners (ranks without an engine) wait for its tokens, enough groups are
        finished, and all required groups are finished. A required group would be too old for training in the
        next round.
        """
        round_number = self._round.open_round_number
        return (
            store_value(f"waiting learners of open round {round_number}") >= self._num_learners
            and store_value(f"finished groups of open round {round_number}") >= self._num_to_finish
            and store_value(f"finished required groups of open round {round_number}") >= self._num_required
        )


def count_waiting_learner(number: int) -> None:
    """Count this rank among the learners that wait for the tokens of a generation round.

    With ``rollout.order: open``, the engines sample until all learners (ranks without an engine) wait. The
    call itself returns at once. ``number`` is `GenerationRound.open_round_number` of the round.
    """
    store_increment(f"waiting learners of open round {number}")


class AdmittedSequence(NamedTuple):
    """Sequence that a replica has admitted.

    Example:
        The third unfinished sequence of a round, in the second group; it already has 40 response tokens::

            AdmittedSequence(position=2, group=1, start=40, sequence=Sequence(...))
    """

    position: int
    """Position in `GenerationRound.unfinished`."""

    group: int
    """Index of the sequence's group in the round."""

    start: int
    """Number of tokens of the response when the sequence was admitted."""

    sequence: Sequence
    """Copy of the buffer's sequence, to which this replica appends the new tokens."""


class ReplicaQueue:
    """Queue of the sequences that one replica admits in a round, group after group.

    The first groups are assigned to the replicas round robin, up to the in-flight limits. The other groups
    form a queue that all replicas share. A replica takes the next group from the shared queue when its
    in-flight limit permits another sequence. So no replica is idle while groups are queued, and no group
    waits for a slow replica. If all groups fit into the limits, every run distributes them in the same way.

    Arguments:
        generation_round: the round, equal on all replicas.
        max_in_flight: maximum number of sequences in flight on this replica.
        max_model_len: the engine's limit of prompt and response tokens together, or None for no limit.
        next_queue_index: function that returns the index of the next group in the shared queue; each of 0,
            1, 2, … is returned on exactly one replica.
        replica: index of this replica.
        replicas: number of replicas.
        replica_by_cached_seed: seed of a sequence -> replica whose engine retains the sequence's key-value
            cache; the sequence's group is assigned to this replica.
    """

    def __init__(
        self,
        generation_round: GenerationRound,
        max_in_flight: int,
        max_model_len: int | None,
        next_queue_index: Callable[[], int] = lambda: 0,
        replica: int = 0,
        replicas: int = 1,
        replica_by_cached_seed: Mapping[int, int] | None = None,
    ) -> None:
        self.round = generation_round
        self.max_in_flight = max_in_flight
        self._max_model_len = max_model_len
        self._next_queue_index = next_queue_index

        # By group index: the positions of the group's unfinished sequences, and the replica that has cached
        # any of these sequences.
        self._positions_by_group: dict[int, list[int]] = {}
        replica_by_cached_group: dict[int, int] = {}
        for position, (group_index, sequence) in enumerate(generation_round.unfinished):
            self._positions_by_group.setdefault(group_index, []).append(position)
            if replica_by_cached_seed and sequence.seed in replica_by_cached_seed:
                replica_by_cached_group[group_index] = replica_by_cached_seed[sequence.seed]

        # Assign the first groups round robin, up to the in-flight limits; the other groups form the shared
        # queue. If any group is cached, all uncached groups are in the shared queue, since the cached groups
        # alone may exceed an in-flight limit.
        uncached_groups = [
            index for index in self._positions_by_group if index not in replica_by_cached_group
        ]
        group_sizes = [len(group.sequences) for group in generation_round.groups]
        largest_group = max(1, max(group_sizes, default=1))
        num_round_robin = 0
        if not replica_by_cached_group:
            num_round_robin = max(1, max_in_flight // largest_group) * replicas
        cached_groups = [
            index for index, cached_replica in replica_by_cached_group.items() if cached_replica == replica
        ]
        round_robin_groups = uncached_groups[:num_round_robin][replica::replicas]
        self._assigned_groups = [*cached_groups, *round_robin_groups]
        self._shared_queue = uncached_groups[num_round_robin:]

        # Sequences of the current group that `pop_sequence` has not returned yet.
        self._current_group: list[AdmittedSequence] = []
        # Admitted sequences of each group that this replica has started and not finished, by group index.
        self._admitted_by_group: dict[int, list[AdmittedSequence]] = {}

    def pop_sequence(self) -> AdmittedSequence | None:
        """Remove and return the next sequence that this replica admits, or None if no group remains.

        All sequences of a group are copied when its first sequence is returned.
        """
        if not self._current_group:
            group_index = self._pop_next_group()
            if group_index is None:
                return None
            positions = self._positions_by_group[group_index]
            self._current_group = [self._copy_sequence(position) for position in positions]
            self._admitted_by_group[group_index] = list(self._current_group)
        return self._current_group.pop(0)

    def pop_finished(self) -> list[tuple[int, SequenceGroup]]:
        """Remove the groups that this replica has finished; return (index in the round, group) of each."""
        finished_indices = []
        for index, admitted_sequences in self._admitted_by_group.items():
            if all(admitted.sequence.is_finished for admitted in admitted_sequences):
                finished_indices.append(index)

        groups = []
        for index in finished_indices:
            admitted_sequences = self._admitted_by_group.pop(index)
            groups.append((index, self._make_finished_group(index, admitted_sequences)))
        return groups

    def _make_finished_group(
        self,
        index: int,
        admitted_sequences: abc.Sequence[AdmittedSequence],
    ) -> SequenceGroup:
        """Make the finished group with this ``index`` in the round.

        The replica has appended tokens to copies of the sequences, so the group is made of these copies.
        """
        # Match sequences by identity. A sequence that finished in an earlier step has no copy: use the
        # original.
        copies = {}
        for admitted in admitted_sequences:
            _, original = self.round.unfinished[admitted.position]
            copies[id(original)] = admitted.sequence

        group = self.round.groups[index]
        sequences = [copies.get(id(sequence), sequence) for sequence in group.sequences]
        return SequenceGroup(group.prompt, sequences)

    def _pop_next_group(self) -> int | None:
        """Remove and return the index of the replica's next group, or None if no group remains for it."""
        if self._assigned_groups:
            return self._assigned_groups.pop(0)

        # Do not request an index if the queue is empty: the request can be a collective.
        if not self._shared_queue:
            return None

        queue_index = self._next_queue_index()
        if queue_index >= len(self._shared_queue):
            self._shared_queue = []
            return None
        return self._shared_queue[queue_index]

    def _copy_sequence(self, position: int) -> AdmittedSequence:
        """Copy the sequence at ``position``; mark the copy as failed if it has no room for a response."""
        group_index, sequence = self.round.unfinished[position]
        copy = sequence.copy()
        copy.finish_round = 0
        start = len(copy.tokens)
        if start == 0 and compute_response_room(copy, self._max_model_len) < 1:
            copy.finish_reason = FINISH_FAILED
        return AdmittedSequence(position, group_index, start, copy)


def compute_response_room(sequence: Sequence, max_model_len: int | None) -> int:
    """Compute the maximum number of response tokens of a sequence.

    The result is 0 or less if the prompt is empty or fills the model's context of ``max_model_len`` tokens.
    """
    room = 0
    if sequence.prompt:
        room = sequence.sampling.max_response_tokens

    if max_model_len is None:
        return room
    return min(room, max_model_len - len(sequence.prompt))


class SchedulerOutput(NamedTuple):
    """Calls to a replica's engine before its next step, equal on all ranks of the replica.

    Example:
        One request to submit, and none to abort::

            SchedulerOutput(requests=(GenerationRequest(0, [5, 6], ...),))
    """

    requests: tuple[GenerationRequest, ...] = ()
    """Requests to submit; a request's number is the index of its sequence in `ReplicaScheduler.admitted`."""

    aborts: tuple[int, ...] = ()
    """Numbers of open requests to abort, before the new ones are submitted."""


class ReplicaScheduler:
    """Scheduler of one replica, for sequences with a single response to their prompt.

    Collective over ``ranks``, the ranks of the replica, which must all make the same engine calls. If the
    schedule depends only on the engine's completions, every rank computes it, without communication.
    Otherwise ``only_leader_schedules`` is true: only the first rank (``is_leader``) computes the schedule,
    and broadcasts a `SchedulerOutput` per engine step. If ``stop_when`` returns true, the round ends before
    the next engine step.
    """

    def __init__(
        self,
        engine: Generator,
        queue: ReplicaQueue,
        *,
        stop_when: Callable[[], bool] | None = None,
        ranks: tuple[int, ...] = (0,),
        only_leader_schedules: bool = False,
        is_leader: bool = True,
    ) -> None:
        self.engine = engine
        self.queue = queue
        self.admitted: list[AdmittedSequence] = []
        self._stop_when = stop_when
        self._ranks = ranks
        self._only_leader_schedules = only_leader_schedules
        self._computes_schedule = is_leader or not only_leader_schedules
        self._version = queue.round.version

        # Maximum number of tokens that are sampled for a sequence in the current call of `run_token_round`,
        # or None for no limit.
        self._max_round_tokens: int | None = None
        # Indices in `admitted` of the sequences that need a request, and the number of open requests.
        self._pending: list[int] = []
        self._num_running = 0

    def run_token_round(
        self,
        tokens: int | None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Sample up to ``tokens`` tokens for every sequence; None means no limit.

        Calls ``after_step`` after each engine step.
        """
        with self.engine.sampling():
            self.start_token_round(tokens)
            while self.step():
                count_progress("engine steps")
                after_step()

            # No requests are open unless `stop_when` has ended the round.
            completions = self.engine.interrupt()
            if self._computes_schedule:
                self._append_interrupted(completions)

    def start_token_round(self, tokens: int | None) -> None:
        """Start a token round, in which at most ``tokens`` tokens are sampled for each sequence.

        Every unfinished sequence is marked as pending, so that `schedule` makes a request for it. Without a
        limit (None), every sequence finishes in the round.
        """
        self._max_round_tokens = tokens
        self._pending = []
        for admitted_index, admitted in enumerate(self.admitted):
            if not admitted.sequence.is_finished:
                self._pending.append(admitted_index)

    def step(self) -> bool:
        """Submit the scheduled requests and run one engine step; return False at the end of the round."""
        output = None
        if self._computes_schedule:
            output = self._schedule_or_stop()
        # If only the first rank computes the schedule, it broadcasts the schedule, or None if the round ends.
        if self._only_leader_schedules:
            output = broadcast_object(output, self._ranks)
        if output is None:
            return False

        # All ranks of the replica make the same calls in the same order.
        for request_number in output.aborts:
            self.engine.abort(request_number)
        for request in output.requests:
            self.engine.submit(request)
        completions = self.engine.step()

        if self._computes_schedule:
            self.process_completions(completions)
        return True

    def _schedule_or_stop(self) -> SchedulerOutput | None:
        """Return the next schedule, or None if the round ends."""
        if self._stop_when is not None and self._stop_when():
            return None
        return self.schedule()

    def schedule(self) -> SchedulerOutput | None:
        """Return the next requests, or None if no request is open and no sequence needs one."""
        num_in_flight = self._num_running + len(self._pending)
        self._pending += self.admit_sequences(num_in_flight)
        requests = tuple(self.make_request(index, self._max_round_tokens) for index in self._pending)
        self._num_running += len(requests)
        self._pending = []

        if self._num_running == 0:
            return None
        return SchedulerOutput(requests)

    def process_completions(self, completions: abc.Sequence[Completion]) -> None:
        """Append the engine's completions to their sequences."""
        self._num_running -= len(completions)
        for completion in completions:
            sequence = self.admitted[completion.number].sequence
            sequence.append_sampled(completion, self._version)
            # A request also gets FINISH_LENGTH if the limit of this call of `run_token_round` is reached. The
            # sequence is finished only if its response has no room for more tokens.
            if completion.finish_reason != FINISH_LENGTH or self.compute_remaining_room(sequence) < 1:
                sequence.finish_reason = completion.finish_reason

    def admit_sequences(self, num_in_flight: int) -> list[int]:
        """Admit sequences up to the in-flight limit; ``num_in_flight`` sequences are already in flight.

        Returns the indices in ``admitted`` of the new sequences, except sequences that have failed because
        their prompt leaves no room for a response.
        """
        unfinished = []
        while num_in_flight + len(unfinished) < self.queue.max_in_flight:
            admitted_index = self._admit_next()
            if admitted_index is None:
                break
            if not self.admitted[admitted_index].sequence.is_finished:
                unfinished.append(admitted_index)
        return unfinished

    def admit_remaining(self) -> None:
        """Admit the groups that no replica has admitted, so that all sequences of the round are reported."""
        while self._admit_next() is not None:
            pass

    def _admit_next(self) -> int | None:
        """Admit the next sequence; return its index in ``admitted``, or None if no group remains."""
        admitted = self.queue.pop_sequence()
        if admitted is None:
            return None
        self.admitted.append(admitted)
        return len(self.admitted) - 1

    def compute_remaining_room(self, sequence: Sequence) -> int:
        """Compute the number of tokens that may still be added to the response."""
        return compute_response_room(sequence, self.engine.max_model_len) - len(sequence.tokens)

    def make_request(
        self,
        admitted_index: int,
        limit: int | None,
        turn_start: int = 0,
    ) -> GenerationRequest:
        """Make a request for at most ``limit`` further tokens of the sequence ``admitted[admitted_index]``.

        Without a ``limit``, the request is for all tokens that the sequence has room for. ``turn_start`` is
        the number of tokens in the response before the current turn.
        """
        sequence = self.admitted[admitted_index].sequence
        max_tokens = self.compute_remaining_room(sequence)
        if limit is not None:
            max_tokens = min(max_tokens, limit)

        return GenerationRequest(
            admitted_index,
            (sequence.prompt + sequence.tokens).tolist(),
            sequence.sampling,
            max_tokens,
            sequence.seed,
            done=len(sequence.tokens),
            turn_tokens=len(sequence.tokens) - turn_start,
        )

    def pop_finished_groups(self) -> list[tuple[int, SequenceGroup]]:
        """Remove the groups that this replica has finished; return (index in the round, group) of each."""
        return self.queue.pop_finished()

    def collect_replaced_prompts(self) -> dict[int, list[int]]:
        """Collect the prompts that environments have replaced, by position in `GenerationRound.unfinished`.

        Returns {} for sequences without environments.
        """
        return {}

    def report_new_tokens(self, routing_shape: RoutingShape | None) -> NewTokens:
        """Return the tokens that this replica has added to its admitted sequences in this round.

        ``routing_shape`` is (layers, experts per token) if the engine records the experts, or None.
        """
        return collect_new_tokens(
            [admitted.position for admitted in self.admitted],
            [admitted.sequence for admitted in self.admitted],
            [admitted.start for admitted in self.admitted],
            self.collect_replaced_prompts(),
            routing_shape,
        )

    def close(self) -> None:
        """Do nothing. Subclasses for sequences with environments end the environments here."""

    def _append_interrupted(self, completions: abc.Sequence[Completion]) -> None:
        """Append the tokens of requests that were interrupted by the round's end."""
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
    routing_shape: RoutingShape | None = None,
    max_in_flight: int | None = None,
    on_finished: OnFinished | None = None,
) -> NewTokens:
    """Sample the unfinished sequences of a round until enough of its groups are finished.

    Arguments:
        engine: this rank's engine.
        layout: ranks of the engine's replicas.
        rank: rank of this process.
        generation_round: the round, equal on all ranks.
        next_queue_index: see `ReplicaQueue`.
        make_scheduler: function that creates the scheduler of this rank's replica.
        routing_shape: (layers, experts per token) if the engine records the experts of each token, or None.
        max_in_flight: maximum number of sequences in flight on a replica; None for the number of requests
            that the engine processes concurrently.
        on_finished: function that is called during sampling, on the first rank of a replica, for each group
            that the replica finishes.

    Returns the new tokens on the first rank of each replica, and no tokens on its other ranks. Collective
    over the ranks of ``layout``, whose communicator must exist.
    """
    all_ranks = ReplicaGroup(layout.ranks)
    coordinates = layout.coordinates(rank)
    is_output_rank = coordinates.tensor == 0
    is_open = generation_round.open_round_number is not None

    # Engines retain the key-value cache of interrupted requests. Requests are interrupted only with
    # `rollout.order: open`, where a round may end while sequences are unfinished.
    replica_by_cached_seed = None
    if is_open:
        replica_by_cached_seed = _gather_cached_sequences(engine, layout, all_ranks)
    if max_in_flight is None:
        max_in_flight = engine.most_rows
    queue = ReplicaQueue(
        generation_round,
        max_in_flight,
        engine.max_model_len,
        next_queue_index,
        coordinates.data,
        layout.data,
        replica_by_cached_seed,
    )
    scheduler = make_scheduler(engine, queue)

    def report_finished() -> None:
        """Call ``on_finished`` for the groups that have finished since the last call."""
        if on_finished is not None and is_output_rank:
            for index, group in scheduler.pop_finished_groups():
                on_finished(index, group)

    if generation_round.max_round_tokens is None:
        _run_until_finished(scheduler, generation_round, report_finished)
    else:
        _run_token_rounds(
            scheduler,
            generation_round,
            all_ranks,
            is_output_rank,
            report_finished,
        )

    # `append_new_tokens` expects every sequence of the round, even those that no replica has started.
    scheduler.close()
    scheduler.admit_remaining()
    if generation_round.max_round_tokens is None:
        for admitted in scheduler.admitted:
            admitted.sequence.finish_round = 1

    # The first rank reports for its replica: the other ranks have the same tokens, or no tokens if
    # only the first rank schedules.
    if not is_output_rank:
        return collect_new_tokens([], [], [], {}, routing_shape)
    return scheduler.report_new_tokens(routing_shape)


def _run_until_finished(
    scheduler: ReplicaScheduler,
    generation_round: GenerationRound,
    report_finished: Callable[[], None],
) -> None:
    """Sample without a limit of tokens per sequence.

    With `rollout.order: closed`, every sequence is sampled to its end. With `rollout.order: open`, sampling
    ends as soon as the learners (ranks without an engine) wait for the tokens and enough groups are finished.
    Calls ``report_finished`` after each engine step.
    """
    # With `rollout.order: closed`, sample nothing if enough groups are finished before the round. With
    # `rollout.order: open`, sample anyway until the learners wait, so that the engines are not idle.
    is_closed = generation_round.open_round_number is None
    if is_closed and _has_enough_groups(generation_round, set()):
        return
    scheduler.run_token_round(None, report_finished)


def _run_token_rounds(
    scheduler: ReplicaScheduler,
    generation_round: GenerationRound,
    all_ranks: ReplicaGroup,
    is_output_rank: bool,
    report_finished: Callable[[], None],
) -> None:
    """Run token rounds until enough groups are finished, counted over all replicas.

    In a token round, at most ``max_round_tokens`` tokens are sampled for each sequence. Then the ranks gather
    which sequences are finished. Calls ``report_finished`` after each engine step.
    """
    # Positions of the finished sequences in `GenerationRound.unfinished`, on all replicas.
    finished_positions: set[int] = set()
    round_index = 0
    while not _has_enough_groups(generation_round, finished_positions):
        round_index += 1
        scheduler.run_token_round(generation_round.max_round_tokens, report_finished)

        newly_finished = []
        for admitted in scheduler.admitted:
            if admitted.position not in finished_positions and admitted.sequence.is_finished:
                admitted.sequence.finish_round = round_index
                newly_finished.append(admitted.position)

        # Every rank needs the positions of all replicas, so that all make the same decision to continue.
        positions = newly_finished if is_output_rank else []
        for replica_positions in all_ranks.gather_objects(positions):
            finished_positions.update(replica_positions)


def _has_enough_groups(generation_round: GenerationRound, finished_positions: Set[int]) -> bool:
    """Return whether enough groups of a round are finished for the training batch.

    ``finished_positions`` are the positions in `GenerationRound.unfinished` of the sequences that have
    finished since the start of the round.
    """
    is_finished = [True] * len(generation_round.groups)
    for position, (group_index, _) in enumerate(generation_round.unfinished):
        if position not in finished_positions:
            is_finished[group_index] = False
    return enough_groups_finished(is_finished, generation_round.required, generation_round.batch_groups)


def _gather_cached_sequences(
    engine: Generator,
    layout: ParallelLayout,
    all_ranks: ReplicaGroup,
) -> dict[int, int]:
    """Gather which replicas retain the key-value caches of interrupted sequences.

    Returns a dict from a sequence's seed to the replica that retains its cache. Collective over the ranks of
    ``layout``.
    """
    seeds_by_rank = all_ranks.gather_objects(tuple(engine.kept))
    replica_by_seed: dict[int, int] = {}
    for rank, seeds in zip(layout.ranks, seeds_by_rank, strict=True):
        replica = layout.coordinates(rank).data
        replica_by_seed |= dict.fromkeys(seeds, replica)
    return replica_by_seed


def draw_queue_index(
    name: str,
    layout: ParallelLayout,
    rank: int,
    only_leader_schedules: bool,
) -> int:
    """Draw the next index of ``name``, a queue of groups that all replicas of the job share.

    Each index is drawn by one replica only. Its first rank gets the index from the job's store, and
    broadcasts it to the replica's other ranks. So the call is collective over these ranks.

    If ``only_leader_schedules`` is true, only the first rank of a replica admits sequences, and it does not
    broadcast the index. The other ranks get an index beyond the end of every queue.
    """
    coordinates = layout.coordinates(rank)
    index = sys.maxsize
    if coordinates.tensor == 0:
        index = store_increment(name)
    if only_leader_schedules:
        return index
    return broadcast_object(index, layout.groups("tensor")[coordinates.data])
