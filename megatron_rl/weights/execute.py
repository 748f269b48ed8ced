"""Execution of one rank's part of a reshard plan on live storage, and checksums of the arrived weights.

The constructor of `Execution` prepares everything that does not depend on the weights' values: views,
messages and the factors of checksums. A sync then only copies, communicates and sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from megatron_rl.distributed.exchange import gather_objects, sum_over_ranks
from megatron_rl.weights.boxes import Region, view_of
from megatron_rl.weights.plan import ReshardPlan, Schedule, schedule_phases
from megatron_rl.weights.transfer import Exchange, ReceivedRegion, SentRegion, Views

SAMPLE_INTERVAL = 8
"""Number of syncs in which ``sampled`` verification checks every region once."""
VERIFY = ("full", "sampled", "off")
"""Values of `hybrid_engine.verify`."""
MAX_LISTED_REGIONS = 10
"""Maximum number of differing regions that an error lists."""


class WeightMismatchError(RuntimeError):
    """Error for weights that differ between trainer and engine after a sync."""


class _Term(NamedTuple):
    """Checksum of a region on this rank: one term of the sum over all ranks."""

    region: int
    """Index of the region."""
    is_reference: bool
    """Whether this is the holder's checksum, to which every receiver's checksum must be equal."""
    weight: int
    """Factor of the checksum in the sum; the factors of one region add up to 0 over all ranks."""
    checksum: BoxChecksum
    """Checksum of the region in this rank's storage."""


class Execution:
    """Prepared execution of this rank's part of a reshard plan; valid while the storages exist.

    ``sources``, ``destinations``: live storages of this rank by name.
    ``staging_bytes``: limit of all send and receive buffers together.
    ``group``: process group, or None for the world; ranks of the plan are global.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        sources: Mapping[str, Tensor],
        destinations: Mapping[str, Tensor],
        staging_bytes: int,
        group: Any = None,
    ) -> None:
        self._rank = rank
        self._group = group
        self._sources = sources
        self._destinations = destinations
        self._source_boxes = plan.index_boxes(rank, is_destination=False)
        self._destination_boxes = plan.index_boxes(rank, is_destination=True)
        self.staging_bytes = staging_bytes

        # All views are created once here, so that a sync only copies and communicates.
        sends: dict[int, list[SentRegion]] = {}
        for peer, peer_regions in plan.regions_to_send(rank).items():
            sends[peer] = [(self._source_view(region), region.dtype) for region in peer_regions]

        regions_by_sender = plan.regions_to_receive(rank)
        local_regions = regions_by_sender.pop(rank, [])
        receives: dict[int, list[ReceivedRegion]] = {}
        for peer, peer_regions in regions_by_sender.items():
            receives[peer] = [(self._destination_views(region), region.dtype) for region in peer_regions]

        self._local_copies: list[tuple[Views, Tensor]] = []
        for region in local_regions:
            targets = self._destination_views(region)
            self._local_copies.append((targets, self._source_view(region)))

        schedule = schedule_phases(plan, staging_bytes)
        self._exchanges = self._build_exchanges(schedule, sends, receives)

        # Verification numbers the regions in the order of the plan, which is equal on all ranks.
        self._regions: list[Region] = []
        for bundle in plan.bundles:
            self._regions += bundle.regions
        self._reference_sums: list[tuple[_Term, Tensor]] = []

    def _source_view(self, region: Region) -> Tensor:
        """Return the view of a region in a source storage of this rank."""
        # Any storage of this rank that contains the region has the same values.
        box = self._source_boxes.boxes_containing(region)[0]
        return view_of(self._sources[box.storage], box)

    def _destination_views(self, region: Region) -> Views:
        """Return the views of a region in all destination storages of this rank that contain it."""
        boxes = self._destination_boxes.boxes_containing(region)
        return tuple(view_of(self._destinations[box.storage], box) for box in boxes)

    @torch.no_grad()
    def run(self, mode: str = "off", sync_index: int = 0) -> None:
        """Move the weights. Collective over the ranks of the plan.

        While the first messages are in transit, this rank makes its local copies and computes the reference
        checksums for a `verify` with the same ``mode`` and ``sync_index``.
        """
        regions = self._regions_to_verify(mode, sync_index)
        if not self._exchanges:
            self._copy_local(regions)

        # Only the first exchange has local work to overlap with.
        local_work = partial(self._copy_local, regions)
        for exchange in self._exchanges:
            exchange.run(local_work)
            local_work = None

        if self.staging_peak > self.staging_bytes:
            raise RuntimeError(f"staging took {self.staging_peak} bytes, the limit is {self.staging_bytes}")

    @property
    def staging_peak(self) -> int:
        """Return the peak size in bytes of all send and receive buffers together, in the last run."""
        return max((exchange.staging_peak for exchange in self._exchanges), default=0)

    def _build_exchanges(
        self,
        schedule: Schedule,
        sends: Mapping[int, Sequence[SentRegion]],
        receives: Mapping[int, Sequence[ReceivedRegion]],
    ) -> list[Exchange]:
        """Build this rank's exchanges: one per phase in which it has messages, in order."""
        sends_by_phase: dict[int, dict[int, Sequence[SentRegion]]] = defaultdict(dict)
        for peer, sent_regions in sends.items():
            phase = schedule.phase_by_pair[self._rank, peer]
            sends_by_phase[phase][peer] = sent_regions

        receives_by_phase: dict[int, dict[int, Sequence[ReceivedRegion]]] = defaultdict(dict)
        for peer, received_regions in receives.items():
            phase = schedule.phase_by_pair[peer, self._rank]
            receives_by_phase[phase][peer] = received_regions

        # Skip phases in which this rank has no messages: point-to-point messages involve only two ranks.
        exchanges = []
        for phase in sorted({*sends_by_phase, *receives_by_phase}):
            exchange = Exchange(
                sends_by_phase[phase],
                receives_by_phase[phase],
                schedule.max_message_bytes,
                self._group,
                schedule.own_message_bytes,
            )
            exchanges.append(exchange)
        return exchanges

    def _copy_local(self, regions: range) -> None:
        """Copy the regions that this rank both holds and needs, then compute its reference checksums."""
        for targets, value in self._local_copies:
            for target in targets:
                target.copy_(value)
        self._reference_sums = self._compute_sums(regions, is_reference=True)

    @torch.no_grad()
    def verify(self, mode: str, sync_index: int) -> int:
        """Compare the checksums of holders and receivers, and return the number of compared regions.

        ``mode`` is a value of `VERIFY`: "full" compares all regions; "sampled" compares every
        `SAMPLE_INTERVAL`-th region and starts one region later in each sync. ``sync_index`` is the number of
        earlier syncs.

        For each region one holder adds its checksum as often as all receivers together subtract theirs, so
        the sum over all ranks is 0 if the checksums are equal. Raises WeightMismatchError on every rank of
        the group if any region differs. Collective over the group.
        """
        if mode == "off":
            return 0

        # `run` may have computed the reference checksums already.
        regions = self._regions_to_verify(mode, sync_index)
        computed_terms = self._reference_sums or self._compute_sums(regions, is_reference=True)
        computed_terms += self._compute_sums(regions, is_reference=False)
        self._reference_sums = []

        # One copy from the device for all checksums.
        terms = [term for term, _ in computed_terms]
        checksums = torch.zeros(0)
        if computed_terms:
            device_checksums = [checksum for _, checksum in computed_terms]
            checksums = torch.stack(device_checksums).cpu()
        region_sums = _sum_by_region(terms, checksums, regions)

        # A region whose copies agree has the sum 0. Reduce a single number, as usually all regions agree:
        # gloo takes several times as long for a vector. With odd factors a single differing region always
        # changes the sum; the differences of several regions cancel with probability 2**-64.
        factors = _odd_factors(0, len(regions), region_sums.device)
        folded_sum = (region_sums * factors).sum()[None]
        if not sum_over_ranks(folded_sum, self._group).item():
            return len(regions)

        # The folded sum is equal on all ranks, so either all of them enter this collective or none does.
        sum_over_ranks(region_sums, self._group)
        nonzero_indices = region_sums.nonzero()[:, 0].tolist()
        differing_regions = {regions[index] for index in nonzero_indices}
        differing_checksums = []
        for term, value in zip(terms, checksums.tolist(), strict=True):
            if term.region in differing_regions:
                differing_checksums.append((term.region, term.is_reference, value))
        self._raise_mismatch(differing_checksums)

    def _regions_to_verify(
        self,
        mode: str,
        sync_index: int,
    ) -> range:
        """Return the indices of the regions that `verify` compares in ``mode`` after sync ``sync_index``."""
        if mode == "off":
            return range(0)
        if mode == "full":
            return range(len(self._regions))
        return range(sync_index % SAMPLE_INTERVAL, len(self._regions), SAMPLE_INTERVAL)

    def _compute_sums(
        self,
        regions: range,
        *,
        is_reference: bool,
    ) -> list[tuple[_Term, Tensor]]:
        """Return this rank's checksums of ``regions``, as holder if ``is_reference``, else as receiver."""
        # Do not build `_terms` without verification, since they prepare a checksum for each region.
        if not regions:
            return []

        sums = []
        for term in self._terms:
            if term.is_reference == is_reference and term.region in regions:
                sums.append((term, term.checksum.compute()))
        return sums

    @cached_property
    def _terms(self) -> Sequence[_Term]:
        """Build the terms of this rank, as reference holder and as receiver of regions.

        The n-th receiver of a region, counted from 1, subtracts its checksum n times, so that equal errors on
        two receivers do not cancel.
        """
        terms: list[_Term] = []
        for index, region in enumerate(self._regions):
            # Holders take turns as the reference, to share the work.
            reference_rank = region.holders[index % len(region.holders)]
            if reference_rank == self._rank:
                terms.append(self._reference_term(index, region))
            if self._rank in region.receivers:
                terms += self._receiver_terms(index, region)
        return terms

    def _reference_term(
        self,
        region_index: int,
        region: Region,
    ) -> _Term:
        """Build the term of this rank as the reference holder of a region.

        The i-th of n receivers subtracts its checksum i times, so the weight of this term is 1 + 2 + … + n:
        the sum is 0 if all checksums are equal.
        """
        num_receivers = len(region.receivers)
        weight = num_receivers * (num_receivers + 1) // 2
        view = self._source_view(region)
        checksum = BoxChecksum(view, region.start, region.dtype)
        return _Term(region_index, True, weight, checksum)

    def _receiver_terms(
        self,
        region_index: int,
        region: Region,
    ) -> list[_Term]:
        """Build the terms of this rank as a receiver of a region, one per storage that contains the region.

        On the n-th receiver of the region, counted from 1, the weights of its terms add up to -n.
        """
        views = self._destination_views(region)
        first_checksum, *copy_checksums = [BoxChecksum(view, region.start, region.dtype) for view in views]

        # Each further storage adds its checksum with weight 1, and lowers the weight of the first one by 1.
        receiver_number = region.receivers.index(self._rank) + 1
        terms = [_Term(region_index, False, -receiver_number - len(copy_checksums), first_checksum)]
        for checksum in copy_checksums:
            terms.append(_Term(region_index, False, 1, checksum))
        return terms

    def _raise_mismatch(self, checksums: Sequence[tuple[int, bool, int]]) -> NoReturn:
        """Raise WeightMismatchError with the regions that differ.

        ``checksums``: (region, is_reference, checksum) of this rank's terms. Collective over the group.
        """
        sums_by_rank = gather_objects((self._rank, checksums), self._group)
        # The holder's checksum of each region.
        reference_checksums: dict[int, int] = {}
        for _, rank_sums in sums_by_rank:
            for region, is_reference, checksum in rank_sums:
                if is_reference:
                    reference_checksums[region] = checksum

        # The receivers whose checksum differs.
        mismatches: list[str] = []
        for rank, rank_sums in sums_by_rank:
            for region, is_reference, checksum in rank_sums:
                reference_checksum = reference_checksums[region]
                if not is_reference and checksum != reference_checksum:
                    mismatches.append(self._describe_mismatch(region, rank, checksum, reference_checksum))

        summary = (
            f"{len(mismatches)} regions of the engine's weights differ from the trainer's after the sync"
        )
        mismatch_lines = "\n  ".join(mismatches[:MAX_LISTED_REGIONS])
        raise WeightMismatchError(f"{summary}:\n  {mismatch_lines}")

    def _describe_mismatch(
        self,
        region_index: int,
        rank: int,
        checksum: int,
        reference_checksum: int,
    ) -> str:
        """Describe in one line a receiver's checksum that differs from the reference."""
        region = self._regions[region_index]
        box = f"{region.name}, box at {list(region.start)} of size {list(region.size)}"

        # Checksums are signed; show them as the 32 bits that they are.
        value_bits = f"{checksum % 2**32:#010x}"
        reference_bits = f"{reference_checksum % 2**32:#010x}"
        holders = f"ranks {list(region.holders)} hold {reference_bits}"
        return f"{box}: rank {rank} has {value_bits}, {holders}"


def _sum_by_region(
    terms: Sequence[_Term],
    checksums: Tensor,
    regions: range,
) -> Tensor:
    """Sum this rank's weighted checksums of each verified region, [len(regions)] int64.

    ``checksums`` [terms] are the values of ``terms``. ``regions`` are the indices of the verified regions.
    """
    # ``regions`` contains every step-th region, so region r has the index r // step in it.
    indices = [term.region // regions.step for term in terms]
    weights = [term.weight for term in terms]
    term_weights = torch.tensor(weights, dtype=torch.int64)
    weighted_checksums = checksums.long() * term_weights

    region_sums = torch.zeros(len(regions), dtype=torch.int64)
    region_indices = torch.tensor(indices, dtype=torch.int64)
    region_sums.index_add_(0, region_indices, weighted_checksums)
    return region_sums


def storage_key(storages: Mapping[str, Tensor]) -> tuple[tuple[str, int, int, torch.dtype], ...]:
    """Return a key that changes if one of the storages is replaced.

    Views of a replaced storage are stale. A storage whose memory is released and allocated again keeps its
    key, and its views stay valid.
    """
    key = []
    for name, tensor in storages.items():
        # `_cdata` is the address of the storage object, which outlives a release of its memory.
        storage_address = tensor.untyped_storage()._cdata
        offset = int(tensor.storage_offset())
        key.append((name, storage_address, offset, tensor.dtype))
    return tuple(key)


# --- checksums
#
# Both ends of a transfer compute a checksum without the other's data. It sums the raw bits as 32-bit words,
# each weighted by its position in the whole tensor, so that a changed bit, a shifted block and swapped rows
# or columns all change it. Integers wrap, so the order of summation does not matter.

_HOST_CHUNK_WORDS = 2**18
"""Number of 4-byte words of a tensor that are summed at a time on CPUs, which have integer matrix products.

The copy of such a chunk takes 1 MiB."""
_ACCELERATOR_CHUNK_WORDS = 2**24
"""Number of words summed at a time on accelerators, where small kernels are slow to launch.

The products of words and weights take 64 MiB."""
# The constants of splitmix64, as signed 64-bit integers: torch (2.13) cannot shift unsigned integers.
_SPLITMIX_INCREMENT = -7046029254386353131
_SPLITMIX_ROUNDS = (
    (30, -4658895280553007687),
    (27, -7723592293110705685),
    (31, 1),
)
"""(right shift, factor) of each round. The factor of the last round is 1."""


class BoxChecksum:
    """Checksum of one box of live storage, computed from its current contents by each call of `compute`.

    ``values``: view of the box, of any strides.
    ``start``: first coordinates of the box in its tensor.
    ``dtype``: dtype to which the values are converted before they are summed, chunk by chunk.

    Any single changed element changes the checksum; several changes cancel with probability 2**-32. The
    checksums of the parts of a box add up to the checksum of the box, modulo 2**32, if columns are cut
    between words of 4 bytes.
    """

    def __init__(
        self,
        values: Tensor,
        start: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        # A vector or scalar is a matrix of one row.
        if values.dim() < 2:
            values = values.reshape(1, -1)
            start = (0, *(start or (0,)))

        columns = values.shape[-1]
        self._elements_per_word = _elements_per_word(start[-1], columns, dtype.itemsize)
        self._column_weights = _column_weights(
            start[-1],
            columns,
            dtype.itemsize,
            values.device,
        )
        self._dtype = dtype
        self._has_product = _has_integer_product(values.device.type)

        # Values whose storage can be viewed as words are read in place; others are copied chunk by chunk.
        # A product of words in place makes no intermediate result, so it needs no chunks.
        in_place = values.dtype == dtype and _is_viewable_as_words(values, self._elements_per_word)
        words_per_row = len(self._column_weights)
        if in_place and self._has_product:
            rows_per_chunk = values.shape[-2]
        elif self._has_product:
            rows_per_chunk = max(1, _HOST_CHUNK_WORDS // words_per_row)
        else:
            rows_per_chunk = max(1, _ACCELERATOR_CHUNK_WORDS // words_per_row)

        self._chunks: list[tuple[Tensor, Tensor]] = []
        for matrix, row_weights in _iterate_matrices(values, start):
            if in_place:
                matrix = matrix.view(torch.int32)
            chunks = zip(
                matrix.split(rows_per_chunk),
                row_weights.split(rows_per_chunk),
                strict=True,
            )
            self._chunks += chunks

    def compute(self) -> Tensor:
        """Return the checksum of the current contents of the storage, a 0-dim int32."""
        sums = [self._sum_chunk(values, row_weights) for values, row_weights in self._chunks]
        if len(sums) == 1:
            return sums[0]
        return torch.stack(sums).sum(dtype=torch.int32)

    def _sum_chunk(
        self,
        values: Tensor,
        row_weights: Tensor,
    ) -> Tensor:
        """Return the weighted sum of a chunk of rows, a 0-dim int32; ``row_weights`` are [rows]."""
        if values.dtype != torch.int32:
            values = _as_words(values.to(self._dtype), self._elements_per_word)

        if self._has_product:
            # Rows first: summing along memory is twice as fast as one product per row.
            column_sums = torch.mm(row_weights[None], values)[0]
            return torch.dot(column_sums, self._column_weights)

        weighted_words = values * self._column_weights
        row_sums = weighted_words.sum(-1, dtype=torch.int32)
        return (row_sums * row_weights).sum(dtype=torch.int32)


def _elements_per_word(
    start: int,
    count: int,
    itemsize: int,
) -> int:
    """Return the number of elements per word of 4 bytes, or 1 if rows begin or end inside a word.

    A row has ``count`` elements of ``itemsize`` bytes, from column ``start`` of its tensor on.
    """
    elements = max(1, 4 // itemsize)
    if start % elements or count % elements:
        return 1
    return elements


def _is_viewable_as_words(values: Tensor, elements_per_word: int) -> bool:
    """Return whether ``values`` can be viewed in place as words of 4 bytes."""
    if values.element_size() * elements_per_word != 4:
        return False
    if elements_per_word == 1:
        return True

    # `view` to a wider dtype needs dense rows that begin at multiples of the wider element.
    if values.stride(-1) != 1:
        return False
    positions = (values.storage_offset(), *values.stride()[:-1])
    return all(position % elements_per_word == 0 for position in positions)


def _as_words(values: Tensor, elements_per_word: int) -> Tensor:
    """Return the bits of ``values`` as int32 words.

    An 8-byte element is two words. Otherwise ``elements_per_word`` elements are one word.
    """
    itemsize = values.element_size()
    if itemsize == 4:
        return values.view(torch.int32)
    if itemsize == 8 or elements_per_word > 1:
        return values.contiguous().view(torch.int32)

    # Each narrow element becomes one word.
    if itemsize == 2:
        return values.view(torch.int16).to(torch.int32)
    return values.view(torch.int8).to(torch.int32)


@lru_cache(maxsize=4)
def _has_integer_product(device_type: str) -> bool:
    """Return whether a device type has integer matrix products, which are faster than weighted sums."""
    matrix = torch.ones(1, 1, dtype=torch.int32, device=device_type)
    try:
        product = torch.mm(matrix, matrix)
        return bool(torch.dot(product[0], matrix[0]).item())
    except RuntimeError:
        # CUDA has no int32 matrix product: torch raises `"addmm_cuda" not implemented for 'Int'`.
        return False


@lru_cache(maxsize=1024)
def _column_weights(
    start: int,
    count: int,
    itemsize: int,
    device: torch.device,
) -> Tensor:
    """Return the factors of a row's words in the checksum, [words] int32.

    The row has ``count`` elements of ``itemsize`` bytes, from column ``start`` of its tensor on.
    """
    elements_per_word = _elements_per_word(start, count, itemsize)
    words_per_element = max(1, itemsize // 4)
    first_word = start * words_per_element // elements_per_word
    num_words = count * words_per_element // elements_per_word
    return _odd_factors(first_word, num_words, device)


def _iterate_matrices(
    values: Tensor,
    start: Sequence[int],
    outer_weight: int = 1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the matrices [rows, columns] that make up a box, each with the checksum factors of its rows.

    ``values`` is the box, of at least two dimensions; ``start`` has its first coordinates in the complete
    tensor. The factors are odd numbers that depend on all coordinates of a row. ``outer_weight`` is the
    product of the outer dimensions' factors, which recursive calls pass on.
    """
    dim = len(start) - values.dim()

    # The dimension is part of the position, so that equal coordinates in two dimensions differ.
    position = start[dim] + values.dim() * 2**40
    position_weights = _odd_factors(position, values.shape[0], values.device)
    dim_weights = position_weights * outer_weight
    if values.dim() == 2:
        yield values, dim_weights
        return
    for inner, inner_weight in zip(values, dim_weights.tolist(), strict=True):
        yield from _iterate_matrices(inner, start, inner_weight)


def _odd_factors(start: int, count: int, device: torch.device) -> Tensor:
    """Return one odd pseudo-random int32 for each of ``count`` positions from ``start`` on (splitmix64)."""
    state = torch.arange(
        start,
        start + count,
        dtype=torch.int64,
        device=device,
    )
    state *= _SPLITMIX_INCREMENT
    for shift, factor in _SPLITMIX_ROUNDS:
        # torch's shift is arithmetic: mask the copies of the sign bit.
        mask = (1 << (64 - shift)) - 1
        state = (state ^ ((state >> shift) & mask)) * factor

    # An odd weight is invertible modulo 2**32, so no changed word is multiplied to 0.
    return (state | 1).to(torch.int32)
