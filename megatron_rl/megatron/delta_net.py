"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464) on packed rows.

Megatron-Core's layer provides the parameters and their checkpoint names. Its forward pass rejects packed rows
(0.16.1), or accepts them only with flash-linear-attention. Its constructor raises without that package.

A delta net is causal, so a row can be padded at its end. Rows of similar length are therefore gathered into
padded batches, the buckets of `PackedRows`: neither the convolution nor the state crosses rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.megatron.layers import RmsNorm
from megatron_rl.megatron.packing import PackedRows

CHUNK = 64
"""Tokens per chunk: the delta rule is computed by matrix products in a chunk, and by a loop across chunks."""
NORM_EPSILON = 1e-6
"""Term that is added to the squared length of queries and keys before the square root, as in the models'
published code."""


class PackedDeltaNet(GatedDeltaNet):
    """Gated delta net within each row of a packed sequence.

    On an accelerator the kernel of flash-linear-attention computes the delta rule, if the package is
    installed; otherwise `chunked_delta_rule` does.
    """

    needs_bucketed_rows = True
    """Marks a layer that needs the buckets of `PackedRows`: padded batches of rows of similar length."""

    # Megatron declares these sizes as optional, but a configuration with delta nets has them.
    key_head_dim: int
    value_head_dim: int
    num_key_heads: int
    num_value_heads: int

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection: Any,
        **kwargs: Any,
    ) -> None:
        with _without_flash_linear_attention():
            super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.out_norm = _HeadNorm(config, self.value_head_dim, pg_collection.tp)

    def _setup_variant_attrs(self) -> None:
        """Set ``gated_delta_rule``, which Megatron-Core 0.19.2 requires and `forward` does not read."""
        parent: Any = super()
        parent._setup_variant_attrs()
        # Megatron's declared type is a kernel of flash-linear-attention with other arguments.
        self.gated_delta_rule = chunked_delta_rule  # pyright: ignore[reportAttributeAccessIssue]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *args: Any,
        packed_seq_params: PackedRows | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the output [T, 1, h] from hidden states [T, 1, h]; return it with the bias None.

        Under sequence parallelism T is the number of this rank's tokens. Collective over the tensor-parallel
        group.
        """
        assert packed_seq_params is not None, "packed rows are the only input format"
        packed_rows = packed_seq_params
        projected, _ = self.in_proj(hidden_states)
        projected = projected.flatten(0, 1)

        # Split the projection for this rank's heads into three parts. The first has queries, keys and values.
        # The second is the output gate. The third has two numbers for each value head: beta (the write
        # strength of the delta rule) and the decay, both before their activation functions.
        value_heads = self.num_value_heads // self.tp_size
        qkv_width = (2 * self.qk_dim + self.v_dim) // self.tp_size
        gate_width = self.v_dim // self.tp_size
        qkv, gate, beta_and_decay = projected.split((qkv_width, gate_width, 2 * value_heads), dim=-1)

        # Compute buckets: batches of rows of similar length. The gate acts on each token separately, so it
        # stays packed.
        outputs = []
        buckets = zip(packed_rows.fill_buckets(qkv), packed_rows.fill_buckets(beta_and_decay), strict=True)
        for bucket_qkv, bucket_beta_and_decay in buckets:
            outputs.append(self._compute_bucket(bucket_qkv, bucket_beta_and_decay).flatten(0, 1))
        output = packed_rows.join_buckets(outputs)

        # The norm of each head comes before its gate.
        gate = gate.view_as(output)
        gated = self.out_norm(output) * functional.silu(gate.float())
        return self.out_proj(gated.to(hidden_states.dtype).flatten(1).unsqueeze(1))

    def _compute_bucket(self, qkv: Tensor, beta_and_decay: Tensor) -> Tensor:
        """Compute the output [rows, longest, value heads, size] of a bucket.

        A bucket is a batch of rows of similar length, padded to the longest row. ``qkv`` [rows, longest,
        width] contains queries, keys and values before the convolution. ``beta_and_decay`` [rows, longest, 2
        value heads] contains the projections of beta and decay, before their activation functions.
        """
        # The convolution pads both ends; only its first ``length`` outputs are causal.
        length = qkv.shape[1]
        convolved = self.conv1d(qkv.transpose(1, 2))[..., :length]
        qkv = functional.silu(convolved).transpose(1, 2)

        key_width = self.qk_dim // self.tp_size
        value_width = self.v_dim // self.tp_size
        query, key, value = qkv.split((key_width, key_width, value_width), dim=-1)
        query = query.unflatten(-1, (-1, self.key_head_dim))
        key = key.unflatten(-1, (-1, self.key_head_dim))
        value = value.unflatten(-1, (-1, self.value_head_dim))

        # Several value heads share a query and key head.
        repeats = self.num_value_heads // self.num_key_heads
        query = _scale_to_unit_length(query).repeat_interleave(repeats, dim=2)
        key = _scale_to_unit_length(key).repeat_interleave(repeats, dim=2)

        # log_decay = -exp(A) softplus(decay_logits + bias) < 0, as in Mamba 2; in float32 because of exp.
        beta_logits, decay_logits = beta_and_decay.float().chunk(2, dim=-1)
        beta = beta_logits.sigmoid()
        log_decay = -self.A_log.float().exp() * functional.softplus(decay_logits + self.dt_bias.float())

        kernel: Any = gated_delta_net.chunk_gated_delta_rule
        if kernel is None or device.on_host():
            return chunked_delta_rule(query, key, value, log_decay, beta)
        output, _ = kernel(
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            g=log_decay,
            beta=beta,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=False,
        )
        return output


class _HeadNorm(RmsNorm):
    """RMS norm of each head's output; all heads on all tensor-parallel ranks share one weight.

    The parameter is the weight itself. In the model's other norms the parameter is the weight minus 1.
    """

    def __init__(
        self,
        config: TransformerConfig,
        size: int,
        group: Any,
    ) -> None:
        norm_config = copy(config)
        norm_config.layernorm_zero_centered_gamma = False
        # Ranks have different heads of the same tokens. The backward pass of `forward` already sums the
        # gradients over ranks, so Megatron must not sum them again.
        norm_config.sequence_parallel = False
        super().__init__(norm_config, size, config.layernorm_epsilon)
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
    beta: Tensor,
) -> Tensor:
    """Compute the gated delta rule chunk by chunk (arXiv 2412.06464, section 3.3), in float32.

    Shapes are [rows, length, heads, size] for query, key and value, and [rows, length, heads] for
    ``log_decay`` and the write strength ``beta``. The state M of a head is a matrix [key size, value size],
    zero before the first token. With a = exp(log_decay), each token updates and reads it:

        M <- a M + beta k (v - a M^T k)^T
        output = M^T q / sqrt(key size)

    Returns the output [rows, length, heads, value size] in the dtype of ``value``.
    """
    num_rows, length, num_heads, key_size = key.shape
    value_size = value.shape[-1]
    chunk_size = min(CHUNK, length)
    num_chunks = -(-length // chunk_size)

    # Shapes: [rows, heads, chunks, tokens of a chunk, size]; beta and decay have no dimension ``size``.
    query = _split_into_chunks(query, num_chunks, chunk_size) * key_size**-0.5
    key = _split_into_chunks(key, num_chunks, chunk_size)
    chunked_value = _split_into_chunks(value, num_chunks, chunk_size)
    beta = _split_into_chunks(beta, num_chunks, chunk_size)
    # Logarithm of the decay from the start of the chunk to each token.
    log_decay_sums = _split_into_chunks(log_decay, num_chunks, chunk_size).cumsum(dim=-1)

    # Decay between the tokens of a chunk. Later tokens are masked before exp, which would overflow for them.
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=key.device).tril()
    log_differences = log_decay_sums[..., :, None] - log_decay_sums[..., None, :]
    decay = log_differences.masked_fill(~causal, -torch.inf).exp()

    # A token's update depends on the updates of earlier tokens in its chunk: solve a triangular system of
    # equations for all updates of the chunk. The updates also depend on the state at the start of the chunk,
    # which the loop below computes: ``corrections`` are the factors of this state.
    system = beta[..., None] * decay * (key @ key.transpose(-1, -2))
    start_decay = log_decay_sums.exp()[..., None]
    right_side = torch.cat((chunked_value, start_decay * key), dim=-1) * beta[..., None]
    solution = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    updates, corrections = solution.split((value_size, key_size), dim=-1)

    # Factors of each chunk's output and of its contribution to the state at its end.
    scores = decay * (query @ key.transpose(-1, -2))
    start_query = start_decay * query
    end_key = (log_decay_sums[..., -1:] - log_decay_sums).exp()[..., None] * key
    chunk_decay = log_decay_sums[..., -1].exp()[..., None, None]

    # Only the state passes from one chunk to the next.
    state = chunked_value.new_zeros(num_rows, num_heads, key_size, value_size)
    outputs = []
    for index in range(num_chunks):
        update = updates[:, :, index] - corrections[:, :, index] @ state
        outputs.append(start_query[:, :, index] @ state + scores[:, :, index] @ update)
        state = chunk_decay[:, :, index] * state + end_key[:, :, index].transpose(-1, -2) @ update

    output = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return output.transpose(1, 2).to(value.dtype)


def _split_into_chunks(
    values: Tensor,
    num_chunks: int,
    chunk_size: int,
) -> Tensor:
    """Zero-pad values [rows, length, heads, ...] and split their tokens into chunks, in float32.

    The result is [rows, heads, num_chunks, chunk_size, ...].
    """
    num_padding = num_chunks * chunk_size - values.shape[1]
    # `pad` expects (before, after) of the last dimension first; only the tokens, dimension 1, are padded.
    padded_values = functional.pad(values.float(), (0, 0) * (values.dim() - 2) + (0, num_padding))
    return padded_values.transpose(1, 2).unflatten(2, (num_chunks, chunk_size))


def _scale_to_unit_length(heads: Tensor) -> Tensor:
    """Scale the vector of each head [..., size] to Euclidean length 1, in float32."""
    heads = heads.float()
    squared_length = heads.square().sum(dim=-1, keepdim=True)
    return heads * (squared_length + NORM_EPSILON).rsqrt()


@contextmanager
def _without_flash_linear_attention() -> Iterator[None]:
    """Allow Megatron's constructor of delta nets inside the block even without flash-linear-attention.

    The constructor of Megatron-Core 0.16.1 and 0.19.2 raises an exception if the flag ``HAVE_FLA`` of its
    module is false. The flag is true inside the block, and restored afterwards.
    """
    # Find the constructor's module by name: it is a module in 0.16, but inside a package in 0.19.
    module = sys.modules[GatedDeltaNet.__init__.__module__]
    original_flag: bool = vars(module)["HAVE_FLA"]
    setattr(module, "HAVE_FLA", True)
    try:
        yield
    finally:
        setattr(module, "HAVE_FLA", original_flag)
