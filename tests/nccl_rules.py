"""Hold programs that run on gloo against the rules of NCCL, which forgives less.

`record` notes each rank's calls of torch.distributed in a file; `violations` reads the files of all ranks and
plays the calls again as NCCL would carry them out: each group has one communicator, which its members make
together with their first call; calls of a communicator follow one another; a rank that waits in one call is
in no other. gloo has connections between pairs of ranks and looks at none of this.
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
"""Call -> the argument of which every member has as many elements."""
_CALLS = (
    *_EQUAL, "allgather", "reduce_scatter", "alltoall_base", "alltoall", "gather", "scatter", "barrier",
    "monitored_barrier", "allreduce_coalesced", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all_single", "send", "recv",
    "recv_anysource",
)  # fmt: skip
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_DTYPES = frozenset(
    ["uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bfloat16", "bool", "float8_e4m3fn"]
)
"""Types of elements that NCCL carries."""
_SPAN = "span "
_MANY = 8


@dataclass
class Call:
    """Hold one call of a rank: of a collective, or of several point-to-point operations at once.

    ``comm`` names the communicator, ``rank`` and ``size`` this process's place in it; ``operations`` are
    (send or recv, peer, elements). ``alone`` is a point-to-point operation outside a batch, which has a
    communicator of its two ranks.
    """

    comm: str
    rank: int
    size: int
    name: str
    signature: tuple[Any, ...] = ()
    operations: list[tuple[str, int, int]] = field(default_factory=list)
    alone: bool = False
    faults: list[str] = field(default_factory=list)


def record(folder: Path) -> None:
    """Note this process's calls in a file of ``folder`` from now on."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import ProcessGroup

    recorder = _Recorder(folder / f"{os.getpid()}.jsonl")

    def watched(name: str) -> Any:
        original = getattr(ProcessGroup, name)

        def run(group: Any, *arguments: Any, **named: Any) -> Any:
            recorder.note(group, name, (*arguments, *named.values()))
            return original(group, *arguments, **named)

        return run

    for name in _CALLS:
        if hasattr(ProcessGroup, name):
            setattr(ProcessGroup, name, watched(name))

    together = dist.batch_isend_irecv
    destroy = dist.destroy_process_group

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        with recorder.batch():
            return together(operations)

    def destroy_process_group(group: Any = None) -> None:
        destroy(group)
        recorder.worlds += group is None

    for module in (dist, dist.distributed_c10d):
        setattr(module, "batch_isend_irecv", batch_isend_irecv)
        setattr(module, "destroy_process_group", destroy_process_group)


class _Recorder:
    """Write down the calls of one process."""

    def __init__(self, path: Path) -> None:
        import torch.distributed as dist

        from megatron_rl.distributed import exchange

        self.worlds = 0

        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._batch: list[Call] | None = None
        # What crosses on the host goes through gloo on any machine.
        objects = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
        functions = [getattr(dist, name) for name in (*objects, "barrier", "monitored_barrier")]
        functions += [exchange.sum_over_ranks, exchange.ReplicaGroup._gather_counts]
        self._on_host = {getattr(function, "__wrapped__", function).__code__ for function in functions}

    def note(self, group: Any, name: str, arguments: Sequence[Any]) -> None:
        """Take one call of a method of a process group."""
        host = self._is_on_host()
        call = Call(self._communicator(group, host), group.rank(), group.size(), name)
        tensors = list(_tensors(arguments))

        call.faults = [] if host else [fault for tensor in tensors for fault in _faults(name, tensor)]
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
        """Take the operations of the block for one call."""
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
        frame: Any = sys._getframe(3)
        for _ in range(6):
            if frame is None or frame.f_code in self._on_host:
                break
            frame = frame.f_back
        return frame is not None and frame.f_code in self._on_host

    def _communicator(self, group: Any, host: bool) -> str:
        """Return a name that is equal on the members alone; worlds of other jobs have the same names."""
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
    """Return what must be equal on all members."""
    options = arguments[-1] if arguments else None
    counted = _tensors(arguments[_EQUAL[name]]) if name in _EQUAL else ()
    root = getattr(options, "rootRank", None) if name in _ROOTED else None
    reduction = str(getattr(getattr(options, "reduceOp", None), "op", None))
    kinds = sorted({f"{tensor.dtype} on {tensor.device.type}" for tensor in tensors})
    return (name, *kinds, sum(tensor.numel() for tensor in counted), root, reduction)


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def read(folder: Path) -> list[list[Call]]:
    """Return the calls of each process that was recorded."""
    return [
        [_call(line) for line in file.read_text().splitlines()] for file in sorted(folder.glob("*.jsonl"))
    ]


def _call(line: str) -> Call:
    comm, rank, size, name, signature, operations, alone, faults = json.loads(line)
    pairs = [tuple(operation) for operation in operations]
    return Call(comm, rank, size, name, tuple(signature), pairs, alone, faults)


def violations(processes: Sequence[Sequence[Call]]) -> list[str]:
    """Say what NCCL would not carry out: of wrong tensors, of wrong orders, and who would wait forever.

    Groups of which not every member was recorded are left out.
    """
    members: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for calls in processes:
        for call in calls:
            if not call.alone:
                members[call.comm].add(call.rank)
                sizes[call.comm] = call.size

    partly = {comm for comm, ranks in members.items() if len(ranks) < sizes[comm]}
    found = [fault for calls in processes for call in calls for fault in call.faults]
    found += [
        f"{comm}: the first call is not entered by members {sorted(set(range(sizes[comm])) - members[comm])}"
        for comm in sorted(partly)
        if comm.endswith("device") and not comm.startswith(_SPAN)
    ]

    kept = [[call for call in calls if call.alone or call.comm not in partly] for calls in processes]
    found += _orders(kept)
    return [*found[:_MANY], *_play(kept)]


def _orders(processes: Sequence[Sequence[Call]]) -> list[str]:
    """Compare the collectives of each communicator, and the lone operations of each pair, one by one."""
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

    found = []
    for title, by_rank in [*collectives.items(), *pairs.items()]:
        (first, truth), *others = sorted(by_rank.items())
        for rank, calls in others:
            if calls == truth:
                continue
            number = next(
                (index for index, (a, b) in enumerate(zip(calls, truth, strict=False)) if a != b),
                min(len(calls), len(truth)),
            )
            mine, theirs = (row[number] if number < len(row) else "nothing" for row in (calls, truth))
            found.append(f"{title}: call {number} is {theirs} on member {first} and {mine} on member {rank}")
    return found


def _play(processes: Sequence[Sequence[Call]]) -> list[str]:
    """Carry out all calls, each as soon as its peers are there; name those that never are."""
    position = [0] * len(processes)
    entered = [False] * len(processes)
    made: dict[str, set[int]] = defaultdict(set)
    number: Counter[tuple[str, int]] = Counter()
    arrived: Counter[tuple[str, int]] = Counter()

    posted: Counter[tuple[Any, ...]] = Counter()

    def lacks(process: int) -> bool:
        """Say whether the process's call waits, after entering it."""
        call = processes[process][position[process]]
        if call.alone:
            return False
        if not entered[process]:
            entered[process] = True
            made[call.comm].add(call.rank)
            for name, peer, _ in call.operations:
                posted[(name, call.comm, call.rank, peer)] += 1
            if not call.operations:
                arrived[call.comm, number[call.comm, call.rank]] += 1

        if len(made[call.comm]) < call.size:
            return True
        if not call.operations:
            return arrived[call.comm, number[call.comm, call.rank]] < call.size

        other = {"send": "recv", "recv": "send"}
        return any(
            posted[(other[name], call.comm, peer, call.rank)] < posted[(name, call.comm, call.rank, peer)]
            for name, peer, _ in call.operations
        )

    moved = True
    while moved:
        moved = False
        for process, calls in enumerate(processes):
            while position[process] < len(calls) and not lacks(process):
                call = calls[position[process]]
                if not call.operations:
                    number[call.comm, call.rank] += 1
                position[process] += 1
                entered[process] = False
                moved = True

    stuck = []
    for process, calls in enumerate(processes):
        for call in calls[position[process] : position[process] + 1]:
            absent = sorted(set(range(call.size)) - made[call.comm])
            stuck.append(
                f"process {process} waits forever in its call {position[process]}: {call.name} "
                f"{call.operations or ''} of {call.comm}"
                + (f", which members {absent} do not enter" if absent else "")
            )
    return stuck[:_MANY]
