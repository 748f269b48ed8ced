"""The fused router's functions, which Megatron-Core imports, and calls only if a user enables them."""


def _fused(*_, **__):
    raise NotImplementedError("the stand-in of Transformer Engine has no fused router")


fused_topk_with_score_function = fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = _fused
