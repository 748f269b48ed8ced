"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): which linear layers have one, and its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.shapes.layer_weights import Cut, Source, Weight
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import PretrainedModel

ATTENTION, MLP = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")
TARGETS = (*ATTENTION, *MLP)
"""Megatron's linear layers that can have an adapter."""
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""What stands before a checkpoint's own names in PEFT's files."""
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has room for (vllm/config/lora.py, MaxLoRARanks); others take that of the next."""
ADAPTER = "adapter"
"""The module below a linear layer that is its adapter; its parameters are A and B."""


class Lora(NamedTuple):
    """Say which adapters a model has: their rank, and Megatron's layers with one."""

    rank: int
    targets: tuple[str, ...]

    @classmethod
    def of(cls, shape: ModelShape, rank: int, targets: Sequence[str] | None = None) -> Lora:
        """Return a model's adapters, in the layers of `default_targets` where ``targets`` names none."""
        return cls(rank, tuple(targets or default_targets(shape)))


def adapters_in_words(rank: int, alpha: float, targets: Sequence[str]) -> str:
    """Return what a checkpoint says of a model's adapters."""
    return f"rank {rank}, alpha {alpha:g} on {', '.join(name for name in TARGETS if name in targets)}"


@dataclass(frozen=True)
class AdaptedModel(PretrainedModel):
    """Describe the adapters of a model as its own tensors are described, by their names in PEFT's files.

    Each checkpoint tensor of a linear layer has an A [rank, in] and a B [out, rank] of its own, and so has
    each routed expert. Megatron's adapter of a layer that holds several has their As one below the other, and
    their Bs where their rows are.
    ``base`` is a checksum of the weights beneath them, where these are known.
    """

    rank: int = 1
    alpha: float = 1.0
    targets: tuple[str, ...] = ()
    base: str | None = None

    def weights(self, layer: int) -> tuple[Weight, ...]:
        """Return the parameters of a layer's adapters."""
        return adapter_weights(super().weights(layer), Lora(self.rank, self.targets))

    def outer(self, first: bool, last: bool) -> tuple[Weight, ...]:
        """Return nothing: what lies outside the layers has no adapters."""
        return ()

    @property
    def engine_rank(self) -> int:
        """Return the rank that vLLM is to have room for."""
        return next(rank for rank in ENGINE_RANKS if rank >= self.rank)

    def modules(self) -> list[str]:
        """Return the last names of the checkpoint's layers that have adapters, as PEFT lists them."""
        return sorted({name.split(".")[-3] for name in self.tensor_shapes()})

    def peft_config(self) -> dict[str, Any]:
        """Return what PEFT's configuration file says of the adapters."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha.is_integer() else self.alpha,
            "target_modules": self.modules(),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
        }


def adapted(
    model: PretrainedModel, rank: int, alpha: float | None, targets: Sequence[str] | None
) -> AdaptedModel:
    """Return the description of a model's adapters; ``alpha`` None is the rank."""
    chosen = default_targets(model.shape) if targets is None else tuple(targets)
    return AdaptedModel(model.family, model.shape, model.config, rank, alpha or float(rank), chosen)


def adapter_weights(weights: Iterable[Weight], lora: Lora) -> tuple[Weight, ...]:
    """Return the parameters of the adapters that a layer with these weights has."""
    adapted = (weight for weight in weights if _layer_of(weight) in lora.targets)
    return tuple(part for weight in adapted for part in _factors(weight, lora.rank))


def _layer_of(weight: Weight) -> str | None:
    """Return which of `TARGETS` a weight is of, in whichever MLP; None where it is of none."""
    *_, layer, kind = weight.name.split(".")
    return layer if kind == "weight" and layer in TARGETS else None


def _factors(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    """Return A and B of a linear layer: of one cut by columns A is cut, of any other B, by the same rows."""
    module = weight.name.removesuffix(".weight")
    column = weight.cut == "columns"
    downs: dict[str, Source] = {}
    for source in weight.sources:
        name = source.name.removesuffix(".weight") + ".lora_A.weight"
        downs[name] = Source(name, (rank, source.shape[1]), "columns" if column else "whole")
    ups = tuple(
        replace(
            source,
            name=source.name.removesuffix(".weight") + ".lora_B.weight",
            shape=(source.shape[0], rank),
            engine="whole" if column else source.engine,
        )
        for source in weight.sources
    )
    cuts: tuple[Cut, Cut] = ("columns", "whole") if column else ("stacked", weight.cut)
    fused = weight.fused.replace(".weight", f".{ADAPTER}.")  # of all experts, where it is one's
    return (
        Weight(
            f"{module}.{ADAPTER}.A", cuts[0], tuple(downs.values()), fused and f"{fused}.A", weight.expert
        ),
        Weight(f"{module}.{ADAPTER}.B", cuts[1], ups, fused and f"{fused}.B", weight.expert),
    )


def default_targets(shape: ModelShape) -> tuple[str, ...]:
    """Return the linear layers of a model that have adapters where none are named: no MLPs beside experts."""
    targets = ATTENTION if shape.experts else TARGETS
    return tuple(name for name in targets if _refusal(shape, name) is None)


def adapts_experts(shape: ModelShape, targets: Sequence[str]) -> bool:
    """Say whether routed experts of a model have adapters, one set each."""
    return shape.experts > 0 and not set(MLP).isdisjoint(targets)


def _refusal(shape: ModelShape, target: str) -> str | None:
    """Return why a layer of this model can have no adapter."""
    if target == "linear_qkv" and shape.mla:
        return "latent attention has no such layer: it projects through latents"
    return None


def target_problems(shape: ModelShape, targets: Sequence[str], where: str) -> list[UserError]:
    """Return the errors of ``targets``, which stand at the configuration path ``where``, for a model."""
    reasons = [(target, _refusal(shape, target)) for target in targets]
    return [
        UserError(
            f"{target} of {shape.name} can have no adapter: {reason}",
            where=where,
            expected="some of " + ", ".join(name for name in TARGETS if _refusal(shape, name) is None),
            got=target,
            fix=f"remove {target}",
        )
        for target, reason in reasons
        if reason is not None
    ]


def adapted_parameter_count(
    shape: ModelShape, layout: ParallelLayout, layers: Sequence[int], targets: Sequence[str]
) -> int:
    """Return the parameters of the layers' weights that have adapters, on one rank of a pipeline stage."""
    weights = [weight for layer in layers for weight in shape.weights(layer) if _layer_of(weight) in targets]
    return sum(_local_elements(weights, _Parts.of(shape, layout)))


def adapter_parameter_count(
    shape: ModelShape, layout: ParallelLayout, layers: Sequence[int], lora: Lora
) -> tuple[int, int]:
    """Return the parameters of the adapters on one rank of a pipeline stage that has these layers.

    The first number is of those outside routed experts, the second of those in them.
    """
    return _adapter_parameters(shape, _Parts.of(shape, layout), tuple(layers), lora)


class _Parts(NamedTuple):
    """Say how a layout cuts: into how many parts outside experts and in each, and how many a rank has."""

    tensor: int
    expert_tensor: int
    experts: int

    @classmethod
    def of(cls, shape: ModelShape, layout: ParallelLayout) -> _Parts:
        return cls(layout.tensor, layout.expert_tensor, shape.experts // layout.expert)


@lru_cache(maxsize=4096)
def _adapter_parameters(
    shape: ModelShape, parts: _Parts, layers: tuple[int, ...], lora: Lora
) -> tuple[int, int]:
    weights = [weight for layer in layers for weight in adapter_weights(shape.weights(layer), lora)]
    return _local_elements(weights, parts)


def _local_elements(weights: Iterable[Weight], parts: _Parts) -> tuple[int, int]:
    """Return how many elements of weights one rank has, outside routed experts and in all of its experts."""
    dense = experts = 0
    for weight in weights:
        cut = (
            1
            if weight.cut in ("whole", "stacked")
            else parts.expert_tensor
            if weight.expert
            else parts.tensor
        )
        if weight.expert:
            experts += weight.elements // cut * parts.experts
        else:
            dense += weight.elements // cut
    return dense, experts
