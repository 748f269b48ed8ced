"""Rotary position embedding with given angles."""

import torch


def apply_rotary_pos_emb(
    t, freqs, tensor_format="sbhd", start_positions=None, interleaved=False, fused=False,
    cu_seqlens=None, cp_size=1, cp_rank=0,
):  # fmt: skip
    """Return ``t`` [s, b, h, d] with its first d2 numbers rotated by ``freqs`` [s, 1, 1, d2]."""
    if (tensor_format, start_positions, cu_seqlens, cp_size) != (
        "sbhd",
        None,
        None,
        1,
    ):
        raise NotImplementedError("the stand-in of Transformer Engine turns places whose angles are given")
    assert fused, "Megatron-Core has its own where it is not"
    assert t.dim() == 4 and freqs.shape == (len(t), 1, 1, freqs.shape[-1])
    assert freqs.dtype == torch.float32 and freqs.is_contiguous()
    turned, kept = t[..., : freqs.shape[-1]].float(), t[..., freqs.shape[-1] :]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
        half = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        half = torch.cat((-second, first), dim=-1)
    turned = turned * freqs.cos() + half * freqs.sin()
    return torch.cat((turned.to(t.dtype), kept), dim=-1)
