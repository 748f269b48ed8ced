"""Shapes of models by name or config.json, also of those that can be planned and not trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError, each, nearest, require_none
from megatron_rl.shapes.families import FAMILIES
from megatron_rl.shapes.family import ConfigReader, Fields, common_sizes, latent_sizes, sliding
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import PretrainedModel, read_json, read_pretrained

_TWO_MATRIX = ("gpt", "gpt2", "gpt_neox", "opt", "falcon", "phi", "starcoder2", "bloom")
_QKV_BIAS_ONLY = ("qwen2_moe", "glm4")
_QK_NORM = ("qwen3_next", "qwen3_5_moe")
_ROUTER_BIAS = ("kimi_k2", "gpt_oss")
_FEATURES = (
    ("gated", False, "an MLP of two matrices"),
    ("layer_norm", True, "LayerNorm"),
    ("learned_positions", None, "learned positions"),
    ("linear_layers", None, "gated delta nets"),
    ("output_gate", True, "a gate on attention's output"),
    ("shared_gate", True, "a gate on shared experts"),
    ("expert_bias", True, "biases in experts"),
)


@lru_cache(maxsize=1)
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the packaged configurations of published models by name."""
    return json.loads(resources.files("megatron_rl.shapes").joinpath("published.json").read_text())


def load_shape(reference: str | Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model that `named_config` knows, or of an inline configuration."""
    if isinstance(reference, Mapping):
        config = reference.get("config", reference)
        return shape_of(config, str(reference.get("name", config.get("_name_or_path") or "inline model")))
    name, config = named_config(reference)
    return shape_of(config, name)


def named_config(reference: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the config.json of a checkpoint directory, of the file itself, or of a preset.

    Raises UserError naming the nearest preset when nothing is found.
    """
    path = Path(reference)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return reference, read_json(path)
    known = {name.lower(): name for name in presets()}
    short = reference.lower().rsplit("/", 1)[-1]
    if short in known:
        return known[short], presets()[known[short]]["config"]
    names = sorted(presets())
    close = nearest(short, names)
    raise UserError(
        f"unknown model {reference!r}",
        where="MODEL",
        expected="a preset name, a Hugging Face directory, or a config.json",
        got=reference,
        fix=f"{f'did you mean {close}? ' if close else ''}presets: {', '.join(names)}",
    )


def shape_of(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """Return the shape of any decoder's config.json: by its family, else from the keys most models share.

    Raises UserErrors naming the missing keys.
    """
    config = config.get("text_config") or config
    family = FAMILIES.get(str(config.get("model_type", "")))
    if family is None:
        reader = ConfigReader(config, name)
        shape = _read(reader, name)
    else:
        reader = ConfigReader(family.normal(config), name)
        shape = replace(family.shape(reader), name=name)
    require_none(reader.errors)
    return shape


def read_trainable(path: Path, errors: list[UserError]) -> PretrainedModel | None:
    """Return the model of a config.json that can be trained; else add what is wrong to ``errors``."""
    try:
        return read_pretrained(path)
    except UserError as error:
        lacking = _untrainable(path)
        for single in each(error):
            errors.append(replace(single, got=f"{single.got}, which needs {lacking}") if lacking else single)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        errors.append(
            UserError(
                "the model's config.json has a value that means nothing",
                where=str(path),
                expected="values as transformers writes them",
                got=f"{type(error).__name__}: {error}",
                fix="copy the file again from the checkpoint",
            )
        )
    return None


def _untrainable(path: Path) -> str:
    """Return what a model that can only be planned has that no family in the table has."""
    try:
        return ", ".join(untrainable(shape_of(read_json(path))))
    except (UserError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        return ""


def untrainable(shape: ModelShape) -> list[str]:
    """Return what a shape has that the layers of this package have not."""
    return [words for name, value, words in _FEATURES if _has(getattr(shape, name), value)]


def _has(value: Any, wanted: Any) -> bool:
    return bool(value) if wanted is None else value == wanted


def _read(reader: ConfigReader, name: str) -> ModelShape:
    """Read the keys most models share; kv heads default to heads, the MLP's width to four times hidden."""
    config = reader.config
    kind = str(config.get("model_type", ""))
    sizes = common_sizes(reader)
    hidden, layers = sizes["hidden"], sizes["layers"]
    gemma = kind.startswith("gemma")
    activation = str(config.get("hidden_act") or config.get("hidden_activation") or "silu")
    gated = gemma or not (activation.startswith(("gelu", "relu")) or kind in _TWO_MATRIX)
    bias = bool(config.get("attention_bias", kind == "qwen2_moe"))
    learned = config.get("position_embedding_type") == "learned"
    width = reader.size("intermediate_size", 4 * hidden)
    fields: Fields = {
        "name": name,
        **sizes,
        "mlp_width": reader.size("intermediate_size_mlp", width),
        "tied": bool(config.get("tie_word_embeddings", gemma)),
        "gated": gated,
        "layer_norm": config.get("norm") == "layernorm" or (not gated and config.get("norm") is None),
        "qkv_bias": bias,
        "output_bias": bias and kind not in _QKV_BIAS_ONLY,
        "mlp_bias": reader.flag("mlp_bias"),
        "qk_norm": bool(config.get("qk_norm", config.get("use_qk_norm", kind in _QK_NORM))),
        "learned_positions": reader.count("max_position_embeddings") if learned else 0,
    }
    return ModelShape(
        **{
            **fields,
            **sliding(reader, layers),
            **_mixture(reader, layers),
            **(latent_sizes(reader) if reader.flag("kv_lora_rank") else {}),
            **_delta_nets(reader, layers),
        }
    )


def _mixture(reader: ConfigReader, layers: int) -> Fields:
    counts = [key for key in ("num_experts", "n_routed_experts", "num_local_experts") if reader.flag(key)]
    if not counts:
        return {}
    kind = str(reader.get("model_type", ""))
    width = reader.size("moe_intermediate_size", reader.size("intermediate_size"))
    shared, gate = reader.count("shared_expert_intermediate_size"), True
    if reader.flag("n_shared_experts"):
        shared, gate = reader.count("n_shared_experts") * width, False
    if kind.startswith("llama4"):
        shared, gate = width, False
    step = reader.size("decoder_sparse_step", reader.size("interleave_moe_layer_step", 1))
    first = reader.count("first_k_dense_replace")
    plain = reader.get("mlp_only_layers") or range(first)
    return {
        "experts": reader.size(counts[0]),
        "experts_per_token": reader.size("num_experts_per_tok", reader.size("experts_per_token", 2)),
        "expert_width": width,
        "shared_width": shared,
        "shared_gate": gate and shared > 0,
        "router_bias": bool(reader.get("router_bias", kind in _ROUTER_BIAS)),
        "expert_bias": kind == "gpt_oss",
        "dense_layers": tuple(layer for layer in range(layers) if layer in plain or (layer + 1) % step),
    }


def _delta_nets(reader: ConfigReader, layers: int) -> Fields:
    """Read gated delta nets: every layer but each ``full_attention_interval``-th has one."""
    if not (reader.flag("full_attention_interval") and reader.flag("linear_num_value_heads")):
        return {}
    interval = reader.size("full_attention_interval")
    heads, size = reader.size("linear_num_value_heads"), reader.size("linear_value_head_dim")
    return {
        "linear_layers": tuple(layer for layer in range(layers) if (layer + 1) % interval),
        "linear_qk": reader.size("linear_num_key_heads") * reader.size("linear_key_head_dim"),
        "linear_v": heads * size,
        "linear_v_heads": heads,
        "linear_v_head_dim": size,
        "linear_conv": reader.size("linear_conv_kernel_dim", 4),
        "output_gate": bool(reader.get("attn_output_gate", True)),
    }
