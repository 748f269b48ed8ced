"""Memory of gated delta nets: tensors saved for the backward pass, and the state in an engine's cache.

A delta net has no keys and values per token. Each value head has a state of one matrix, key size by value
size, whatever the length of the row, so its cache counts rows instead of tokens (Yang et al. 2024, arXiv
2412.06464).
"""

from __future__ import annotations

from megatron_rl.shapes.model import ModelShape

_STATE_BYTES = 4
"""Bytes of an element of the state, which engines and kernels keep in float32."""

_CHUNK_TOKENS = 64
"""Tokens of a chunk of the torch rule, which saves the state at each chunk's start."""


def saved_elements(shape: ModelShape, tensor: int, dtype_bytes: int, *, fused: bool) -> float:
    """Count the elements per token that a delta net saves on one of ``tensor`` ranks.

    Float32 tensors count as 4 / ``dtype_bytes`` elements. ``fused`` selects flash-linear-attention's kernels,
    which compute the states of chunks again in the backward pass.
    """
    float32 = 4 / dtype_bytes
    # Queries, keys, values, output gate, and per head the decay and the step size.
    projections = 2 * shape.linear_qk + 2 * shape.linear_v + 2 * shape.linear_v_heads
    convolution = 2 * shape.linear_qk + shape.linear_v
    # Queries and keys are repeated for the value heads that share them.
    repeated = 2 * shape.linear_v_heads * shape.linear_k_head_dim * float32
    # The rule's output, and the same normalised and gated: the output projection's input.
    outputs = 2 * shape.linear_v

    elements = projections + convolution + repeated + outputs
    if not fused:
        elements += _matrix_elements(shape) * float32 / _CHUNK_TOKENS
    return elements / tensor


def state_bytes_per_row(shape: ModelShape, tensor: int, dtype_bytes: float) -> float:
    """Return the cache bytes of a row in all delta nets of a model, on one of ``tensor`` ranks.

    The matrix of each value head is in float32. The convolution keeps its last inputs in the model's dtype.
    """
    matrices = _matrix_elements(shape) * _STATE_BYTES
    conv_inputs = (shape.linear_conv - 1) * (2 * shape.linear_qk + shape.linear_v) * dtype_bytes
    return len(shape.linear_layers) * (matrices + conv_inputs) / tensor


def _matrix_elements(shape: ModelShape) -> int:
    """Count the elements of the state matrices of one layer: value heads x key size x value size."""
    return shape.linear_v_heads * shape.linear_k_head_dim * shape.linear_v_head_dim
