"""Functions of the fused router: Megatron-Core imports them, and calls them only if a user enables them."""


def _raise_no_fused_router(*_, **__):
    raise NotImplementedError("the stand-in of Transformer Engine has no fused router")


# Megatron-Core imports the three names together.
fused_topk_with_score_function = _raise_no_fused_router
fused_compute_score_for_moe_aux_loss = _raise_no_fused_router
fused_moe_aux_loss = _raise_no_fused_router
