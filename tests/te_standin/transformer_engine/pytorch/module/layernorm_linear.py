"""Norm followed by a linear layer, in one module."""

from transformer_engine.pytorch.module.base import constant, normalise, refuse
from transformer_engine.pytorch.module.linear import ShardedLinear


class LayerNormLinear(ShardedLinear):
    """Norm followed by a linear layer."""

    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-05,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        normalization="LayerNorm",
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        parameters_split=None,
        zero_centered_gamma=False,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_wgrad=False,
        ub_bulk_dgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        name=None,
    ):
        super().__init__(name)
        refuse(
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            parameters_split=parameters_split,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            symmetric_ar_type=symmetric_ar_type,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            delay_wgrad_compute=delay_wgrad_compute,
            return_layernorm_output=return_layernorm_output,
        )
        # A norm needs complete rows of features, which row parallelism splits.
        assert normalization in ("LayerNorm", "RMSNorm")
        assert parallel_mode != "row"

        # Parallelism is set before the sizes, which depend on it.
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.ub_name = ub_name
        self.set_parallelism(tp_group, tp_size)
        self._set_sizes(in_features, out_features, bias, return_bias, parallel_mode, sequence_parallel)

        # The norm's parameters come first, as in the real class: they are in its order of parameters.
        init = constant(float(not zero_centered_gamma))
        self.add_parameter("layer_norm_weight", (in_features,), init, params_dtype, device)
        # Every rank normalises its part of the sequence, so the gradients are summed over the group.
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        if normalization == "LayerNorm":
            self.add_parameter("layer_norm_bias", (in_features,), constant(0.0), params_dtype, device)
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel
        else:
            self.layer_norm_bias = None

        self._add_weight_and_bias(init_method, params_dtype, device, get_rng_state_tracker)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        """Return the product of the normalised input, and the bias if the caller adds it."""
        refuse(fp8_output=fp8_output, fp8_grad=fp8_grad)
        normalised = normalise(
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.eps,
            self.normalization,
            self.zero_centered_gamma,
        )
        return self._multiply(normalised)
