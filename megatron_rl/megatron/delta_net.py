"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464) on packed rows.

Megatron-Core's layer has the parameters and their checkpoint names. Its forward pass refuses packed rows
(0.16.1) or takes them with flash-linear-attention alone, and its constructor raises without that package.

A delta net is causal, so a row can be padded at its end. Rows are therefore gathered by length into the
buckets of `PackedRows`, as `PackedAttention` does: neither the convolution nor the state crosses rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.megatron.layers import RmsNorm
from megatron_rl.megatron.packing import PackedRows

CHUNK = 64
"""Tokens of a chunk: inside one the rule is matrix products, between chunks it is a loop."""


class PackedDeltaNet(GatedDeltaNet):
    """Gated delta net inside each row of a packed sequence.

    On an accelerator with flash-linear-attention its kernel computes the rule, otherwise PyTorch does.
    """

    # The sizes are optional in a configuration, but not in one with delta nets.
    key_head_dim: int
    value_head_dim: int
    num_key_heads: int
    num_value_heads: int

    def __init__(self, config: TransformerConfig, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        with _without_flash_linear_attention():
            super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.out_norm = _HeadNorm(config, self.value_head_dim, pg_collection.tp)

    def _setup_variant_attrs(self) -> None:
        """Set the rule too, which the constructor of 0.19.2 requires and `forward` does not read."""
        parent: Any = super()
        parent._setup_variant_attrs()
        # Its arguments are those of the forward pass here.
        self.gated_delta_rule = chunked_delta_rule  # pyright: ignore[reportAttributeAccessIssue]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *args: Any,
        packed_seq_params: PackedRows | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [T, 1, h] of hidden states [T, 1, h], and no bias.

        T is a shard under sequence parallelism. Collective over the tensor-parallel group.
        """
        assert packed_seq_params is not None, "packed rows are the only input format"
        packed = packed_seq_params
        projected = self.in_proj(hidden_states)[0].flatten(0, 1)

        # This rank's heads: the queries, keys and values, the gate of the output, two numbers per value head.
        values = self.num_value_heads // self.tp_size
        mixed_width = (2 * self.qk_dim + self.v_dim) // self.tp_size
        sections = (mixed_width, self.v_dim // self.tp_size, 2 * values)
        mixed, gate, rates = projected.split(sections, dim=-1)

        filled = zip(packed.fill(mixed), packed.fill(rates), strict=True)
        output = packed.join([self._bucket(*bucket).flatten(0, 1) for bucket in filled])

        # The norm of each head comes before its gate.
        gate = gate.view_as(output)
        gated = self.out_norm(output) * functional.silu(gate.float())
        return self.out_proj(gated.to(hidden_states.dtype).flatten(1).unsqueeze(1))

    def _bucket(self, mixed: Tensor, rates: Tensor) -> Tensor:
        """Return a bucket's output [rows, longest, value heads, size].

        ``mixed`` [rows, longest, width] are queries, keys and values before the convolution, ``rates``
        [rows, longest, 2 value heads] the projections of learning rate and decay.
        """
        length = mixed.shape[1]
        convolved = self.conv1d(mixed.transpose(1, 2))[..., :length]
        mixed = functional.silu(convolved).transpose(1, 2)
        key_width = self.qk_dim // self.tp_size
        widths = (key_width, key_width, self.v_dim // self.tp_size)
        query, key, value = (
            heads.unflatten(-1, (-1, size))
            for heads, size in zip(
                mixed.split(widths, dim=-1),
                (self.key_head_dim, self.key_head_dim, self.value_head_dim),
                strict=True,
            )
        )

        # Several value heads share a query and key head.
        repeats = self.num_value_heads // self.num_key_heads
        query = _normalise(query).repeat_interleave(repeats, dim=2)
        key = _normalise(key).repeat_interleave(repeats, dim=2)
        rate, decay = rates.float().chunk(2, dim=-1)
        log_decay = -self.A_log.float().exp() * functional.softplus(decay + self.dt_bias.float())

        kernel: Any = gated_delta_net.chunk_gated_delta_rule
        if kernel is None or device.on_host():
            return chunked_delta_rule(query, key, value, log_decay, rate.sigmoid())
        output, _ = kernel(
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            g=log_decay,
            beta=rate.sigmoid(),
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=False,
        )
        return output


class _HeadNorm(RmsNorm):
    """Norm of one head's output, with one weight for the heads of all tensor-parallel ranks.

    Its weight is not counted from zero, as those of the model's other norms are.
    """

    def __init__(self, config: TransformerConfig, size: int, group: Any) -> None:
        plain = copy(config)
        plain.layernorm_zero_centered_gamma = False
        # Ranks differ by heads, not by tokens: `forward` sums gradients, which Megatron must not do again.
        plain.sequence_parallel = False
        super().__init__(plain, size, config.layernorm_epsilon)
        self.group = group

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised ``hidden`` [T, heads, size], in its dtype.

        Collective over the tensor-parallel group in the backward pass.
        """
        weight = copy_to_tensor_model_parallel_region(self.weight, self.group)
        normalised = functional.rms_norm(hidden.float(), weight.shape, None, self.eps)
        return normalised.to(hidden.dtype) * weight


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rate: Tensor,
) -> Tensor:
    """Compute the gated delta rule chunk by chunk (arXiv 2412.06464, section 3.3), in float32.

    Shapes are [rows, length, heads, size] for query, key and value, and [rows, length, heads] for
    ``log_decay`` and the learning ``rate``. The state M of a head is a matrix [key size, value size], zero
    before the first token. With a = exp(log_decay), each token updates and reads it:

        M <- a M + rate k (v - a M^T k)^T
        output = M^T q / sqrt(key size)

    Returns the output [rows, length, heads, value size] in the dtype of ``value``.
    """
    rows, length, heads, key_size = key.shape
    chunk = min(CHUNK, length)
    count = -(-length // chunk)
    chunked = partial(_in_chunks, count=count, chunk=chunk)
    query = chunked(query) * key_size**-0.5
    key = chunked(key)
    new_values = chunked(value)
    rate = chunked(rate)
    # Decay from the start of the chunk to each token.
    total = chunked(log_decay).cumsum(dim=-1)

    # Decay between the tokens of a chunk. Later tokens are masked before exp, which would overflow for them.
    before = torch.ones(chunk, chunk, dtype=torch.bool, device=key.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~before, -torch.inf).exp()

    # Every token's update depends on those of the earlier tokens of its chunk: solve for all of them at once,
    # up to the part that depends on the state at the start of the chunk.
    system = rate[..., None] * decay * (key @ key.transpose(-1, -2))
    start_decay = total.exp()[..., None]
    known = torch.cat((new_values, start_decay * key), dim=-1) * rate[..., None]
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    updates, corrections = solved.split((new_values.shape[-1], key_size), dim=-1)

    scores = decay * (query @ key.transpose(-1, -2))
    start_query = start_decay * query
    end_key = (total[..., -1:] - total).exp()[..., None] * key
    chunk_decay = total[..., -1].exp()[..., None, None]

    state = new_values.new_zeros(rows, heads, key_size, new_values.shape[-1])
    outputs = []
    for index in range(count):
        update = updates[:, :, index] - corrections[:, :, index] @ state
        outputs.append(start_query[:, :, index] @ state + scores[:, :, index] @ update)
        state = chunk_decay[:, :, index] * state + end_key[:, :, index].transpose(-1, -2) @ update

    output = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return output.transpose(1, 2).to(value.dtype)


def _in_chunks(values: Tensor, count: int, chunk: int) -> Tensor:
    """Return values [rows, length, heads, ...] as float32 [rows, heads, count, chunk, ...], zero-padded."""
    padding = count * chunk - values.shape[1]
    padded = functional.pad(values.float(), (0, 0) * (values.dim() - 2) + (0, padding))
    return padded.transpose(1, 2).unflatten(2, (count, chunk))


def _normalise(heads: Tensor) -> Tensor:
    """Return heads [..., size] of length 1, in float32."""
    heads = heads.float()
    return heads * (heads.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


@contextmanager
def _without_flash_linear_attention() -> Iterator[None]:
    """Run Megatron's constructor without its kernels, for which it raises (seen in 0.16.1 and 0.19.2)."""
    # The constructor's module: 0.19 has a package in place of the module of 0.16.
    module = sys.modules[GatedDeltaNet.__init__.__module__]
    available: bool = vars(module)["HAVE_FLA"]
    setattr(module, "HAVE_FLA", True)
    try:
        yield
    finally:
        setattr(module, "HAVE_FLA", available)


def place_delta_nets(layers: list[Any], config: TransformerConfig, first: int, fused: bool) -> None:
    """Replace attention by gated delta nets in the specs of consecutive layers that the model has them in.

    ``first`` is the number of layers before them, ``fused`` if they are Transformer Engine's.
    """
    in_proj: Any = ColumnParallelLinear
    out_proj: Any = RowParallelLinear
    if fused:
        from megatron.core.extensions import transformer_engine

        # The norm before a layer's attention is a part of its projection.
        in_proj = transformer_engine.TELayerNormColumnParallelLinear
        out_proj = transformer_engine.TERowParallelLinear
    submodules = GatedDeltaNetSubmodules(in_proj=in_proj, out_proj=out_proj)
    delta_net = ModuleSpec(module=PackedDeltaNet, submodules=submodules)

    pattern: Any = config.linear_attention_freq
    for index, layer in enumerate(layers):
        if pattern[first + index]:
            # Layers may share one spec.
            layers[index] = replace(layer, submodules=replace(layer.submodules, self_attention=delta_net))
