"""Rotary position embedding with precomputed angles."""

import torch


def apply_rotary_pos_emb(
    t,
    freqs,
    tensor_format="sbhd",
    start_positions=None,
    interleaved=False,
    fused=False,
    cu_seqlens=None,
    cp_size=1,
    cp_rank=0,
):
    """Return ``t`` [s, b, h, d] with its first d2 features rotated by the angles ``freqs`` [s, 1, 1, d2]."""
    if tensor_format != "sbhd" or start_positions is not None or cu_seqlens is not None or cp_size != 1:
        raise NotImplementedError("the stand-in of Transformer Engine rotates by one angle per position")

    # Megatron-Core has its own implementation without fusion, so it never asks for this one then.
    assert fused, "Megatron-Core rotates by itself without fusion"
    assert t.dim() == 4
    assert freqs.shape == (len(t), 1, 1, freqs.shape[-1])
    assert freqs.dtype == torch.float32
    assert freqs.is_contiguous()

    rotary_dim = freqs.shape[-1]
    rotary = t[..., :rotary_dim].float()
    unchanged = t[..., rotary_dim:]

    # Each pair (x, y) of features becomes (-y, x), at neighbouring or at half-distant indices.
    if interleaved:
        first = rotary[..., ::2]
        second = rotary[..., 1::2]
        perpendicular = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = rotary.chunk(2, dim=-1)
        perpendicular = torch.cat((-second, first), dim=-1)

    # float32 as in the fused kernel; the result has the input's dtype.
    rotated = rotary * freqs.cos() + perpendicular * freqs.sin()
    return torch.cat((rotated.to(t.dtype), unchanged), dim=-1)
