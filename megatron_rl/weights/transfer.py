"""Move pieces of tensors between ranks, point to point, through staging memory of a fixed size."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import gather_objects, rank_in
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import BoxGroup

ALIGNMENT = 16
ALONE = 2**20
"""Pieces of at least this many bytes travel alone, and where they are dense without staging."""


@dataclass
class _Segment:
    """Where one part of a view lies in a message; a receiver may write it to several places."""

    views: tuple[Tensor, ...]
    dtype: torch.dtype
    offset: int

    def staged(self, buffer: Tensor) -> Tensor:
        """Return the segment's place in a message buffer [bytes]."""
        shape = self.views[0].shape
        count = shape.numel() * self.dtype.itemsize
        return buffer[self.offset : self.offset + count].view(self.dtype).view(shape)

    def in_place(self) -> Tensor | None:
        """Return the only view's own storage [bytes] where it can be sent or received as it lies."""
        view = self.views[0]
        if len(self.views) > 1 or view.dtype != self.dtype or not view.is_contiguous():
            return None
        return view.reshape(-1).view(torch.uint8)


@dataclass
class _Stream:
    """The messages of one ordered pair of ranks; both sides divide them alike from shapes and dtypes."""

    slot: int
    messages: list[list[_Segment]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    closed: bool = True

    def fill(self, pieces: Sequence[tuple[tuple[Tensor, ...], torch.dtype]]) -> None:
        """Append all pieces, those that share messages first."""
        for views, dtype in sorted(pieces, key=lambda piece: self.is_alone(*piece)):
            self.add(views, dtype)

    def add(self, views: tuple[Tensor, ...], dtype: torch.dtype) -> None:
        """Append views of equal shape, cutting them where a message is full."""
        alone = self.is_alone(views, dtype)
        if alone or self.closed:
            self._begin()
        self._place(views, dtype)
        self.closed = alone

    def is_alone(self, views: tuple[Tensor, ...], dtype: torch.dtype) -> bool:
        """Say whether views are large enough for messages of their own."""
        return views[0].numel() * dtype.itemsize >= min(ALONE, self.slot)

    def in_place(self) -> list[Tensor | None]:
        """Return for each message the storage that replaces its staging buffer, None where none can."""
        return [parts[0].in_place() if len(parts) == 1 else None for parts in self.messages]

    def _place(self, views: tuple[Tensor, ...], dtype: torch.dtype) -> None:
        shape = views[0].shape
        count = shape.numel() * dtype.itemsize
        offset = -(-self.lengths[-1] // ALIGNMENT) * ALIGNMENT
        if count <= self.slot - offset:
            self.messages[-1].append(_Segment(views, dtype, offset))
            self.lengths[-1] = offset + count
            return
        row = count // shape[0] if shape else count
        rows = (self.slot - offset) // row
        if rows:
            self._place(tuple(view[:rows] for view in views), dtype)
            self._place(tuple(view[rows:] for view in views), dtype)
        elif offset:
            self._begin()
            self._place(views, dtype)
        else:
            for index in range(shape[0]):
                self._place(tuple(view[index] for view in views), dtype)

    def _begin(self) -> None:
        self.messages.append([])
        self.lengths.append(0)


class Exchange:
    """Hold this rank's compiled share of a transfer; `run` may be called as long as the views live.

    ``sends`` and ``receives`` are by peer rank, in the order both sides share: (views, dtype on the
    wire). A sent view is converted to that dtype while it is packed; a received part is written to each
    of its views; what is large and dense travels from and to its own storage. ``slot`` bytes bound each of
    the two buffers of each stream, and must be equal on all ranks. Ranks are global; ``group`` None is the
    world.
    """

    def __init__(
        self,
        sends: Mapping[int, Sequence[tuple[Tensor, torch.dtype]]],
        receives: Mapping[int, Sequence[tuple[tuple[Tensor, ...], torch.dtype]]],
        slot: int,
        group: Any = None,
    ) -> None:
        self._group = group
        self._sends = {peer: _Stream(slot) for peer in sends}
        self._receives = {peer: _Stream(slot) for peer in receives}
        for peer, views in sends.items():
            self._sends[peer].fill([((view,), dtype) for view, dtype in views])
        for peer, targets in receives.items():
            self._receives[peer].fill(targets)
        streams = [*self._sends.values(), *self._receives.values()]
        self._in_place = {id(stream): stream.in_place() for stream in streams}
        self.rounds = max((len(stream.messages) for stream in streams), default=0)
        self.staging_peak = 0

    def run(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Send and receive everything; ``meanwhile`` runs once, while the first messages travel.

        The next message of each stream travels while the last one is written into place. ``staging_peak``
        is then the number of bytes that were allocated.
        """
        buffers: list[dict[Any, Tensor]] = [{}, {}]
        self.staging_peak = 0
        works = self._post(0, buffers[0]) if self.rounds else []
        if meanwhile is not None:
            meanwhile()
        for number in range(self.rounds):
            following = []
            if number + 1 < self.rounds:
                following = self._post(number + 1, buffers[(number + 1) % 2])
            for work in works:
                work.wait()
            self._unpack(number, buffers[number % 2])
            works = following

    def _post(self, number: int, buffers: dict[Any, Tensor]) -> list[Any]:
        operations = []
        for peer, stream in self._receives.items():
            if number < len(stream.messages):
                message = self._buffer(buffers, ("in", peer), stream, number)
                operations.append(dist.P2POp(dist.irecv, message, peer, self._group))
        for peer, stream in self._sends.items():
            if number < len(stream.messages):
                message = self._buffer(buffers, ("out", peer), stream, number)
                if self._in_place[id(stream)][number] is None:
                    for segment in stream.messages[number]:
                        segment.staged(message).copy_(segment.views[0])
                operations.append(dist.P2POp(dist.isend, message, peer, self._group))
        return dist.batch_isend_irecv(operations) if operations else []

    def _buffer(self, buffers: dict[Any, Tensor], key: Any, stream: _Stream, number: int) -> Tensor:
        storages = self._in_place[id(stream)]
        in_place = storages[number]
        if in_place is not None:
            return in_place
        if key not in buffers:
            staged = zip(stream.lengths, storages, strict=True)
            largest = max(length for length, storage in staged if storage is None)
            place = stream.messages[0][0].views[0].device
            buffers[key] = torch.empty(largest, dtype=torch.uint8, device=place)
            self.staging_peak += largest
        return buffers[key][: stream.lengths[number]]

    def _unpack(self, number: int, buffers: dict[Any, Tensor]) -> None:
        for peer, stream in self._receives.items():
            if number < len(stream.messages) and self._in_place[id(stream)][number] is None:
                for segment in stream.messages[number]:
                    value = segment.staged(buffers["in", peer])
                    for view in segment.views:
                        view.copy_(value)


def connect(group: Any) -> None:
    """Have every member of a group make its communicator, before some of them exchange messages.

    An accelerator's library makes it with the first call on the group, which waits until all members have
    entered one. ``group`` None is the world. Collective over the group.
    """
    dist.all_reduce(torch.zeros(1, device=device.device()), group=group)


def slot_bytes(staging_bytes: int, streams: int) -> int:
    """Return the message size at which ``streams`` double-buffered streams fit into ``staging_bytes``.

    Raises ValueError when not even the smallest message fits.
    """
    slot = staging_bytes // (2 * max(streams, 1)) // ALIGNMENT * ALIGNMENT
    if slot < ALIGNMENT:
        raise ValueError(f"{staging_bytes} bytes of staging are too few for {streams} streams")
    return slot


def gather_layout(
    boxes: Sequence[TensorBox] | None, dtypes: Mapping[str, torch.dtype], group: Any = None
) -> list[BoxGroup]:
    """Return the boxes of all ranks, ranks with equal boxes as one group.

    ``boxes`` is None on ranks that hold none; ``dtypes`` are of this rank's storages. Equal
    boxes travel once. Collective over the group.
    """
    rank = rank_in(group)
    content = None
    digest = None
    if boxes is not None:
        used = {box.storage for box in boxes}
        content = (
            tuple(replace(box, rank=-1) for box in boxes),
            {name: dtype for name, dtype in sorted(dtypes.items()) if name in used},
        )
        digest = hashlib.sha256(pickle.dumps(content)).hexdigest()
    holders: dict[str, list[int]] = {}
    for other, content_digest in gather_objects((rank, digest), group):
        if content_digest is not None:
            holders.setdefault(content_digest, []).append(other)
    tells = digest is not None and rank == min(holders[digest])
    told = dict(
        item for item in gather_objects((digest, content) if tells else None, group) if item is not None
    )
    return [
        BoxGroup(tuple(sorted(ranks)), told[content_digest][0], told[content_digest][1])
        for content_digest, ranks in sorted(holders.items(), key=lambda item: min(item[1]))
    ]
