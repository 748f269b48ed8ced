"""Linear layer whose weight may be sharded by columns or rows."""

import torch
import torch.nn.functional as functional

from transformer_engine.pytorch.distributed import gather_column_input, reduce_row_output
from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    constant,
    default_init,
    mark_sharded,
    refuse,
)


class ShardedLinear(TransformerEngineBaseModule):
    """Common code of `Linear` and `LayerNormLinear`: weight, bias and product."""

    def _set_sizes(self, in_features, out_features, bias, return_bias, parallel_mode, sequence_parallel):
        """Set the sizes of this rank's shard and the attributes that Megatron-Core reads."""
        if parallel_mode == "row":
            assert in_features % self.tp_size == 0
            in_features //= self.tp_size
        elif parallel_mode == "column":
            assert out_features % self.tp_size == 0
            out_features //= self.tp_size
        else:
            assert parallel_mode is None

        # A single rank has the whole sequence, so sequence parallelism has no effect there.
        self.parallel_mode = parallel_mode
        self.in_features = in_features
        self.out_features = out_features
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias

    def _add_weight_and_bias(self, init_method, dtype, device, get_rng_tracker):
        """Create the weight [out_features, in_features] and the bias; without a bias it is empty."""
        # The shape is transposed, as in torch.nn.Linear.
        weight_shape = (self.out_features, self.in_features)
        init = init_method or default_init
        self.add_parameter("weight", weight_shape, init, dtype, device, get_rng_tracker)
        mark_sharded(self.weight, int(self.parallel_mode == "row"))

        if not self.use_bias:
            self.bias = torch.empty(0, dtype=dtype, device=device)
            return

        self.add_parameter("bias", (self.out_features,), constant(0.0), dtype, device)
        # A row-parallel bias is complete on every rank and is added to this rank's part of the sequence.
        if self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif self.parallel_mode == "column":
            mark_sharded(self.bias, 0)

    def _multiply(self, inp):
        """Return the product of input and weight, and the bias if the caller adds it."""
        assert inp.shape[-1] == self.in_features, "GEMM not possible"
        # A column-parallel weight needs complete inputs, a row-parallel one returns partial sums.
        is_sharded = self.parallel_mode is not None and self.tp_size > 1

        if is_sharded and self.parallel_mode == "column":
            inp = gather_column_input(inp, self.tp_group, self.sequence_parallel)
        out = functional.linear(inp, self.weight)
        if is_sharded and self.parallel_mode == "row":
            out = reduce_row_output(out, self.tp_group, self.sequence_parallel)

        # After the reduction, or the bias would be added once per rank.
        if self.apply_bias:
            out = out + self.bias
        if self.return_bias:
            return out, self.bias
        return out


class Linear(ShardedLinear):
    """Linear layer."""

    def __init__(
        self,
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
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
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
        )
        # Megatron-Core reads these attributes; none of them changes the result on the host.
        self.ub_name = ub_name
        self.save_original_input = save_original_input
        self.rng_tracker_name = rng_tracker_name

        self.set_parallelism(tp_group, tp_size)
        self._set_sizes(in_features, out_features, bias, return_bias, parallel_mode, sequence_parallel)
        self._add_weight_and_bias(init_method, params_dtype, device, get_rng_state_tracker)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        """Return the product [.., out_features], and the bias if the caller adds it."""
        refuse(fp8_output=fp8_output, fp8_grad=fp8_grad)
        return self._multiply(inp)
