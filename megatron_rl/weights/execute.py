"""Execution of one rank's part of a reshard plan on its parameters, and checksums of the arrived weights.

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
    """Checksum of a region on this rank: one term of the region's checksum sum over all ranks.

    The sum is 0 if all ranks have equal checksums of the region.
    """

    region: int
    """Index of the region."""
    is_reference: bool
    """Whether this is the reference: the checksum of one holder, which every receiver must equal."""
    factor: int
    """Factor of the checksum in the sum; the factors of one region add up to 0 over all ranks."""
    checksum: BoxChecksum
    """Checksum of the region in one of this rank's parameters."""


class Execution:
    """Prepared execution of this rank's part of a reshard plan; valid while the parameters exist.

    ``sources``, ``destinations``: parameters of this rank by name, from and to which weights are copied.
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
        self._reference_checksums: list[tuple[_Term, Tensor]] = []

    def _source_view(self, region: Region) -> Tensor:
        """Return the view of a region in a source parameter of this rank."""
        # All source parameters of this rank that contain the region have the same values in it.
        box = self._source_boxes.boxes_containing(region)[0]
        return view_of(self._sources[box.storage], box)

    def _destination_views(self, region: Region) -> Views:
        """Return the views of a region in all destination parameters of this rank that contain it."""
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
                schedule.min_separate_bytes,
            )
            exchanges.append(exchange)
        return exchanges

    def _copy_local(self, verified_regions: range) -> None:
        """Make this rank's local copies, then compute its reference checksums of ``verified_regions``.

        A region that this rank both holds and needs is copied locally. A reference checksum is the checksum
        of one holder, which `verify` compares with the receivers' checksums.
        """
        for targets, value in self._local_copies:
            for target in targets:
                target.copy_(value)
        self._reference_checksums = self._compute_checksums(verified_regions, is_reference=True)

    @torch.no_grad()
    def verify(self, mode: str, sync_index: int) -> int:
        """Compare the checksums of holders and receivers, and return the number of compared regions.

        ``mode`` is a value of `VERIFY`: "full" compares all regions; "sampled" compares every
        `SAMPLE_INTERVAL`-th region and starts one region later in each sync. ``sync_index`` is the number of
        earlier syncs.

        The checksums of a region are summed over all ranks: each receiver subtracts its checksum, the n-th
        receiver n times. One holder, the reference, adds its checksum as many times as all receivers together
        subtract theirs. If all checksums are equal, the sum is 0.

        Raises WeightMismatchError on every rank of the group if any region differs. Collective over the
        group.
        """
        if mode == "off":
            return 0

        # `run` may have computed the reference checksums already.
        regions = self._regions_to_verify(mode, sync_index)
        computed_checksums = self._reference_checksums or self._compute_checksums(regions, is_reference=True)
        computed_checksums += self._compute_checksums(regions, is_reference=False)
        self._reference_checksums = []

        # One copy from the device for all checksums.
        terms = [term for term, _ in computed_checksums]
        checksums = torch.zeros(0)
        if computed_checksums:
            device_checksums = [checksum for _, checksum in computed_checksums]
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

    def _compute_checksums(
        self,
        regions: range,
        *,
        is_reference: bool,
    ) -> list[tuple[_Term, Tensor]]:
        """Compute this rank's checksums of ``regions``; return (term, checksum) pairs.

        If ``is_reference`` is true, compute the checksums of the regions for which this rank is the
        reference: the holder with which the receivers are compared. Otherwise compute the checksums of the
        regions that this rank receives. A term has the region and the factor of the checksum, see `_Term`.
        """
        # Do not build `_terms` without verification, since they prepare a checksum for each region.
        if not regions:
            return []

        computed_checksums = []
        for term in self._terms:
            if term.is_reference == is_reference and term.region in regions:
                computed_checksums.append((term, term.checksum.compute()))
        return computed_checksums

    @cached_property
    def _terms(self) -> Sequence[_Term]:
        """Build this rank's terms of the regions' checksum sums, which are 0 if no weight differs.

        One holder of a region, the reference, adds its checksum to the region's sum. The n-th receiver of the
        region, counted from 1, subtracts its checksum n times.
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
        """Build the term of the region's checksum sum that this rank adds as the reference.

        The reference is one holder of the region, with which all receivers are compared.
        """
        # The i-th of n receivers subtracts its checksum i times. The reference adds its checksum
        # 1 + 2 + … + n times: if all checksums are equal, the sum is 0.
        num_receivers = len(region.receivers)
        factor = num_receivers * (num_receivers + 1) // 2
        view = self._source_view(region)
        checksum = BoxChecksum(view, region.start, region.dtype)
        return _Term(region_index, is_reference=True, factor=factor, checksum=checksum)

    def _receiver_terms(
        self,
        region_index: int,
        region: Region,
    ) -> list[_Term]:
        """Build the terms of the region's checksum sum that this rank adds as a receiver.

        The rank has one term for each of its parameters that contain the region. The receivers of the region
        have the numbers 1, 2, …; the factors of the terms of receiver n add up to -n.
        """
        views = self._destination_views(region)
        first_checksum, *copy_checksums = [BoxChecksum(view, region.start, region.dtype) for view in views]

        # Weight receiver n by n, so that errors on several receivers are unlikely to cancel.
        receiver_number = region.receivers.index(self._rank) + 1
        # Every parameter after the first has the factor 1. The factor of the first parameter makes the sum of
        # all factors -n.
        first_factor = -receiver_number - len(copy_checksums)
        terms = [_Term(region_index, is_reference=False, factor=first_factor, checksum=first_checksum)]
        for checksum in copy_checksums:
            terms.append(_Term(region_index, is_reference=False, factor=1, checksum=checksum))
        return terms

    def _raise_mismatch(self, checksums: Sequence[tuple[int, bool, int]]) -> NoReturn:
        """Raise WeightMismatchError with the receivers' checksums that differ from the reference checksum.

        ``checksums``: (index of a region, is_reference, checksum) for each checksum that this rank has
        computed. The reference checksum of a region is the checksum of one holder. Collective over the group.
        """
        checksums_by_rank = gather_objects((self._rank, checksums), self._group)
        # The reference checksum of each region.
        reference_checksums: dict[int, int] = {}
        for _, rank_checksums in checksums_by_rank:
            for region, is_reference, checksum in rank_checksums:
                if is_reference:
                    reference_checksums[region] = checksum

        # The receivers whose checksum differs.
        mismatches: list[str] = []
        for rank, rank_checksums in checksums_by_rank:
            for region, is_reference, checksum in rank_checksums:
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
        """Describe in one line a receiver's checksum that differs from the reference checksum."""
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
    """Return this rank's part of each verified region's checksum sum, [len(regions)] int64.

    ``checksums`` [terms] are the checksums of ``terms``. Each is multiplied by the factor of its term.
    ``regions`` are the indices of the verified regions.
    """
    # ``regions`` contains every step-th region, so region r has the index r // step in it.
    indices = [term.region // regions.step for term in terms]
    factors = torch.tensor([term.factor for term in terms], dtype=torch.int64)
    summands = checksums.long() * factors

    region_sums = torch.zeros(len(regions), dtype=torch.int64)
    region_indices = torch.tensor(indices, dtype=torch.int64)
    region_sums.index_add_(0, region_indices, summands)
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
# Both ends of a transfer compute a checksum without the other's data. It sums the raw bits as 32-bit words.
# Each word is multiplied by a factor that depends on the word's position in the complete tensor, so a changed
# bit, a shifted block, swapped rows and swapped columns all change the checksum. Integers wrap, so the order
# of summation does not matter.

_HOST_CHUNK_WORDS = 2**18
"""Number of 4-byte words of a tensor that are summed at a time on CPUs, where torch.mm supports int32.

The copy of such a chunk takes 1 MiB."""
_ACCELERATOR_CHUNK_WORDS = 2**24
"""Number of words summed at a time on accelerators, where small kernels are slow to launch.

The products of words and factors take 64 MiB."""
# The constants of splitmix64, as signed 64-bit integers: torch (2.13) cannot shift unsigned integers.
_SPLITMIX_INCREMENT = -7046029254386353131
_SPLITMIX_ROUNDS = (
    (30, -4658895280553007687),
    (27, -7723592293110705685),
    (31, 1),
)
"""(right shift, factor) of each round. The factor of the last round is 1."""


class BoxChecksum:
    """Checksum of a box, a slice of a tensor; each call of `compute` reads the current values.

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
        self._column_factors = _column_factors(
            start[-1],
            columns,
            dtype.itemsize,
            values.device,
        )
        self._dtype = dtype
        self._supports_int32_matmul = _supports_int32_matmul(values.device.type)

        # Values whose storage can be viewed as words are read in place; others are copied chunk by chunk.
        in_place = values.dtype == dtype and _is_viewable_as_words(values, self._elements_per_word)
        words_per_row = len(self._column_factors)
        if in_place and self._supports_int32_matmul:
            # `torch.mm` of words in place has no large intermediate result, so one chunk is enough.
            rows_per_chunk = values.shape[-2]
        elif self._supports_int32_matmul:
            rows_per_chunk = max(1, _HOST_CHUNK_WORDS // words_per_row)
        else:
            # Without `torch.mm`, the products of words and factors take as much memory as the chunk.
            rows_per_chunk = max(1, _ACCELERATOR_CHUNK_WORDS // words_per_row)

        self._chunks: list[tuple[Tensor, Tensor]] = []
        for matrix, row_factors in _iterate_matrices(values, start):
            if in_place:
                matrix = matrix.view(torch.int32)
            chunks = zip(
                matrix.split(rows_per_chunk),
                row_factors.split(rows_per_chunk),
                strict=True,
            )
            self._chunks += chunks

    def compute(self) -> Tensor:
        """Return the checksum of the current values, a 0-dim int32."""
        sums = [self._sum_chunk(values, row_factors) for values, row_factors in self._chunks]
        if len(sums) == 1:
            return sums[0]
        return torch.stack(sums).sum(dtype=torch.int32)

    def _sum_chunk(
        self,
        values: Tensor,
        row_factors: Tensor,
    ) -> Tensor:
        """Return the checksum of a chunk of rows, a 0-dim int32.

        Each 32-bit word is multiplied by the factor of its row, ``row_factors`` [rows], and by the factor of
        its column.
        """
        if values.dtype != torch.int32:
            values = _as_words(values.to(self._dtype), self._elements_per_word)

        if self._supports_int32_matmul:
            # Sum over the rows first: this is twice as fast as a dot product for each row.
            column_sums = torch.mm(row_factors[None], values)[0]
            return torch.dot(column_sums, self._column_factors)

        products = values * self._column_factors
        row_sums = products.sum(-1, dtype=torch.int32)
        return (row_sums * row_factors).sum(dtype=torch.int32)


def _elements_per_word(
    start: int,
    count: int,
    itemsize: int,
) -> int:
    """Return the number of elements per word of 4 bytes, or 1 if rows begin or end inside a word.

    A row has ``count`` elements of ``itemsize`` bytes. Its first element is in column ``start`` of the
    complete tensor.
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
def _supports_int32_matmul(device_type: str) -> bool:
    """Return whether torch supports `torch.mm` and `torch.dot` of int32 tensors on a device type."""
    matrix = torch.ones(1, 1, dtype=torch.int32, device=device_type)
    try:
        product = torch.mm(matrix, matrix)
        return bool(torch.dot(product[0], matrix[0]).item())
    except RuntimeError:
        # CUDA has no int32 matrix product: torch raises `"addmm_cuda" not implemented for 'Int'`.
        return False


@lru_cache(maxsize=1024)
def _column_factors(
    start: int,
    count: int,
    itemsize: int,
    device: torch.device,
) -> Tensor:
    """Return the factor by which the checksum multiplies each 32-bit word of a row, [words] int32.

    The row has ``count`` elements of ``itemsize`` bytes. Its first element is in column ``start`` of the
    complete tensor.
    """
    elements_per_word = _elements_per_word(start, count, itemsize)
    words_per_element = max(1, itemsize // 4)
    first_word = start * words_per_element // elements_per_word
    num_words = count * words_per_element // elements_per_word
    return _odd_factors(first_word, num_words, device)


def _iterate_matrices(
    values: Tensor,
    start: Sequence[int],
    outer_factor: int = 1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the matrices [rows, columns] of a box of a tensor, each with the checksum factors of its rows.

    ``values`` are the elements of the box, in at least two dimensions. ``start`` are the coordinates of its
    first element in the complete tensor. A row's factor is odd, and depends on all coordinates of the row.
    Recursive calls pass the product of the outer dimensions' factors as ``outer_factor``.
    """
    dim = len(start) - values.dim()

    # Add the number of the remaining dimensions to the position: a row and a column with the same coordinate
    # must have different factors.
    position = start[dim] + values.dim() * 2**40
    position_factors = _odd_factors(position, values.shape[0], values.device)
    dim_factors = position_factors * outer_factor
    if values.dim() == 2:
        yield values, dim_factors
        return
    for inner, inner_factor in zip(values, dim_factors.tolist(), strict=True):
        yield from _iterate_matrices(inner, start, inner_factor)


def _odd_factors(start: int, count: int, device: torch.device) -> Tensor:
    """Return the checksum factors of ``count`` positions that begin with ``start``, [count] int32.

    A factor is an odd pseudo-random number, the hash of its position (splitmix64). The checksum multiplies
    the 32-bit words of a tensor by such factors.
    """
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

    # Odd, because an odd factor is invertible modulo 2**32: a changed word always has a changed product.
    return (state | 1).to(torch.int32)
