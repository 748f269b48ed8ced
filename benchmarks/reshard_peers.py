"""Weight transfer as in other projects: gather complete tensors on every rank, then load them.

The published algorithms are implemented here for a dense Qwen2. Each tensor is broadcast over the pipeline
group, gathered over the tensor group, and converted to Hugging Face tensors on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.megatron.model import live_parameters
from megatron_rl.megatron.parameter_mapping import global_name

Named = tuple[str, Tensor]
Load = Callable[[Iterable[Named]], Any]


class Gatherer:
    """Source of complete Hugging Face tensors on every rank; ``received`` is the number of received bytes."""

    def __init__(self, model: Any) -> None:
        groups = model.groups
        layout = groups.layout
        self._model = model
        self._config = model.hf_config
        self._pipeline = groups.pipeline

        self._tensor = groups.tensor
        self._stage = groups.coordinates.pipeline
        self._tensor_size = layout.tensor
        self._parameters = {global_name(model, name): value for name, value in live_parameters(model).items()}

        # Every rank has the shapes of all stages, so that it can allocate the receive buffers.
        stage_shapes: list[Any] = [None] * layout.pipeline

        shapes = {name: (tuple(value.shape), value.dtype) for name, value in self._parameters.items()}
        dist.all_gather_object(stage_shapes, shapes, group=self._pipeline)
        self._plan = [
            (name, stage, *shape_and_dtype)
            for stage, names in enumerate(stage_shapes)
            for name, shape_and_dtype in names.items()
        ]
        self._sources = dist.get_process_group_ranks(self._pipeline)
        self.received = 0

    def tensors(self) -> Iterator[Named]:
        """Gather one parameter after the other."""
        for name, stage, shape, dtype in self._plan:
            value = torch.empty(shape, dtype=dtype)
            if stage == self._stage:
                value = self._parameters[name]
            yield from self._convert(name, self._gather(self._broadcast(value, stage)))

    def buckets(self, size: int) -> Iterator[Named]:
        """Gather parameters of one stage together, in flat buckets of at most ``size`` bytes."""
        bucket: list[Any] = []
        bucket_bytes = 0

        for item in self._plan:
            _, stage, shape, dtype = item
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            # A bucket has parameters of one stage. The limit applies to the bucket after the gather.
            if bucket and (bucket_bytes + num_bytes > size // self._tensor_size or stage != bucket[0][1]):
                yield from self._gather_bucket(bucket)
                bucket = []
                bucket_bytes = 0
            bucket.append(item)
            bucket_bytes += num_bytes
        yield from self._gather_bucket(bucket)

    def _gather_bucket(self, items: list[Any]) -> Iterator[Named]:
        """Gather the parameters of one bucket with two collectives."""
        stage = items[0][1]
        if stage == self._stage:
            flat = torch.cat([self._parameters[name].flatten() for name, *_ in items])
        else:
            flat = torch.empty(sum(torch.Size(shape).numel() for _, _, shape, _ in items), dtype=items[0][3])

        shards = self._gather(self._broadcast(flat, stage))

        # Split the flat shards into parameters again.
        position = 0
        for name, _, shape, _ in items:
            end = position + torch.Size(shape).numel()
            yield from self._convert(name, [shard[position:end].view(shape) for shard in shards])
            position = end

    def _broadcast(self, value: Tensor, stage: int) -> Tensor:
        """Broadcast a stage's parameter over the pipeline group."""
        # With one stage every rank has the parameter.
        if len(self._sources) > 1:
            dist.broadcast(value, self._sources[stage], group=self._pipeline)
            if stage != self._stage:
                self.received += value.nbytes
        return value

    def _gather(self, value: Tensor) -> list[Tensor]:
        """Gather the shards of a parameter over the tensor group."""
        if self._tensor_size == 1:
            return [value]
        gathered = torch.empty(self._tensor_size * value.numel(), dtype=value.dtype)
        dist.all_gather_into_tensor(gathered, value.flatten(), group=self._tensor)
        self.received += gathered.nbytes - value.nbytes
        return [shard.view(value.shape) for shard in gathered.chunk(self._tensor_size)]

    def _convert(
        self,
        name: str,
        shards: list[Tensor],
    ) -> Iterator[Named]:
        """Join tensor-parallel shards, and yield the tensors with their Hugging Face names."""
        config = self._config
        layer = name.removeprefix("decoder.layers.").split(".", 1)
        prefix = f"model.layers.{layer[0]}."

        # Megatron pads the vocabulary to a multiple of the ranks.
        if name == "embedding.word_embeddings.weight":
            yield "model.embed_tokens.weight", torch.cat(shards)[: config.vocab_size]
        elif name == "output_layer.weight":
            yield "lm_head.weight", torch.cat(shards)[: config.vocab_size]
        elif name == "decoder.final_layernorm.weight":
            yield "model.norm.weight", shards[0]
        elif "linear_qkv" in name:
            yield from self._split_query_key_value(prefix, name.rsplit(".", 1)[1], torch.cat(shards))
        elif "linear_fc1" in name:
            # Each shard has rows of the gate projection, followed by rows of the up projection.
            halves = [shard.chunk(2) for shard in shards]
            yield prefix + "mlp.gate_proj.weight", torch.cat([gate for gate, _ in halves])
            yield prefix + "mlp.up_proj.weight", torch.cat([up for _, up in halves])
        elif "linear_fc2" in name:
            yield prefix + "mlp.down_proj.weight", torch.cat(shards, 1)
        elif "linear_proj" in name:
            yield prefix + "self_attn.o_proj.weight", torch.cat(shards, 1)
        elif "input_layernorm" in name:
            yield prefix + "input_layernorm.weight", shards[0]
        else:
            yield prefix + "post_attention_layernorm.weight", shards[0]

    def _split_query_key_value(
        self,
        prefix: str,
        parameter: str,
        fused: Tensor,
    ) -> Iterator[Named]:
        """Split a fused projection, whose rows are for each key-value group: query heads, key, value.

        ``parameter`` is ``weight`` or ``bias``.
        """
        groups = self._config.num_key_value_heads
        heads = self._config.num_attention_heads
        dim = self._config.hidden_size // heads
        grouped = fused.view(
            groups,
            heads // groups + 2,
            dim,
            *fused.shape[1:],
        )
        projections = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        for letter, projection in zip("qkv", projections, strict=True):
            yield f"{prefix}self_attn.{letter}_proj.{parameter}", projection.reshape(-1, *fused.shape[1:])


def gather_all(gatherer: Gatherer, load: Load) -> None:
    """Gather the complete model on every rank, then load it."""
    load(list(gatherer.tensors()))


def per_tensor(gatherer: Gatherer, load: Load) -> None:
    """Gather and load one tensor after the other."""
    for named_tensor in gatherer.tensors():
        load([named_tensor])


def bucketed(
    gatherer: Gatherer,
    load: Load,
    size: int = 16 * 2**20,
) -> None:
    """Gather and load the tensors of one bucket after the other."""
    load(gatherer.buckets(size))
