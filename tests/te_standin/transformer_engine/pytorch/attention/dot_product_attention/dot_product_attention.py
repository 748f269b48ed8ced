"""Causal attention within the rows of a packed sequence, with the real module's checks."""

import math
from itertools import pairwise

import torch

from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    refuse,
)

_attention_backends = {}
"""Last selected backend in the real module; empty, since the host has no kernels to select from."""


def _ignore_missing_extra_state(module, incompatible_keys):
    """Remove the states of 8-bit scaling from the missing keys of a loaded checkpoint."""
    incompatible_keys.missing_keys[:] = [
        key for key in incompatible_keys.missing_keys if "core_attention._extra_state" not in key
    ]


class DotProductAttention(TransformerEngineBaseModule):
    """Attention in THD format: rows are concatenated, and ``cu_seqlens`` contains their boundaries."""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        bottom_right_diagonal=None,
        softcap=0.0,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
        name=None,
    ):
        super().__init__(name=name)
        refuse(
            attention_dropout=attention_dropout,
            softcap=softcap,
            return_max_logit=return_max_logit,
            cp_group=cp_group is not None,
            softmax_type=softmax_type != "vanilla",
            attention_type=attention_type != "self",
            bottom_right_diagonal=bottom_right_diagonal,
        )
        self.set_parallelism(tp_group, tp_size)

        # Latent attention has keys and values of different sizes.
        if isinstance(kv_channels, int):
            kv_channels = (kv_channels, kv_channels)
        self.hidden_size_per_attention_head_k = kv_channels[0]
        self.hidden_size_per_attention_head_v = kv_channels[1]

        # Without groups every head has keys and values of its own.
        if num_gqa_groups is None:
            num_gqa_groups = num_attention_heads
        assert num_attention_heads % num_gqa_groups == 0
        self.num_gqa_groups = num_gqa_groups
        self.num_gqa_groups_per_partition = num_gqa_groups // self.tp_size

        # A window is (left, right); -1 is unbounded, and a causal mask has no positions to the right.
        if window_size is None:
            window_size = (-1, 0)
        self.window_size = tuple(window_size)
        assert self.window_size[0] >= -1 and self.window_size[1] == 0, "for a causal mask"

        if softmax_scale is None:
            softmax_scale = 1.0 / math.sqrt(self.hidden_size_per_attention_head_k)
        self.softmax_scale = softmax_scale
        self.attn_mask_type = attn_mask_type
        self.qkv_format = qkv_format
        self.cp_comm_type = cp_comm_type

        # As in Megatron-Core, a checkpoint may lack the state of 8-bit scaling.
        self.register_load_state_dict_post_hook(_ignore_missing_extra_state)

    def forward(
        self,
        query_layer=None,
        key_layer=None,
        value_layer=None,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        bottom_right_diagonal=None,
        softcap=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
        bf16_backward=False,
        num_splits=1,
        score_mod=None,
        score_mod_bprop=None,
        score_mod_tensors=None,
        score_mod_bprop_tensors=None,
        qkv_layer=None,
        kv_layer=None,
        qkv_interleave_dim=-3,
        thd_attention_policies=None,
        thd_attention_policy_dispatch="auto",
    ):
        """Return [tokens, heads * value size] of query, key and value [tokens, heads or groups, size]."""
        refuse(
            checkpoint_core_attention=checkpoint_core_attention,
            fp8_output=fp8_output,
            attention_mask=attention_mask is not None,
            cu_seqlens_q_padded=cu_seqlens_q_padded is not None,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded is not None,
            window_size=window_size is not None,
            softcap=softcap is not None,
            core_attention_bias=core_attention_bias is not None,
            alibi_slopes=alibi_slopes is not None,
            kv_layer=kv_layer is not None,
            inference_params=inference_params is not None,
            score_mod=score_mod is not None,
            qkv_layer=qkv_layer is not None,
            thd_attention_policies=thd_attention_policies is not None,
            pad_between_seqs=pad_between_seqs is not None,
        )
        if (qkv_format or self.qkv_format) != "thd":
            raise NotImplementedError("the stand-in of Transformer Engine attends in THD format alone")

        # The real module has the same requirements on tensors and boundaries.
        assert (attn_mask_type or self.attn_mask_type) == "padding_causal", "for THD, and causal"
        self._check_tensors(query_layer, key_layer, value_layer)
        assert cu_seqlens_q.dtype == torch.int32
        assert cu_seqlens_kv.dtype == torch.int32
        assert cu_seqlens_q.dim() == 1

        boundaries = cu_seqlens_q.tolist()
        assert boundaries == cu_seqlens_kv.tolist()
        assert boundaries[0] == 0
        assert boundaries[-1] == len(query_layer) == len(key_layer)
        longest_row = max(end - begin for begin, end in pairwise(boundaries))
        assert max_seqlen_q == max_seqlen_kv >= longest_row > 0

        # Repeat each group's keys and values for all of its query heads.
        heads_per_group = query_layer.shape[1] // key_layer.shape[1]
        keys = key_layer.repeat_interleave(heads_per_group, dim=1)
        values = value_layer.repeat_interleave(heads_per_group, dim=1)
        row_outputs = [
            self._attend(query_layer[begin:end], keys[begin:end], values[begin:end])
            for begin, end in pairwise(boundaries)
        ]
        return torch.cat(row_outputs).flatten(1)

    def _check_tensors(self, query, key, value):
        """Check that query, key and value have the dtype and shapes that the real module requires."""
        assert query.dtype == key.dtype == value.dtype, "the same data type"
        assert query.dim() == key.dim() == value.dim() == 3, "3D tensors when qkv_format = thd"
        # Only their sizes may differ between keys and values.
        assert key.shape[:-1] == value.shape[:-1]
        assert query.shape[-1] == key.shape[-1]
        assert key.shape[-1] == self.hidden_size_per_attention_head_k
        assert value.shape[-1] == self.hidden_size_per_attention_head_v
        assert key.shape[-2] == self.num_gqa_groups_per_partition

    def _attend(self, query, key, value):
        """Return the causal attention [tokens, heads, value size] within one row."""
        logits = torch.einsum("ihd,jhd->hij", query, key).float() * self.softmax_scale

        # Mask future tokens and tokens before the window.
        positions = torch.arange(len(query), device=query.device)
        distances = positions[:, None] - positions[None, :]
        is_masked = distances < 0
        if self.window_size[0] >= 0:
            is_masked |= distances > self.window_size[0]

        # Softmax in float32, product in the dtype of the values, as the fused kernels do.
        weights = logits.masked_fill(is_masked, -torch.inf).softmax(-1).to(value.dtype)
        return torch.einsum("hij,jhd->ihd", weights, value)
