"""The parallel layout of a role: its ranks along Megatron's dimensions, without any communicator.

One formula maps a rank to its coordinates: the ranks of a role are ordered tensor fastest, then context,
then data, then pipeline, which is Megatron's default order ``tp-cp-ep-dp-pp``. The expert dimensions divide
the same ranks of one pipeline stage a second time: expert-tensor fastest, then expert, then expert-data.

Pipeline stages get the same number of layers, as in Megatron-Core. The first and the last stage are
exceptions: their sizes can be set, or the embedding and the loss can count as a layer each.

`check` and model building call the same functions to validate a model's sizes in a layout
(`trainer_problems`, `expert_training_problems`, `engine_problems`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.shapes.model import ModelShape

SHORT_NAMES = {
    "tensor": "tp", "pipeline": "pp", "virtual_pipeline": "vpp", "context": "cp",
    "expert": "ep", "expert_tensor": "etp", "data": "dp",
}  # fmt: skip
"""Size of a layout -> its usual abbreviation."""
_PROCESS_GROUPS = {
    "tensor": ("tensor",),
    "context": ("context",),
    "data": ("data",),
    "pipeline": ("pipeline",),
    "model": ("tensor", "pipeline"),
    "data_context": ("data", "context"),
    "tensor_context": ("tensor", "context"),
    "tensor_data_context": ("tensor", "data", "context"),
    # Expert layers divide the same ranks by the expert dimensions.
    "expert": ("expert",),
    "expert_tensor": ("expert_tensor",),
    "expert_data": ("expert_data",),
    "expert_tensor_and_expert": ("expert_tensor", "expert"),
    "expert_model": ("expert_tensor", "expert", "pipeline"),
}
"""Name of the process groups of a model -> dimensions that they span."""
LISTED_RANKS = 8
"""Maximum number of ranks that an error lists."""


class Coordinates(NamedTuple):
    """Coordinates of a rank in the layout of its role, each counted from 0."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class ParallelLayout:
    """Layout of a role's ranks: the parallel sizes, from which the data-parallel size follows.

    Inconsistent sizes are accepted: `problems` lists the errors, `checked` raises the first.

    >>> layout = ParallelLayout(tuple(range(8)), tensor=2, pipeline=2)
    >>> layout.data, layout.coordinates(5)
    (2, Coordinates(tensor=1, context=0, data=0, pipeline=1))
    """

    ranks: tuple[int, ...]
    """Global ranks of the role, in the layout's order."""
    tensor: int = 1
    """Tensor-parallel size."""
    pipeline: int = 1
    """Number of pipeline stages."""
    virtual_pipeline: int = 1
    """Model chunks of each stage; above 1 the pipeline schedule is interleaved."""
    context: int = 1
    """Context-parallel size: ranks that share the tokens of a sequence."""
    expert: int = 1
    """Expert-parallel size: ranks over which the routed experts are distributed."""
    expert_tensor: int = 1
    """Tensor-parallel size inside each routed expert."""
    sequence_parallel: bool = False
    """Whether activations between layers are sharded by tokens over the tensor-parallel ranks."""
    path: str = "layout"
    """Configuration path of the layout, for errors."""

    @property
    def size(self) -> int:
        """Return the number of ranks of the role."""
        return len(self.ranks)

    @property
    def model_ranks(self) -> int:
        """Return the number of ranks of one model replica: tensor x pipeline x context."""
        return self.tensor * self.pipeline * self.context

    @property
    def token_shards(self) -> int:
        """Return the number of ranks over which sequence parallelism shards the tokens between layers."""
        if not self.sequence_parallel:
            return 1
        return self.tensor

    @property
    def data(self) -> int:
        """Return the data-parallel size: the number of model replicas among the role's ranks."""
        return self.size // self.model_ranks

    @property
    def expert_data(self) -> int:
        """Return the number of replicas of each expert shard."""
        return max(1, self.size // (self.expert * self.expert_tensor * self.pipeline))

    def checked(self) -> ParallelLayout:
        """Return the layout itself; raises the first of its `problems`."""
        for error in problems(self):
            raise error
        return self

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank of this role."""
        # The inverse of `rank_of`: tensor varies fastest, pipeline slowest.
        index = self.ranks.index(rank)
        index, tensor = divmod(index, self.tensor)
        index, context = divmod(index, self.context)
        pipeline, data = divmod(index, self.data)
        return Coordinates(tensor, context, data, pipeline)

    def rank_of(self, tensor: int = 0, context: int = 0, data: int = 0, pipeline: int = 0) -> int:
        """Return the global rank of the role at these coordinates."""
        index = ((pipeline * self.data + data) * self.context + context) * self.tensor + tensor
        return self.ranks[index]

    def groups(self, *dimensions: str) -> list[tuple[int, ...]]:
        """Return the rank groups that span the named dimensions.

        The ranks of a group differ only in their coordinates of these dimensions, and keep the layout's
        order. Dimensions are ``tensor context data pipeline``, or the expert dimensions of the same ranks:
        ``expert_tensor expert expert_data pipeline``. Names of the two lists cannot be combined.
        """
        dense_grid = [("tensor", self.tensor), ("context", self.context), ("data", self.data)]
        expert_grid = [
            ("expert_tensor", self.expert_tensor),
            ("expert", self.expert),
            ("expert_data", self.expert_data),
        ]

        # ``pipeline`` is in both grids: only the other names select a grid.
        grid = dense_grid
        if {name for name, _ in expert_grid} & set(dimensions):
            grid = expert_grid
        return _group_ranks(self.ranks, [*grid, ("pipeline", self.pipeline)], dimensions)

    def process_groups(self) -> dict[str, list[tuple[int, ...]]]:
        """Return the ranks of all process groups of a Megatron model, by name.

        The groups of one name have no rank in common. Groups of different names with the same ranks share one
        communicator.
        """
        groups = {name: self.groups(*dimensions) for name, dimensions in _PROCESS_GROUPS.items()}
        groups["all"] = [self.ranks]

        # Tied embeddings are on the first and on the last stage of a pipeline. With a single stage the group
        # has one rank.
        groups["embedding"] = [
            (ranks[0], ranks[-1]) if len(ranks) > 1 else ranks for ranks in groups["pipeline"]
        ]
        return groups

    def output_ranks(self) -> tuple[int, ...]:
        """Return the output rank of each data-parallel replica: the first rank of its last pipeline stage."""
        last_stage = self.pipeline - 1
        return tuple(self.rank_of(data=data, pipeline=last_stage) for data in range(self.data))

    def text(self, data_noun: str = "data") -> str:
        """Format the layout as ``tensor 2 x pipeline 2 x data 4``.

        ``data_noun`` is the noun for the data-parallel size, such as "replicas" for a rollout engine.
        """
        sizes = [
            ("tensor", self.tensor),
            ("context", self.context),
            ("pipeline", self.pipeline),
            (data_noun, self.data),
        ]
        return _format_product(sizes, always=("tensor", data_noun))

    def short_text(self) -> str:
        """Format the layout as ``TP2 PP2 DP4``.

        TP and DP are always included, and other sizes if they are above 1. The expert-tensor size is omitted.
        """
        terms = []
        for name, abbreviation in SHORT_NAMES.items():
            size = getattr(self, name)
            if name in ("tensor", "data") or (size > 1 and name != "expert_tensor"):
                terms.append(f"{abbreviation.upper()}{size}")
        return " ".join(terms)


def _group_ranks(
    ranks: Sequence[int], grid: list[tuple[str, int]], dimensions: Sequence[str]
) -> list[tuple[int, ...]]:
    """Group ranks that differ only in their coordinates of ``dimensions``.

    ``grid``: (name, size) of each dimension of the layout, beginning with the fastest-varying dimension.
    """
    groups: dict[tuple[int, ...], list[int]] = {}

    for index, rank in enumerate(ranks):
        # The coordinates are the digits of the index, the fastest dimension first.
        other_coordinates = []
        for name, size in grid:
            index, coordinate = divmod(index, size)
            if name not in dimensions:
                other_coordinates.append(coordinate)
        groups.setdefault(tuple(other_coordinates), []).append(rank)

    return [tuple(group) for group in groups.values()]


def problems(
    layout: ParallelLayout, world_size: int | None = None, smallest_world: int | None = None
) -> list[UserError]:
    """Return the errors of a layout: invalid sizes, invalid ranks, and sizes that do not divide the ranks.

    ``world_size`` is the number of processes, ``smallest_world`` the smallest number of processes that every
    role's sizes divide; None if unknown.
    """
    # Validate sizes and ranks first: the later rules divide by them.
    errors = _size_problems(layout) + _rank_problems(layout, world_size)
    if errors:
        return errors

    # Report a wrong number of ranks once: check the sizes of expert parallelism only if tensor, pipeline and
    # context parallelism divide the number of ranks.
    path = layout.path
    errors = _replica_problems(layout, smallest_world)
    copy_size = layout.expert * layout.expert_tensor * layout.pipeline
    if not errors and layout.size % copy_size:
        errors.append(
            UserError(
                f"expert {layout.expert} x expert_tensor {layout.expert_tensor} x pipeline {layout.pipeline} "
                f"= {copy_size} does not divide {_format_rank_count(layout)}",
                where=f"{path}.expert",
                expected=f"a number of ranks divisible by {copy_size}, the ranks of one copy of the experts",
                got=_format_rank_count(layout),
                fix=f"lower {path}.expert or {path}.expert_tensor",
            )
        )

    # Sizes that require another size above 1.
    if layout.virtual_pipeline > 1 and layout.pipeline == 1:
        errors.append(
            UserError(
                "a virtual pipeline needs a pipeline",
                where=f"{path}.virtual_pipeline",
                expected="1, since pipeline is 1",
                got=str(layout.virtual_pipeline),
                fix=f"set {path}.pipeline to 2 or more, or virtual_pipeline to 1",
            )
        )
    if layout.sequence_parallel and layout.tensor == 1:
        errors.append(
            UserError(
                "sequence parallelism needs tensor parallelism",
                where=f"{path}.sequence_parallel",
                expected="false, since tensor is 1",
                got="true",
                fix=f"remove {path}.sequence_parallel: it is derived from tensor",
            )
        )
    return errors


def _size_problems(layout: ParallelLayout) -> list[UserError]:
    """Return an error for each parallel size of a layout that is below 1."""
    size_names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    return [
        UserError(
            "a parallel size must be 1 or more",
            where=f"{layout.path}.{name}",
            expected="1 or more",
            got=str(getattr(layout, name)),
            fix=f"set {layout.path}.{name} to 1 to switch it off",
        )
        for name in size_names
        if getattr(layout, name) < 1
    ]


def _rank_problems(layout: ParallelLayout, world_size: int | None) -> list[UserError]:
    """Return errors for an empty list of ranks, for ranks outside the job, and for duplicates."""
    key = f"{layout.path}.ranks"
    if not layout.ranks:
        return [
            UserError(
                f"{layout.path} has no ranks",
                where=key,
                expected="at least one rank",
                got="an empty list",
                fix=f"name ranks, or remove {key} to use every rank",
            )
        ]

    # Ranks outside the job.
    errors = []
    invalid_ranks = [
        rank for rank in layout.ranks if rank < 0 or (world_size is not None and rank >= world_size)
    ]
    if invalid_ranks:
        upper_bound = ""
        if world_size is not None:
            upper_bound = f" to {world_size - 1}: the job has {world_size} processes"
        ellipsis = ""
        if len(invalid_ranks) > LISTED_RANKS:
            ellipsis = " ..."
        errors.append(
            UserError(
                f"{layout.path} uses ranks that do not exist",
                where=key,
                expected=f"ranks from 0{upper_bound}",
                got=", ".join(map(str, invalid_ranks[:LISTED_RANKS])) + ellipsis,
                fix=f"start at least {max(invalid_ranks) + 1} processes, or name other ranks",
            )
        )

    # Ranks that are listed several times.
    counts = Counter(layout.ranks)
    duplicate_ranks = sorted(rank for rank, count in counts.items() if count > 1)
    if duplicate_ranks:
        errors.append(
            UserError(
                f"{layout.path} names a rank twice",
                where=key,
                expected="each rank once",
                got=f"twice: {', '.join(map(str, duplicate_ranks[:LISTED_RANKS]))}",
                fix="name each rank once",
            )
        )
    return errors


def _replica_problems(layout: ParallelLayout, smallest_world: int | None) -> list[UserError]:
    """Return an error if the number of ranks is not a multiple of one replica's ranks, otherwise [].

    ``smallest_world``: smallest number of processes that every role's sizes divide, or None if unknown.
    """
    replica_ranks = layout.model_ranks
    if layout.size % replica_ranks == 0:
        return []

    if replica_ranks == layout.tensor:
        # Tensor parallelism alone: the largest size that divides the ranks is a complete fix.
        sizes_text = f"tensor {replica_ranks}"
        key = f"{layout.path}.tensor"
        size_fix = f"set {key} to {math.gcd(replica_ranks, layout.size)}"
    else:
        sizes = [("tensor", layout.tensor), ("pipeline", layout.pipeline), ("context", layout.context)]
        sizes_text = f"{_format_product(sizes, always=('tensor', 'pipeline'))} = {replica_ranks}"
        key = layout.path
        size_fix = f"choose sizes whose product divides {layout.size}"

    return [
        UserError(
            f"{sizes_text} does not divide {_format_rank_count(layout)}",
            where=key,
            expected=f"a number of ranks divisible by {replica_ranks}, the ranks of one copy of the model",
            got=_format_rank_count(layout),
            fix=f"start {smallest_world or replica_ranks} processes or a multiple of it, or {size_fix}",
        )
    ]


def _format_rank_count(layout: ParallelLayout) -> str:
    """Format the number of a layout's ranks, as in ``1 rank`` and ``8 ranks``."""
    if layout.size == 1:
        return "1 rank"
    return f"{layout.size} ranks"


def _format_product(sizes: Sequence[tuple[str, int]], always: Sequence[str] = ()) -> str:
    """Format named sizes as a product such as ``tensor 2 x data 4``.

    Sizes of 1 are left out, except for the names in ``always``.
    """
    return " x ".join(f"{name} {size}" for name, size in sizes if size > 1 or name in always)


FIRST = "num_layers_in_first_pipeline_stage"
LAST = "num_layers_in_last_pipeline_stage"
EMBEDDING = "account_for_embedding_in_pipeline_split"
LOSS = "account_for_loss_in_pipeline_split"
STAGE_SETTINGS = (FIRST, LAST, EMBEDDING, LOSS)
"""Megatron's settings for uneven pipeline stages."""
LISTED_DIVISORS = 12
"""Maximum number of divisors of the number of layers that an error lists."""


def stage_layers(
    layers: int, layout: ParallelLayout, settings: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return the layers of each pipeline stage, counted over the whole model from 0.

    Arguments and errors are as in `stage_chunks`.
    """
    stages = stage_chunks(layers, layout, settings)
    return [list(chain.from_iterable(chunks)) for chunks in stages]


def stage_chunks(
    layers: int, layout: ParallelLayout, settings: Mapping[str, Any] | None = None
) -> list[list[list[int]]]:
    """Return the layers of each model chunk, [stages][virtual stages][layers of the chunk].

    ``settings`` are Megatron's; only `STAGE_SETTINGS` are read. Raises UserError for layers that Megatron
    cannot distribute. Source: `get_num_layers_to_build` and `get_transformer_layer_offset`.
    """
    stages = layout.pipeline
    virtual = layout.virtual_pipeline
    settings = settings or {}
    first_size = settings.get(FIRST)
    last_size = settings.get(LAST)

    # A single stage has all layers; a setting for its size may only confirm that.
    if stages == 1:
        explicit_sizes = [size for size in (first_size, last_size) if size is not None]
        if explicit_sizes and explicit_sizes != [layers]:
            raise _uneven_error(layers, layout, settings)
        return [[list(range(layers))]]

    embedding_layers = int(bool(settings.get(EMBEDDING)))
    loss_layers = int(bool(settings.get(LOSS)))
    stage_sizes = _stage_sizes(layers + embedding_layers + loss_layers, stages, first_size, last_size)
    # If both ends have explicit sizes and the schedule is interleaved, Megatron divides by the number of
    # stages between the ends.
    divides_by_zero = stages == 2 and virtual > 1 and first_size is not None and last_size is not None
    if stage_sizes is None or divides_by_zero or any(size % virtual for size in stage_sizes):
        raise _uneven_error(layers, layout, settings)

    # Consecutive chunks are on consecutive pipeline stages: stage s has chunks s, s + stages, ...
    chunks_by_stage: list[list[list[int]]] = [[] for _ in stage_sizes]
    next_layer = -embedding_layers  # an embedding that counts as a layer comes before layer 0
    for _ in range(virtual):
        for stage, stage_size in enumerate(stage_sizes):
            end = next_layer + stage_size // virtual
            # Clip to the model's layers: the embedding and the loss only count as layers.
            chunks_by_stage[stage].append(list(range(max(next_layer, 0), min(end, layers))))
            next_layer = end
    return chunks_by_stage


def _stage_sizes(total: int, stages: int, first: int | None, last: int | None) -> list[int] | None:
    """Return the number of layers of each stage; None if the middle stages cannot be equal.

    ``total`` includes the embedding and the loss if they count as layers. ``first`` and ``last`` are the
    explicit sizes of the end stages; an end stage with None gets the size of a middle stage.
    """
    explicit_sizes = [size for size in (first, last) if size is not None]
    middle_stages = stages - len(explicit_sizes)
    middle_layers = total - sum(explicit_sizes)
    if middle_layers < 0:
        return None
    if middle_stages == 0 and middle_layers:
        return None
    if middle_stages and middle_layers % middle_stages:
        return None

    # Without middle stages, the explicit sizes of both ends replace these zeros.
    middle_size = 0
    if middle_stages:
        middle_size = middle_layers // middle_stages
    sizes = [middle_size] * stages
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    return sizes


def _uneven_error(layers: int, layout: ParallelLayout, settings: Mapping[str, Any]) -> UserError:
    """Return the error for layers that cannot be distributed over the stages of a layout."""
    stages = layout.pipeline
    virtual = layout.virtual_pipeline
    explicit_settings = {name: settings[name] for name in STAGE_SETTINGS if settings.get(name)}

    sizes = f"pipeline {stages}"
    key = f"{layout.path}.pipeline"
    if virtual > 1:
        sizes += f" x virtual_pipeline {virtual}"
        key = f"{layout.path}.virtual_pipeline"

    # Report the settings for uneven stages if there are any, otherwise the sizes of the layout.
    if not explicit_settings:
        divisors = [number for number in range(1, layers + 1) if layers % number == 0]
        expected = f"a divisor of {layers}: {', '.join(map(str, divisors[:LISTED_DIVISORS]))}"
        got = str(stages * virtual)
        fix = "choose one of these"
    else:
        expected = f"no stage sizes, or {layers} layers in the single stage"
        if stages > 1:
            expected = "equal stages between the first and the last, each divisible by virtual_pipeline"
        got = ", ".join(f"{name}: {value}" for name, value in explicit_settings.items())
        fix = "change or remove " + ", ".join(explicit_settings)

    # Suggest shorter end stages. Do not suggest them for two interleaved stages: Megatron would divide by the
    # number of stages between the ends, which is zero.
    end_sizes = end_stage_sizes(layers, stages, virtual)
    if end_sizes is not None and stages > 1 and (stages > 2 or virtual == 1):
        role = layout.path.rpartition(".")[0] or "actor"
        fix += f", or set {FIRST}: {end_sizes[0]} and {LAST}: {end_sizes[1]} in {role}.megatron"

    return UserError(
        f"the model's {layers} layers cannot be distributed over {sizes}",
        where=key,
        expected=expected,
        got=got,
        fix=fix,
    )


def end_stage_sizes(layers: int, stages: int, virtual: int = 1) -> tuple[int, int] | None:
    """Return the number of layers of the first and of the last stage for which all middle stages are equal.

    ``stages`` is the pipeline size, and ``virtual`` the number of chunks of a stage. If all stages can have
    the same number of layers, the result has this number twice. Otherwise the first and the last stage get
    fewer layers than a middle stage if possible, since they also have the embedding and the output layer.
    Returns None if no numbers of layers make the middle stages equal.
    """
    if layers % (stages * virtual) == 0:
        return layers // stages, layers // stages
    if stages == 1 or layers % virtual or (stages == 2 and virtual > 1):
        return None

    # Count in units of ``virtual`` layers, since every chunk of a stage has equally many layers. Try larger
    # middle stages first: they leave shorter end stages.
    units = layers // virtual
    for middle_units in (math.ceil(units / stages), units // stages):
        end_units = units - middle_units * (stages - 2)
        # Each end needs a unit, and may have at most one unit more than a middle stage.
        fits_ends = 2 <= end_units <= 2 * (middle_units + 1)
        if fits_ends and (middle_units or stages == 2):
            first_units = math.ceil(end_units / 2)
            last_units = end_units // 2
            return first_units * virtual, last_units * virtual
    return None


def end_settings(layers: int, stages: int, virtual: int = 1) -> dict[str, int] | None:
    """Return Megatron's settings for the first and the last stage, with the sizes from `end_stage_sizes`.

    The settings are empty for an even split, and None if no sizes make the middle stages equal.
    """
    ends = end_stage_sizes(layers, stages, virtual)
    if ends is None:
        return None
    if layers % (stages * virtual) == 0:
        return {}
    return {FIRST: ends[0], LAST: ends[1]}


@lru_cache(maxsize=4096)
def default_stage_layers(layers: int, stages: int, virtual: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each pipeline stage if the configuration does not set a split.

    The split is even if possible, and otherwise has shorter first and last stages (`end_stage_sizes`). If the
    stages between these two ends cannot be equal, the split is as even as possible; Megatron needs an
    explicit pipeline layout for such a split.
    """
    settings = end_settings(layers, stages, virtual)
    if settings is None:
        bounds = [layers * stage // stages for stage in range(stages + 1)]
        return tuple(tuple(range(low, high)) for low, high in pairwise(bounds))

    layout = ParallelLayout((), pipeline=stages, virtual_pipeline=virtual)
    return tuple(tuple(stage) for stage in stage_layers(layers, layout, settings))


def trainer_problems(
    shape: ModelShape, layout: ParallelLayout, settings: Mapping[str, Any] | None = None
) -> list[UserError]:
    """Return the errors of a model in the Megatron layout of a role.

    ``settings`` are Megatron's settings. Settings for uneven stages and fused rotary embeddings are checked.
    """
    path = layout.path

    # Tensor parallelism shards heads and widths. Widths are reported only if the heads fit, since the fix
    # for the heads changes the tensor-parallel size.
    errors = _head_problems(shape, layout, " and use pipeline or data parallelism for the other ranks")
    if not errors:
        errors = _width_problems(shape, layout)
    for block in (*shape.mixers, *shape.feed_forwards):
        errors += block.problems(shape, layout, settings or {})

    # Pipeline parallelism distributes complete layers.
    try:
        stage_layers(shape.layers, layout, settings)
    except UserError as error:
        errors.append(error)

    if layout.expert > 1 and not shape.experts:
        errors.append(
            UserError(
                "expert parallelism is set for a model without experts",
                where=f"{path}.expert",
                expected=f"1: {shape.name} is dense",
                got=str(layout.expert),
                fix=f"remove {path}.expert",
            )
        )

    if shape.experts % layout.expert:
        fix = f"set {path}.expert to {math.gcd(shape.experts, layout.expert)}"
        errors.append(_indivisible_error(shape.experts, "experts", layout.expert, f"{path}.expert", fix))
    return errors


def plain_experts_error(name: str) -> UserError:
    """Return the error for a mixture of experts without Transformer Engine's layers on an accelerator.

    ``name``: name of the model.
    """
    return UserError(
        "without Transformer Engine's layers the experts are computed one after the other",
        where="model.attention",
        expected="Transformer Engine, whose grouped products compute all experts at once",
        got=f"Megatron's plain layers for {name}",
        fix="install it as launch/setup.sh --gpu does, and remove model.attention=torch",
    )


def expert_training_problems(shape: ModelShape, layout: ParallelLayout) -> list[UserError]:
    """Return the errors that Megatron raises only for training a mixture of experts."""
    if not shape.experts or layout.tensor == 1 or layout.sequence_parallel:
        return []

    key = f"{layout.path}.sequence_parallel"
    return [
        UserError(
            "training experts on tensor-parallel ranks requires sequence parallelism in Megatron",
            where=key,
            expected="true, or unset",
            got="false",
            fix=f"remove {key}",
        )
    ]


def engine_problems(shape: ModelShape, layout: ParallelLayout) -> list[UserError]:
    """Return the errors of a model in the layout of the rollout engine."""
    errors = _head_problems(shape, layout)
    kv_heads = min(mixer.key_value_heads(shape) for mixer in shape.mixers)
    if shape.sinks and layout.tensor > kv_heads:
        # vLLM (0.32) does not replicate key-value heads in models with sinks.
        key = f"{layout.path}.tensor"
        errors.append(
            UserError(
                "vLLM computes attention with sinks on at most one rank for each key-value head",
                where=key,
                expected=f"at most {kv_heads}, the key-value heads of {shape.name}",
                got=str(layout.tensor),
                fix=f"set {key} to {shape.largest_tensor_parallel_size(layout.tensor)}",
            )
        )

    return errors


def _head_problems(shape: ModelShape, layout: ParallelLayout, fix_suffix: str = "") -> list[UserError]:
    """Return the error for attention heads that tensor and context parallelism do not divide.

    ``fix_suffix`` is appended to the fix, which names a valid tensor-parallel size.
    """
    tensor = layout.tensor
    context = layout.context
    tensor_key = f"{layout.path}.tensor"
    tensor_fix = f"set {tensor_key} to {shape.largest_tensor_parallel_size(tensor)}{fix_suffix}"

    if shape.heads % tensor:
        return [_indivisible_error(shape.heads, "attention heads", tensor, tensor_key, tensor_fix)]

    if shape.heads % (tensor * context):
        return [
            UserError(
                f"tensor {tensor} x context {context} = {tensor * context} does not divide the model's "
                f"{shape.heads} attention heads",
                where=f"{layout.path}.context",
                expected=f"a divisor of {shape.heads // tensor}, the heads of a tensor-parallel rank",
                got=str(context),
                fix=f"set {layout.path}.context to {math.gcd(context, shape.heads // tensor)}",
            )
        ]

    for mixer in shape.mixers:
        for noun, heads in mixer.other_sharded_heads(shape).items():
            if heads % tensor:
                return [_indivisible_error(heads, noun, tensor, tensor_key, tensor_fix)]

    # If there are fewer key-value heads than ranks, each head must be shared by the same number of ranks.
    for mixer in shape.mixers:
        kv_heads = mixer.key_value_heads(shape)
        if kv_heads and kv_heads % tensor and tensor % kv_heads:
            return [_indivisible_error(kv_heads, "key-value heads", tensor, tensor_key, tensor_fix)]
    return []


def _width_problems(shape: ModelShape, layout: ParallelLayout) -> list[UserError]:
    """Return an error for each feed-forward width that its tensor-parallel size does not divide."""
    # (noun, width, name of the size that must divide it); a width of 0 is divisible by every size.
    widths: list[tuple[str, int, str]] = []
    for feed_forward in shape.feed_forwards:
        widths += feed_forward.tensor_widths(shape)

    errors: list[UserError] = []
    for noun, width, size_name in widths:
        size = getattr(layout, size_name)
        key = f"{layout.path}.{size_name}"
        if width % size:
            errors.append(_indivisible_error(width, noun, size, key, f"lower {key}"))
    return errors


def _indivisible_error(count: int, noun: str, size: int, key: str, fix: str) -> UserError:
    """Return the error for a parallel size that does not divide a count of the model, such as its heads.

    ``noun`` is the plural noun of ``count``; ``key`` is the configuration key of the parallel ``size``.
    """
    return UserError(
        f"{size} does not divide the model's {count} {noun}",
        where=key,
        expected=f"a divisor of {count}",
        got=str(size),
        fix=fix,
    )
