"""Role that samples sequences in rounds, with the replicas of an engine or with servers."""

from __future__ import annotations

from functools import partial

from megatron_rl.config.sections.rollout import EnvironmentConfig
from megatron_rl.data.chat_format import ChatFormats
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import (
    ReplicaGroup,
    broadcast_object,
    store_increment,
)
from megatron_rl.environments.host import EnvironmentPool
from megatron_rl.rollout.collate import (
    NewTokens,
    RoutingShape,
    collect_new_tokens,
)
from megatron_rl.rollout.engines.base import Engine, Generator, ToolParser
from megatron_rl.rollout.engines.servers import ServerGenerator
from megatron_rl.rollout.multi_turn import MultiTurnScheduler
from megatron_rl.rollout.scheduler import (
    GenerationRound,
    OnFinished,
    OpenRoundEnd,
    ReplicaQueue,
    ReplicaScheduler,
    count_waiting_learner,
    draw_queue_index,
    sample_round,
)
from megatron_rl.rollout.types import SequenceGroup
from megatron_rl.shapes.layout import ParallelLayout


class RolloutRole:
    """Role that samples sequences, with the replicas of an engine or with servers.

    ``layout``: ranks of the role; ``tensor`` is the engine's tensor-parallel size, ``data`` its number of
        replicas.
    ``engine``: the engine, or the client of the servers, on this rank; None on ranks outside the layout.
    ``rank``: rank of this process.
    ``environment``: configuration of the environment for multi-turn rollouts, or None for single responses.
        The first rank of each replica runs its processes.
    ``chat_formats``: chat formats that render an environment's messages.
    ``routing_shape``: (layers, experts per token) if the engine returns the routing of each token, or None.
    ``max_in_flight``: maximum number of sequences in flight on a replica, or None for the engine's limit.
    ``parse_tool_calls``: parser of the tool calls in a turn, or None if turns have no tool calls.
    ``in_process``: whether the engine runs in the job's processes instead of servers; equal on all ranks.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        engine: Engine | ServerGenerator | None,
        rank: int,
        environment: EnvironmentConfig | None = None,
        chat_formats: ChatFormats | None = None,
        routing_shape: RoutingShape | None = None,
        max_in_flight: int | None = None,
        parse_tool_calls: ToolParser | None = None,
        in_process: bool = True,
    ) -> None:
        self.layout = layout
        self.engine = engine
        self.rank = rank
        self.environment = environment
        self._chat_formats = chat_formats
        self._routing_shape = routing_shape
        self._max_in_flight = max_in_flight
        self._parse_tool_calls = parse_tool_calls
        self._in_process = in_process

        # Only the first rank of a replica runs environments.
        self._environment_pool: EnvironmentPool | None = None
        if environment is not None and engine is not None and layout.coordinates(rank).tensor == 0:
            self._environment_pool = EnvironmentPool(environment)

    def infer(
        self,
        generation_round: GenerationRound,
        on_finished: OnFinished | None = None,
    ) -> NewTokens:
        """Sample a round of sequences; return this rank's new tokens. Collective over the role's ranks.

        ``on_finished``: function ``on_finished(index, group)``, called for each group that this rank
        finishes. ``index`` is the group's index in the round. With `rollout.order: open`, a step trains on
        the groups that finish first. The call then returns only after all ranks without an engine have called
        `gather_new_tokens`.
        """
        if self.engine is None:
            return collect_new_tokens([], [], [], {}, self._routing_shape)

        # Each round has a separate queue in the job's store. The queue's key contains the number of the
        # round: the first rank takes the next number from the store and broadcasts it.
        next_round = 0
        if self.rank == self.layout.ranks[0]:
            next_round = store_increment("rounds")
        round_number = broadcast_object(next_round, self.layout.ranks)

        # With `rollout.order: open`, replicas sample until enough groups are finished and all ranks without
        # an engine wait in `gather_new_tokens`. `OpenRoundEnd` detects this with counters in the job's store.
        round_end = None
        if generation_round.open_round_number is not None:
            num_ranks_without_engine = device.world_size() - len(self.layout.ranks)
            round_end = OpenRoundEnd(generation_round, num_ranks_without_engine)

        def report_finished(index: int, group: SequenceGroup) -> None:
            """Report a finished group to the caller, and count it for the end of the round."""
            if on_finished is not None:
                on_finished(index, group)
            if round_end is not None:
                round_end.count_finished(index)

        # Without a callback, the scheduler does not have to collect finished groups.
        finish_callback: OnFinished | None = None
        if on_finished is not None or round_end is not None:
            finish_callback = report_finished

        # With environments or `rollout.order: open`, the schedule depends on time, which differs between
        # ranks: the first rank of a replica computes the schedule for all of the replica's ranks.
        only_leader_schedules = self.environment is not None or round_end is not None
        new_tokens = sample_round(
            self.engine,
            self.layout,
            self.rank,
            generation_round,
            next_queue_index=partial(
                draw_queue_index,
                f"of round {round_number}",
                self.layout,
                self.rank,
                only_leader_schedules,
            ),
            make_scheduler=partial(self._make_scheduler, round_end, only_leader_schedules),
            routing_shape=self._routing_shape,
            max_in_flight=self._max_in_flight,
            on_finished=finish_callback,
        )

        if not self._in_process:
            # Count the requests that were sent to another server because the first server was lost.
            assert isinstance(self.engine, ServerGenerator)
            new_tokens = new_tokens._replace(resubmitted=self.engine.pop_resubmitted())
        return new_tokens

    def gather_new_tokens(
        self,
        new_tokens: NewTokens,
        replica_group: ReplicaGroup,
        generation_round: GenerationRound,
    ) -> NewTokens:
        """Gather the new tokens of all replicas onto all ranks of ``replica_group``.

        Collective over the replica group.
        """
        # With `rollout.order: open`, a step trains on the groups that finish first, and the engines sample
        # until every rank without an engine waits in the gather below. Count this rank as waiting. The number
        # is None with `rollout.order: closed`.
        if generation_round.open_round_number is not None and self.engine is None:
            count_waiting_learner(generation_round.open_round_number)

        shard = replica_group.gather_rows(new_tokens.shard)

        # Gather objects only with environments or servers: pickling is slow.
        outcomes = {}
        prompts = {}
        resubmitted = 0
        if self.environment is not None or not self._in_process:
            objects = (new_tokens.outcomes, new_tokens.replaced_prompts, new_tokens.resubmitted)
            for rank_outcomes, rank_prompts, rank_resubmitted in replica_group.gather_objects(objects):
                outcomes |= rank_outcomes
                prompts |= rank_prompts
                resubmitted += rank_resubmitted

        experts = None
        if new_tokens.experts is not None:
            experts = replica_group.gather_rows(new_tokens.experts)
        return NewTokens(shard, outcomes, prompts, experts, resubmitted)

    def _make_scheduler(
        self,
        round_end: OpenRoundEnd | None,
        only_leader_schedules: bool,
        engine: Generator,
        queue: ReplicaQueue,
    ) -> ReplicaScheduler:
        """Return the scheduler of this rank's replica: a `MultiTurnScheduler` on ranks with environments.

        ``only_leader_schedules``: whether only the first rank of the replica computes the schedule and
        broadcasts it to the replica's other ranks. ``round_end`` is set with `rollout.order: open`, and None
        otherwise.
        """
        # With `rollout.order: open`, a round ends when enough groups are finished and all ranks without an
        # engine wait for them. Otherwise the round ends with its last group.
        coordinates = self.layout.coordinates(self.rank)
        ranks = self.layout.groups("tensor")[coordinates.data]
        stop_when = None
        if round_end is not None:
            stop_when = round_end.is_over

        # Only the replica's first rank has environments; the other ranks receive its schedule.
        if self._environment_pool is not None:
            assert self._chat_formats is not None
            return MultiTurnScheduler(
                engine,
                queue,
                self._environment_pool,
                self._chat_formats,
                self._parse_tool_calls,
                stop_when=stop_when,
                ranks=ranks,
            )
        return ReplicaScheduler(
            engine,
            queue,
            stop_when=stop_when,
            ranks=ranks,
            only_leader_schedules=only_leader_schedules,
            is_leader=coordinates.tensor == 0,
        )

    @property
    def unenforced_limits(self) -> tuple[str, ...]:
        """Describe the limits of the environments' processes that this machine cannot enforce."""
        if self._environment_pool is None:
            return ()
        return self._environment_pool.unenforced_limits

    def close(self) -> None:
        """Release the engine and the environments' processes."""
        if self._environment_pool is not None:
            self._environment_pool.close()
        if self.engine is not None:
            self.engine.close()
