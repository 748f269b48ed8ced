"""Check programs that run on gloo against the rules of NCCL, which is stricter.

`record` writes each rank's calls of torch.distributed to a file. `violations` reads the files of all ranks
and replays the calls under NCCL's rules: each group has one communicator, which all members create
together with their first call; calls of a communicator run in order; a rank that waits in one call cannot
enter another. gloo connects pairs of ranks and enforces none of this.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_EQUAL = {
    "allreduce": 0,
    "broadcast": 0,
    "reduce": 0,
    "_allgather_base": 1,
    "_reduce_scatter_base": 0,
}
"""Call -> index of the argument that must have as many elements on every member."""
_CALLS = (
    *_EQUAL, "allgather", "reduce_scatter", "alltoall_base", "alltoall", "gather", "scatter", "barrier",
    "monitored_barrier", "allreduce_coalesced", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all_single", "send", "recv",
    "recv_anysource",
)  # fmt: skip
"""Methods of ``ProcessGroup`` that are recorded; a method that this torch does not have is skipped."""
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Calls that have a root rank."""
_DTYPES = frozenset(
    ["uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bfloat16", "bool", "float8_e4m3fn"]
)
"""Element types that NCCL supports."""
_SPAN = "span "
"""Prefix of groups that span jobs; their names are unique without the job's number."""
_MANY = 8
"""Most problems of one kind that are reported."""


@dataclass
class Call:
    """One call of a rank: a collective, or a batch of point-to-point operations.

    Example: ``Call("18012-0 0 [0, 1] device", rank=1, size=2, name="allreduce", ...)``.
    """

    comm: str
    """Name of the communicator, equal on its members and on no other rank."""
    rank: int
    """This process's rank in the communicator."""
    size: int
    """Number of the communicator's members."""
    name: str
    signature: tuple[Any, ...] = ()
    """Properties of a collective that have to be equal on all members."""
    operations: list[tuple[str, int, int]] = field(default_factory=list)
    """(send or recv, peer, elements) of each point-to-point operation."""
    alone: bool = False
    """A point-to-point operation outside a batch, which has a communicator of its two ranks."""
    faults: list[str] = field(default_factory=list)
    """Tensors of this call that NCCL rejects."""


def record(folder: Path) -> None:
    """Append this process's calls to a file in ``folder`` from now on."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import ProcessGroup

    recorder = _Recorder(folder / f"{os.getpid()}.jsonl")

    def recorded(name: str) -> Any:
        original = getattr(ProcessGroup, name)

        def run(group: Any, *arguments: Any, **keywords: Any) -> Any:
            recorder.note(group, name, (*arguments, *keywords.values()))
            return original(group, *arguments, **keywords)

        return run

    for name in _CALLS:
        if hasattr(ProcessGroup, name):
            setattr(ProcessGroup, name, recorded(name))

    # A batch is one NCCL call. Destroying the default group ends a job: its groups' names may come again.
    original_batch = dist.batch_isend_irecv
    original_destroy = dist.destroy_process_group

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        with recorder.batch():
            return original_batch(operations)

    def destroy_process_group(group: Any = None) -> None:
        original_destroy(group)
        recorder.worlds += group is None

    for module in (dist, dist.distributed_c10d):
        setattr(module, "batch_isend_irecv", batch_isend_irecv)
        setattr(module, "destroy_process_group", destroy_process_group)


class _Recorder:
    """Recorder of one process's calls."""

    def __init__(self, path: Path) -> None:
        import torch.distributed as dist

        from megatron_rl.distributed import exchange

        self.worlds = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._batch: list[Call] | None = None
        # These exchange host data and use gloo on any machine, so NCCL's rules do not apply to them.
        objects = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
        functions = [getattr(dist, name) for name in (*objects, "barrier", "monitored_barrier")]
        functions += [exchange.sum_over_ranks, exchange.ReplicaGroup._gather_counts]
        self._on_host = {getattr(function, "__wrapped__", function).__code__ for function in functions}

    def note(self, group: Any, name: str, arguments: Sequence[Any]) -> None:
        """Record one call of a method of a process group."""
        host = self._is_on_host()
        call = Call(self._communicator(group, host), group.rank(), group.size(), name)
        tensors = list(_tensors(arguments))

        # gloo accepts every tensor; only calls that NCCL would run are checked.
        if not host:
            call.faults = [fault for tensor in tensors for fault in _faults(name, tensor)]

        if name in ("send", "recv"):
            call.operations = [(name, int(arguments[1]), sum(tensor.numel() for tensor in tensors))]
            call.alone = self._batch is None
            if self._batch is not None:
                self._batch.append(call)
                return
        else:
            call.signature = _signature(name, arguments, tensors)
        self._write(call)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Record the operations of the block as one call."""
        self._batch = calls = []
        try:
            yield
        finally:
            self._batch = None
            if calls:
                operations = [operation for call in calls for operation in call.operations]
                faults = [fault for call in calls for fault in call.faults]
                first = calls[0]
                self._write(
                    Call(first.comm, first.rank, first.size, "batch", operations=operations, faults=faults)
                )

    def _is_on_host(self) -> bool:
        """Return whether the call comes from a function that exchanges host data."""
        # `note` and the patched method add frames; torch's own wrappers add up to six.
        frame: Any = sys._getframe(3)
        for _ in range(6):
            if frame is None or frame.f_code in self._on_host:
                break
            frame = frame.f_back
        return frame is not None and frame.f_code in self._on_host

    def _communicator(self, group: Any, host: bool) -> str:
        """Return a name that is equal on the group's members and on no other rank.

        The default groups of all jobs have the same name, so the job's port and number are part of it.
        """
        import torch.distributed as dist

        job = f"{os.environ.get('MASTER_PORT')}-{self.worlds} "
        name = group.group_name if group.group_name.startswith(_SPAN) else job + group.group_name
        return f"{name} {dist.get_process_group_ranks(group)} {'host' if host else 'device'}"

    def _write(self, call: Call) -> None:
        os.write(self._file, (json.dumps(list(vars(call).values())) + "\n").encode())


def _faults(name: str, tensor: Any) -> Iterator[str]:
    if str(tensor.dtype).split(".")[1] not in _DTYPES:
        yield f"{name} of {tensor.dtype}"
    if not tensor.is_contiguous():
        yield f"{name} of a tensor that is not contiguous"


def _signature(name: str, arguments: Sequence[Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the properties of a collective that NCCL needs equal on all members."""
    options = arguments[-1] if arguments else None
    equal_tensors = _tensors(arguments[_EQUAL[name]]) if name in _EQUAL else ()
    root = getattr(options, "rootRank", None) if name in _ROOTED else None
    reduction = str(getattr(getattr(options, "reduceOp", None), "op", None))

    tensor_types = sorted({f"{tensor.dtype} on {tensor.device.type}" for tensor in tensors})
    return (name, *tensor_types, sum(tensor.numel() for tensor in equal_tensors), root, reduction)


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in arguments, including those in lists."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def read(folder: Path) -> list[list[Call]]:
    """Return the recorded calls of each process."""
    return [
        [_call(line) for line in file.read_text().splitlines()] for file in sorted(folder.glob("*.jsonl"))
    ]


def _call(line: str) -> Call:
    comm, rank, size, name, signature, operations, alone, faults = json.loads(line)
    pairs = [tuple(operation) for operation in operations]
    return Call(comm, rank, size, name, tuple(signature), pairs, alone, faults)


def violations(processes: Sequence[Sequence[Call]]) -> list[str]:
    """Describe the calls that NCCL would not run: invalid tensors, differing orders, and deadlocks.

    Groups with a member that was not recorded are ignored.
    """
    members: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for calls in processes:
        for call in calls:
            if not call.alone:
                members[call.comm].add(call.rank)
                sizes[call.comm] = call.size

    # NCCL builds a communicator in its first call, which every member has to enter.
    incomplete = {comm for comm, ranks in members.items() if len(ranks) < sizes[comm]}
    problems = [fault for calls in processes for call in calls for fault in call.faults]
    problems += [
        f"{comm}: the first call is not entered by members {sorted(set(range(sizes[comm])) - members[comm])}"
        for comm in sorted(incomplete)
        if comm.endswith("device") and not comm.startswith(_SPAN)
    ]

    # The order of calls can only be compared on communicators whose members have all been recorded.
    complete = [[call for call in calls if call.alone or call.comm not in incomplete] for calls in processes]
    problems += _orders(complete)
    return [*problems[:_MANY], *_play(complete)]


def _orders(processes: Sequence[Sequence[Call]]) -> list[str]:
    """Compare the collectives of each communicator, and the single operations of each pair, in order."""
    collectives: dict[str, dict[int, list[Any]]] = defaultdict(dict)
    pairs: dict[tuple[str, int, int], dict[int, list[Any]]] = defaultdict(dict)
    for calls in processes:
        for call in calls:
            if call.alone:
                name, peer, count = call.operations[0]
                low, high = sorted((call.rank, peer))
                source, target = (call.rank, peer) if name == "send" else (peer, call.rank)
                pairs[call.comm, low, high].setdefault(call.rank, []).append((source, target, count))
            elif not call.operations:
                collectives[call.comm].setdefault(call.rank, []).append(call.signature)

    problems = []
    for title, by_rank in [*collectives.items(), *pairs.items()]:
        (first_rank, expected), *further_ranks = sorted(by_rank.items())
        # Report the first call that differs from the one of the lowest rank.
        for rank, calls in further_ranks:
            if calls == expected:
                continue
            number = next(
                (index for index, (a, b) in enumerate(zip(calls, expected, strict=False)) if a != b),
                min(len(calls), len(expected)),
            )

            actual_call, expected_call = (
                row[number] if number < len(row) else "nothing" for row in (calls, expected)
            )
            problems.append(
                f"{title}: call {number} is {expected_call} on member {first_rank} "
                f"and {actual_call} on member {rank}"
            )
    return problems


def _play(processes: Sequence[Sequence[Call]]) -> list[str]:
    """Replay all calls, each as soon as its peers have entered; describe the ones that never complete."""
    # Per process: the index of its current call, and whether it has entered it.
    position = [0] * len(processes)
    entered = [False] * len(processes)
    # Per communicator: its members so far, each member's finished collectives, entries of each collective.
    communicators: dict[str, set[int]] = defaultdict(set)
    number: Counter[tuple[str, int]] = Counter()
    arrived: Counter[tuple[str, int]] = Counter()
    posted: Counter[tuple[Any, ...]] = Counter()

    def is_waiting(process: int) -> bool:
        """Enter the process's call if it has not entered it; return whether it still waits."""
        call = processes[process][position[process]]
        if call.alone:
            return False
        if not entered[process]:
            entered[process] = True
            communicators[call.comm].add(call.rank)
            for name, peer, _ in call.operations:
                posted[(name, call.comm, call.rank, peer)] += 1
            if not call.operations:
                arrived[call.comm, number[call.comm, call.rank]] += 1

        if len(communicators[call.comm]) < call.size:
            return True
        if not call.operations:
            return arrived[call.comm, number[call.comm, call.rank]] < call.size

        # Sends and receives match by count: a batch completes when every peer has posted the opposite.
        opposite = {"send": "recv", "recv": "send"}
        return any(
            posted[(opposite[name], call.comm, peer, call.rank)] < posted[(name, call.comm, call.rank, peer)]
            for name, peer, _ in call.operations
        )

    # Advance every process as far as possible until none advances any more.
    progressed = True
    while progressed:
        progressed = False
        for process, calls in enumerate(processes):
            while position[process] < len(calls) and not is_waiting(process):
                call = calls[position[process]]
                if not call.operations:
                    number[call.comm, call.rank] += 1
                position[process] += 1
                entered[process] = False
                progressed = True

    # A process that did not finish waits in the first of its remaining calls.
    stuck = []
    for process, calls in enumerate(processes):
        for call in calls[position[process] : position[process] + 1]:
            missing_ranks = sorted(set(range(call.size)) - communicators[call.comm])
            stuck.append(
                f"process {process} waits forever in its call {position[process]}: {call.name} "
                f"{call.operations or ''} of {call.comm}"
                + (f", which members {missing_ranks} do not enter" if missing_ranks else "")
            )
    return stuck[:_MANY]
