"""Point-to-point transfer of tensor regions between ranks, through staging memory of a fixed size.

The regions for one peer are packed into messages. Sender and receiver compute the same messages without
negotiation, because the division depends only on shapes, dtypes and the size of a message.
"""

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
from megatron_rl.distributed.exchange import gather_objects, global_rank
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import BoxGroup

Views = tuple[Tensor, ...]
"""Views of equal shape. A receiver writes the data to all of them; a sender has exactly one."""
SentRegion = tuple[Tensor, torch.dtype]
"""View of a region to send, and its dtype on the wire."""
ReceivedRegion = tuple[Views, torch.dtype]
"""Views to write a received region to, and its dtype on the wire."""

ALIGNMENT = 16
"""Alignment of the segments of a message, in bytes, so that a view of any dtype is aligned."""
MIN_SEPARATE_BYTES = 2**20
"""Default size, in bytes, of the smallest region that gets separate messages.

A dense region with separate messages needs no staging."""


@dataclass
class _Segment:
    """One weight's region, or some rows of the region, in a message."""

    views: Views
    """Views of the weights, of equal shape; a receiver may write a segment to several weights."""
    dtype: torch.dtype
    """Dtype on the wire."""
    offset: int
    """Bytes from the start of the message."""

    def staging_view(self, buffer: Tensor) -> Tensor:
        """Return this segment's view of the message buffer [bytes], in the shape of the weights' views."""
        shape = self.views[0].shape
        end = self.offset + shape.numel() * self.dtype.itemsize
        segment = buffer[self.offset : end]
        return segment.view(self.dtype).view(shape)

    def unstaged_bytes(self) -> Tensor | None:
        """Return the bytes of the weight itself, 1-D uint8, if they can be sent or received directly.

        Returns None if the segment must be copied through a staging buffer: its dtype is converted, its
        elements are not contiguous, or it is written to several weights.
        """
        view = self.views[0]
        if len(self.views) > 1 or view.dtype != self.dtype or not view.is_contiguous():
            return None
        # The view of a single element may have the stride 0, with which torch cannot view it as bytes.
        elements = view.as_strided((view.numel(),), (1,))
        return elements.view(torch.uint8)


@dataclass
class _Stream:
    """Sequence of messages from one rank to another; both ranks divide the regions into the same messages."""

    max_message_bytes: int
    """Bytes of the largest message."""
    min_separate_bytes: int = MIN_SEPARATE_BYTES
    """Smallest region, in bytes, that gets separate messages; smaller regions share messages."""
    messages: list[list[_Segment]] = field(default_factory=list)
    """Segments of each message."""
    lengths: list[int] = field(default_factory=list)
    """Bytes of each message."""
    starts_new_message: bool = True
    """Whether the next segment begins a new message."""

    def append_regions(self, regions: Sequence[ReceivedRegion]) -> None:
        """Append all regions: first the small regions, which share messages, then the large ones."""
        for views, dtype in sorted(regions, key=lambda region: self.has_separate_messages(*region)):
            self.append_region(views, dtype)

    def append_region(self, views: Views, dtype: torch.dtype) -> None:
        """Append one region to the messages.

        A large region begins a new message, and so does the region after it. Other regions are added to the
        last message. If a region does not fit into a message, its remaining rows are put into new messages.
        ``views`` are the region's views of equal shape, ``dtype`` is the dtype on the wire.
        """
        is_separate = self.has_separate_messages(views, dtype)
        if is_separate or self.starts_new_message:
            self._begin_message()
        self._append_views(views, dtype)
        self.starts_new_message = is_separate

    def has_separate_messages(
        self,
        views: Views,
        dtype: torch.dtype,
    ) -> bool:
        """Return whether a region is so large that it shares no message with other regions.

        ``views`` are the region's views of equal shape, ``dtype`` is the dtype on the wire.
        """
        num_bytes = views[0].numel() * dtype.itemsize
        return num_bytes >= min(self.min_separate_bytes, self.max_message_bytes)

    def unstaged_views(self) -> list[Tensor | None]:
        """Return a 1-D uint8 view of the weight for each message that needs no staging buffer.

        Such a message is sent from or received in the memory of the weight. The result has None for a message
        that must be copied through a staging buffer.
        """
        views: list[Tensor | None] = []
        for segments in self.messages:
            unstaged_view = None
            # The segments of a shared message are not contiguous in memory, so they must be staged.
            if len(segments) == 1:
                unstaged_view = segments[0].unstaged_bytes()
            views.append(unstaged_view)
        return views

    def _append_views(self, views: Views, dtype: torch.dtype) -> None:
        """Append views to the last message; rows that do not fit begin new messages."""
        shape = views[0].shape
        num_bytes = shape.numel() * dtype.itemsize
        padding = -self.lengths[-1] % ALIGNMENT
        offset = self.lengths[-1] + padding
        free_bytes = self.max_message_bytes - offset
        if num_bytes <= free_bytes:
            segment = _Segment(views, dtype, offset)
            self.messages[-1].append(segment)
            self.lengths[-1] = offset + num_bytes
            return

        # Count the rows that fit into the rest of this message; a scalar counts as one row.
        row_bytes = num_bytes
        if shape:
            row_bytes = num_bytes // shape[0]
        num_rows = free_bytes // row_bytes

        if num_rows:
            # Fill this message with complete rows, then append the remaining rows.
            self._append_views(tuple(view[:num_rows] for view in views), dtype)
            self._append_views(tuple(view[num_rows:] for view in views), dtype)
        elif offset:
            # Not even a row fits into the remaining bytes.
            self._begin_message()
            self._append_views(views, dtype)
        else:
            # A row is larger than a message: split within rows.
            for index in range(shape[0]):
                row_views = tuple(view[index] for view in views)
                self._append_views(row_views, dtype)

    def _begin_message(self) -> None:
        """Append an empty message."""
        self.messages.append([])
        self.lengths.append(0)


class Exchange:
    """Prepared sends and receives of this rank; `run` can be repeated as long as the weights exist.

    A sent view is converted to the dtype on the wire while it is packed. A received segment is written to
    each of its views. A large dense region needs no staging: messages use the memory of the weight itself.

    ``sends``: peer to (view, dtype on the wire), in the order that both sides use.
    ``receives``: peer to (views to write, dtype on the wire), in the same order as the peer's sends.
    ``max_message_bytes``: largest message, and largest size of a staging buffer, equal on all ranks.
    ``min_separate_bytes``: smallest region, in bytes, that gets separate messages, equal on all ranks.
    ``group``: process group, or None for the world; peers are global ranks.
    """

    def __init__(
        self,
        sends: Mapping[int, Sequence[SentRegion]],
        receives: Mapping[int, Sequence[ReceivedRegion]],
        max_message_bytes: int,
        group: Any = None,
        min_separate_bytes: int = MIN_SEPARATE_BYTES,
    ) -> None:
        self._group = group

        self._sends: dict[int, _Stream] = {}
        for peer, sent_regions in sends.items():
            self._sends[peer] = _Stream(max_message_bytes, min_separate_bytes)
            regions = [((view,), dtype) for view, dtype in sent_regions]
            self._sends[peer].append_regions(regions)

        self._receives: dict[int, _Stream] = {}
        for peer, received_regions in receives.items():
            self._receives[peer] = _Stream(max_message_bytes, min_separate_bytes)
            self._receives[peer].append_regions(received_regions)

        # A stream is the sequence of messages to or from one peer. Each round exchanges one message of every
        # stream; a stream with fewer messages skips the last rounds.
        streams = [*self._sends.values(), *self._receives.values()]
        self._unstaged_views = {id(stream): stream.unstaged_views() for stream in streams}
        message_counts = [len(stream.messages) for stream in streams]
        self.rounds = max(message_counts, default=0)
        self.staging_peak = 0

    def run(self, local_work: Callable[[], None] | None = None) -> None:
        """Send and receive all messages; call ``local_work`` once, while the first messages are in transit.

        Sets ``staging_peak`` to the number of allocated staging bytes.
        """
        # Double buffering: the next message of each stream is in transit while the previous one is unpacked.
        buffers: list[dict[Any, Tensor]] = [{}, {}]
        self.staging_peak = 0
        work_handles = []
        if self.rounds:
            work_handles = self._post_messages(0, buffers[0])
        if local_work is not None:
            local_work()

        for round_index in range(self.rounds):
            next_index = round_index + 1
            next_handles = []
            if next_index < self.rounds:
                next_handles = self._post_messages(next_index, buffers[next_index % 2])

            # On an accelerator, `wait` does not block the CPU: the device stream unpacks after the arrival.
            for handle in work_handles:
                handle.wait()
            self._unpack_messages(round_index, buffers[round_index % 2])
            work_handles = next_handles

    def _post_messages(
        self,
        message_index: int,
        buffers: dict[Any, Tensor],
    ) -> list[Any]:
        """Post the sends and receives of message ``message_index`` of every stream; return the work handles.

        ``buffers`` maps (direction, peer) to the staging buffer; missing buffers are added.
        """
        operations = []
        for peer, stream in self._receives.items():
            if message_index < len(stream.messages):
                message = self._message_buffer(
                    buffers,
                    ("in", peer),
                    stream,
                    message_index,
                )
                operation = dist.P2POp(
                    dist.irecv,
                    message,
                    peer,
                    self._group,
                )
                operations.append(operation)

        # Pack the segments of a message into its staging buffer, unless the message needs no staging.
        for peer, stream in self._sends.items():
            if message_index < len(stream.messages):
                message = self._message_buffer(
                    buffers,
                    ("out", peer),
                    stream,
                    message_index,
                )
                if self._unstaged_views[id(stream)][message_index] is None:
                    for segment in stream.messages[message_index]:
                        segment.staging_view(message).copy_(segment.views[0])
                operation = dist.P2POp(
                    dist.isend,
                    message,
                    peer,
                    self._group,
                )
                operations.append(operation)

        # Post all in one batch: NCCL deadlocks if two ranks each enqueue their send before their receive.
        if not operations:
            return []
        return dist.batch_isend_irecv(operations)

    def _message_buffer(
        self,
        buffers: dict[Any, Tensor],
        key: Any,
        stream: _Stream,
        message_index: int,
    ) -> Tensor:
        """Return the memory of a message as 1-D uint8: a view of the weight, or else a staging buffer.

        A message that cannot be sent from or received in the memory of the weight gets a staging buffer.
        ``stream`` is the sequence of messages to or from one peer. ``buffers`` maps ``key``, the
        (direction, peer) of the stream, to the stream's staging buffer; a missing buffer is added.
        """
        unstaged_views = self._unstaged_views[id(stream)]
        unstaged_view = unstaged_views[message_index]
        if unstaged_view is not None:
            return unstaged_view

        # All staged messages of the stream use the same buffer.
        if key not in buffers:
            messages = zip(stream.lengths, unstaged_views, strict=True)
            max_length = max(length for length, view in messages if view is None)
            storage_device = stream.messages[0][0].views[0].device
            buffers[key] = torch.empty(max_length, dtype=torch.uint8, device=storage_device)
            self.staging_peak += max_length
        return buffers[key][: stream.lengths[message_index]]

    def _unpack_messages(
        self,
        message_index: int,
        buffers: dict[Any, Tensor],
    ) -> None:
        """Copy the message ``message_index`` of every sender from its staging buffer into the weights."""
        for peer, stream in self._receives.items():
            if message_index >= len(stream.messages):
                continue
            # A message without staging was received in the memory of the weight.
            if self._unstaged_views[id(stream)][message_index] is not None:
                continue

            for segment in stream.messages[message_index]:
                received = segment.staging_view(buffers["in", peer])
                for view in segment.views:
                    view.copy_(received)


def create_communicator(group: Any) -> None:
    """Create the communicator of a group before some of its ranks exchange messages.

    NCCL creates it in the first call on the group, which blocks until all ranks of the group have made a
    call; a rank without messages would never make one. ``group`` None is the world. Collective over the
    group.
    """
    dist.all_reduce(torch.zeros(1, device=device.device()), group=group)


def largest_message_bytes(staging_bytes: int, streams: int) -> int:
    """Return the largest message, in bytes, with which double-buffered streams fit into ``staging_bytes``.

    Raises ValueError if not even the smallest message fits.
    """
    num_buffers = 2 * max(streams, 1)
    message_bytes = staging_bytes // num_buffers // ALIGNMENT * ALIGNMENT
    if message_bytes < ALIGNMENT:
        raise ValueError(f"{staging_bytes} bytes of staging are too few for {streams} streams")
    return message_bytes


def gather_box_groups(
    boxes: Sequence[TensorBox] | None,
    dtypes: Mapping[str, torch.dtype],
    group: Any = None,
) -> list[BoxGroup]:
    """Gather the boxes of all ranks, which are slices of tensors; ranks with equal boxes form one group.

    A rank without boxes passes None. ``dtypes`` maps this rank's parameters to dtypes. Ranks compare digests
    of their boxes first, so that equal boxes are sent once. Collective over the group.
    """
    rank = global_rank(group)

    # Leave out the rank and the dtypes of parameters without boxes, so that replicas have equal content.
    content = None
    digest = None
    if boxes is not None:
        shared_boxes = tuple(replace(box, rank=-1) for box in boxes)
        box_storages = sorted({box.storage for box in boxes})
        box_dtypes = {name: dtypes[name] for name in box_storages if name in dtypes}
        content = (shared_boxes, box_dtypes)
        digest = hashlib.sha256(pickle.dumps(content)).hexdigest()

    ranks_by_digest: dict[str, list[int]] = {}
    for peer, peer_digest in gather_objects((rank, digest), group):
        if peer_digest is not None:
            ranks_by_digest.setdefault(peer_digest, []).append(peer)

    # The lowest rank of each digest sends the content.
    payload = None
    if digest is not None and rank == min(ranks_by_digest[digest]):
        payload = (digest, content)
    payloads = gather_objects(payload, group)
    content_by_digest = dict(payload for payload in payloads if payload is not None)

    # Sort the groups by their lowest ranks: all ranks must build the same plan, so they need the same order.
    box_groups = []
    for group_digest in sorted(ranks_by_digest, key=lambda digest: min(ranks_by_digest[digest])):
        group_ranks = sorted(ranks_by_digest[group_digest])
        group_boxes, group_dtypes = content_by_digest[group_digest]
        box_groups.append(BoxGroup(tuple(group_ranks), group_boxes, group_dtypes))
    return box_groups
