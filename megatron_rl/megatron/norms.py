"""Norms that Megatron's layer specs do not have: after attention and MLP, and over all heads of attention.

A norm over all heads needs one number per token from every tensor-parallel rank: the sum of squares of the
rank's heads. All other computation is local.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_rl.distributed import device
from megatron_rl.megatron.layers import RmsNorm


class AllHeadsNorm(nn.Module):
    """RMS norm (Zhang & Sennrich 2019) over the heads of all tensor-parallel ranks together, in float32.

    ``weight`` [heads * head_dim] has the weights of all heads on every rank; a rank uses the slice of its own
    heads. The weight is replicated for two reasons. Several ranks may share a key head, if there are more
    ranks than key heads. And Megatron sums the gradients of q_layernorm and k_layernorm over tensor-parallel
    ranks (`finalize_model_grads`), which completes the gradient: each rank computes it only for its heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        heads: int,
        head_dim: int,
        group: Any,
    ) -> None:
        super().__init__()
        ranks = group.size()
        self.eps = config.layernorm_epsilon
        self.group = group
        self.heads = heads
        self.first_head = group.rank() * heads // ranks
        self.local_heads = max(1, heads // ranks)
        # Number of ranks that have the same head: more than 1 if there are fewer heads than ranks.
        self.ranks_per_head = ranks * self.local_heads // heads
        weight = torch.ones(heads * head_dim, dtype=config.params_dtype, device=device.device())
        self.weight = nn.Parameter(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised heads [T, 1, local heads, head_dim], in their dtype.

        Collective over the tensor-parallel group.
        """
        heads = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        squares = heads.square().sum(dim=(-2, -1), keepdim=True)
        if self.group.size() > 1:
            # Sum over ranks in the backward pass too: the outputs of each rank depend on the sum.
            squares = mappings.reduce_from_tensor_model_parallel_region(squares, self.group)
            squares = mappings.copy_to_tensor_model_parallel_region(squares, self.group)
            # The sum over ranks contains every head `ranks_per_head` times.
            squares = squares / self.ranks_per_head

        scale = torch.rsqrt(squares / self.weight.numel() + self.eps)
        weight = self.weight.view(self.heads, -1).narrow(0, self.first_head, self.local_heads)
        return (heads * scale * weight.to(heads.dtype)).to(hidden.dtype)


def replace_query_key_norms(layers: Iterable[Any]) -> None:
    """Replace the norms of queries and keys in ``layers`` by norms over all heads.

    Source: Team OLMo, arXiv 2501.00656, section 3.1.
    """
    for layer in layers:
        attention = layer.self_attention
        config = attention.config
        group = attention.pg_collection.tp
        attention.q_layernorm = AllHeadsNorm(config, config.num_attention_heads, config.kv_channels, group)
        attention.k_layernorm = AllHeadsNorm(config, config.num_query_groups, config.kv_channels, group)


def prepare_post_norms(chunk: Any, pre_norms: bool) -> None:
    """Add a norm after attention and a norm after the MLP to each layer of a GPTModel chunk.

    The layers must be Megatron's local layers (without Transformer Engine). A norm becomes the attribute
    ``post_layernorm`` of the output projection. Without ``pre_norms`` the norms before attention and MLP are
    removed. Sources: Gemma Team, arXiv 2408.00118; Team OLMo, arXiv 2501.00656, section 3.1.
    """
    config = chunk.config
    for layer in chunk.decoder.layers:
        for projection in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
            projection.post_layernorm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)
            projection.register_forward_hook(_norm_output)

        if not pre_norms:
            layer.input_layernorm = IdentityOp()
            layer.pre_mlp_layernorm = IdentityOp()
            # Recomputation frees the output of these modules. IdentityOp returns its input, the residual
            # stream, which is still needed.
            layer.recompute_input_layernorm = False
            layer.recompute_pre_mlp_layernorm = False


def _norm_output(
    module: Any,
    inputs: Any,
    output: tuple[Tensor, Any],
) -> tuple[Tensor, Any]:
    """Normalise a projection's output by its ``post_layernorm`` (forward hook)."""
    return module.post_layernorm(output[0]), output[1]
