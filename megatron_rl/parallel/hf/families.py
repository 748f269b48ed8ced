"""The supported model families as one table: settings and Hugging Face tensor names of each.

Adding a family means adding a row to `FAMILIES`; no other module knows an architecture by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from megatron_rl.errors import UserError


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
    """Prefix of the experts that every token passes, one wide MLP in the checkpoint too."""


@dataclass(frozen=True)
class Family:
    """Describe one architecture: what its config says in Megatron's words, and how its tensors are named.

    ``settings`` gives further TransformerConfig fields; ``qkv_bias`` and ``all_bias`` read the transformers
    config. ``mla`` says that attention is multi-latent, ``sandwich`` that each block has a norm behind it
    too, with Gemma's embeddings and rotary angles. ``moe`` names expert tensors;
    ``is_moe_layer(config, layer)`` says which layers have experts.
    """

    qkv_bias: Callable[[Any], bool] = _no
    all_bias: Callable[[Any], bool] = _no
    qk_norm: bool = False
    settings: Callable[[Any], dict[str, Any]] = _no_settings
    mla: bool = False
    sandwich: bool = False
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


def _deepseek(config: Any) -> dict[str, Any]:
    settings = _moe_settings(config, config.n_routed_experts, config.moe_intermediate_size)
    settings |= {
        "moe_layer_freq": [
            int(_deepseek_moe_layer(config, layer)) for layer in range(config.num_hidden_layers)
        ],
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }
    if config.model_type == "deepseek_v3":
        # The bias is the checkpoint's: it must not drift away from the generation engine's.
        settings |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        settings["moe_router_bias_update_rate"] = 0.0
    else:
        settings["moe_router_pre_softmax"] = True
    if (config.n_group or 1) > 1:
        settings |= {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    return settings


def _deepseek_moe_layer(config: Any, layer: int) -> bool:
    return layer >= config.first_k_dense_replace


def _latent(config: Any) -> dict[str, Any]:
    """Return the fields of Megatron's MLATransformerConfig."""
    rope = config.rope_parameters
    yarn = rope.get("rope_type", "default") == "yarn"
    settings = {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "kv_channels": config.v_head_dim,
        "num_query_groups": config.num_attention_heads,
        "qk_layernorm": True,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope.get("factor", 1.0) if yarn else 1.0,
    }
    for ours, theirs in (
        ("original_max_position_embeddings", "original_max_position_embeddings"),
        ("beta_fast", "beta_fast"),
        ("beta_slow", "beta_slow"),
        ("mscale", "mscale"),
        ("mscale_all_dim", "mscale_all_dim"),
    ):
        if yarn and rope.get(theirs) is not None:
            settings[ours] = rope[theirs]
    return settings


def _deepseek_family(router_bias: str | None) -> Family:
    return Family(
        mla=True,
        settings=lambda config: {**_latent(config), **_deepseek(config)},
        is_moe_layer=_deepseek_moe_layer,
        moe=MoeNames(
            router="mlp.gate.weight",
            expert="mlp.experts.{expert}",
            gate="gate_proj.weight",
            up="up_proj.weight",
            down="down_proj.weight",
            router_bias=router_bias,
            shared="mlp.shared_experts",
        ),
    )


def _gemma3(config: Any) -> dict[str, Any]:
    return {
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": config.query_pre_attn_scalar**-0.5,
        "bias_activation_fusion": False,  # Megatron fuses other activations
    }


FAMILIES: Mapping[str, Family] = {
    "llama": Family(all_bias=_llama_bias),
    "qwen2": Family(qkv_bias=_yes),
    "qwen3": Family(qk_norm=True, qkv_bias=_attention_bias),
    "mistral": Family(),
    "gemma3_text": Family(qk_norm=True, qkv_bias=_attention_bias, sandwich=True, settings=_gemma3),
    "deepseek_v2": _deepseek_family(None),
    "deepseek_v3": _deepseek_family("mlp.gate.e_score_correction_bias"),
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


def check_attention(config: Any) -> None:
    """Raise UserError for attention or logits that Megatron would compute differently."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name, None):
            raise UserError(
                f"{name} is not supported: PyTorch's fused attention and Megatron's output layer know none.",
                where=f"config.json: {name}",
                expected="null",
                got=str(getattr(config, name)),
            )


_ROUTINGS = {"deepseek_v2": ("greedy",), "deepseek_v3": (None, "noaux_tc")}


def check_routing(config: Any) -> None:
    """Raise UserError for a way to route tokens to experts that Megatron would compute differently."""
    method = getattr(config, "topk_method", None)
    if method not in _ROUTINGS.get(config.model_type, (method,)):
        raise UserError(
            f"Expert routing by {method!r} is not supported for {config.model_type!r}.",
            where="config.json: topk_method",
            expected="one of " + ", ".join(str(name) for name in _ROUTINGS[config.model_type]),
            got=str(method),
        )
    normalised = getattr(config, "norm_topk_prob", None)
    if config.model_type in _ROUTINGS and bool(normalised) != (config.model_type == "deepseek_v3"):
        raise UserError(
            "This normalisation of the routing weights is not supported.",
            where="config.json: norm_topk_prob",
            expected=str(config.model_type == "deepseek_v3").lower(),
            got=str(normalised).lower(),
        )


def expert_count(config: Any) -> int:
    """Return the number of routed experts per layer, 0 for a dense model."""
    for name in ("n_routed_experts", "num_local_experts", "num_experts"):
        count = getattr(config, name, None)
        if count:
            return int(count)
    return 0


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


def has_scalar_head(hf_config: Any) -> bool:
    """Say whether the model gives one number per token, as critics and reward models do."""
    return any(name.endswith("ForSequenceClassification") for name in hf_config.architectures or ())


def with_scalar_head(hf_config: Any) -> Any:
    """Return the config of the same model with a head of one number, as transformers names it."""
    if has_scalar_head(hf_config):
        return hf_config
    config = copy.deepcopy(hf_config)
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise UserError(
            "transformers has no class for this model with a head of one number.",
            where="config.json: model_type",
            expected=", ".join(sorted(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)),
            got=config.model_type,
            fix="use a model of another family for this role",
        )
    config.architectures, config.num_labels, config.tie_word_embeddings = [name], 1, False
    return config
