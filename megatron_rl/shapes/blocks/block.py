"""The two halves of a decoder layer: a mixer such as attention, and a feed-forward such as an MLP.

Every difference between types of layers is a method here. Parameter counts, memory, weight sync, adapters and
the planner sum over the blocks of a `ModelShape`, without a case per type. `megatron_rl.megatron.blocks` has
the Megatron modules of each block, under the same name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.shapes.layer_weights import Weight

if TYPE_CHECKING:
    from megatron_rl.shapes.layout import ParallelLayout
    from megatron_rl.shapes.model import ModelShape


@dataclass(frozen=True)
class LocalLayer:
    """Properties of a layer on one rank that determine the memory of its activations.

    Activations are counted in elements of ``dtype_bytes`` bytes, per token of a micro-batch. A float32 number
    counts as `float32_elements` elements: 2 in a bfloat16 model.
    """

    shape: ModelShape
    """Sizes of the model."""
    tensor: int
    """Tensor-parallel size."""
    expert_tensor: int
    """Tensor-parallel size inside each routed expert."""
    token_shards: int
    """Number of ranks over which tokens are sharded between layers, see `ParallelLayout.token_shards`."""
    dtype_bytes: int
    """Bytes of an element of the model's dtype."""
    fused: bool
    """Whether the layer is Transformer Engine's. Otherwise it is Megatron's layer without Transformer Engine,
    with this package's norm and attention, in which only core attention is fused."""
    recompute: str = "none"
    """``none``, or ``selective`` to recompute core attention: everything between its projections."""

    @property
    def float32_elements(self) -> float:
        """Return the size of a float32 number in elements of the model's dtype, such as 2 for bfloat16."""
        return 4 / self.dtype_bytes

    def unfused_norm_elements(self, width: float, output: bool = True) -> float:
        """Count the elements per token that a norm without Transformer Engine saves for the backward pass.

        The norm saves its input in float32, the normalised values, and its output. ``width``: size of the
        norm. ``output``: whether the norm's output is counted; false if no later module saves it.
        """
        normalised_elements = 1.0
        if self.shape.centered_norms:
            normalised_elements = self.float32_elements

        saved_elements = self.float32_elements + normalised_elements
        if output:
            saved_elements += 1
        return width * saved_elements


@dataclass(frozen=True)
class Mixer(ABC):
    """The half of a layer in which tokens depend on earlier tokens, such as attention.

    Sizes are fields of the subclass, or fields of `ModelShape` for the mixers of this package.
    """

    name: ClassVar[str]
    """Key in `MIXERS`, and name of the modules in ``shapes.blocks`` and ``megatron.blocks``."""
    noun: ClassVar[str]
    """Plural noun for errors."""
    layer_types: ClassVar[tuple[str, ...]] = ()
    """Values of ``layer_types`` in config.json that select this mixer."""
    size_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of config.json that a model with such layer types must have."""
    first_projection: ClassVar[str] = "linear_qkv"
    """Megatron's projection into which Transformer Engine fuses the norm before the mixer."""
    config_class: ClassVar[str] = "TransformerConfig"
    """Megatron's configuration class of a model with this mixer."""
    kernel_size_name: ClassVar[str] = "a head size"
    """Name of `kernel_size`, for errors."""
    fuses_rotary: ClassVar[bool] = True
    """Whether Megatron's fused rotary embedding can be used with packed rows."""
    takes_adapters: ClassVar[bool] = True
    """Whether models with this mixer may have low-rank adapters."""

    @abstractmethod
    def weights(self, shape: ModelShape) -> Iterable[Weight]:
        """Yield the parameters of a layer's mixer, without the norms before and after it."""

    @abstractmethod
    def saved_elements(self, layer: LocalLayer) -> float:
        """Count the elements per token that the mixer saves for the backward pass on one rank.

        The output of the preceding norm is counted with the norm.
        """

    @abstractmethod
    def live_elements(self, layer: LocalLayer) -> float:
        """Return the peak number of activation elements per token in a forward pass without gradients.

        The mixer is that of a layer without Transformer Engine. The residual stream and the mixer's input are
        not counted.
        """

    def key_value_heads(self, shape: ModelShape) -> int:
        """Return the number of key-value heads, or 0 for a mixer without keys per token."""
        return 0

    def key_size(self, shape: ModelShape) -> int:
        """Return the size of one head's query and key; 0 if the mixer has no keys per token."""
        return 0

    def value_size(self, shape: ModelShape) -> int:
        """Return the size of one head's value; 0 if the mixer has no values per token."""
        return 0

    def query_width(self, shape: ModelShape) -> int:
        """Return the width of the queries of all heads; the planner estimates attention times from it."""
        return shape.heads * shape.head_dim

    def flops_per_key(self, shape: ModelShape) -> int:
        """Return the forward FLOPs of one token per attended key, without projections."""
        return 0

    def flops_per_token(self, shape: ModelShape) -> float:
        """Return the forward FLOPs per token that are constant in the context length, without projections."""
        return 0.0

    def cache_elements(self, shape: ModelShape) -> int:
        """Count the elements of a layer's cache for one token of a sequence."""
        return 0

    def cache_shards(self, shape: ModelShape, tensor: int) -> int:
        """Return the number of distinct shards of the cache on ``tensor`` ranks of an engine."""
        return 1

    def kernel_size(self, shape: ModelShape) -> int:
        """Return the head size by which engines select an attention kernel; 0 without attention."""
        return 0

    def state_bytes(self, shape: ModelShape, dtype_bytes: float) -> float:
        """Return the bytes of a layer's fixed-size state per sequence, in addition to the cache per token."""
        return 0.0

    def tensor_parallel_heads(self, shape: ModelShape) -> int:
        """Return the number of heads that a trainer's tensor-parallel size must divide; 0 without a limit."""
        return math.gcd(*self.other_sharded_heads(shape).values())

    def other_sharded_heads(self, shape: ModelShape) -> dict[str, int]:
        """Return the numbers of heads, except query and key-value heads, that tensor parallelism shards.

        The result maps the name of a kind of head in error messages, such as "key heads of gated delta nets",
        to the number of heads of this kind.
        """
        return {}

    def exchanged_elements(self, shape: ModelShape, tensor: int, context: int) -> float:
        """Count the elements per token of the all-to-all before and after context-parallel attention."""
        return 0.0

    def gathered_elements(self, shape: ModelShape, tensor: int) -> float:
        """Count the elements per token that context-parallel ranks all-gather instead of exchanging heads."""
        return 0.0

    def settings(self, shape: ModelShape) -> dict[str, Any]:
        """Return the fields of Megatron's TransformerConfig that follow from the mixer."""
        return {}

    def problems(
        self, shape: ModelShape, layout: ParallelLayout, settings: Mapping[str, Any]
    ) -> Iterator[UserError]:
        """Yield the errors of the mixer in a role's layout; ``settings`` are the user's Megatron settings."""
        yield from ()

    def adapter_refusal(self, target: str) -> str | None:
        """Return the reason why Megatron's linear layer ``target`` cannot have an adapter; None if it can."""
        return None


@dataclass(frozen=True)
class FeedForward(ABC):
    """The half of a layer that processes each token independently, such as an MLP or a mixture of experts.

    Sizes are fields of the subclass, or fields of `ModelShape` for the feed-forwards of this package.
    """

    name: ClassVar[str]
    """Key in `FEED_FORWARDS`, and name of the modules in ``shapes.blocks`` and ``megatron.blocks``."""
    routed: ClassVar[bool] = False
    """Whether a router selects among the ``experts`` of `ModelShape` for each token."""

    @abstractmethod
    def weights(self, shape: ModelShape) -> Iterable[Weight]:
        """Yield the parameters of a layer's feed-forward; one `Weight` represents all routed experts."""

    @abstractmethod
    def inner_width(self, shape: ModelShape) -> int:
        """Return the width between the feed-forward's projections, summed over the experts of a token."""

    @abstractmethod
    def saved_elements(self, layer: LocalLayer) -> float:
        """Count the elements per token that the feed-forward saves for the backward pass on one rank.

        The output of the preceding norm is counted with the norm. Routed tokens are assumed to spread
        evenly over experts.
        """

    @abstractmethod
    def live_elements(self, layer: LocalLayer) -> float:
        """Return the peak number of activation elements per token in a forward pass without gradients.

        The feed-forward is that of a layer without Transformer Engine. Hidden states, such as the residual
        stream, are not counted here but in `live_hidden_states`.
        """

    def live_hidden_states(self, shape: ModelShape) -> int:
        """Return the number of hidden states that exist at the peak that `live_elements` describes."""
        return 4

    def temporary_elements(self, layer: LocalLayer) -> float:
        """Count the elements per token of temporary tensors, which exist only while the layer is computed."""
        return 0.0

    def tensor_widths(self, shape: ModelShape) -> list[tuple[str, int, str]]:
        """Return the widths that parallelism shards, as tuples (noun, width, name of a parallel size).

        The parallel size is a field of `ParallelLayout`, and must divide the width.
        """
        return []

    def settings(self, shape: ModelShape) -> dict[str, Any]:
        """Return the fields of Megatron's TransformerConfig that follow from the feed-forward."""
        return {}

    def problems(
        self, shape: ModelShape, layout: ParallelLayout, settings: Mapping[str, Any]
    ) -> Iterator[UserError]:
        """Yield the errors of the feed-forward in a role's layout; ``settings``: see `Mixer.problems`."""
        yield from ()


class Block(NamedTuple):
    """Structure of one layer. Layers with equal blocks have the same parameters.

    Example: ``Block(Attention(), Experts())`` for a layer of Mixtral.
    """

    mixer: Mixer
    feed_forward: FeedForward
