"""The field's ways to bring Megatron shards to an engine: gather whole tensors everywhere, then load them.

Algorithms as published, written for a dense Qwen2: each tensor is broadcast over the pipeline group, gathered
over the tensor group and converted to its Hugging Face parts on every rank.
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
    """Give whole Hugging Face tensors on every rank; ``received`` counts the bytes that arrived here."""

    def __init__(self, model: Any) -> None:
        self._model, self._config = model, model.hf_config
        layout, groups = model.groups.layout, model.groups
        self._pipeline, self._tensor = groups.pipeline, groups.tensor
        self._stage, self._tensor_size = groups.coordinates.pipeline, layout.tensor
        self._own = {global_name(model, name): value for name, value in live_parameters(model).items()}
        told: list[Any] = [None] * layout.pipeline
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in self._own.items()}
        dist.all_gather_object(told, shapes, group=self._pipeline)
        self._plan = [
            (name, stage, *meta) for stage, names in enumerate(told) for name, meta in names.items()
        ]
        self._sources = dist.get_process_group_ranks(self._pipeline)
        self.received = 0

    def tensors(self) -> Iterator[Named]:
        """Gather one parameter after the other."""
        for name, stage, shape, dtype in self._plan:
            value = self._own[name] if stage == self._stage else torch.empty(shape, dtype=dtype)
            yield from self._convert(name, self._gather(self._broadcast(value, stage)))

    def buckets(self, size: int) -> Iterator[Named]:
        """Gather parameters of one stage together, in flat buckets of at most ``size`` bytes."""
        bucket: list[Any] = []
        filled = 0
        for item in self._plan:
            _, stage, shape, dtype = item
            count = torch.Size(shape).numel() * dtype.itemsize
            if bucket and (filled + count > size // self._tensor_size or stage != bucket[0][1]):
                yield from self._bucket(bucket)
                bucket, filled = [], 0
            bucket.append(item)
            filled += count
        yield from self._bucket(bucket)

    def _bucket(self, items: list[Any]) -> Iterator[Named]:
        stage = items[0][1]
        if stage == self._stage:
            flat = torch.cat([self._own[name].flatten() for name, *_ in items])
        else:
            flat = torch.empty(sum(torch.Size(shape).numel() for _, _, shape, _ in items), dtype=items[0][3])
        parts = self._gather(self._broadcast(flat, stage))
        position = 0
        for name, _, shape, _ in items:
            count = torch.Size(shape).numel()
            yield from self._convert(name, [part[position : position + count].view(shape) for part in parts])
            position += count

    def _broadcast(self, value: Tensor, stage: int) -> Tensor:
        if len(self._sources) > 1:
            dist.broadcast(value, self._sources[stage], group=self._pipeline)
            self.received += value.nbytes if stage != self._stage else 0
        return value

    def _gather(self, value: Tensor) -> list[Tensor]:
        if self._tensor_size == 1:
            return [value]
        whole = torch.empty(self._tensor_size * value.numel(), dtype=value.dtype)
        dist.all_gather_into_tensor(whole, value.flatten(), group=self._tensor)
        self.received += whole.nbytes - value.nbytes
        return [part.view(value.shape) for part in whole.chunk(self._tensor_size)]

    def _convert(self, name: str, parts: list[Tensor]) -> Iterator[Named]:
        """Join tensor-parallel parts and name them as the checkpoint does."""
        config = self._config
        layer = name.removeprefix("decoder.layers.").split(".", 1)
        prefix = f"model.layers.{layer[0]}."
        if name == "embedding.word_embeddings.weight":
            yield "model.embed_tokens.weight", torch.cat(parts)[: config.vocab_size]
        elif name == "output_layer.weight":
            yield "lm_head.weight", torch.cat(parts)[: config.vocab_size]
        elif name == "decoder.final_layernorm.weight":
            yield "model.norm.weight", parts[0]
        elif "linear_qkv" in name:
            yield from self._query_key_value(prefix, name.rsplit(".", 1)[1], torch.cat(parts))
        elif "linear_fc1" in name:
            halves = [part.chunk(2) for part in parts]
            yield prefix + "mlp.gate_proj.weight", torch.cat([gate for gate, _ in halves])
            yield prefix + "mlp.up_proj.weight", torch.cat([up for _, up in halves])
        elif "linear_fc2" in name:
            yield prefix + "mlp.down_proj.weight", torch.cat(parts, 1)
        elif "linear_proj" in name:
            yield prefix + "self_attn.o_proj.weight", torch.cat(parts, 1)
        elif "input_layernorm" in name:
            yield prefix + "input_layernorm.weight", parts[0]
        else:
            yield prefix + "post_attention_layernorm.weight", parts[0]

    def _query_key_value(self, prefix: str, kind: str, fused: Tensor) -> Iterator[Named]:
        groups, heads = self._config.num_key_value_heads, self._config.num_attention_heads
        dim = self._config.hidden_size // heads
        grouped = fused.view(groups, heads // groups + 2, dim, *fused.shape[1:])
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        for letter, part in zip("qkv", parts, strict=True):
            yield f"{prefix}self_attn.{letter}_proj.{kind}", part.reshape(-1, *fused.shape[1:])


def gather_all(gatherer: Gatherer, load: Load) -> None:
    """Hold the whole model on every rank, then load it."""
    load(list(gatherer.tensors()))


def per_tensor(gatherer: Gatherer, load: Load) -> None:
    """Load each tensor as it is gathered."""
    for named in gatherer.tensors():
        load([named])


def bucketed(gatherer: Gatherer, load: Load, size: int = 16 * 2**20) -> None:
    """Load tensors as their buckets are gathered."""
    load(gatherer.buckets(size))
