"""Between Megatron-LM's arguments and config.json: one table of what a model's arguments are.

`arguments_of` gives the arguments of a model, for a checkpoint that Megatron-LM is to read. Reading one, the
config.json that is derived, or comes with the tokenizer, must lead back to the arguments of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.errors import UserError, UserErrors
from megatron_rl.shapes.family import rope_parameters, rotary_fraction
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import PretrainedModel, describe

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron-Core's scaling of rotary angles, --use-rope-scaling, has beside its factor."""
ABSENT: Mapping[str, str] = {
    "mtp_num_layers": "layers that predict further tokens",
    "squared_relu": "squared ReLU",
    "quick_geglu": "quick GEGLU",
    "rotary_interleaved": "interleaved rotary angles",
    "rotary_seq_len_interpolation_factor": "interpolated positions",
    "no_rope_freq": "layers without rotary angles",
    "experimental_attention_variant": "another attention",
    "attention_output_gate": "a gate on attention's output",
    "window_size": "local attention",
    "qk_l2_norm": "an L2 norm of queries and keys",
    "heterogeneous_layers_config_path": "layers that differ",
    "heterogeneous_layers_config_encoded_json": "layers that differ",
    "hybrid_override_pattern": "Mamba layers",
    "is_hybrid_model": "Mamba layers",
    "moe_latent_size": "experts in a latent space",
    "moe_shared_expert_gate": "a gate on shared experts",
    "glu_linear_offset": "an offset in the gated MLP",
    "activation_func_clamp_value": "clamped activations",
    "apply_residual_connection_post_layernorm": "residuals behind the norm",
    "fp32_residual_connection": "residuals in float32",
}
"""Arguments that none of the models here sets: what they would stand for."""
_TRAINED_OTHERWISE = ("max_position_embeddings", "vocab_size", "init_method_std")
"""Arguments of a model that do not change what its weights compute."""


def latent_sizes(shape: ModelShape) -> dict[str, Any]:
    """Return the sizes of latent attention by Megatron's names for them."""
    return {
        "q_lora_rank": shape.q_lora or None,
        "kv_lora_rank": shape.kv_lora,
        "qk_head_dim": shape.qk_nope,
        "qk_pos_emb_head_dim": shape.qk_rope,
        "v_head_dim": shape.v_head_dim,
    }


def arguments_of(model: PretrainedModel) -> dict[str, Any]:
    """Return the arguments with which Megatron-LM builds a model; raises UserError for what it cannot."""
    shape, config = model.shape, model.config
    rope = rope_parameters(config)
    activation = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    refusal = _inexpressible(model, activation, rope)
    if refusal is not None:
        raise UserError(
            f"Megatron-LM has no arguments for a model of the family {model.family.title}",
            where="--format megatron",
            expected="a decoder that pretrain_gpt.py builds",
            got=refusal,
            fix="export it as a Hugging Face model: --format hf",
        )
    arguments: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.mlp_width,
        "num_attention_heads": shape.heads,
        "group_query_attention": not shape.mla and shape.kv_heads != shape.heads,
        "num_query_groups": 1 if shape.mla or shape.kv_heads == shape.heads else shape.kv_heads,
        "kv_channels": shape.value_dim,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab,
        "untie_embeddings_and_output_weights": not shape.tied,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "layernorm_zero_centered_gamma": False,
        "swiglu": shape.gated and activation == "silu",
        "add_bias_linear": shape.mlp_bias,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm or shape.mla,
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rotary_fraction(config),
        "use_rope_scaling": rope.get("rope_type") == "llama3",
        "multi_latent_attention": shape.mla,
        "num_experts": shape.experts or None,
        "init_method_std": config["initializer_range"],
    }
    if shape.mla:
        yarn = rope.get("rope_type") == "yarn"
        arguments |= {
            **latent_sizes(shape),
            "rope_type": "yarn" if yarn else "rope",
            "rotary_scaling_factor": rope["factor"] if yarn else 1.0,
            "mscale": rope.get("mscale", 1.0),
            "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
        }
    if rope.get("rope_type") == "llama3":
        arguments["rope_scaling_factor"] = rope["factor"]
    if shape.experts:
        arguments |= _expert_arguments(model)
    return arguments


def _expert_arguments(model: PretrainedModel) -> dict[str, Any]:
    shape, routing = model.shape, model.family.megatron(model.config)
    alike = not shape.dense_layers
    names = {
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
    }
    return {
        "moe_ffn_hidden_size": shape.expert_width,
        "moe_router_topk": shape.experts_per_token,
        "moe_layer_freq": 1 if alike else [int(shape.has_experts(layer)) for layer in range(shape.layers)],
        "moe_shared_expert_intermediate_size": shape.shared_width or None,
        **{name: routing.get(name, default) for name, default in names.items()},
    }


def _inexpressible(model: PretrainedModel, activation: str, rope: Mapping[str, Any]) -> str | None:
    """Return what of a model no argument says, None for a model that arguments describe."""
    shape, kind = model.shape, rope.get("rope_type", "default")
    if shape.sandwich_norms:
        return "norms behind attention and MLP"
    if shape.scalar_head:
        return "a head of one number"
    if not shape.gated or activation != "silu":
        return f"the activation {activation}"
    if shape.sliding_layers:
        return "attention to a window of tokens"
    if kind == "llama3" and any(rope.get(name) != value for name, value in LLAMA3.items()):
        return f"RoPE scaling other than {LLAMA3}"
    if kind not in ("default", "llama3") and not (kind == "yarn" and shape.mla):
        return f"RoPE scaling of type {kind}"
    return None


def config_of(arguments: Mapping[str, Any], where: str, vocabulary: int | None) -> dict[str, Any]:
    """Return the config.json of a checkpoint's model, from the arguments that it was trained with.

    ``vocabulary`` is the size of the tokenizer, for arguments that leave it to that. ``where`` names the
    checkpoint. Raises UserErrors that name each argument no model here has, with what it means.
    """
    get = arguments.get
    refused = list(_refusals(arguments, where))
    size = _vocabulary(arguments) or vocabulary
    if size is None:
        fix = "name the model's tokenizer in model.hf_path"
        refused.append(_refusal(where, "vocab_size", None, "a number, or a tokenizer that has one", fix))
    if refused:
        raise UserErrors(refused)
    heads, experts = get("num_attention_heads"), get("num_experts")
    family, architecture = _family(arguments)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(get("rotary_base", 10000))}
    if get("use_rope_scaling"):
        rope |= {"rope_type": "llama3", "factor": get("rope_scaling_factor", 8.0), **LLAMA3}
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": family,
        "vocab_size": size,
        "hidden_size": get("hidden_size"),
        "intermediate_size": get("ffn_hidden_size"),
        "num_hidden_layers": get("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("num_query_groups") if get("group_query_attention") else heads,
        "head_dim": get("kv_channels"),
        "hidden_act": "silu",
        "max_position_embeddings": get("max_position_embeddings"),
        "rms_norm_eps": get("layernorm_epsilon", get("norm_epsilon")),
        "initializer_range": get("init_method_std", 0.02),
        "rope_parameters": rope,
        "tie_word_embeddings": not get("untie_embeddings_and_output_weights"),
        "dtype": str(get("params_dtype", "torch.bfloat16")).removeprefix("torch."),
    }
    if get("add_bias_linear"):
        config |= {"attention_bias": True, "mlp_bias": True}
    if experts:
        width = get("moe_ffn_hidden_size") or get("ffn_hidden_size")
        config |= {"num_experts_per_tok": get("moe_router_topk")}
        if family == "mixtral":
            config |= {"num_local_experts": experts, "intermediate_size": width}
        else:
            alike = get("moe_router_pre_softmax")
            config |= {"num_experts": experts, "moe_intermediate_size": width, "norm_topk_prob": not alike}
            config["mlp_only_layers"] = [
                layer for layer, on in enumerate(_expert_layers(arguments)) if not on
            ]
    return config


def _family(arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Return model_type and architecture of the transformers class with such layers."""
    experts, qk_norm = bool(arguments.get("num_experts")), bool(arguments.get("qk_layernorm"))
    if arguments.get("add_qkv_bias") and not (experts or qk_norm or arguments.get("add_bias_linear")):
        return "qwen2", "Qwen2ForCausalLM"
    return {
        (False, False): ("llama", "LlamaForCausalLM"),
        (False, True): ("qwen3", "Qwen3ForCausalLM"),
        (True, False): ("mixtral", "MixtralForCausalLM"),
        (True, True): ("qwen3_moe", "Qwen3MoeForCausalLM"),
    }[experts, qk_norm]


def _vocabulary(arguments: Mapping[str, Any]) -> int | None:
    """Return the tokens of the tokenizer that the arguments state, None where they leave it to that."""
    size = arguments.get("vocab_size")
    # This one ends documents with a token of its own, behind those that are counted.
    return size + 1 if size and arguments.get("tokenizer_type") == "NullTokenizer" else size


def _refusals(arguments: Mapping[str, Any], where: str) -> Iterator[UserError]:
    """Yield an error for each argument that no model here has."""
    for name, meaning in ABSENT.items():
        if arguments.get(name):
            yield _refusal(where, name, arguments[name], f"not set: {meaning} cannot be trained here")
    for name, expected in (
        ("position_embedding_type", "rope"),
        ("normalization", "RMSNorm"),
        ("swiglu", True),
    ):
        if arguments.get(name) != expected:
            yield _refusal(where, name, arguments.get(name), repr(expected))
    if arguments.get("multi_latent_attention"):
        fix = "name a folder with the model's own config.json in model.hf_path"
        yield _refusal(
            where, "multi_latent_attention", True, "a config.json: it is not derived for these", fix
        )
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"):
        if not isinstance(arguments.get(name), int):
            yield _refusal(where, name, arguments.get(name), "a number")


def _expert_layers(arguments: Mapping[str, Any]) -> list[bool]:
    """Return which layers have experts."""
    layers, frequency = arguments.get("num_layers") or 0, arguments.get("moe_layer_freq") or 1
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(layers)]
    return [bool(value) for value in frequency]


def contradictions(
    arguments: Mapping[str, Any], model: PretrainedModel, where: str, place: str
) -> list[UserError]:
    """Return how a checkpoint's arguments contradict the config.json at ``place``.

    ``where`` names the checkpoint. Arguments that the checkpoint does not have contradict nothing.
    """
    try:
        expected = arguments_of(model)
    except UserError as error:
        return [
            UserError(
                f"{place} describes a model that Megatron-LM does not train",
                where=where,
                expected=error.expected,
                got=error.got,
                fix="name the config.json that belongs to this checkpoint",
            )
        ]
    errors = [_refusal(where, name, arguments[name], f"not set: {meaning} is not in {place}")
              for name, meaning in ABSENT.items() if arguments.get(name)]  # fmt: skip
    stated, effective = _effective(arguments), _effective(expected)
    for name, value in effective.items():
        if name in stated and not _same(stated[name], value):
            fix = "correct it, or name the folder that belongs to this checkpoint"
            errors.append(_refusal(where, name, stated[name], f"{value!r}, by {place}", fix))
    return errors


def _effective(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that count, in one form: those that others switch off are left out."""
    values = {name: value for name, value in arguments.items() if name not in _TRAINED_OTHERWISE}
    if "num_attention_heads" in values and not values.get("multi_latent_attention"):
        groups = values.get("num_query_groups") if values.get("group_query_attention") else None
        values["num_query_groups"] = groups or values["num_attention_heads"]
    else:
        for name in ("num_query_groups", "kv_channels"):
            values.pop(name, None)
    values.pop("group_query_attention", None)
    if values.get("add_bias_linear"):  # which is of queries, keys and values too
        values["add_qkv_bias"] = True
    if values.get("num_experts"):
        values["moe_ffn_hidden_size"] = values.get("moe_ffn_hidden_size") or values.get("ffn_hidden_size")
        layers = _expert_layers(values)
        values["moe_layer_freq"] = [int(on) for on in layers]
        if all(layers):
            values.pop("ffn_hidden_size", None)
    else:
        values = {name: value for name, value in values.items() if not name.startswith("moe_")}
    if not values.get("use_rope_scaling"):
        values.pop("rope_scaling_factor", None)
    return values


def _same(stated: Any, expected: Any) -> bool:
    numbers = isinstance(stated, int | float) and isinstance(expected, int | float)
    if numbers and not isinstance(expected, bool):
        return abs(stated - expected) <= 1e-6 * abs(expected)
    return (not stated and not expected) or stated == expected


def _refusal(where: str, name: str, value: Any, expected: str, fix: str | None = None) -> UserError:
    return UserError(
        f"the Megatron checkpoint was trained with another `{name}` than can be used",
        where=where,
        expected=f"{name}: {expected}",
        got="not set" if value is None else repr(value)[:200],
        fix=fix or "use a checkpoint that was trained without it",
    )


def derived(arguments: Mapping[str, Any], where: str, vocabulary: int | None) -> dict[str, Any]:
    """Return a derived config.json that leads back to the arguments; raises UserErrors as `config_of`."""
    config = config_of(arguments, where, vocabulary)
    errors = contradictions(
        arguments, describe(config, "the derived config.json"), where, "what is supported"
    )
    if errors:
        raise UserErrors(errors)
    return config
