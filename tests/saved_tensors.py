"""Measure how much memory autograd saves in a forward pass of the package's own layers."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.megatron import layers
from megatron_rl.megatron.model import ParallelModel, build_model, live_parameters
from tests.hf_models import config_of

TOKENS = 256
"""Tokens of the measured batch."""


def saved_bytes(model: ParallelModel) -> int:
    """Return the bytes of all distinct storages that a forward pass saves for backward, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in live_parameters(model).values()}
    # Values keep the tensors alive, so that no address is used twice.
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            saved.setdefault(address, tensor)
        return tensor

    tokens = torch.randint(0, 100, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    packing = model.pack([TOKENS // 4] * 4)

    chunk: Any = model.chunks[0].train()
    with device.megatron_mode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunk(tokens, None, None, packed_seq_params=packing)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def layer_bytes(
    family: str,
    groups: ParallelGroups,
    dtype: torch.dtype,
    recompute: str,
) -> tuple[float, Any]:
    """Return the mean bytes that a layer saves per token, and the model's shape.

    The bytes are half the difference between a model of four layers and one of two, so embeddings and the
    output layer cancel out. Key-value heads are repeated as on an accelerator, which the memory model
    describes; the host's attention accepts grouped heads.
    """
    setattr(layers, "_supports_grouped_keys", lambda query: False)
    # Every layer has to be of the same kind, or the difference would mix dense and expert layers.
    changes: dict[str, Any] = {}
    if family == "qwen3-moe":
        changes["mlp_only_layers"] = []
    if family.startswith("deepseek"):
        changes["first_k_dense_replace"] = 0

    # Two layers and four: half of the difference is one layer.
    totals = []
    shape = None
    for depth in (2, 4):
        if family in ("gemma3", "gemma4"):
            changes["layer_types"] = ["sliding_attention", "full_attention"] * (depth // 2)

        config = config_of(family, num_hidden_layers=depth, **changes)
        model = build_model(config, groups, dtype=dtype, recompute=recompute)
        totals.append(saved_bytes(model))
        shape = model.spec.model.shape
    return (totals[1] - totals[0]) / 2 / TOKENS, shape
