"""Linear layer whose weight may be sharded by columns or rows."""

import torch
import torch.nn.functional as functional

from transformer_engine.pytorch.distributed import into_column, out_of_row
from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    constant,
    cut,
    default_init,
    refuse,
)


class CutLinear(TransformerEngineBaseModule):
    """Common part of `Linear` and `LayerNormLinear`: weight, bias and product."""

    def _prepare(
        self,
        in_features,
        out_features,
        bias,
        return_bias,
        mode,
        sequence_parallel,
    ):
        self.parallel_mode = mode
        self.in_features = in_features // self.tp_size if mode == "row" else in_features
        self.out_features = out_features // self.tp_size if mode == "column" else out_features
        assert mode in (None, "column", "row")
        assert (in_features if mode == "row" else out_features) % (self.tp_size if mode else 1) == 0
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias

    def _weights(self, init_method, dtype, device, tracker):
        shape = (self.out_features, self.in_features)
        self.add("weight", shape, init_method or default_init, dtype, device, tracker)
        cut(self.weight, 1 if self.parallel_mode == "row" else 0)
        if not self.use_bias:
            self.bias = torch.empty(0, dtype=dtype, device=device)
            return
        self.add("bias", (self.out_features,), constant(0.0), dtype, device)
        if self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif self.parallel_mode == "column":
            cut(self.bias, 0)

    def _product(self, inp):
        assert inp.shape[-1] == self.in_features, "GEMM not possible"
        exchanges = self.parallel_mode is not None and self.tp_size > 1
        if exchanges and self.parallel_mode == "column":
            inp = into_column(inp, self.tp_group, self.sequence_parallel)
        out = functional.linear(inp, self.weight)
        if exchanges and self.parallel_mode == "row":
            out = out_of_row(out, self.tp_group, self.sequence_parallel)
        if self.apply_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class Linear(CutLinear):
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
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, parameters_split=parameters_split,
            ub_overlap_ag=ub_overlap_ag, ub_overlap_rs=ub_overlap_rs, symmetric_ar_type=symmetric_ar_type,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad, ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad, delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip
        self.ub_name, self.save_original_input = ub_name, save_original_input
        self.rng_tracker_name = rng_tracker_name
        self.join(tp_group, tp_size)
        self._prepare(
            in_features,
            out_features,
            bias,
            return_bias,
            parallel_mode,
            sequence_parallel,
        )
        self._weights(init_method, params_dtype, device, get_rng_state_tracker)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        """Return the product [.., out_features], and the bias if it is not added here."""
        refuse(fp8_output=fp8_output, fp8_grad=fp8_grad)
        return self._product(inp)
