"""Features of model families that Megatron's settings and the blocks of the layers cannot express."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_rl.megatron.layers import cap_scores, scale_embeddings, scale_layers, scale_queries
from megatron_rl.shapes.family import rope_parameters

if TYPE_CHECKING:
    from megatron_rl.megatron.model_spec import ModelSpec


def _scale_embeddings(chunk: Any, spec: ModelSpec) -> None:
    """Multiply embeddings by the square root of their width."""
    scale_embeddings(chunk)


def _scale_queries(chunk: Any, spec: ModelSpec) -> None:
    """Multiply queries by a factor that depends on the token's position, see `scale_queries`."""
    parameters = rope_parameters(spec.model.config)
    beta = parameters["llama_4_scaling_beta"]
    scale_queries(chunk, beta, parameters["original_max_position_embeddings"])


def _cap_scores(chunk: Any, spec: ModelSpec) -> None:
    """Soft-cap the attention scores, if config.json has a bound for them."""
    cap = spec.model.config.get("attn_logit_softcapping")
    if cap is not None:
        cap_scores(chunk, cap)


def _scale_layers(chunk: Any, spec: ModelSpec) -> None:
    """Multiply the output of each layer by a scalar of the checkpoint."""
    scale_layers(chunk)


FEATURES: Mapping[str, Callable[[Any, ModelSpec], None]] = {
    "scaled_embedding": _scale_embeddings,
    "scaled_queries": _scale_queries,
    "capped_scores": _cap_scores,
    "scaled_layers": _scale_layers,
}
"""Name in `Family.features` -> function that adds this feature to a new GPTModel chunk."""
