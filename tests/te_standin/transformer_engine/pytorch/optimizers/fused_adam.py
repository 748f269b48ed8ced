"""Adam with one step count per parameter group."""

import torch

from transformer_engine.pytorch.module.base import refuse


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with float32 state and an integer step count in each group."""

    def __init__(
        self,
        params,
        lr=0.001,
        betas=(0.9, 0.999),
        eps=1e-08,
        weight_decay=0.0,
        amsgrad=False,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        set_grad_none=None,
    ):
        refuse(
            amsgrad=amsgrad,
            capturable=capturable,
            master_weights=master_weights,
            use_decoupled_grad=use_decoupled_grad,
            store_param_remainders=store_param_remainders,
            state_dtype={exp_avg_dtype, exp_avg_sq_dtype} != {torch.float32},
        )
        # Megatron-Core saves these keys of a parameter group in checkpoints.
        group_defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, group_defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            loss = closure()

        for group in self.param_groups:
            # The count also advances for a group that is empty on this rank: other ranks share its state.
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)
        return loss

    def _update(self, group, parameter):
        """Apply one step of Adam to a parameter, computed in float32."""
        state = self.state[parameter]
        if not state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)

        gradient = parameter.grad.float()
        weight = parameter.float()
        # Adam adds the weight decay to the gradient, AdamW to the update below.
        if not self.adam_w_mode:
            gradient = gradient + group["weight_decay"] * weight

        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

        # After infinitely many steps the bias correction is 1, so this disables it.
        num_steps = torch.inf
        if group["bias_correction"]:
            num_steps = group["step"]
        mean = state["exp_avg"] / (1 - beta1**num_steps)
        variance = state["exp_avg_sq"] / (1 - beta2**num_steps)

        update = mean / (variance.sqrt() + group["eps"])
        if self.adam_w_mode:
            update = update + group["weight_decay"] * weight
        parameter.copy_(weight - group["lr"] * update)
