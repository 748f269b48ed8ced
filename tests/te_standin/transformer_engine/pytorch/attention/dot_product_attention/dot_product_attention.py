"""Causal attention within the rows of a packed sequence, with the real module's checks."""

import math
from itertools import pairwise

import torch

from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    refuse,
)

_attention_backends = {}
"""Backend that the real module chose last; the host has no kernels to choose from."""


def _forgive(module, incompatible):
    kept = [key for key in incompatible.missing_keys if "core_attention._extra_state" not in key]
    incompatible.missing_keys[:] = kept


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
            attention_dropout=attention_dropout, softcap=softcap, return_max_logit=return_max_logit,
            cp_group=cp_group is not None, softmax_type=softmax_type != "vanilla",
            attention_type=attention_type != "self", bottom_right_diagonal=bottom_right_diagonal,
        )  # fmt: skip
        self.join(tp_group, tp_size)
        sizes = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        (
            self.hidden_size_per_attention_head_k,
            self.hidden_size_per_attention_head_v,
        ) = sizes
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.num_gqa_groups_per_partition = self.num_gqa_groups // self.tp_size
        assert num_attention_heads % self.num_gqa_groups == 0
        self.attn_mask_type, self.qkv_format = attn_mask_type, qkv_format
        self.window_size = (-1, 0) if window_size is None else tuple(window_size)
        assert self.window_size[0] >= -1 and self.window_size[1] == 0, "for a causal mask"
        self.softmax_scale = 1.0 / math.sqrt(sizes[0]) if softmax_scale is None else softmax_scale
        self.cp_comm_type = cp_comm_type
        # As in Megatron-Core, a checkpoint may lack the state of 8-bit scaling.
        self.register_load_state_dict_post_hook(_forgive)

    def forward(
        self, query_layer=None, key_layer=None, value_layer=None, attention_mask=None, qkv_format=None,
        cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None, window_size=None,
        bottom_right_diagonal=None, softcap=None, checkpoint_core_attention=False,
        core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None,
        fast_zero_fill=True, inference_params=None, pad_between_seqs=None, fp8_output=False,
        bf16_backward=False, num_splits=1, score_mod=None, score_mod_bprop=None, score_mod_tensors=None,
        score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None, qkv_interleave_dim=-3,
        thd_attention_policies=None, thd_attention_policy_dispatch="auto",
    ):  # fmt: skip
        """Return [tokens, heads * value size] of query, key and value [tokens, heads or groups, size]."""
        given = {
            "attention_mask": attention_mask, "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded, "window_size": window_size, "softcap": softcap,
            "core_attention_bias": core_attention_bias, "alibi_slopes": alibi_slopes, "kv_layer": kv_layer,
            "inference_params": inference_params, "score_mod": score_mod, "qkv_layer": qkv_layer,
            "thd_attention_policies": thd_attention_policies, "pad_between_seqs": pad_between_seqs,
        }  # fmt: skip
        refuse(
            checkpoint_core_attention=checkpoint_core_attention, fp8_output=fp8_output,
            **{name: value is not None for name, value in given.items()},
        )  # fmt: skip
        query, key, value = query_layer, key_layer, value_layer
        if (qkv_format or self.qkv_format) != "thd":
            raise NotImplementedError("the stand-in of Transformer Engine attends in THD format alone")
        assert (attn_mask_type or self.attn_mask_type) == "padding_causal", "for THD, and causal"
        self._insist(query, key, value)
        bounds = cu_seqlens_q.tolist()
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        assert cu_seqlens_q.dim() == 1 and bounds == cu_seqlens_kv.tolist()
        assert bounds[0] == 0 and bounds[-1] == len(query) == len(key)
        assert max_seqlen_q == max_seqlen_kv >= max(end - begin for begin, end in pairwise(bounds)) > 0
        repeats = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        rows = [
            self._row(query[begin:end], key[begin:end], value[begin:end]) for begin, end in pairwise(bounds)
        ]
        return torch.cat(rows).flatten(1)

    def _insist(self, query, key, value):
        assert query.dtype == key.dtype == value.dtype, "the same data type"
        assert query.dim() == key.dim() == value.dim() == 3, "3D tensors when qkv_format = thd"
        assert key.shape[:-1] == value.shape[:-1] and query.shape[-1] == key.shape[-1]
        assert key.shape[-1] == self.hidden_size_per_attention_head_k
        assert value.shape[-1] == self.hidden_size_per_attention_head_v
        assert key.shape[-2] == self.num_gqa_groups_per_partition

    def _row(self, query, key, value):
        scores = torch.einsum("ihd,jhd->hij", query, key).float() * self.softmax_scale
        places = torch.arange(len(query), device=query.device)
        distance = places[:, None] - places[None, :]
        hidden = distance < 0
        if self.window_size[0] >= 0:
            hidden |= distance > self.window_size[0]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(value.dtype)
        return torch.einsum("hij,jhd->ihd", weights, value)
