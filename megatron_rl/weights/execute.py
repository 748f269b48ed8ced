"""Carry out one rank's share of a plan on live storage, and check that it arrived."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from megatron_rl.distributed.exchange import gather_objects, sum_over_ranks
from megatron_rl.weights.boxes import Region, view_of
from megatron_rl.weights.plan import ReshardPlan, Schedule, schedule
from megatron_rl.weights.transfer import Exchange

SAMPLE = 8
"""``sampled`` verification checks every region once in this many syncs."""
VERIFY = ("full", "sampled", "off")


class WeightMismatchError(RuntimeError):
    """Report weights that differ between trainer and engine after a sync."""


class _Term(NamedTuple):
    """One checksum that this rank computes of a region, and how often it is added: taken away below 0.

    ``told`` is the holder's, which the receivers' must equal.
    """

    region: int
    told: bool
    times: int
    checksum: BoxSum


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
        self._sums: list[tuple[_Term, Tensor]] = []

    def _held_view(self, region: Region) -> Tensor:
        box = self._sources.containing(region)[0]
        return view_of(self._held[box.storage], box)

    def _written_views(self, region: Region) -> tuple[Tensor, ...]:
        return tuple(view_of(self._written[box.storage], box) for box in self._targets.containing(region))

    @torch.no_grad()
    def run(self, mode: str = "off", turn: int = 0) -> None:
        """Move the weights. Collective over the ranks of the plan.

        Copies inside the rank are made while the first messages travel, and so are the checksums that this
        rank tells as a holder, for `verify` with this ``mode`` and ``turn``.
        """
        regions = self._compared(mode, turn)
        if not self._exchanges:
            self._copy_local(regions)
        for number, exchange in enumerate(self._exchanges):
            exchange.run(None if number else partial(self._copy_local, regions))
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

    def _copy_local(self, regions: range) -> None:
        for targets, value in self._local:
            for target in targets:
                target.copy_(value)
        self._sums = self._compute(regions, told=True)

    @torch.no_grad()
    def verify(self, mode: str, turn: int) -> int:
        """Compare checksums of every region, or of one in `SAMPLE`, and return how many were compared.

        For each region one of its holders adds its checksum as often as all receivers together take theirs
        away: the sum over all ranks is 0 where they are equal. Raises WeightMismatchError on all ranks alike.
        Collective over the group.
        """
        if mode == "off":
            return 0
        regions = self._compared(mode, turn)
        known = self._sums or self._compute(regions, told=True)
        known += self._compute(regions, told=False)
        self._sums = []
        balances = torch.zeros(len(regions), dtype=torch.int64)
        sums = torch.stack([checksum for _, checksum in known]).cpu() if known else torch.zeros(0)
        places = torch.tensor([term.region // regions.step for term, _ in known], dtype=torch.int64)
        times = torch.tensor([term.times for term, _ in known], dtype=torch.int64)
        balances.index_add_(0, places, sums.long() * times)
        # One number travels where all is well: gloo takes several times as long for a vector. Odd factors
        # show any single region that differs; several cancel with probability 2**-64.
        folded = (balances * _mix(0, len(regions), balances.device)).sum()[None]
        if sum_over_ranks(folded, self._group).item():
            sum_over_ranks(balances, self._group)
            wrong = {regions[place] for place in balances.nonzero()[:, 0].tolist()}
            values = zip([term for term, _ in known], sums.tolist(), strict=True)
            self._report([(term.region, term.told, value) for term, value in values if term.region in wrong])
        return len(regions)

    def _compared(self, mode: str, turn: int) -> range:
        """Return the numbers of the regions that are compared in a turn."""
        if mode == "off":
            return range(0)
        return (
            range(len(self._regions)) if mode == "full" else range(turn % SAMPLE, len(self._regions), SAMPLE)
        )

    def _compute(self, regions: range, *, told: bool) -> list[tuple[_Term, Tensor]]:
        """Return this rank's checksums of ``regions``: those that it tells as a holder, or a receiver's."""
        chosen = self._terms if regions else ()
        terms = [term for term in chosen if term.told == told and term.region in regions]
        return [(term, term.checksum.compute()) for term in terms]

    @cached_property
    def _terms(self) -> Sequence[_Term]:
        """What this rank adds for each region, as the one holder that tells its checksum and as receiver.

        The receiver with number n takes it away n times, so that equal faults of several do not cancel.
        """
        terms = []
        for index, region in enumerate(self._regions):
            receivers = len(region.receivers)
            if region.holders[index % len(region.holders)] == self._rank:
                held = BoxSum(self._held_view(region), region.start, region.dtype)
                terms.append(_Term(index, True, receivers * (receivers + 1) // 2, held))
            if self._rank in region.receivers:
                number = region.receivers.index(self._rank) + 1
                views = self._written_views(region)
                first, *others = [BoxSum(view, region.start, region.dtype) for view in views]
                terms.append(_Term(index, False, -number - len(others), first))
                terms += [_Term(index, False, 1, other) for other in others]
        return terms

    def _report(self, known: Sequence[tuple[int, bool, int]]) -> NoReturn:
        """Raise WeightMismatchError from the regions that differ, whether told, and their checksums here."""
        by_rank = gather_objects((self._rank, known), self._group)
        told = {index: value for _, sums in by_rank for index, is_told, value in sums if is_told}
        faults = [
            self._fault(index, rank, value, told[index])
            for rank, sums in by_rank
            for index, is_told, value in sums
            if not is_told and value != told[index]
        ]
        raise WeightMismatchError(
            f"{len(faults)} regions of the engine's weights differ from the trainer's after the sync:\n  "
            + "\n  ".join(faults[:10])
        )

    def _fault(self, index: int, rank: int, value: int, told: int) -> str:
        region = self._regions[index]
        box = f"{region.name}, box at {list(region.start)} of size {list(region.size)}"
        holders = f"ranks {list(region.holders)} hold {told % 2**32:#010x}"
        return f"{box}: rank {rank} has {value % 2**32:#010x}, {holders}"


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
            # Rows first: summing along memory is twice as fast as one product per row.
            return torch.dot(torch.mm(rows[None], words)[0], self._columns)
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
        return bool(torch.dot(torch.mm(ones, ones)[0], ones[0]).item())
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
