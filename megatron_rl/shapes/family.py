"""A model family: how to read its config.json, name its tensors, and configure Megatron for it.

A `Family` is an entry in the table of families. The functions below it read structures that several families
have in common, such as sliding windows, latent attention and mixtures of experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.shapes.fused_experts import FusedExperts
from megatron_rl.shapes.model import ModelShape

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""Activations of a gated MLP that can be trained, by their names in transformers."""
DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "initializer_range": 0.02}
"""Defaults of most families for keys that config.json leaves out."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary scaling that do not depend on the sequence length."""
LARGEST_SIZE = 1 << 40
"""Largest accepted size in a config.json: far beyond any real model."""


@dataclass
class ConfigReader:
    """Reader of a config.json that collects the errors of all values instead of raising the first.

    >>> reader = ConfigReader({"hidden_size": 64, "num_hidden_layers": -1})
    >>> reader.size("hidden_size"), reader.size("num_hidden_layers"), len(reader.errors)
    (64, 1, 1)
    """

    config: Mapping[str, Any]
    """The values of config.json."""
    file: str = "config.json"
    """File name for errors."""
    errors: list[UserError] = field(default_factory=list)
    """Missing and unsupported values."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` if the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            return default
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return the positive integer at a key; record an error and return 1 for any other value."""
        # JSON's true and false are integers in Python.
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE:
            return value

        # A size of 1 lets the reading continue, so that one pass reports every error.
        got = repr(value)[:80]
        if value is None:
            got = "nothing"
        self.errors.append(
            UserError(
                f"the model's config.json has no usable `{key}`",
                where=f"{self.file}: {key}",
                expected="a positive integer",
                got=got,
                fix="copy config.json again from the checkpoint",
            )
        )
        return 1

    def count(self, key: str) -> int:
        """Return the positive integer at a key, or 0 if the value is absent, null or zero."""
        if not self.config.get(key):
            return 0
        return self.size(key)

    def flag(self, key: str) -> bool:
        """Return whether the value at a key is true; false for an absent key."""
        return bool(self.config.get(key))

    def refuse(self, message: str, key: str, expected: str, fix: str = "use another checkpoint") -> None:
        """Record an error for the unsupported value at ``key``."""
        self.errors.append(
            UserError(
                message,
                where=f"{self.file}: {key}",
                expected=expected,
                got=_as_json(self.config.get(key)),
                fix=fix,
            )
        )

    def allow(self, key: str, *values: Any) -> None:
        """Record an error unless the value at a key is one of ``values``; None permits an absent key."""
        value = self.config.get(key)
        if value not in values:
            expected = " or ".join(_as_json(allowed) for allowed in values)
            self.refuse(f"{key} = {_as_json(value)} is not supported for this model", key, expected)


def _as_json(value: Any) -> str:
    """Format a value as JSON text."""
    return json.dumps(value)


Fields = dict[str, Any]
"""Fields of `ModelShape`, or of Megatron's TransformerConfig, by name."""


def no_fields(source: Any) -> Fields:
    """Return an empty mapping: the default for a family without special structure, settings or keys."""
    return {}


@dataclass(frozen=True)
class Family:
    """Entry in the table of model families: how to read config.json, name tensors and configure Megatron.

    Example: `megatron_rl.shapes.families.qwen3`.
    """

    title: str
    """Display name in the list of models."""
    model_type: str
    """``model_type`` of config.json, as transformers writes it."""
    architecture: str
    """The transformers class of the language model."""
    scalar_architecture: str
    """The transformers class of the same model with a scalar head."""
    structure: Callable[[ConfigReader], Fields] = no_fields
    """Reader of the fields of `ModelShape` beyond the common ones; refuses values that Megatron would compute
    differently."""
    megatron: Callable[[Mapping[str, Any]], Fields] = no_fields
    """Function from config.json to the TransformerConfig fields that do not follow from the shape."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers for keys that config.json leaves out."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of keys: spelling -> key."""
    renamed: Sequence[tuple[str, str]] = ()
    """(common substring, this family's substring) of tensor names that differ from the common names."""
    partial_rotary: bool = False
    """Whether rotary angles may apply to only a part of each head."""
    rope_types: Sequence[str] = ()
    """Types of rotary scaling beyond `ROPE_TYPES`."""
    features: Sequence[str] = ()
    """Names in `megatron.features.FEATURES`: computations without a Megatron setting or a block."""
    engine_keys: Callable[[Mapping[str, Any]], Fields] = no_fields
    """Function from config.json to the keys that vLLM reads and transformers does not write."""
    fused_experts: FusedExperts | None = None
    """Storage format of checkpoints with fused experts; None for one tensor per expert."""
    copied: Sequence[str] = ()
    """Substrings of the names of tensors that are not trained; exports copy them from the starting model."""
    engine_family: str = ""
    """``model_type`` of the family that engines build instead, if it computes the same on the rows of a job;
    empty for this family."""
    further_model_types: Sequence[str] = ()
    """Further values of ``model_type`` in checkpoints with the same layers but no transformers class."""

    @property
    def model_types(self) -> tuple[str, ...]:
        """Return all values of ``model_type`` for this family, beginning with transformers' value."""
        return (self.model_type, *self.further_model_types)

    def tensor_name(self, name: str) -> str:
        """Return this family's checkpoint name for the common name of a layer's tensor."""
        for common_name, family_name in self.renamed:
            name = name.replace(common_name, family_name)
        return name

    def normalise_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Normalise a config.json: rename aliases of keys, and add the defaults of absent keys."""
        renamed_config = {self.aliases.get(key, key): value for key, value in config.items()}
        return {**DEFAULTS, **self.defaults, **renamed_config}

    def shape(self, reader: ConfigReader) -> ModelShape:
        """Return the shape of the model that a normalised config.json describes.

        Errors are added to ``reader.errors``. The returned shape is valid only if there are none.
        """
        config = reader.config
        sizes = common_sizes(reader)

        # Refuse computations that no layer of this package implements.
        activation = reader.get("hidden_act") or reader.get("hidden_activation") or "silu"
        if activation not in ACTIVATIONS:
            reader.refuse(
                f"the activation {activation!r} is not supported", "hidden_act", ", ".join(ACTIVATIONS)
            )
        supported_ropes = (*ROPE_TYPES, *self.rope_types)
        unsupported_ropes = sorted(set(rope_types(config)) - set(supported_ropes))
        if unsupported_ropes:
            reader.refuse(
                f"RoPE scaling of type {unsupported_ropes[0]!r} is not supported",
                "rope_parameters",
                ", ".join(supported_ropes),
            )

        # Later entries take precedence: the family's own structure overrides the common fields.
        architectures = reader.get("architectures") or [self.architecture]
        has_scalar_head = architectures[0] == self.scalar_architecture
        common_fields = {
            "name": architectures[0],
            **sizes,
            "mlp_width": reader.size("intermediate_size"),
            "max_positions": reader.size("max_position_embeddings", LARGEST_SIZE),
            "tied": reader.flag("tie_word_embeddings") and not has_scalar_head,
            "scalar_head": has_scalar_head,
        }
        windows = sliding_window_fields(reader, sizes["layers"])
        shape = ModelShape(**{**common_fields, **windows, **self.structure(reader)})

        # Megatron has one setting for both biases, add_bias_linear.
        mlp_bias = shape.mlp_bias or shape.expert_bias
        if shape.output_bias != mlp_bias:
            reader.refuse(
                "biases only in attention's output, or only in the MLP, are not supported",
                "attention_bias",
                f"as in the MLP, {_as_json(mlp_bias)}",
            )

        if rotary_fraction(config) != 1 and not self.partial_rotary:
            reader.refuse("this family rotates complete heads", "partial_rotary_factor", "1")
        return shape


def common_sizes(reader: ConfigReader) -> dict[str, int]:
    """Read the sizes that every decoder's config.json contains: fields of `ModelShape`."""
    hidden = reader.size("hidden_size")
    heads = reader.size("num_attention_heads")
    return {
        "hidden": hidden,
        "layers": reader.size("num_hidden_layers"),
        "heads": heads,
        "kv_heads": reader.size("num_key_value_heads", heads),
        "head_dim": reader.size("head_dim", max(1, hidden // heads)),
        "vocab": reader.size("vocab_size"),
    }


def latent_sizes(reader: ConfigReader) -> Fields:
    """Read the sizes of multi-head latent attention: fields of `ModelShape`."""
    return {
        "q_lora": reader.count("q_lora_rank"),
        "kv_lora": reader.size("kv_lora_rank"),
        "qk_nope": reader.size("qk_nope_head_dim"),
        "qk_rope": reader.size("qk_rope_head_dim"),
        "v_head_dim": reader.size("v_head_dim"),
    }


def rope_parameters(config: Mapping[str, Any], layer_type: str = "full_attention") -> Mapping[str, Any]:
    """Return the rotary parameters of one type of layer, with ``rope_theta`` and ``rope_type``.

    transformers 5 writes them as ``rope_parameters``, by layer type if types differ; older versions write
    ``rope_theta``, ``rope_scaling`` and ``rope_local_base_freq``.
    """
    parameters = config.get("rope_parameters")
    if parameters is None:
        scaling = dict(config.get("rope_scaling") or {})
        theta = config.get("rope_theta", 10000.0)

        # Layers with a sliding window have a separate base, without scaling.
        if layer_type == "sliding_attention" and config.get("rope_local_base_freq") is not None:
            scaling = {}
            theta = config["rope_local_base_freq"]

        # Older checkpoints write `type` instead of `rope_type`.
        parameters = {"rope_type": scaling.pop("type", "default"), "rope_theta": theta, **scaling}

    # Parameters are nested by layer type, or are the same for all layers.
    return parameters.get(layer_type, parameters)


def rotary_fraction(config: Mapping[str, Any], layer_type: str = "full_attention") -> float:
    """Return the fraction of a head's dimensions that are rotated; these are the head's first dimensions.

    ``layer_type`` selects the rotary parameters, if layer types have separate ones.
    """
    parameters = rope_parameters(config, layer_type)
    # With this type complete heads are rotated, and the angles of some dimensions are zero.
    if parameters.get("rope_type") == "proportional":
        return 1.0

    default_fraction = config.get("partial_rotary_factor", 1.0)
    # MiniMax-M2's config.json has the number of rotated dimensions instead.
    if config.get("rotary_dim") and config.get("head_dim"):
        default_fraction = config["rotary_dim"] / config["head_dim"]
    return float(parameters.get("partial_rotary_factor", default_fraction))


def rope_types(config: Mapping[str, Any]) -> list[str]:
    """Return the types of rotary scaling of two layer types: sliding window, then full attention."""
    parameters = [rope_parameters(config, name) for name in ("sliding_attention", "full_attention")]
    return [str(layer_parameters.get("rope_type", "default")) for layer_parameters in parameters]


def sliding_window_fields(reader: ConfigReader, layers: int) -> Fields:
    """Read the layers that attend to a sliding window, and the window's size in tokens."""
    # A config.json may have the size of a window that is disabled.
    window = reader.config.get("sliding_window")
    if not window or reader.config.get("use_sliding_window") is False:
        return {}

    # config.json has a type for each layer, the distance between layers with full attention, or the number of
    # the first layer with a window.
    layer_types = reader.config.get("layer_types")
    if layer_types is not None:
        sliding_layers = [layer for layer, name in enumerate(layer_types) if name == "sliding_attention"]
    elif reader.config.get("sliding_window_pattern"):
        pattern = reader.size("sliding_window_pattern")
        sliding_layers = [layer for layer in range(layers) if (layer + 1) % pattern]
    else:
        # Without ``use_sliding_window`` the window applies to every layer.
        first_layer = 0
        if reader.flag("use_sliding_window"):
            first_layer = int(reader.get("max_window_layers", 0))
        sliding_layers = list(range(first_layer, layers))

    if not sliding_layers:
        return {}
    return {"sliding_window": reader.size("sliding_window"), "sliding_layers": tuple(sliding_layers)}


def expert_fields(
    reader: ConfigReader, count_key: str, width_key: str, dense_layers: tuple[int, ...] = ()
) -> Fields:
    """Read the fields of a mixture of experts.

    ``count_key`` and ``width_key``: keys of config.json with the number of experts and the width of an
    expert. ``dense_layers``: layers with a dense MLP instead.
    """
    experts = reader.size(count_key)
    experts_per_token = reader.size("num_experts_per_tok")
    if reader.get(count_key) is not None and experts_per_token > experts:
        reader.refuse(
            "a token is sent to more experts than a layer has",
            "num_experts_per_tok",
            f"at most {experts}, the value of {count_key}",
        )
    return {
        "experts": experts,
        "experts_per_token": experts_per_token,
        "expert_width": reader.size(width_key),
        "dense_layers": dense_layers,
    }


def sparse_step_dense_layers(reader: ConfigReader) -> tuple[int, ...]:
    """Return the dense layers of Qwen's MoE models.

    Every ``decoder_sparse_step``-th layer has experts, unless ``mlp_only_layers`` lists it.
    """
    step = reader.get("decoder_sparse_step", 1)
    mlp_only_layers = reader.get("mlp_only_layers", [])

    dense_layers: list[int] = []
    for layer in range(reader.size("num_hidden_layers")):
        is_sparse_step = step > 0 and (layer + 1) % step == 0
        if layer in mlp_only_layers or not is_sparse_step:
            dense_layers.append(layer)
    return tuple(dense_layers)


def gated_shared_expert_fields(reader: ConfigReader, dense_layers: tuple[int, ...] = ()) -> Fields:
    """Read the fields of routed experts and a shared expert with a gated output, as in Qwen's MoE models."""
    return {
        **expert_fields(reader, "num_experts", "moe_intermediate_size", dense_layers),
        "shared_width": reader.size("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


DELTA_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Defaults of transformers for the models of `delta_net_structure`."""


def delta_net_fields(reader: ConfigReader, layers: int, interval: int = 0) -> Fields:
    """Read the layers with gated delta nets, and the sizes of the delta nets.

    transformers 5 writes a type per layer (``layer_types``). Older versions write
    ``full_attention_interval``, the distance between layers with full attention. Without either key the
    distance is ``interval``; 0 means full attention in all layers.
    """
    layer_types = reader.get("layer_types")
    linear_layers: tuple[int, ...] = ()
    if reader.flag("full_attention_interval"):
        interval = reader.size("full_attention_interval")

    # ``layer_types`` takes precedence over the distance.
    if layer_types is not None:
        linear_layers = tuple(layer for layer, name in enumerate(layer_types) if name == "linear_attention")
    elif interval:
        linear_layers = tuple(layer for layer in range(layers) if (layer + 1) % interval)
    if not linear_layers:
        return {}

    # Keys have as many heads as queries; several value heads share a key head.
    key_heads = reader.size("linear_num_key_heads")
    value_heads = reader.size("linear_num_value_heads")
    value_dim = reader.size("linear_value_head_dim")
    return {
        "linear_layers": linear_layers,
        "linear_k_heads": key_heads,
        "linear_qk": key_heads * reader.size("linear_key_head_dim"),
        "linear_v": value_heads * value_dim,
        "linear_v_heads": value_heads,
        "linear_v_head_dim": value_dim,
        "linear_conv": reader.size("linear_conv_kernel_dim", 4),
    }


def delta_net_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Qwen3-Next and Qwen3.5: gated delta nets, and attention with an output gate."""
    reader.allow("attention_bias", False, None)
    reader.allow("attn_output_gate", True, None)
    reader.allow("hidden_act", "silu", None)

    # The published models have full attention in every fourth layer.
    fields = delta_net_fields(reader, reader.size("num_hidden_layers"), interval=4)
    if fields and fields["linear_v_heads"] % fields["linear_k_heads"]:
        reader.refuse(
            "the key heads of a delta net do not divide its value heads",
            "linear_num_value_heads",
            f"a multiple of linear_num_key_heads, {fields['linear_k_heads']}",
        )
    return {**fields, "qk_norm": True, "output_gate": True, "centered_norms": True}


def delta_net_megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return Megatron's settings for the norms of models with gated delta nets."""
    return {"layernorm_zero_centered_gamma": True}


def attention_bias_fields(reader: ConfigReader) -> Fields:
    """Read ``attention_bias``: whether the projections of query, key, value and output have biases."""
    has_bias = reader.flag("attention_bias")
    return {"qkv_bias": has_bias, "output_bias": has_bias}


def shared_expert_fields(reader: ConfigReader) -> Fields:
    """Read the routed and shared experts of DeepSeek and GLM, whose first layers are dense."""
    dense_layers = tuple(range(reader.count("first_k_dense_replace")))
    return {
        **expert_fields(reader, "n_routed_experts", "moe_intermediate_size", dense_layers),
        "shared_width": reader.size("moe_intermediate_size") * reader.count("n_shared_experts"),
    }


def count_dense_layers(config: Mapping[str, Any], default: int) -> int:
    """Return the number of dense layers before the first layer with experts.

    The number is read from ``mlp_layer_types``, or from ``first_k_dense_replace`` if that key is absent.
    Without either key it is ``default``.
    """
    layer_types = config.get("mlp_layer_types")
    if layer_types is None:
        return int(config.get("first_k_dense_replace", default))
    if "sparse" not in layer_types:
        return len(layer_types)
    return layer_types.index("sparse")


def with_dense_layer_count(reader: ConfigReader, default: int) -> ConfigReader:
    """Return a reader whose config.json has the number of dense layers as ``first_k_dense_replace``.

    vLLM and the functions of this module read this key; transformers writes a type per layer instead.
    ``default`` is passed to `count_dense_layers`. Records an error if a dense layer follows a layer with
    experts.
    """
    dense_count = count_dense_layers(reader.config, default)
    if "dense" in (reader.get("mlp_layer_types") or [])[dense_count:]:
        reader.refuse(
            "dense layers after a layer with experts are not supported",
            "mlp_layer_types",
            "all dense layers before the first sparse layer",
        )
    config = {**reader.config, "first_k_dense_replace": dense_count}
    return ConfigReader(config, reader.file, reader.errors)


def with_sparse_attention(
    dense_family: Family, dense_layers: int, *, defaults: Mapping[str, Any], **names: str
) -> Family:
    """Return a family with the layers of ``dense_family`` and an indexer for sparse attention.

    The indexer selects ``index_topk`` keys for each token. In a row of at most that many tokens it selects
    all keys, so that the outputs are equal to the outputs of dense attention. Longer rows are not supported.
    The indexer is copied into exports and not trained.

    ``dense_layers``: number of dense layers before the first layer with experts, if config.json does not
    contain this number.
    ``defaults``: defaults of config.json in addition to `Family.defaults`.
    ``names``: fields of `Family` that name the new family, such as ``title``.
    """

    def structure(reader: ConfigReader) -> Fields:
        """Read config.json as a model of ``dense_family`` with at most ``index_topk`` tokens in a sequence.

        For such sequences the outputs of sparse attention are equal to the outputs of dense attention.
        """
        max_positions = reader.size("max_position_embeddings", LARGEST_SIZE)
        max_row_length = min(max_positions, reader.size("index_topk"))
        return {
            **dense_family.structure(with_dense_layer_count(reader, dense_layers)),
            "max_positions": max_row_length,
        }

    def engine_keys(config: Mapping[str, Any]) -> Fields:
        """Return the keys of ``dense_family``, and the number of dense layers, which vLLM reads."""
        dense_count = count_dense_layers(config, dense_layers)
        return {**dense_family.engine_keys(config), "first_k_dense_replace": dense_count}

    # Exports copy the indexer's tensors. Engines build the dense DeepSeek V3, whose outputs are the same.
    return replace(
        dense_family,
        structure=structure,
        defaults={**dense_family.defaults, "index_topk": 2048, **defaults},
        engine_keys=engine_keys,
        copied=(".self_attn.indexer.",),
        engine_family="deepseek_v3",
        further_model_types=(),
        **names,  # pyright: ignore[reportArgumentType]
    )


def biased_router_settings() -> Fields:
    """Return Megatron's settings of a sigmoid router whose biases balance the load of the experts."""
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        # Keep the checkpoint's bias: an updated bias would differ from the generation engine's.
        "moe_router_bias_update_rate": 0.0,
    }


def gemma_structure(reader: ConfigReader) -> Fields:
    """Read the structure that Gemma 2 and 3 share: biases, post-norms, and centred norms.

    A centred norm stores its weights as their difference from 1.
    """
    reader.allow("use_bidirectional_attention", None, False)
    return {**attention_bias_fields(reader), "post_norms": True, "centered_norms": True}


def gemma_megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return Megatron's settings for Gemma's norms and attention."""
    return {
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
        "bias_activation_fusion": False,  # Megatron's fused kernels are for other activations
    }


def olmo_structure(reader: ConfigReader) -> Fields:
    """Read the structure that OLMo 2 and 3 have in common: post-norms, and norms over all heads."""
    return {
        **attention_bias_fields(reader),
        "qk_norm": True,
        "whole_qk_norm": True,
        "pre_norms": False,
        "post_norms": True,
    }


def deepseek_structure(reader: ConfigReader) -> Fields:
    """Read the structure of DeepSeek V2 and V3: latent attention and a mixture of experts."""
    reader.allow("attention_bias", False, None)

    # transformers multiplies cos and sin by a quotient of mscale and mscale_all_dim. It is 1 if they are
    # equal.
    rope = rope_parameters(reader.config)
    equal_scales = rope.get("mscale") and rope["mscale"] == rope.get("mscale_all_dim")
    if rope.get("rope_type") == "yarn" and not equal_scales:
        reader.refuse(
            "YaRN that rescales cos and sin is not supported with latent attention",
            "rope_parameters",
            "mscale equal to mscale_all_dim",
        )
    return {**shared_expert_fields(reader), **latent_sizes(reader)}


def deepseek_megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return Megatron's settings for DeepSeek's router and rotary angles."""
    # In Megatron, latent attention has separate settings for rotary angles, with or without YaRN.
    rope = rope_parameters(config)
    rope_type = "rope"
    scaling_factor = 1.0
    is_yarn = rope.get("rope_type", "default") == "yarn"
    if is_yarn:
        rope_type = "yarn"
        scaling_factor = rope.get("factor", 1.0)

    settings: Fields = {
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        "moe_router_dtype": "fp32",
        "rope_type": rope_type,
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": scaling_factor,
    }

    # Keys that config.json omits keep Megatron's defaults.
    if is_yarn:
        yarn_keys = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        settings |= {name: rope[name] for name in yarn_keys if rope.get(name) is not None}
    return settings
