"""The supported model families as one table: settings and Hugging Face tensor names of each.

Adding a family means adding a row to `FAMILIES`; no other module knows an architecture by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from megatron_rl.config.errors import UserError


def _no(config: Any) -> bool:
    return False


def _yes(config: Any) -> bool:
    return True


def _attention_bias(config: Any) -> bool:
    return bool(config.attention_bias)


def _no_settings(config: Any) -> dict[str, Any]:
    return {}


def _gelu_tanh(value: Tensor) -> Tensor:
    return functional.gelu(value, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
}


@dataclass(frozen=True)
class MoeNames:
    """Name the tensors of one mixture-of-experts block below ``model.layers.N``."""

    router: str
    expert: str  # with {expert}
    gate: str
    up: str
    down: str
    router_bias: str | None = None
    shared: str | None = None


@dataclass(frozen=True)
class Family:
    """Describe one architecture: what its config says in Megatron's words, and how its tensors are named.

    ``settings`` gives further TransformerConfig fields. ``qkv_bias``, ``all_bias`` and ``window`` read the
    transformers config. ``moe`` names expert tensors; ``is_moe_layer(config, layer)`` says which layers
    have experts.
    """

    qkv_bias: Callable[[Any], bool] = _no
    all_bias: Callable[[Any], bool] = _no
    qk_norm: bool = False
    settings: Callable[[Any], dict[str, Any]] = _no_settings
    moe: MoeNames | None = None
    is_moe_layer: Callable[[Any, int], bool] = lambda config, layer: False


def _llama_bias(config: Any) -> bool:
    attention, mlp = bool(config.attention_bias), bool(config.mlp_bias)
    if attention != mlp:
        raise UserError(
            "Biases in attention alone or in the MLP alone are not supported for Llama.",
            where="config.json: attention_bias, mlp_bias",
            expected="both true or both false",
            got=f"attention_bias={attention}, mlp_bias={mlp}",
        )
    return attention


def _moe_settings(config: Any, experts: int, ffn: int) -> dict[str, Any]:
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": ffn,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }


def _mixtral(config: Any) -> dict[str, Any]:
    return _moe_settings(config, config.num_local_experts, config.intermediate_size)


def _qwen3_moe_layer(config: Any, layer: int) -> bool:
    step = config.decoder_sparse_step
    return layer not in config.mlp_only_layers and step > 0 and (layer + 1) % step == 0


def _qwen3_moe(config: Any) -> dict[str, Any]:
    settings = _moe_settings(config, config.num_experts, config.moe_intermediate_size)
    # A softmax over the chosen logits equals a softmax over all of them, renormalised over the chosen.
    settings["moe_router_pre_softmax"] = not config.norm_topk_prob
    settings["moe_layer_freq"] = [
        int(_qwen3_moe_layer(config, layer)) for layer in range(config.num_hidden_layers)
    ]
    return settings


FAMILIES: Mapping[str, Family] = {
    "llama": Family(all_bias=_llama_bias),
    "qwen2": Family(qkv_bias=_yes),
    "qwen3": Family(qk_norm=True, qkv_bias=_attention_bias),
    "mistral": Family(),
    "mixtral": Family(
        settings=_mixtral,
        is_moe_layer=lambda config, layer: True,
        moe=MoeNames(
            router="block_sparse_moe.gate.weight",
            expert="block_sparse_moe.experts.{expert}",
            gate="w1.weight",
            up="w3.weight",
            down="w2.weight",
        ),
    ),
    "qwen3_moe": Family(
        qk_norm=True,
        qkv_bias=_attention_bias,
        settings=_qwen3_moe,
        is_moe_layer=_qwen3_moe_layer,
        moe=MoeNames(
            router="mlp.gate.weight",
            expert="mlp.experts.{expert}",
            gate="gate_proj.weight",
            up="up_proj.weight",
            down="down_proj.weight",
        ),
    ),
}


def family_of(hf_config: Any) -> Family:
    """Return the table row of a transformers config.

    Raises UserError naming the supported architectures when there is none.
    """
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise UserError(
            f"The architecture {hf_config.model_type!r} is not supported.",
            where="config.json: model_type",
            expected="one of " + ", ".join(sorted(FAMILIES)),
            got=str(hf_config.model_type),
        )
    if family.qk_norm and family.qkv_bias(hf_config):
        raise UserError(
            f"attention_bias is not supported for {hf_config.model_type!r}.",
            where="config.json: attention_bias",
            expected="false",
            got="true",
        )
    return family
