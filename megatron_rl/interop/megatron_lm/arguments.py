"""Conversion between Megatron-LM's arguments and config.json, with one table for both directions.

`derive_arguments` returns the arguments of a model, for a checkpoint that Megatron-LM reads. A checkpoint
that Megatron-LM wrote has arguments and needs a config.json, which is derived or read from the tokenizer's
folder. It is accepted only if `derive_arguments` returns the checkpoint's arguments for it, so the two
directions cannot contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.errors import UserError, UserErrors
from megatron_rl.shapes.blocks.latent_attention import latent_settings
from megatron_rl.shapes.family import rope_parameters, rotary_fraction
from megatron_rl.shapes.pretrained import PretrainedModel, parse_pretrained

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Megatron-Core's scaling of rotary angles (--use-rope-scaling), apart from the factor."""
UNSUPPORTED_ARGUMENTS: Mapping[str, str] = {
    "mtp_num_layers": "layers that predict further tokens",
    "squared_relu": "squared ReLU",
    "quick_geglu": "quick GEGLU",
    "rotary_interleaved": "interleaved rotary angles",
    "rotary_seq_len_interpolation_factor": "interpolated positions",
    "no_rope_freq": "layers without rotary angles",
    "experimental_attention_variant": "another attention",
    "attention_output_gate": "a gate on attention's output",
    "linear_attention_freq": "linear attention",
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
    "apply_residual_connection_post_layernorm": "residuals after the norm",
    "fp32_residual_connection": "residuals in float32",
}
"""Megatron-LM's arguments of features that cannot be trained here -> name of the feature, for errors."""
_SETTINGS_WITHOUT_ARGUMENT = (
    "moe_router_dtype", "moe_router_bias_update_rate", "moe_router_load_balancing_type",
    "moe_aux_loss_coeff", "moe_token_dispatcher_type", "num_moe_experts", "num_query_groups",
    "original_max_position_embeddings", "beta_fast", "beta_slow",
)  # fmt: skip
"""Settings of a model in Megatron that need no argument of the same name.

Some affect only training, and some have an argument of a different name. ``num_query_groups`` has no effect
in latent attention. The last three are settings of YaRN: Megatron-LM has no arguments for them, and uses the
values of DeepSeek's checkpoints.
"""
_ARGUMENTS_WITHOUT_EFFECT = ("max_position_embeddings", "vocab_size", "init_method_std")
"""Arguments of a model that do not change what its weights compute."""
_LONGEST_VALUE = 200
"""Maximum number of characters of a value in an error."""


def derive_arguments(model: PretrainedModel) -> dict[str, Any]:
    """Return the arguments with which Megatron-LM builds a model.

    Raises UserError for a model that Megatron-LM cannot build.
    """
    shape = model.shape
    config = model.config
    rope_settings = rope_parameters(config)
    activation = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    feature = _find_unsupported_feature(model, activation, rope_settings)
    if feature is not None:
        raise _no_arguments_error(model, feature)

    # Without grouped queries Megatron-LM's default number of groups is 1.
    is_grouped = not shape.has_latent_attention and shape.kv_heads != shape.heads
    query_groups = 1
    if is_grouped:
        query_groups = shape.kv_heads

    arguments: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.mlp_width,
        "num_attention_heads": shape.heads,
        "group_query_attention": is_grouped,
        "num_query_groups": query_groups,
        "kv_channels": shape.v_head_dim or shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab,
        "untie_embeddings_and_output_weights": not shape.tied,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "layernorm_zero_centered_gamma": False,
        "swiglu": shape.gated and activation == "silu",
        "add_bias_linear": shape.mlp_bias,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm or shape.has_latent_attention,
        "position_embedding_type": "rope",
        "rotary_base": rope_settings["rope_theta"],
        "rotary_percent": rotary_fraction(config),
        "use_rope_scaling": rope_settings.get("rope_type") == "llama3",
        "multi_latent_attention": shape.has_latent_attention,
        "num_experts": shape.experts or None,
        "init_method_std": config["initializer_range"],
    }

    # Add the arguments of latent attention, scaled rotary angles and experts.
    if shape.has_latent_attention:
        arguments |= latent_settings(shape)
        arguments |= {
            "rope_type": "rope",
            "rotary_scaling_factor": 1.0,
            "mscale": rope_settings.get("mscale", 1.0),
            "mscale_all_dim": rope_settings.get("mscale_all_dim", 0.0),
        }
        if rope_settings.get("rope_type") == "yarn":
            arguments |= {"rope_type": "yarn", "rotary_scaling_factor": rope_settings["factor"]}
    if rope_settings.get("rope_type") == "llama3":
        arguments["rope_scaling_factor"] = rope_settings["factor"]
    if shape.experts:
        arguments |= _expert_arguments(model)

    # Reject a model with settings in Megatron that no argument expresses.
    feature = _find_feature_without_argument(model, arguments)
    if feature is not None:
        raise _no_arguments_error(model, feature)
    return arguments


def _no_arguments_error(model: PretrainedModel, feature: str) -> UserError:
    """Return the error for a model with a feature for which Megatron-LM has no argument."""
    return UserError(
        f"Megatron-LM has no arguments for a model of the family {model.family.title}",
        where="--format megatron",
        expected="a decoder that pretrain_gpt.py builds",
        got=feature,
        fix="export it as a Hugging Face model: --format hf",
    )


def _find_feature_without_argument(model: PretrainedModel, arguments: Mapping[str, Any]) -> str | None:
    """Return a feature of the model's family or blocks that no argument expresses, or None."""
    shape = model.shape
    settings: dict[str, Any] = {}
    for block in (*shape.mixers, *shape.feed_forwards):
        settings |= block.settings(shape)
    settings |= model.family.megatron(model.config)

    for name, value in settings.items():
        argument = arguments.get(name)
        # A setting that is disabled needs no argument.
        is_disabled = not argument and not value
        if name in _SETTINGS_WITHOUT_ARGUMENT or argument == value or is_disabled:
            continue
        return UNSUPPORTED_ARGUMENTS.get(name, f"{name} = {value}")
    if model.family.features:
        return model.family.features[0].replace("_", " ")
    return None


def _expert_arguments(model: PretrainedModel) -> dict[str, Any]:
    """Return the Megatron-LM command-line arguments of a model with a mixture of experts.

    The values of the router's arguments are the Megatron settings of the model family, or Megatron-LM's
    defaults.
    """
    shape = model.shape
    family_settings = model.family.megatron(model.config)

    # A period of 1 means that every layer has experts.
    layer_frequency: int | list[int] = 1
    if shape.dense_layers:
        layer_frequency = [int(shape.has_experts(layer)) for layer in range(shape.layers)]

    # Megatron-LM's defaults, for settings that the family does not set.
    defaults = {
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
    }
    arguments: dict[str, Any] = {
        "moe_ffn_hidden_size": shape.expert_width,
        "moe_router_topk": shape.experts_per_token,
        "moe_layer_freq": layer_frequency,
        "moe_shared_expert_intermediate_size": shape.shared_width or None,
    }
    for name, default in defaults.items():
        arguments[name] = family_settings.get(name, default)
    return arguments


def _find_unsupported_feature(
    model: PretrainedModel,
    activation: str,
    rope_settings: Mapping[str, Any],
) -> str | None:
    """Return the first feature of the model that no argument of Megatron-LM can express, or None.

    Only features of the model's shape, of the activation function and of RoPE are considered.
    """
    shape = model.shape
    rope_type = rope_settings.get("rope_type", "default")
    if shape.post_norms:
        return "norms after attention and MLP"
    if shape.blocks:
        return "blocks other than attention and MLPs"
    # Only gpt-oss has attention sinks, and its experts have biases.
    if shape.sinks:
        return "attention sinks, and experts with biases"
    if shape.whole_qk_norm:
        return "QK norms over all heads"
    # The head of a reward model or a critic.
    if shape.scalar_head:
        return "a scalar head"
    if not shape.gated or activation != "silu":
        return f"the activation {activation}"
    if shape.sliding_layers:
        return "sliding-window attention"

    # Megatron-LM scales rotary angles like Llama 3, with fixed constants, or by YaRN in latent attention.
    if rope_type == "llama3" and any(rope_settings.get(name) != value for name, value in LLAMA3.items()):
        return f"RoPE scaling other than {LLAMA3}"
    is_latent_yarn = rope_type == "yarn" and shape.has_latent_attention
    if rope_type not in ("default", "llama3") and not is_latent_yarn:
        return f"RoPE scaling of type {rope_type}"
    return None


def _build_config(arguments: Mapping[str, Any], setting: str, tokenizer_size: int | None) -> dict[str, Any]:
    """Build the config.json of a checkpoint's model from the arguments with which the model was trained.

    ``tokenizer_size`` is the size of the tokenizer's vocabulary. It is used if the arguments contain no
    vocabulary size. ``setting`` is the configuration key of the checkpoint's path. If the arguments enable
    features that cannot be trained here, raises UserErrors with an error for each of these arguments.
    """
    get = arguments.get

    # Report all unsupported arguments together.
    errors = list(_argument_errors(arguments, setting))
    vocabulary_size = _vocabulary_size(arguments) or tokenizer_size
    if vocabulary_size is None:
        fix = "name the model's tokenizer in model.hf_path"
        expected = "a number, or a tokenizer with a vocabulary size"
        errors.append(_argument_error(setting, "vocab_size", None, expected, fix))
    if errors:
        raise UserErrors(errors)

    heads = get("num_attention_heads")
    key_value_heads = heads
    if get("group_query_attention"):
        key_value_heads = get("num_query_groups")
    expert_count = get("num_experts")
    model_type, architecture = _transformers_family(arguments)
    rope_settings: dict[str, Any] = {"rope_type": "default", "rope_theta": float(get("rotary_base", 10000))}
    if get("use_rope_scaling"):
        rope_settings |= {"rope_type": "llama3", "factor": get("rope_scaling_factor", 8.0), **LLAMA3}

    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocabulary_size,
        "hidden_size": get("hidden_size"),
        "intermediate_size": get("ffn_hidden_size"),
        "num_hidden_layers": get("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": get("kv_channels"),
        "hidden_act": "silu",
        "max_position_embeddings": get("max_position_embeddings"),
        "rms_norm_eps": get("layernorm_epsilon", get("norm_epsilon")),
        "initializer_range": get("init_method_std", 0.02),
        "rope_parameters": rope_settings,
        "tie_word_embeddings": not get("untie_embeddings_and_output_weights"),
        "dtype": str(get("params_dtype", "torch.bfloat16")).removeprefix("torch."),
    }
    if get("add_bias_linear"):
        config |= {"attention_bias": True, "mlp_bias": True}

    # Mixtral and Qwen3-MoE have different keys for experts, and Mixtral has no dense layers.
    if expert_count:
        expert_width = get("moe_ffn_hidden_size") or get("ffn_hidden_size")
        config["num_experts_per_tok"] = get("moe_router_topk")
        if model_type == "mixtral":
            config |= {"num_local_experts": expert_count, "intermediate_size": expert_width}
        else:
            expert_layers = _expert_layers(arguments)
            dense_layers = [layer for layer, has_experts in enumerate(expert_layers) if not has_experts]
            config |= {
                "num_experts": expert_count,
                "moe_intermediate_size": expert_width,
                # Megatron's softmax over only the top-k logits equals a softmax over all logits whose top-k
                # probabilities are renormalised.
                "norm_topk_prob": not get("moe_router_pre_softmax"),
                "mlp_only_layers": dense_layers,
            }
    return config


def _transformers_family(arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Return the Hugging Face model_type and architecture of the model that ``arguments`` describe."""
    has_experts = bool(arguments.get("num_experts"))
    has_qk_norm = bool(arguments.get("qk_layernorm"))

    # Qwen2 is the only one of these families with biases of queries, keys and values but no other biases.
    has_qkv_bias_alone = arguments.get("add_qkv_bias") and not arguments.get("add_bias_linear")
    if has_qkv_bias_alone and not has_experts and not has_qk_norm:
        return "qwen2", "Qwen2ForCausalLM"

    families = {
        (False, False): ("llama", "LlamaForCausalLM"),
        (False, True): ("qwen3", "Qwen3ForCausalLM"),
        (True, False): ("mixtral", "MixtralForCausalLM"),
        (True, True): ("qwen3_moe", "Qwen3MoeForCausalLM"),
    }
    return families[has_experts, has_qk_norm]


def _vocabulary_size(arguments: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size in the arguments, or None if the tokenizer determines it."""
    size = arguments.get("vocab_size")
    if size and arguments.get("tokenizer_type") == "NullTokenizer":
        # NullTokenizer adds an end-of-document token after the vocab_size tokens.
        return size + 1
    return size


def _argument_errors(arguments: Mapping[str, Any], setting: str) -> Iterator[UserError]:
    """Yield an error for each argument of a feature that cannot be trained here, and for absent sizes."""
    for name, meaning in UNSUPPORTED_ARGUMENTS.items():
        if arguments.get(name):
            expected_text = f"not set: {meaning} cannot be trained here"
            yield _argument_error(setting, name, arguments[name], expected_text)

    # All families for which a config.json is derived have these values.
    for name, required_value in (
        ("position_embedding_type", "rope"),
        ("normalization", "RMSNorm"),
        ("swiglu", True),
    ):
        if arguments.get(name) != required_value:
            yield _argument_error(setting, name, arguments.get(name), repr(required_value))

    if arguments.get("multi_latent_attention"):
        required_value = "a config.json: it cannot be derived for latent attention"
        fix = "name a folder with the model's own config.json in model.hf_path"
        yield _argument_error(setting, "multi_latent_attention", True, required_value, fix)

    # Sizes that config.json must have.
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"):
        if not isinstance(arguments.get(name), int):
            yield _argument_error(setting, name, arguments.get(name), "a number")


def _expert_layers(arguments: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it has experts, from ``moe_layer_freq``, which is a period or a list."""
    layer_count = arguments.get("num_layers") or 0
    frequency = arguments.get("moe_layer_freq") or 1
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(layer_count)]
    return [bool(value) for value in frequency]


def contradiction_errors(
    arguments: Mapping[str, Any],
    model: PretrainedModel,
    setting: str,
    config_path: str,
) -> list[UserError]:
    """Return the errors of a checkpoint whose arguments contradict the config.json at ``config_path``.

    ``setting`` is the configuration key of the checkpoint's path. Arguments that the checkpoint lacks are not
    compared.
    """
    try:
        expected_arguments = derive_arguments(model)
    except UserError as error:
        return [
            UserError(
                f"{config_path} describes a model that Megatron-LM does not train",
                where=setting,
                expected=error.expected,
                got=error.got,
                fix="name the config.json that belongs to this checkpoint",
            )
        ]

    errors: list[UserError] = []
    for name, meaning in UNSUPPORTED_ARGUMENTS.items():
        if arguments.get(name):
            expected_text = f"not set: {meaning} is not in {config_path}"
            errors.append(_argument_error(setting, name, arguments[name], expected_text))

    # Compare only arguments that the checkpoint has.
    checkpoint_values = _effective_arguments(arguments)
    for name, value in _effective_arguments(expected_arguments).items():
        if name in checkpoint_values and not _are_equal(checkpoint_values[name], value):
            expected_value = f"{value!r}, by {config_path}"
            fix = "correct it, or name the folder that belongs to this checkpoint"
            errors.append(_argument_error(setting, name, checkpoint_values[name], expected_value, fix))
    return errors


def _effective_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that have an effect, normalised so that equal models have equal values."""
    values = {name: value for name, value in arguments.items() if name not in _ARGUMENTS_WITHOUT_EFFECT}

    # Without grouped queries there are as many groups as heads; latent attention has no groups.
    if "num_attention_heads" in values and not values.get("multi_latent_attention"):
        is_grouped = values.get("group_query_attention") and values.get("num_query_groups")
        if not is_grouped:
            values["num_query_groups"] = values["num_attention_heads"]
    else:
        values.pop("num_query_groups", None)
        values.pop("kv_channels", None)
    values.pop("group_query_attention", None)

    # Biases in all linear layers include biases in the query, key and value projections.
    if values.get("add_bias_linear"):
        values["add_qkv_bias"] = True

    # The width of experts defaults to the width of the MLP. If every layer has experts, the width of the MLP
    # has no other effect.
    if values.get("num_experts"):
        expert_width = values.get("moe_ffn_hidden_size") or values.get("ffn_hidden_size")
        expert_layers = _expert_layers(values)
        values["moe_ffn_hidden_size"] = expert_width
        values["moe_layer_freq"] = [int(has_experts) for has_experts in expert_layers]
        if all(expert_layers):
            values.pop("ffn_hidden_size", None)
    else:
        values = {name: value for name, value in values.items() if not name.startswith("moe_")}

    if not values.get("use_rope_scaling"):
        values.pop("rope_scaling_factor", None)
    return values


def _are_equal(value: Any, expected: Any) -> bool:
    """Return whether two arguments are equal; numbers may differ by rounding, and False equals None and 0."""
    is_number = isinstance(expected, int | float) and not isinstance(expected, bool)
    if is_number and isinstance(value, int | float):
        return abs(value - expected) <= 1e-6 * abs(expected)

    # An argument that is False, None or 0 turns its feature off.
    if not value and not expected:
        return True
    return value == expected


def _argument_error(
    setting: str,
    name: str,
    value: Any,
    expected: str,
    fix: str | None = None,
) -> UserError:
    """Return the error for an argument of the checkpoint that has an unsupported ``value``.

    ``expected`` describes the supported values, and ``setting`` is the configuration key of the checkpoint's
    path.
    """
    got = "not set"
    if value is not None:
        got = repr(value)[:_LONGEST_VALUE]

    return UserError(
        f"the Megatron checkpoint's argument `{name}` cannot be used",
        where=setting,
        expected=f"{name}: {expected}",
        got=got,
        fix=fix or "use a checkpoint that was trained without it",
    )


def derive_config(arguments: Mapping[str, Any], setting: str, tokenizer_size: int | None) -> dict[str, Any]:
    """Derive a model's config.json from the arguments in a checkpoint of Megatron-LM.

    The result is verified: the arguments that `derive_arguments` returns for it must equal ``arguments``.
    ``setting`` is the configuration key of the checkpoint's path. ``tokenizer_size`` is the size of the
    tokenizer's vocabulary. It is used if the arguments contain no vocabulary size. Raises UserErrors for a
    model that cannot be trained here.
    """
    config = _build_config(arguments, setting, tokenizer_size)
    model = parse_pretrained(config, "the derived config.json")
    errors = contradiction_errors(arguments, model, setting, "the config.json derived from them")
    if errors:
        raise UserErrors(errors)
    return config
