"""Linear layers of all experts of a rank, in one module."""

import torch
import torch.nn.functional as functional

from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    constant,
    default_init,
    mark_sharded,
    refuse,
)


class GroupedLinear(TransformerEngineBaseModule):
    """Linear layer of each expert on its own split of the rows; rows are exchanged elsewhere."""

    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        device="cuda",
        ub_overlap_rs=False,
        ub_overlap_ag=False,
        ub_name=None,
        delay_wgrad_compute=False,
        save_original_input=False,
        single_grouped_weight=False,
        single_grouped_bias=False,
        name=None,
        use_grouped_tensor=None,
    ):
        super().__init__(name)
        refuse(
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_ag=ub_overlap_ag,
            use_grouped_tensor=use_grouped_tensor,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
        )
        self.set_parallelism(tp_group, tp_size)
        # The error of the real class, which a configuration with such a layer would get on a GPU.
        if self.tp_size > 1 and bias:
            raise ValueError("GroupedLinear doesn't support bias when TP > 1.")

        # The size of this rank's shard of each expert.
        if parallel_mode == "row":
            in_features //= self.tp_size
        elif parallel_mode == "column":
            out_features //= self.tp_size
        self.parallel_mode = parallel_mode
        self.in_features = in_features
        self.out_features = out_features

        # Megatron-Core's subclass reads these attributes.
        self.num_gemms = num_gemms
        self.ub_name = ub_name
        self.save_original_input = save_original_input
        self.rng_tracker_name = rng_tracker_name
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias

        # One weight and one bias per expert, with the names of the real class.
        init = init_method or default_init
        sharded_dim = int(parallel_mode == "row")
        for expert in range(num_gemms):
            weight_name = f"weight{expert}"
            weight_shape = (out_features, in_features)
            self.add_parameter(weight_name, weight_shape, init, params_dtype, device, get_rng_state_tracker)
            mark_sharded(getattr(self, weight_name), sharded_dim)

            bias_name = f"bias{expert}"
            if bias:
                self.add_parameter(bias_name, (out_features,), constant(0.0), params_dtype, device)
            else:
                setattr(self, bias_name, torch.empty(0, dtype=params_dtype, device=device))

    def forward(self, inp, m_splits, is_first_microbatch=None, out=None, dgrad_out=None):
        """Return [tokens, out_features]; ``m_splits`` contains each expert's number of tokens."""
        refuse(out=out is not None, dgrad_out=dgrad_out is not None)
        # Tokens are sorted by expert.
        num_tokens_by_expert = [int(size) for size in m_splits]
        assert len(num_tokens_by_expert) == self.num_gemms
        assert inp.dim() == 2
        assert len(inp) == sum(num_tokens_by_expert)
        assert inp.shape[-1] == self.in_features

        biases = []
        outputs = []
        for expert, tokens in enumerate(inp.split(num_tokens_by_expert)):
            weight = getattr(self, f"weight{expert}")
            bias = getattr(self, f"bias{expert}")
            biases.append(bias)
            # A returned bias is added by the caller, weighted with the router's probabilities.
            if self.apply_bias:
                outputs.append(functional.linear(tokens, weight, bias))
            else:
                outputs.append(functional.linear(tokens, weight))

        output = torch.cat(outputs)
        if self.return_bias:
            return output, biases
        return output
