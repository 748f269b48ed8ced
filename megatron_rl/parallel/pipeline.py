"""Send micro-batches between pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table


class PipelineExchange(P2PCommunicator):
    """Send activations and gradients between stages that all know how many tokens each micro-batch has.

    Stages pack the same micro-batches, in ``tokens`` of a rank each, so a receiver knows what comes next.
    Megatron would send the shape before every tensor, and wait for the whole device each time. ``chunks`` are
    the virtual stages of a rank.
    """

    def __init__(self, group: Any, config: Any, tokens: Sequence[int], chunks: int = 1) -> None:
        super().__init__(group, config)
        self._hidden = config.hidden_size
        first, last = group.rank() == 0, group.rank() == group.size() - 1
        order = get_schedule_table(len(tokens), chunks, config.microbatch_group_size_per_vp_stage)
        # The neighbours' order of work, without what ends with them: the outputs of the last stage's last
        # chunk, and the gradients of the first stage's first chunk, which is its last in the backward pass.
        self._forward = [tokens[micro] for micro, chunk in order if not (first and chunk == chunks - 1)]
        self._backward = [tokens[micro] for micro, chunk in order if not (last and chunk == chunks - 1)]

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        """Return the shapes [tokens, 1, hidden size] of the next activations and gradients to come."""
        shapes = [
            (coming.pop(0), 1, self._hidden) if received else None
            for coming, received in ((self._forward, recv_prev), (self._backward, recv_next))
        ]
        return shapes[0], shapes[1]
