"""Linear layers of all experts of a rank, in one module."""

import torch
import torch.nn.functional as functional

from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    constant,
    cut,
    default_init,
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
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute,
            ub_overlap_rs=ub_overlap_rs, ub_overlap_ag=ub_overlap_ag, use_grouped_tensor=use_grouped_tensor,
            single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias,
        )  # fmt: skip
        self.num_gemms, self.ub_name, self.save_original_input = (
            num_gemms,
            ub_name,
            save_original_input,
        )
        self.rng_tracker_name = rng_tracker_name
        self.join(tp_group, tp_size)
        if self.tp_size > 1 and bias:
            raise ValueError("GroupedLinear doesn't support bias when TP > 1.")
        self.parallel_mode = parallel_mode
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // self.tp_size if parallel_mode == "column" else out_features
        self.use_bias, self.return_bias, self.apply_bias = (
            bias,
            return_bias,
            bias and not return_bias,
        )
        for index in range(num_gemms):
            shape = (self.out_features, self.in_features)
            init = init_method or default_init
            self.add(
                f"weight{index}",
                shape,
                init,
                params_dtype,
                device,
                get_rng_state_tracker,
            )
            cut(
                getattr(self, f"weight{index}"),
                1 if parallel_mode == "row" else 0,
            )
            if bias:
                self.add(
                    f"bias{index}",
                    (self.out_features,),
                    constant(0.0),
                    params_dtype,
                    device,
                )
            else:
                setattr(
                    self,
                    f"bias{index}",
                    torch.empty(0, dtype=params_dtype, device=device),
                )

    def forward(self, inp, m_splits, is_first_microbatch=None, out=None, dgrad_out=None):
        """Return [rows, out_features]; ``m_splits`` contains each expert's number of rows."""
        refuse(out=out is not None, dgrad_out=dgrad_out is not None)
        splits = [int(size) for size in m_splits]
        assert len(splits) == self.num_gemms
        assert inp.dim() == 2 and len(inp) == sum(splits) and inp.shape[-1] == self.in_features
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)]
        parts = [
            functional.linear(
                rows,
                getattr(self, f"weight{index}"),
                biases[index] if self.apply_bias else None,
            )
            for index, rows in enumerate(inp.split(splits))
        ]
        joined = torch.cat(parts)
        return (joined, biases) if self.return_bias else joined
