"""Stochastic gradient descent."""

import torch

from transformer_engine.pytorch.module.base import refuse

required = object()


class FusedSGD(torch.optim.SGD):
    """Stochastic gradient descent as in torch."""

    def __init__(
        self,
        params,
        lr=required,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        *,
        wd_after_momentum=False,
        materialize_master_grads=True,
        set_grad_none=None,
    ):
        refuse(wd_after_momentum=wd_after_momentum)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
