"""What a family of models is: how its config.json is read, its tensors are named, and Megatron is set."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.shapes.model import ModelShape

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""The activations of a gated MLP that can be trained, as transformers names them."""
DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "initializer_range": 0.02}
"""Values of most families where config.json leaves them out."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The scalings of rotary angles that do not depend on the sequence length."""
LARGEST = 1 << 40


@dataclass
class ConfigReader:
    """Read the values of a config.json; what is wrong or not supported is collected in ``errors``."""

    config: Mapping[str, Any]
    place: str = "config.json"
    errors: list[UserError] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default where it is absent or null."""
        value = self.config.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; one that is absent or null without a default is an error."""
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST:
            return value
        self.errors.append(
            UserError(
                f"the model's config.json has no usable `{key}`",
                where=f"{self.place}: {key}",
                expected="a positive integer",
                got="nothing" if value is None else repr(value)[:80],
                fix="copy config.json again from the checkpoint",
            )
        )
        return 1

    def count(self, key: str) -> int:
        """Return a number that may be absent, null or 0."""
        return self.size(key) if self.config.get(key) else 0

    def flag(self, key: str) -> bool:
        """Return a truth value, false where it is absent."""
        return bool(self.config.get(key))

    def refuse(self, message: str, key: str, expected: str, fix: str = "use another checkpoint") -> None:
        """Record that a value is not supported."""
        self.errors.append(
            UserError(
                message,
                where=f"{self.place}: {key}",
                expected=expected,
                got=_shown(self.config.get(key)),
                fix=fix,
            )
        )

    def allow(self, key: str, *values: Any) -> None:
        """Refuse a value other than these."""
        if self.config.get(key) not in values:
            words = " or ".join(_shown(value) for value in values)
            self.refuse(f"{key} = {_shown(self.config.get(key))} is not supported for this model", key, words)


def _shown(value: Any) -> str:
    """Return a value as JSON writes it."""
    return json.dumps(value)


Fields = dict[str, Any]


def no_fields(source: Any) -> Fields:
    """Return nothing: a family whose config.json says no more than every family's."""
    return {}


@dataclass(frozen=True)
class Family:
    """State every fact about one family of models; adding a family means writing one of these.

    ``structure`` reads the fields of `ModelShape` beyond the common ones, and refuses what Megatron would
    compute differently. ``megatron`` gives the TransformerConfig fields that do not follow from the shape.
    """

    title: str
    """The name in the list of models."""
    model_type: str
    architecture: str
    """The transformers class of the language model."""
    scalar_architecture: str
    """The transformers class of the same model with a head of one number."""
    structure: Callable[[ConfigReader], Fields] = no_fields
    megatron: Callable[[Mapping[str, Any]], Fields] = no_fields
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes where config.json has no such key."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of keys: spelling -> key."""
    renamed: Sequence[tuple[str, str]] = ()
    """Parts of a layer's tensor names that differ from the common ones: common -> this family's."""
    partial_rotary: bool = False
    """The model may turn a part of each head alone."""
    engine_keys: Mapping[str, Any] = field(default_factory=dict)
    """What vLLM reads in config.json and transformers does not write."""

    def tensor_name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor of a layer."""
        for common, special in self.renamed:
            name = name.replace(common, special)
        return name

    def normal(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with every key spelled in one way and the defaults filled in."""
        spelled = {self.aliases.get(key, key): value for key, value in config.items()}
        return {**DEFAULTS, **self.defaults, **spelled}

    def shape(self, reader: ConfigReader) -> ModelShape:
        """Return the shape that a normal config.json describes; problems are left in ``reader.errors``."""
        config = reader.config
        sizes = common_sizes(reader)
        activation = reader.get("hidden_act") or reader.get("hidden_activation") or "silu"
        if activation not in ACTIVATIONS:
            reader.refuse(
                f"the activation {activation!r} is not supported", "hidden_act", ", ".join(ACTIVATIONS)
            )
        kinds = sorted(set(rope_types(config)) - set(ROPE_TYPES))
        if kinds:
            reader.refuse(
                f"RoPE scaling of type {kinds[0]!r} is not supported",
                "rope_parameters",
                ", ".join(ROPE_TYPES),
            )
        architectures = reader.get("architectures") or [self.architecture]
        scalar = architectures[0] == self.scalar_architecture
        shape = {
            "name": architectures[0],
            **sizes,
            "mlp_width": reader.size("intermediate_size"),
            "max_positions": reader.size("max_position_embeddings", LARGEST),
            "tied": reader.flag("tie_word_embeddings") and not scalar,
            "scalar_head": scalar,
        }
        result = ModelShape(**{**shape, **sliding(reader, sizes["layers"]), **self.structure(reader)})
        if result.output_bias != result.mlp_bias:
            reader.refuse(
                "Biases in attention's output alone, or in the MLP alone, are not supported",
                "attention_bias",
                f"the same as mlp_bias, {_shown(result.mlp_bias)}",
            )
        if rotary_fraction(config) != 1 and not self.partial_rotary:
            reader.refuse("the model turns whole heads", "partial_rotary_factor", "1")
        return result


def common_sizes(reader: ConfigReader) -> dict[str, int]:
    """Read the sizes that the config.json of every decoder has."""
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    return {
        "hidden": hidden,
        "layers": reader.size("num_hidden_layers"),
        "heads": heads,
        "kv_heads": reader.size("num_key_value_heads", heads),
        "head_dim": reader.size("head_dim", max(1, hidden // heads)),
        "vocab": reader.size("vocab_size"),
    }


def latent_sizes(reader: ConfigReader) -> Fields:
    """Read the sizes of multi-head latent attention."""
    return {
        "q_lora": reader.count("q_lora_rank"),
        "kv_lora": reader.size("kv_lora_rank"),
        "qk_nope": reader.size("qk_nope_head_dim"),
        "qk_rope": reader.size("qk_rope_head_dim"),
        "v_head_dim": reader.size("v_head_dim"),
    }


def rope_parameters(config: Mapping[str, Any], layer_type: str = "full_attention") -> Mapping[str, Any]:
    """Return rotary parameters of one kind of layer, with ``rope_theta`` and ``rope_type``.

    transformers 5 writes them as ``rope_parameters``, by kind of layer where kinds differ; before, they were
    ``rope_theta``, ``rope_scaling`` and ``rope_local_base_freq``.
    """
    parameters = config.get("rope_parameters")
    if parameters is None:
        scaling = dict(config.get("rope_scaling") or {})
        theta = config.get("rope_theta", 10000.0)
        if layer_type == "sliding_attention" and config.get("rope_local_base_freq") is not None:
            scaling, theta = {}, config["rope_local_base_freq"]
        parameters = {"rope_type": scaling.pop("type", "default"), "rope_theta": theta, **scaling}
    return parameters.get(layer_type, parameters)


def rotary_fraction(config: Mapping[str, Any]) -> float:
    """Return the part of each head that rotary angles turn, its first dimensions."""
    fallback = config.get("partial_rotary_factor", 1.0)
    return float(rope_parameters(config).get("partial_rotary_factor", fallback))


def rope_types(config: Mapping[str, Any]) -> list[str]:
    """Return the type of rotary scaling of each kind of layer."""
    kinds = (rope_parameters(config, kind) for kind in ("sliding_attention", "full_attention"))
    return [str(kind.get("rope_type", "default")) for kind in kinds]


def sliding(reader: ConfigReader, layers: int) -> Fields:
    """Read which layers attend to a window of tokens, and its size."""
    window = reader.config.get("sliding_window")
    if not window or reader.config.get("use_sliding_window") is False:
        return {}
    kinds = reader.config.get("layer_types")
    if kinds is not None:
        indices = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    elif reader.config.get("sliding_window_pattern"):
        pattern = reader.size("sliding_window_pattern")
        indices = [layer for layer in range(layers) if (layer + 1) % pattern]
    else:
        first = int(reader.get("max_window_layers", 0)) if reader.flag("use_sliding_window") else 0
        indices = list(range(first, layers))
    return (
        {"sliding_window": reader.size("sliding_window"), "sliding_layers": tuple(indices)} if indices else {}
    )


def experts(reader: ConfigReader, count: str, width: str, dense_layers: tuple[int, ...] = ()) -> Fields:
    """Read a mixture of experts from the keys of its number of experts and of an expert's width."""
    return {
        "experts": reader.size(count),
        "experts_per_token": reader.size("num_experts_per_tok"),
        "expert_width": reader.size(width),
        "dense_layers": dense_layers,
    }


def attention_bias(reader: ConfigReader) -> Fields:
    """Read ``attention_bias``: biases of query, key, value and output."""
    bias = reader.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias}


def shared_experts(reader: ConfigReader) -> Fields:
    """Read routed and shared experts behind dense first layers, as DeepSeek and GLM have them."""
    first = reader.count("first_k_dense_replace")
    return {
        **experts(reader, "n_routed_experts", "moe_intermediate_size", tuple(range(first))),
        "shared_width": reader.size("moe_intermediate_size") * reader.count("n_shared_experts"),
    }


def biased_router() -> Fields:
    """Return Megatron's settings of a router by sigmoids whose biases balance the experts."""
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        # The bias is the checkpoint's: it must not drift away from the generation engine's.
        "moe_router_bias_update_rate": 0.0,
    }


def gemma(reader: ConfigReader) -> Fields:
    """Read what Gemma 2 and 3 have in common."""
    reader.allow("use_bidirectional_attention", None, False)
    return {**attention_bias(reader), "sandwich_norms": True}


def gemma_megatron(config: Mapping[str, Any]) -> Fields:
    """Return what Megatron must know of Gemma's norms and attention."""
    return {
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
        "bias_activation_fusion": False,  # Megatron fuses other activations
    }


def deepseek(reader: ConfigReader) -> Fields:
    """Read latent attention and experts, as DeepSeek V2 and V3 have them."""
    reader.allow("attention_bias", False, None)
    rope = rope_parameters(reader.config)
    same = rope.get("mscale") and rope["mscale"] == rope.get("mscale_all_dim")
    if rope.get("rope_type") == "yarn" and not same:
        reader.refuse(
            "YaRN that rescales cos and sin is not supported with latent attention",
            "rope_parameters",
            "mscale equal to mscale_all_dim",
        )
    return {**shared_experts(reader), **latent_sizes(reader)}


def deepseek_megatron(config: Mapping[str, Any]) -> Fields:
    """Return what Megatron must know of DeepSeek's router and rotary angles."""
    rope = rope_parameters(config)
    yarn = rope.get("rope_type", "default") == "yarn"
    settings: Fields = {
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        "moe_router_dtype": "fp32",
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope.get("factor", 1.0) if yarn else 1.0,
    }
    names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    settings |= {name: rope[name] for name in names if yarn and rope.get(name) is not None}
    return settings
