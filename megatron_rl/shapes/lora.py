"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): their linear layers and their tensors.

An adapter adds B A x to the output of a linear layer. A and B are described as `Weight`, like any other
parameters, so that import, export, weight sync and counts need no special cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.shapes.layer_weights import EngineSharding, Sharding, Source, Weight
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import PretrainedModel

ATTENTION = ("linear_qkv", "linear_proj")
"""Megatron's linear layers of attention."""
MLP = ("linear_fc1", "linear_fc2")
"""Megatron's linear layers of an MLP or of an expert."""
TARGETS = (*ATTENTION, *MLP)
"""Megatron's linear layers that can have an adapter."""
PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""Prefix of tensor names in PEFT's files, before the names of a checkpoint's modules."""
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM can allocate (vllm/config/lora.py, MaxLoRARanks); other ranks are rounded up."""
ADAPTER = "adapter"
"""Name of the adapter module below a linear layer; its parameters are A and B."""


class Lora(NamedTuple):
    """Rank of a model's low-rank adapters, and the linear layers that have one.

    Example: ``Lora(16, ("linear_qkv", "linear_proj"))`` are adapters of rank 16 in both projections of
    attention.
    """

    rank: int
    """Rank of the adapters: the number of rows of A, and of columns of B."""
    targets: tuple[str, ...]
    """Megatron's linear layers with an adapter, of `TARGETS`."""

    @classmethod
    def for_model(cls, shape: ModelShape, rank: int, targets: Sequence[str] | None = None) -> Lora:
        """Return a model's adapters of ``rank`` in the layers ``targets``, by default `default_targets`."""
        return cls(rank, tuple(targets or default_targets(shape)))


def format_adapters(rank: int, alpha: float, targets: Sequence[str]) -> str:
    """Describe adapters as ``rank 16, alpha 32 on linear_qkv, linear_proj``."""
    return f"rank {rank}, alpha {alpha:g} on {', '.join(name for name in TARGETS if name in targets)}"


@dataclass(frozen=True)
class AdaptedModel(PretrainedModel):
    """Adapters of a model, with the interface of `PretrainedModel` and the tensor names of PEFT's files.

    Each checkpoint tensor of a linear layer, and of each routed expert, has its own A [rank, in] and
    B [out, rank]. In a Megatron layer that fuses several tensors, the adapter stacks all As, and each B fills
    the rows of its tensor.
    """

    rank: int = 1
    """Rank of the adapters: the number of rows of A, and of columns of B."""
    alpha: float = 1.0
    """Scale: the adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Megatron's linear layers with an adapter, of `TARGETS`."""
    base: str | None = None
    """Checksum of the base weights, or None if it is unknown."""

    def weights(self, layer: int) -> tuple[Weight, ...]:
        """Return the parameters A and B of all adapters of a layer, in the order of its linear layers."""
        return adapter_weights(super().weights(layer), Lora(self.rank, self.targets))

    def outer_weights(self, first: bool, last: bool) -> tuple[Weight, ...]:
        """Return no parameters: embedding, final norm and output layer have no adapters."""
        return ()

    @property
    def engine_rank(self) -> int:
        """Return the adapter rank that vLLM must allocate: the smallest sufficient rank of `ENGINE_RANKS`."""
        # A rank always exists: `check` refuses larger adapters.
        return next(rank for rank in ENGINE_RANKS if rank >= self.rank)

    def modules(self) -> list[str]:
        """Return the names of the modules with adapters, without their paths: PEFT's ``target_modules``."""
        return sorted({name.split(".")[-3] for name in self.tensor_shapes()})

    def peft_config(self) -> dict[str, Any]:
        """Return the content of PEFT's configuration file, adapter_config.json."""
        # PEFT declares lora_alpha as an integer.
        alpha: float = self.alpha
        if alpha.is_integer():
            alpha = int(alpha)

        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": alpha,
            "target_modules": self.modules(),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
        }


def make_adapted_model(
    model: PretrainedModel, rank: int, alpha: float | None, targets: Sequence[str] | None
) -> AdaptedModel:
    """Return the adapters of a model, without the model's own parameters.

    ``alpha`` defaults to the value of ``rank``, and ``targets`` to `default_targets`.
    """
    if targets is None:
        targets = default_targets(model.shape)

    return AdaptedModel(
        model.family,
        model.shape,
        model.config,
        model.multimodal,
        rank=rank,
        alpha=alpha or float(rank),
        targets=tuple(targets),
    )


def adapter_weights(weights: Iterable[Weight], lora: Lora) -> tuple[Weight, ...]:
    """Return the adapter parameters A and B of each target among the parameters ``weights`` of a layer."""
    factors: list[Weight] = []
    for weight in weights:
        if _find_target(weight) in lora.targets:
            factors += _make_factors(weight, lora.rank)
    return tuple(factors)


def _find_target(weight: Weight) -> str | None:
    """Return the linear layer of `TARGETS` that a weight belongs to, or None for any other parameter."""
    module, _, parameter = weight.name.rpartition(".")
    layer = module.rpartition(".")[2]
    # Biases have no adapter.
    if parameter == "weight" and layer in TARGETS:
        return layer
    return None


def _make_factors(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    """Return the adapter parameters A [rank, in] and B [out, rank] of the linear layer ``weight`` [out, in].

    If ``weight`` is sharded along its inputs (``columns``, Megatron's RowParallelLinear), A is sharded along
    its inputs and B is replicated. Otherwise A is replicated, and B is sharded along its outputs like
    ``weight``.
    """
    is_input_sharded = weight.sharding == "columns"
    a_sharding: Sharding = "stacked"
    a_engine_sharding: EngineSharding = "whole"
    b_sharding = weight.sharding
    if is_input_sharded:
        a_sharding = "columns"
        a_engine_sharding = "columns"
        b_sharding = "whole"

    # If a family fuses several sources into one tensor, the sources have the same name and share one A.
    a_sources: dict[str, Source] = {}
    for source in weight.sources:
        name = source.name.removesuffix(".weight") + ".lora_A.weight"
        a_sources[name] = Source(name, (rank, source.shape[1]), a_engine_sharding)

    # Each B has the rows of its source. B is sharded like the source, or replicated if the layer is sharded
    # along its inputs.
    b_sources = []
    for source in weight.sources:
        b_engine_sharding = source.engine_sharding
        if is_input_sharded:
            b_engine_sharding = "whole"
        b_source = replace(
            source,
            name=source.name.removesuffix(".weight") + ".lora_B.weight",
            shape=(source.shape[0], rank),
            engine_sharding=b_engine_sharding,
        )
        b_sources.append(b_source)

    module = weight.name.removesuffix(".weight")
    fused_a = ""
    fused_b = ""
    if weight.fused:
        fused_module = weight.fused.replace(".weight", f".{ADAPTER}.")  # one module for all routed experts
        fused_a = f"{fused_module}.A"
        fused_b = f"{fused_module}.B"
    return (
        Weight(f"{module}.{ADAPTER}.A", a_sharding, tuple(a_sources.values()), fused_a, weight.expert),
        Weight(f"{module}.{ADAPTER}.B", b_sharding, tuple(b_sources), fused_b, weight.expert),
    )


def default_targets(shape: ModelShape) -> tuple[str, ...]:
    """Return the linear layers that get adapters by default.

    In a dense model, every linear layer that can have an adapter gets one. In a mixture of experts, only the
    linear layers of attention get adapters.
    """
    targets: tuple[str, ...] = TARGETS
    if shape.experts:
        targets = ATTENTION
    return tuple(name for name in targets if _adapter_refusal(shape, name) is None)


def adapts_experts(shape: ModelShape, targets: Sequence[str]) -> bool:
    """Return whether the routed experts of a model have adapters, given the adapted layers ``targets``."""
    return shape.experts > 0 and not set(MLP).isdisjoint(targets)


def _adapter_refusal(shape: ModelShape, target: str) -> str | None:
    """Return the reason why a model's linear layer ``target`` cannot have an adapter; None if it can."""
    for mixer in shape.mixers:
        reason = mixer.adapter_refusal(target)
        if reason is not None:
            return reason
    return None


def target_problems(shape: ModelShape, targets: Sequence[str], key: str) -> list[UserError]:
    """Return an error for each linear layer in ``targets`` that cannot have an adapter.

    ``key``: configuration key of ``targets``.
    """
    supported_targets = ", ".join(name for name in TARGETS if _adapter_refusal(shape, name) is None)
    reasons = [(target, _adapter_refusal(shape, target)) for target in targets]

    return [
        UserError(
            f"{target} of {shape.name} cannot have an adapter: {reason}",
            where=key,
            expected=f"some of {supported_targets}",
            got=target,
            fix=f"remove {target}",
        )
        for target, reason in reasons
        if reason is not None
    ]


def adapted_parameter_count(
    shape: ModelShape, layout: ParallelLayout, layers: Sequence[int], targets: Sequence[str]
) -> int:
    """Count the parameters of a rank's linear layers with adapters, without the adapters themselves.

    ``layers``: layers of the rank's pipeline stage. ``targets``: the linear layers with adapters.
    """
    adapted_weights: list[Weight] = []
    for layer in layers:
        adapted_weights += [weight for weight in shape.weights(layer) if _find_target(weight) in targets]
    return sum(_local_elements(adapted_weights, _ShardCounts.for_layout(shape, layout)))


def adapter_parameter_count(
    shape: ModelShape, layout: ParallelLayout, layers: Sequence[int], lora: Lora
) -> tuple[int, int]:
    """Count the adapter parameters outside and inside routed experts, on one rank of a pipeline stage.

    ``layers``: layers of the stage.
    """
    return _adapter_parameters(shape, _ShardCounts.for_layout(shape, layout), tuple(layers), lora)


class _ShardCounts(NamedTuple):
    """Numbers of shards of a layer's weights in a layout; cache key of `_adapter_parameters`."""

    tensor: int
    """Shards of a layer outside routed experts."""
    expert_tensor: int
    """Shards of each routed expert."""
    experts: int
    """Routed experts of a rank."""

    @classmethod
    def for_layout(cls, shape: ModelShape, layout: ParallelLayout) -> _ShardCounts:
        """Return the shard counts of a model in a layout."""
        return cls(layout.tensor, layout.expert_tensor, shape.experts // layout.expert)


@lru_cache(maxsize=4096)
def _adapter_parameters(
    shape: ModelShape, shards: _ShardCounts, layers: tuple[int, ...], lora: Lora
) -> tuple[int, int]:
    """Compute `adapter_parameter_count`, cached because the planner requests it for every candidate."""
    weights: list[Weight] = []
    for layer in layers:
        weights += adapter_weights(shape.weights(layer), lora)
    return _local_elements(weights, shards)


def _local_elements(weights: Iterable[Weight], shards: _ShardCounts) -> tuple[int, int]:
    """Count the elements of weights on one rank: (outside routed experts, in all its routed experts)."""
    dense_elements = 0
    expert_elements = 0
    for weight in weights:
        shard_count = shards.tensor
        if weight.expert:
            shard_count = shards.expert_tensor
        # A replicated parameter is complete on every rank.
        if weight.sharding in ("whole", "stacked"):
            shard_count = 1

        elements = weight.elements // shard_count
        if weight.expert:
            expert_elements += elements * shards.experts
        else:
            dense_elements += elements
    return dense_elements, expert_elements
