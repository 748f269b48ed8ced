"""Carry out one rank's share of a plan on live storage, and check that it arrived."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_rl.hybrid_engine.plan import ReshardPlan, Schedule, schedule
from megatron_rl.parallel.boxes import Region, view_of
from megatron_rl.parallel.exchange import gather_objects, sum_over_ranks
from megatron_rl.parallel.transfer import Exchange

SAMPLE = 8
"""``sampled`` verification checks every region once in this many syncs."""
VERIFY = ("full", "sampled", "off")


class WeightMismatchError(RuntimeError):
    """Report weights that differ between trainer and engine after a sync."""


class Execution:
    """Hold views of everything this rank sends, receives and copies; valid while the storages stay.

    ``held`` and ``written`` are this rank's live source and destination storages by name. In and out
    staging together never exceed ``staging_bytes``. ``group`` None is the world; ranks are global.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        held: Mapping[str, Tensor],
        written: Mapping[str, Tensor],
        staging_bytes: int,
        group: Any = None,
    ) -> None:
        self._rank, self._group = rank, group
        self._held, self._written = held, written
        self._sources = plan.boxes_of(rank, destination=False)
        self._targets = plan.boxes_of(rank, destination=True)
        self.staging_bytes = staging_bytes
        sends = {
            peer: [(self._held_view(region), region.dtype) for region in going]
            for peer, going in plan.to_send(rank).items()
        }
        coming = plan.to_receive(rank)
        local = coming.pop(rank, [])
        receives = {
            peer: [(self._written_views(region), region.dtype) for region in arriving]
            for peer, arriving in coming.items()
        }
        self._local = [(self._written_views(region), self._held_view(region)) for region in local]
        self._exchanges = self._phases(schedule(plan, staging_bytes), sends, receives)
        self._regions = [region for bundle in plan.bundles for region in bundle.regions]
        self._sums: list[tuple[BoxSum | None, list[BoxSum]]] | None = None

    def _held_view(self, region: Region) -> Tensor:
        box = self._sources.containing(region)[0]
        return view_of(self._held[box.storage], box)

    def _written_views(self, region: Region) -> tuple[Tensor, ...]:
        return tuple(view_of(self._written[box.storage], box) for box in self._targets.containing(region))

    @torch.no_grad()
    def run(self) -> None:
        """Move the weights. Collective over the ranks of the plan.

        Copies inside the rank are made while the first messages travel.
        """
        if not self._exchanges:
            self._copy_local()
        for number, exchange in enumerate(self._exchanges):
            exchange.run(None if number else self._copy_local)
        if self.staging_peak > self.staging_bytes:
            raise RuntimeError(f"staging took {self.staging_peak} bytes, the bound is {self.staging_bytes}")

    @property
    def staging_peak(self) -> int:
        """Return the most bytes of staging memory that the last run held, in and out together."""
        return max((exchange.staging_peak for exchange in self._exchanges), default=0)

    def _phases(self, when: Schedule, sends: dict[int, Any], receives: dict[int, Any]) -> list[Exchange]:
        """Return this rank's exchanges in the order of the schedule."""
        rank = self._rank
        numbers = {when.phase[rank, peer] for peer in sends} | {when.phase[peer, rank] for peer in receives}
        return [
            Exchange(
                {peer: views for peer, views in sends.items() if when.phase[rank, peer] == number},
                {peer: views for peer, views in receives.items() if when.phase[peer, rank] == number},
                when.slot,
                self._group,
            )
            for number in sorted(numbers)
        ]

    def _copy_local(self) -> None:
        for targets, value in self._local:
            for target in targets:
                target.copy_(value)

    @torch.no_grad()
    def verify(self, mode: str, turn: int) -> int:
        """Compare checksums of every region, or of one in `SAMPLE`, and return how many were compared.

        For each region one of its holders tells its checksum and every receiver compares its own. Raises
        WeightMismatchError on all ranks alike. Collective over the group.
        """
        if mode == "off":
            return 0
        if self._sums is None:
            self._sums = [self._box_sums(index, region) for index, region in enumerate(self._regions)]
        chosen = (
            range(len(self._regions)) if mode == "full" else range(turn % SAMPLE, len(self._regions), SAMPLE)
        )
        told = torch.zeros(len(chosen), dtype=torch.int32)
        held = [(position, self._sums[index][0]) for position, index in enumerate(chosen)]
        known = [(position, box_sum) for position, box_sum in held if box_sum is not None]
        if known:
            sums = [box_sum.compute() for _, box_sum in known]
            told[[position for position, _ in known]] = torch.stack(sums).cpu()
        sum_over_ranks(told, self._group)
        faults = self._compare(chosen, told)
        count = int(sum_over_ranks(torch.tensor([len(faults)]), self._group))
        if count:
            by_rank = gather_objects(faults, self._group)
            everywhere = [fault for rank_faults in by_rank for fault in rank_faults]
            raise WeightMismatchError(
                f"{count} regions of the engine's weights differ from the trainer's after the sync:\n  "
                + "\n  ".join(everywhere[:10])
            )
        return len(chosen)

    def _box_sums(self, index: int, region: Region) -> tuple[BoxSum | None, list[BoxSum]]:
        """Return what computes a region's checksum here: as the one holder that tells it, as its receiver."""
        held = None
        if region.holders[index % len(region.holders)] == self._rank:
            held = BoxSum(self._held_view(region), region.start, region.dtype)
        written = self._written_views(region) if self._rank in region.receivers else ()
        return held, [BoxSum(view, region.start, region.dtype) for view in written]

    def _compare(self, chosen: range, told: Tensor) -> list[str]:
        assert self._sums is not None
        checked = [
            (position, index, box_sum)
            for position, index in enumerate(chosen)
            for box_sum in self._sums[index][1]
        ]
        if not checked:
            return []
        written = torch.stack([box_sum.compute() for _, _, box_sum in checked]).cpu()
        expected = told[[position for position, _, _ in checked]]
        faults = []
        for wrong in (written != expected).nonzero()[:, 0].tolist():
            region = self._regions[checked[wrong][1]]
            box = f"{region.name}, box at {list(region.start)} of size {list(region.size)}"
            holders = f"ranks {list(region.holders)} hold {int(expected[wrong]) % 2**32:#010x}"
            faults.append(f"{box}: rank {self._rank} has {int(written[wrong]) % 2**32:#010x}, {holders}")
        return faults


def storage_key(storages: Mapping[str, Tensor]) -> tuple[tuple[str, int, int, torch.dtype], ...]:
    """Return what tells whether compiled views, which keep their storages alive, are still of these.

    A storage that is emptied and filled again elsewhere in memory is the same one, and its views follow.
    """
    return tuple(
        (name, tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.dtype)
        for name, tensor in storages.items()
    )


# --- checksums
#
# Both ends of a transfer compute them without seeing each other's data. The sum runs over the raw bits, each
# weighted by its position in the whole tensor, so that a changed bit, a shifted block and swapped rows or
# columns all change it. Integers wrap: the order of summation does not matter.

_CHUNK, _WIDE_CHUNK = 2**18, 2**24
"""Words handled at once on the host, and on accelerators, where many small parts are slow to launch. Their
products take at most 1 and 64 MiB."""


class BoxSum:
    """Compute the checksum of one box of live storage, as often as asked.

    ``values`` has any strides; the box begins at ``start`` of its tensor. Values are converted to ``dtype``
    first, a part at a time. Any single changed element changes the result; several changes cancel with
    probability 2**-32. The checksums of the parts of a box add up to its own, modulo 2**32, where columns are
    cut between words of 4 bytes.
    """

    def __init__(self, values: Tensor, start: Sequence[int], dtype: torch.dtype) -> None:
        if values.dim() < 2:
            values, start = values.reshape(1, -1), (0, *(start or (0,)))
        together = _elements_of_a_word(start[-1], values.shape[-1], dtype.itemsize)
        self._columns = _column_weights(start[-1], values.shape[-1], dtype.itemsize, values.device)
        self._dtype, self._together = dtype, together
        self._products = _has_integer_product(values.device.type)
        # Words that lie in memory as they are summed are seen through a view; others are copied by parts.
        in_place = values.dtype == dtype and _views_as_words(values, together)
        chunk = _CHUNK if self._products else _WIDE_CHUNK
        whole = in_place and self._products
        step = values.shape[-2] if whole else max(1, chunk // len(self._columns))
        self._parts = [
            (part.view(torch.int32) if in_place else part, weights)
            for matrix, rows in _matrices(values, start)
            for part, weights in zip(matrix.split(step), rows.split(step), strict=True)
        ]

    def compute(self) -> Tensor:
        """Return the checksum of what the storage holds now, a 0-dim int32."""
        sums = [self._part(values, rows) for values, rows in self._parts]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(dtype=torch.int32)

    def _part(self, values: Tensor, rows: Tensor) -> Tensor:
        words = values if values.dtype == torch.int32 else _words(values.to(self._dtype), self._together)
        if self._products:
            return torch.dot(rows, torch.mv(words, self._columns))
        return ((words * self._columns).sum(-1, dtype=torch.int32) * rows).sum(dtype=torch.int32)


def _elements_of_a_word(start: int, count: int, itemsize: int) -> int:
    """Return how many elements of a row make a word of 4 bytes: 1 where rows begin or end inside a word."""
    together = max(1, 4 // itemsize)
    return together if start % together == 0 and count % together == 0 else 1


def _views_as_words(values: Tensor, together: int) -> bool:
    """Say whether words of ``together`` elements lie in memory as they are summed."""
    if values.element_size() * together != 4:
        return False
    places = (values.storage_offset(), *values.stride()[:-1])
    return together == 1 or (values.stride(-1) == 1 and all(place % together == 0 for place in places))


def _words(values: Tensor, together: int) -> Tensor:
    """Return the raw bits of values as int32: two for an 8-byte element, one for ``together`` narrow ones."""
    if values.element_size() == 4:
        return values.view(torch.int32)
    if values.element_size() == 8 or together > 1:
        return values.contiguous().view(torch.int32)
    narrow = torch.int16 if values.element_size() == 2 else torch.int8
    return values.view(narrow).to(torch.int32)


@lru_cache(maxsize=4)
def _has_integer_product(kind: str) -> bool:
    """Say whether the device multiplies integer matrices, which is several times faster there."""
    ones = torch.ones(1, 1, dtype=torch.int32, device=kind)
    try:
        return bool(torch.dot(ones[0], torch.mv(ones, ones[0])).item())
    except RuntimeError:
        return False


@lru_cache(maxsize=1024)
def _column_weights(start: int, count: int, itemsize: int, device: torch.device) -> Tensor:
    together, words = _elements_of_a_word(start, count, itemsize), 2 if itemsize == 8 else 1
    return _mix(start * words // together, count * words // together, device)


def _matrices(values: Tensor, start: Sequence[int], weight: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the [rows, columns] matrices of a box, with an odd weight per row from all its coordinates."""
    dim = len(start) - values.dim()
    axis = _mix(start[dim] + values.dim() * 2**40, values.shape[0], values.device) * weight
    if values.dim() == 2:
        yield values, axis
        return
    for inner, factor in zip(values, axis.tolist(), strict=True):
        yield from _matrices(inner, start, factor)


def _mix(start: int, count: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random int32 numbers for the positions from ``start`` on (splitmix64's steps)."""
    x = torch.arange(start, start + count, dtype=torch.int64, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x | 1).to(torch.int32)
